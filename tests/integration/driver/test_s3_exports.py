"""Exports to a real S3 server (moto), through a proxy that fails and dies; s3fs is the one of PyPI, unchanged."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
from tests.support.endpoints import s3
from tests.support.endpoints.s3 import Proxy
from tests.support.waiting import eventually
from tests.unit.driver.trajectories.exports.test_exporter import World

from penstock.analysis.export import read_exports
from penstock_chassis.errors import FailedPrecondition
from penstock_chassis.journal import Journal
from penstock_driver.app import MIGRATIONS
from penstock_driver.store.annotations import Annotations
from penstock_driver.trajectories.exports.destination import Destination
from penstock_driver.trajectories.exports.exporter import BatchLimits, Exporter, Sources

ROLLOUTS = 40


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of an S3 server with the bucket `runs`."""
    with s3.serving(tmp_path / "moto.log") as address:
        yield address


@pytest.fixture
async def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Proxy]:
    async with s3.behind_proxy(server, monkeypatch.setenv) as proxy:
        yield proxy


@pytest.mark.requirement("R124")
async def test_every_rollout_reaches_s3_through_faults_and_an_outage(proxy: Proxy, server: str, tmp_path: Path) -> None:
    """Failed and lost requests, lost answers, a store that is away: each rollout is there once for a reader."""
    with ThreadPoolExecutor(2) as pool:
        async with await Journal.open(tmp_path / "driver.db", MIGRATIONS) as journal:
            world = World(journal, tmp_path, pool)
            destination = await Destination.opened("s3://runs/all", pool)
            assert await destination.check("d0", is_known=False) is None
            limits = BatchLimits(rollouts=2, wait_s=0.01)
            exporter = Exporter(
                world.queue, Sources(world.records, world.log, world.gates, Annotations(journal)), destination,
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
    s3.lead_to(server)
    rows = await asyncio.to_thread(lambda: list(read_exports("s3://runs/all", "rollouts")))
    assert Counter((row["rollout_id"], row["attempt"]) for row in rows) == {(name, 1): 1 for name in ended}
    calls = await asyncio.to_thread(lambda: [row["call_id"] for row in read_exports("s3://runs/all", "turns")])
    assert Counter(calls) == {f"{name}-{index}": 1 for name in ended for index in range(2)}
    assert not world.gates.kept and sorted(world.gates.reported) == sorted(ended)
    names = await asyncio.to_thread(lambda: fsspec.filesystem("s3").find("runs/all/default"))
    assert all(name.startswith("runs/all/default/run%2F") for name in names), names


@pytest.mark.requirement("R124")
async def test_an_absent_bucket_is_named_before_the_driver_serves(proxy: Proxy, server: str) -> None:
    s3.lead_to(server)
    with ThreadPoolExecutor(1) as pool:
        destination = await Destination.opened("s3://nosuch/all", pool)
        with pytest.raises(FailedPrecondition, match="s3://nosuch/all cannot be written") as refused:
            await destination.check("d0", is_known=True)
    assert refused.value.reason == "EXPORT_NOT_WRITABLE"
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in refused.value.message
