"""A sandbox's one endpoint: connections to its loopback port, carried to one upstream and to nothing else.

Purpose: the sandbox helper opened the listener inside the sandbox's network namespace; this service accepts on it and
connects to the policy's address. The sandbox has no other network access.

Invariants: those of ``host.relay``; a slow reader slows its writer (only the transports buffer); closing the endpoint
cuts every connection at once.
"""

from __future__ import annotations

import asyncio
import socket

import structlog

from penstock_chassis import sockets
from penstock_chassis.aio.tasks import TaskOwner
from penstock_sandbox.backends.host.relay import MAX_CONNECTIONS, relay
from penstock_sandbox.backends.host.upstream import CHUNK, reset
from penstock_sandbox.domain.model import NetworkPolicy

_ACCEPT_PAUSE_S = 0.05

_log = structlog.get_logger(__name__)


class Endpoint:
    """Serves one listener until closed."""

    def __init__(self, sandbox_id: str, listener: socket.socket, policy: NetworkPolicy) -> None:
        self._sandbox_id = sandbox_id
        self._listener = listener
        self._policy = policy
        self._connections = TaskOwner()
        self._acceptor: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Starts to accept."""
        self._listener.setblocking(False)
        self._acceptor = asyncio.create_task(self._accept(), name=f"endpoint-{self._sandbox_id}")

    async def aclose(self) -> None:
        """Stops accepting and cuts every connection."""
        if self._acceptor is not None:
            self._acceptor.cancel()
            await asyncio.gather(self._acceptor, return_exceptions=True)
        await self._connections.aclose()
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                # Out of descriptors, or a peer that left at once: the endpoint stays.
                _log.warning("accepting failed", sandbox=self._sandbox_id, error=str(error))
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if len(self._connections) >= MAX_CONNECTIONS:
                connection.close()
                continue
            self._connections.start(self._carry(connection))

    async def _carry(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            reader, writer = await asyncio.open_connection(sock=connection, limit=CHUNK)
        except OSError:
            connection.close()
            return
        try:
            await relay(_Program(reader, writer), self._policy, self._sandbox_id)
        finally:
            writer.transport.close()


class _Program:
    """An accepted connection, as ``relay`` expects it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self) -> bytes:
        return await self._reader.read(CHUNK)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def has_arrived(self) -> bool:
        if not sockets.stands(self._writer.transport):
            raise ConnectionResetError
        return sockets.has_all(self._writer.transport)

    def end(self) -> None:
        if self._writer.can_write_eof():
            self._writer.write_eof()

    def reset(self) -> None:
        reset(self._writer)
