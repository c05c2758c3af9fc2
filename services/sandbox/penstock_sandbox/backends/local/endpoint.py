"""The one endpoint of a sandbox: connections to its loopback port, carried to one upstream and to nothing else.

Purpose: the door opened the listener inside the sandbox's network namespace; this service accepts on it and connects to
the address that the policy names. The sandbox has no other way out.

Invariants: bytes are carried as they are, half-closes included; a reader that is slow slows its writer (nothing is
buffered beyond the transports' limits); closing the endpoint cuts every connection at once. A side that breaks off is
a reset at the other side, and so is a cut: the upstream must not take bytes for read that ended here (R105). So a
program's end is passed on only once all that came for it is at its socket; a reset is, where that does not come about.
"""

from __future__ import annotations

import asyncio
import socket

import structlog

from penstock_chassis import sockets
from penstock_sandbox.backends.relaying import Answers
from penstock_sandbox.backends.upstream import CHUNK, Streams, connect, reset
from penstock_sandbox.model import NetworkPolicy

_CONNECTIONS = 256
_ACCEPT_PAUSE_S = 0.05

_log = structlog.get_logger(__name__)


class Endpoint:
    """Serves one listener until closed."""

    def __init__(self, sandbox_id: str, listener: socket.socket, policy: NetworkPolicy) -> None:
        self._sandbox_id = sandbox_id
        self._listener = listener
        self._policy = policy
        self._connections: set[asyncio.Task[None]] = set()
        self._acceptor: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begin to accept."""
        self._listener.setblocking(False)
        self._acceptor = asyncio.create_task(self._accept(), name=f"endpoint-{self._sandbox_id}")

    async def aclose(self) -> None:
        """Stop accepting and cut every connection."""
        tasks = [*self._connections]
        if self._acceptor is not None:
            tasks.append(self._acceptor)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
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
            if len(self._connections) >= _CONNECTIONS:
                connection.close()
                continue
            task = asyncio.create_task(self._carry(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _carry(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            inside = await asyncio.open_connection(sock=connection, limit=CHUNK)
        except OSError:
            connection.close()
            return
        try:
            try:
                outside = await connect(self._policy)
            except (OSError, TimeoutError) as error:
                # The agent sees a reset; the operator sees why.
                _log.warning(
                    "upstream unreachable", sandbox=self._sandbox_id, upstream=self._policy.upstream, error=str(error)
                )
                reset(inside[1])
            else:
                await self._splice(inside, outside)
        finally:
            inside[1].transport.close()

    async def _splice(self, inside: Streams, outside: Streams) -> None:
        ended = False
        try:
            async with asyncio.TaskGroup() as both:
                answers = _answers(inside, outside)
                both.create_task(_inwards(inside, answers))
                both.create_task(_outwards(inside, outside, answers))
            ended = True
        except* OSError:
            # One side broke off: the other one must not take that for an end.
            reset(inside[1])
        finally:
            if ended:
                outside[1].transport.abort()
            else:
                reset(outside[1])


async def _outwards(inside: Streams, outside: Streams, answers: Answers) -> None:
    while data := await inside[0].read(CHUNK):
        outside[1].write(data)
        await outside[1].drain()
    await answers.arrive()
    _end(outside[1])


async def _inwards(inside: Streams, answers: Answers) -> None:
    await answers.carry()
    _end(inside[1])


def _answers(inside: Streams, outside: Streams) -> Answers:
    async def write(data: bytes) -> None:
        inside[1].write(data)
        await inside[1].drain()

    def has_arrived() -> bool:
        if not sockets.stands(inside[1].transport):
            raise ConnectionResetError
        return sockets.has_all(inside[1].transport)

    return Answers(outside, write, has_arrived)


def _end(writer: asyncio.StreamWriter) -> None:
    if writer.can_write_eof():
        writer.write_eof()
