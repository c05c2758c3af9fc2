"""Connects a program in a sandbox to its upstream and carries bytes both ways; tracks whether they arrived (R105).

Invariants: at most one part of `CHUNK` bytes is buffered here in each direction; half-closes are carried; an error on
one side, or a cut, resets the other: the upstream must not count bytes as read that ended here. So a program's end of
stream is passed on only once all data for it is at its socket; if that fails, a reset is.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

import structlog

from penstock_chassis import sockets
from penstock_sandbox.backends.host.upstream import CHUNK, Streams, connect, reset
from penstock_sandbox.domain.model import NetworkPolicy

MAX_CONNECTIONS: Final = 256
"""Maximum connections that one sandbox may have at a time."""

ARRIVAL_S: Final = 1.0
"""Maximum delay in seconds of a program's end of stream while bytes are on their way to it."""
_MOST_PAUSE_S: Final = 0.05

_log = structlog.get_logger(__name__)


class Program(Protocol):
    """The connection of a program in a sandbox, as the service has it."""

    async def read(self) -> bytes:
        """Returns what the program sent next; empty at its end of stream."""

    async def write(self, data: bytes) -> None:
        """Sends towards the program, waiting while it does not read."""

    def has_arrived(self) -> bool:
        """Whether all written bytes are at the program's socket. Raises the error of its side."""

    def end(self) -> None:
        """Passes on the upstream's end of stream."""

    def reset(self) -> None:
        """Resets the connection: the program sees a failure. Harmless if it is over."""


async def relay(
    program: Program, policy: NetworkPolicy, sandbox_id: str, broken: tuple[type[Exception], ...] = (OSError,)
) -> None:
    """Connects ``program`` to the policy's upstream, and returns when both directions have ended, or one has failed.

    ``broken`` are the errors of a broken connection, of either side.
    """
    try:
        outside = await connect(policy)
    except (OSError, TimeoutError) as error:
        # The agent sees a reset; the operator's log has the reason.
        _log.warning(
            "upstream unreachable", sandbox=sandbox_id, upstream=policy.upstream or policy.proxy, error=str(error)
        )
        program.reset()
        return
    ended = False
    try:
        async with asyncio.TaskGroup() as both:
            answers = _Answers(outside, program)
            both.create_task(_outwards(program, outside, answers))
            both.create_task(_inwards(program, answers))
        ended = True
    except* broken:
        program.reset()
    finally:
        if ended:
            outside[1].transport.abort()
        else:
            reset(outside[1])


async def _outwards(program: Program, outside: Streams, answers: _Answers) -> None:
    while data := await program.read():
        outside[1].write(data)
        await outside[1].drain()
    await answers.arrive()
    if outside[1].can_write_eof():
        outside[1].write_eof()


async def _inwards(program: Program, answers: _Answers) -> None:
    await answers.carry()
    program.end()


class _Answers:
    """The direction from an upstream to a program."""

    def __init__(self, outside: Streams, program: Program) -> None:
        self._reader, self._transport = outside[0], outside[1].transport
        self._program = program
        self._is_empty = False
        """Whether no bytes are between reading and writing."""

    async def carry(self) -> None:
        """Carries bytes until the upstream's end of stream."""
        self._is_empty = True
        while data := await self._reader.read(CHUNK):
            self._is_empty = False
            await self._program.write(data)
            self._is_empty = True

    async def arrive(self) -> None:
        """Waits until all bytes so far are at the program's socket; call it before the program's end is passed on.

        A program that closed its socket had read its bytes, and resets the connection when more arrive.

        Raises:
            ConnectionResetError: not all of it arrived in `ARRIVAL_S`.
        """
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + ARRIVAL_S, 0.0
        while True:
            await asyncio.sleep(pause)  # also at first: a part just read is then written
            if self._is_empty and not sockets.unread(self._transport) and self._program.has_arrived():
                return
            if loop.time() >= until:
                raise ConnectionResetError("the answer did not reach the program")
            pause = min(_MOST_PAUSE_S, 2 * pause + 0.001)
