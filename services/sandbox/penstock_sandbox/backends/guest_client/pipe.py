"""The byte streams between the service and a guest agent; a backend opens them, as often as requested.

Purpose: whatever can run ``attach`` (or ``deliver`` and ``attach --output-only``) in a sandbox and carry its standard
input and output is a ``Pipe``. It may break at any time; the link over it loses nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from penstock_sandbox.guest import frames
from penstock_sandbox.guest.handshake import ATTACH

_READ = 256 * 1024


class Pipe(Protocol):
    """A byte stream in both directions, opened outwards by the service."""

    async def send(self, data: bytes) -> None:
        """Sends all of ``data``, waiting while the peer does not read; raises when the pipe is broken."""

    def received(self) -> AsyncIterator[bytes]:
        """Yields data as it arrives; ends (or raises) when the pipe does. Used once."""

    async def aclose(self) -> None:
        """Closes the pipe; harmless if it is broken."""


Opener = Callable[[], Awaitable[Pipe]]
"""Opens a pipe to a sandbox's guest agent. Raises SandboxGone if the sandbox does not exist any more."""


class SandboxGone(Exception):
    """The backend knows that the sandbox has ended: retries are useless. ``reason`` is UPPER_SNAKE."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Armoured:
    """A pipe whose peer was started with ``--armour``: lines of printable text instead of bytes."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    async def send(self, data: bytes) -> None:
        await self._pipe.send(frames.armour(data))

    async def received(self) -> AsyncIterator[bytes]:
        clear = frames.Unarmour()
        async for data in self._pipe.received():
            if plain := clear.feed(data):
                yield plain

    async def aclose(self) -> None:
        await self._pipe.aclose()


class StreamPipe:
    """A pipe over asyncio's streams; ``close`` ends the process or other source behind them."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._close = close

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def received(self) -> AsyncIterator[bytes]:
        while data := await self._reader.read(_READ):
            yield data

    async def aclose(self) -> None:
        self._writer.transport.abort()
        if self._close is not None:
            await self._close()


def unix_socket(path: str) -> Opener:
    """Returns an opener of pipes to a guest agent's socket on this machine, without ``attach`` in between."""

    async def connect() -> Pipe:
        try:
            reader, writer = await asyncio.open_unix_connection(path, limit=_READ)
        except (ConnectionRefusedError, FileNotFoundError) as error:
            # It listened before the first pipe was opened, so it has ended.
            raise SandboxGone("ATTENDANT_ENDED") from error
        writer.write(ATTACH)
        return StreamPipe(reader, writer)

    return connect
