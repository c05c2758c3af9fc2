"""A network that fails when it is told to: a TCP proxy between a client and a service."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final, Self

from tests.support.endpoints.loopback import unused_port

_CHUNK: Final = 65536


class Proxy:
    """Listens on a port of its own, and forwards to `upstream` (`host:port`) as long as it is well.

    `cut` closes what is open, and lets new connections through; `refuse` closes all and listens no more; `swallow` lets
    nothing come back from the service; `heal` ends whatever was the matter.
    """

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._port = unused_port()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._heard = asyncio.Event()

    @property
    def address(self) -> str:
        """Where clients connect."""
        return f"127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        self._heard.set()
        await self.heal()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()

    async def cut(self) -> None:
        """Closes every connection; whatever was on its way is lost."""
        for writer in list(self._open):
            writer.transport.abort()
        self._heard.set()

    async def refuse(self) -> None:
        """Nobody listens here any more."""
        if self._server is not None:
            self._server.close()
            self._server = None
        await self.cut()

    async def swallow(self) -> None:
        """What the service says reaches nobody."""
        self._heard.clear()

    async def heal(self) -> None:
        """All is well."""
        self._heard.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._upstream.rpartition(":")
        try:
            above, below = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, below}
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_forward(reader, below, None))
                tasks.create_task(_forward(above, writer, self._heard))
        finally:
            self._open -= {writer, below}
            for end in (writer, below):
                end.transport.abort()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event | None) -> None:
    """Until either end is closed; then both are."""
    with suppress(ConnectionError):
        while data := await reader.read(_CHUNK):
            if gate is not None:
                await gate.wait()
                if writer.transport.is_closing():
                    return
            writer.write(data)
            await writer.drain()
    writer.transport.abort()
