"""What an upstream says, on its way to a program in a sandbox, and whether it arrived (R105).

Invariant: nothing is buffered here beyond one part of at most `CHUNK` bytes, and nothing looks at what is on its way
until the program sends no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from penstock_chassis import sockets
from penstock_sandbox.backends.upstream import CHUNK, Streams

ARRIVAL_S: Final = 1.0
"""Longest that a program's end waits for what was on its way to it."""
_MOST_PAUSE_S: Final = 0.05


class Answers:
    """One direction of a connection.

    Args:
        outside: the upstream.
        write: takes a part towards the program.
        has_arrived: whether all that was written is at the program's socket. Raises what the program's side broke with.
    """

    def __init__(
        self, outside: Streams, write: Callable[[bytes], Awaitable[None]], has_arrived: Callable[[], bool]
    ) -> None:
        self._reader, self._transport = outside[0], outside[1].transport
        self._write = write
        self._has_arrived = has_arrived
        self._is_empty = False
        """Whether nothing is between reading and writing."""

    async def carry(self) -> None:
        """Until the upstream has said all."""
        self._is_empty = True
        while data := await self._reader.read(CHUNK):
            self._is_empty = False
            await self._write(data)
            self._is_empty = True

    async def arrive(self) -> None:
        """Waits until all that came so far is at the program's socket; to be done before its end is passed on.

        A program that closed its socket had read what was there, and resets the connection with the next byte.

        Raises:
            ConnectionResetError: not all of it arrived in `ARRIVAL_S`.
        """
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + ARRIVAL_S, 0.0
        while True:
            await asyncio.sleep(pause)  # also at first: what was read is then written
            if self._is_empty and not sockets.unread(self._transport) and self._has_arrived():
                return
            if loop.time() >= until:
                raise ConnectionResetError("what came for the program did not arrive")
            pause = min(_MOST_PAUSE_S, 2 * pause + 0.001)
