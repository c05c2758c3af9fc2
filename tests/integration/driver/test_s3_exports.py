"""Exports to a real S3 server (moto), through a proxy that fails and dies; s3fs is the one of PyPI, unchanged."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from urllib.parse import urlsplit

import fsspec
import pytest
import s3fs
from tests.support.endpoints.token_endpoint import unused_port
from tests.support.waiting import eventually, eventually_async
from tests.unit.driver.exports.test_exporter import World

from penstock.analysis.export import read_exports
from penstock_chassis.errors import FailedPrecondition
from penstock_chassis.journal import Journal
from penstock_driver.app import MIGRATIONS
from penstock_driver.exports.destination import Destination
from penstock_driver.exports.exporter import BatchLimits, Exporter

SHARE = 0.3
"""How many of the requests fail."""
ROLLOUTS = 40


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of an S3 server with the bucket `runs`."""
    port = unused_port()
    with (tmp_path / "moto.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


class Proxy:
    """A proxy in front of an HTTP server. It answers SHARE of the requests with 500, or breaks off, before the
    request is done or after; between `die` and `start` it accepts no connection."""

    def __init__(self, upstream: str) -> None:
        self._host, self._port = urlsplit(upstream).hostname, urlsplit(upstream).port
        self._random = random.Random(7)  # the same faults each time
        self._faults = cycle(("error", "lost request", "lost answer"))
        self._server: asyncio.Server | None = None
        self.port = 0
        self.seen: Counter[str] = Counter()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def die(self) -> None:
        assert self._server is not None
        self._server.close()
        self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.LimitOverrunError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
                if headers.get(b"expect") == b"100-continue":
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    head = head.replace(b"Expect: 100-continue\r\n", b"")
                body = await reader.readexactly(int(headers.get(b"content-length", 0)))
                fault = next(self._faults) if self._random.random() < SHARE else "none"
                self.seen[fault] += 1
                if fault == "lost request" or self._server is None:
                    break
                if fault == "error":
                    writer.write(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n")
                    continue
                answer = await self._asked(head, body)
                if fault == "lost answer":
                    break
                writer.write(answer)
                await writer.drain()
                break  # the answer says Connection: close
        writer.close()

    async def _asked(self, head: bytes, body: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        lines = [line for line in head.split(b"\r\n") if line and not line.lower().startswith(b"connection:")]
        writer.write(b"\r\n".join([*lines, b"Connection: close", b"", body]))
        await writer.drain()
        answer = await reader.read(-1)
        writer.close()
        return answer


@pytest.fixture
async def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Proxy]:
    """The environment leads s3fs to it, as an operator would."""
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "very secret"),
        ("AWS_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    proxy = Proxy(server)
    await proxy.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server)
    bucket = s3fs.S3FileSystem(skip_instance_cache=True)

    def made() -> bool:
        with suppress(Exception):  # it is starting
            bucket.mkdir("runs")
        return bool(bucket.exists("runs"))

    await eventually_async(lambda: asyncio.to_thread(made), "the server has the bucket")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{proxy.port}")
    s3fs.S3FileSystem.clear_instance_cache()
    yield proxy
    s3fs.S3FileSystem.clear_instance_cache()
    if proxy._server is not None:
        await proxy.die()


@pytest.mark.requirement("R124")
async def test_every_rollout_reaches_s3_through_faults_and_an_outage(
    proxy: Proxy, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failed and lost requests, lost answers, a store that is away: each rollout is there once for a reader."""
    with ThreadPoolExecutor(2) as pool:
        async with await Journal.open(tmp_path / "driver.db", MIGRATIONS) as journal:
            world = World(journal, tmp_path, pool)
            destination = await Destination.opened("s3://runs/all", pool)
            assert await destination.check("d0", is_known=False) is None
            limits = BatchLimits(rollouts=2, wait_s=0.01)
            exporter = Exporter(
                world.queue, world.records, world.log, world.gates, destination,
                driver="d0-1", spool=tmp_path / "spool", limits=limits,
            )  # fmt: skip
            task = asyncio.ensure_future(exporter.run())
            ended = []
            for number in range(ROLLOUTS):
                ended.append(await world.end(run=f"run/{number % 3}"))
                exporter.ended()
                if number == ROLLOUTS // 2:
                    await eventually(lambda: len(world.gates.reported) > 2, "some are stored")
                    await proxy.die()
            await eventually(lambda: exporter.failing is not None, "the outage is noticed", within=90)
            assert exporter.failing is not None and "very secret" not in exporter.failing.message
            await proxy.start()
            async with asyncio.timeout(300):
                await exporter.finish()
            task.cancel()
            await world.log.aclose()
    assert min(proxy.seen[fault] for fault in ("error", "lost request", "lost answer", "none")) > 0, proxy.seen
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server)
    s3fs.S3FileSystem.clear_instance_cache()
    rows = await asyncio.to_thread(lambda: list(read_exports("s3://runs/all", "rollouts")))
    assert Counter((row["rollout_id"], row["attempt"]) for row in rows) == {(name, 1): 1 for name in ended}
    calls = await asyncio.to_thread(lambda: [row["call_id"] for row in read_exports("s3://runs/all", "turns")])
    assert Counter(calls) == {f"{name}-{index}": 1 for name in ended for index in range(2)}
    assert not world.gates.kept and sorted(world.gates.reported) == sorted(ended)
    names = await asyncio.to_thread(lambda: fsspec.filesystem("s3").find("runs/all/default"))
    assert all(name.startswith("runs/all/default/run%2F") for name in names), names


@pytest.mark.requirement("R124")
async def test_an_absent_bucket_is_named_before_the_driver_serves(
    proxy: Proxy, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server)
    s3fs.S3FileSystem.clear_instance_cache()
    with ThreadPoolExecutor(1) as pool:
        destination = await Destination.opened("s3://nosuch/all", pool)
        with pytest.raises(FailedPrecondition, match="s3://nosuch/all cannot be written") as refused:
            await destination.check("d0", is_known=True)
    assert refused.value.reason == "EXPORT_NOT_WRITABLE"
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in refused.value.message
