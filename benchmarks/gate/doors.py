"""A bare HTTP client: its own cost is small, and the same for everything that is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Self

AT_ONCE: Final = 64
"""Connections that are opened at once: fewer than a listener lets wait."""


class Door(asyncio.Protocol):
    """A keep-alive connection to a chat completions endpoint, one request at a time.

    `pieces` counts what has come, keep-alives included, since the last request.
    """

    def __init__(self, address: str, path: str, token: str, rollout_id: str = "") -> None:
        self.rollout_id = rollout_id
        self.pieces = 0
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._head = (
            f"POST {path} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {token}\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode()
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[bytes] | None = None
        self._come = bytearray()
        self._more = asyncio.Event()

    async def open(self) -> Self:
        """Connects."""
        await asyncio.get_running_loop().create_connection(lambda: self, self._host, self._port)
        return self

    def close(self) -> None:
        """Hangs up."""
        if self._transport is not None:
            self._transport.abort()

    def post(self, body: bytes) -> asyncio.Future[bytes]:
        """One call; the future has the answer's body, or RuntimeError when it is none with status 200."""
        assert self._transport is not None and not self._transport.is_closing(), "open it first"
        self._come.clear()
        self.pieces = 0
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(b"%b%d\r\n\r\n%b" % (self._head, len(body), body))
        return self._answer

    async def come(self, pieces: int) -> None:
        """Returns when that much of the answer has come. Raises what the answer raises."""
        while self.pieces < pieces:
            if self._answer is not None and self._answer.done():
                self._answer.result()
                raise RuntimeError("the answer came before what was waited for")
            self._more.clear()
            await self._more.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """For asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        """For asyncio."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(RuntimeError(f"the connection ended before the answer: {error}"))
        self._more.set()

    def data_received(self, data: bytes) -> None:
        """For asyncio."""
        self._come += data
        self.pieces += 1
        self._more.set()
        head, found, body = self._come.partition(b"\r\n\r\n")
        if self._answer is None or self._answer.done() or not found or not _whole(head.lower(), body):
            return
        if head.startswith(b"HTTP/1.1 200"):
            self._answer.set_result(bytes(body))
        else:
            self._answer.set_exception(RuntimeError(f"{bytes(head.splitlines()[0])!r}: {bytes(body[:500])!r}"))


async def connect(doors: Sequence[Door]) -> None:
    """Connects them all."""
    for start in range(0, len(doors), AT_ONCE):
        await asyncio.gather(*(door.open() for door in doors[start : start + AT_ONCE]))


def _whole(head: bytearray, body: bytearray) -> bool:
    if b"transfer-encoding: chunked" in head:
        return body.endswith(b"0\r\n\r\n")
    start = head.index(b"content-length:") + 15
    return len(body) >= int(head[start:].split(b"\r\n", 1)[0])
