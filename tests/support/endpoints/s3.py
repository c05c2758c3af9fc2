"""Parts around an S3 server of a test: what s3fs is to know of it, its bucket, and a proxy that fails."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import cycle
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import s3fs
from tests.support.endpoints.loopback import unused_port
from tests.support.waiting import eventually_async

SHARE: Final = 0.3
"""How many of the requests fail at the proxy."""
BUCKET: Final = "runs"
CREDENTIALS: Final[Mapping[str, str]] = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "very secret",
    "AWS_REGION": "us-east-1",
}
ENDPOINT: Final = "AWS_ENDPOINT_URL_S3"
"""The variable that leads s3fs to a server, as an operator would."""

_MOTO: Final = "import sys; sys.setswitchinterval(60); from moto.server import main; main()"
"""No thread gives way to another amid a request: moto looks for an object, and then writes it, in two steps."""


@contextmanager
def serving(log: Path) -> Iterator[str]:
    """Yields the address of an S3 server (moto)."""
    port = unused_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _MOTO, "-H", "127.0.0.1", "-p", str(port)], stdout=output, stderr=output
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@asynccontextmanager
async def behind_proxy(server: str, set_variable: Callable[[str, str], None]) -> AsyncIterator[Proxy]:
    """Yields a proxy of a server that has the bucket; the environment leads s3fs to it, as an operator would."""
    for name, value in CREDENTIALS.items():
        set_variable(name, value)
    set_variable(ENDPOINT, server)
    proxy = Proxy(server)
    await proxy.start()
    await eventually_async(lambda: asyncio.to_thread(has_bucket), "the server has the bucket")
    lead_to(proxy.address)
    try:
        yield proxy
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        await proxy.die()


def has_bucket() -> bool:
    """Whether the environment's server has the bucket, which is made; False while it is starting."""
    bucket = s3fs.S3FileSystem(skip_instance_cache=True)
    with suppress(Exception):
        bucket.mkdir(BUCKET)
    with suppress(Exception):
        return bool(bucket.exists(BUCKET))
    return False


def lead_to(endpoint: str) -> None:
    """Have this process, and those that it starts, use this server from now on."""
    os.environ[ENDPOINT] = endpoint
    s3fs.S3FileSystem.clear_instance_cache()


class Proxy:
    """A proxy in front of an HTTP server. It answers SHARE of the requests with 500, or breaks off, before the
    request is done or after. Between `die` and `start` it accepts no connection, and while the server is away it breaks
    off all."""

    def __init__(self, upstream: str, host: str = "127.0.0.1") -> None:
        """`host` is its own address."""
        self._own = host
        self._host, self._port = urlsplit(upstream).hostname, urlsplit(upstream).port
        self._random = random.Random(7)  # the same faults each time
        self._faults = cycle(("error", "lost request", "lost answer"))
        self._server: asyncio.Server | None = None
        self.port = unused_port()
        self.seen: Counter[str] = Counter()
        """Requests by what was done to them: error, lost request, lost answer, none."""

    @property
    def address(self) -> str:
        """Its URL."""
        return f"http://{self._own}:{self.port}"

    async def start(self) -> None:
        """Accept connections, each time at the same port."""
        self._server = await asyncio.start_server(self._serve, self._own, self.port)

    async def die(self) -> None:
        """Accept no more connections."""
        if self._server is not None:
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
