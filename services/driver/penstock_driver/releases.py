"""What rollouts and terminal episodes hold elsewhere, given back: sandboxes and places at the gate, found by labels.

Invariants: nothing is told to be released before it is; what is still held is owed until it is released, and whoever
owes it has that on disk, for the next driver (R50, R70); a service that is away for an hour delays that and prevents
nothing. One task works for all that is owed, with growing pauses; what cannot be released keeps none of the others
waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from penstock_chassis.errors import DeadlineExceeded, PenstockError, Unavailable

DRIVER_LABEL: Final = "penstock_driver"
"""Whose a sandbox is, or a place at the gate: the driver's instance id."""
RELEASE_LIMIT_S: Final = 60.0
"""How long somebody waits for a release, and how long one try may take."""
FIRST_PAUSE_S: Final = 0.2
MOST_PAUSE_S: Final = 5.0
"""While somebody waits for the release."""
MOST_PAUSE_OWED_S: Final = 60.0

_log = structlog.get_logger("penstock.driver")

Then = Callable[[], Awaitable[None]]
"""What is written down once all is released."""


async def nothing() -> None:
    """For those of whose release nothing is written down."""


class Releases:
    """All releases of one kind of holder. Stop with `aclose()`, when nobody asks for one any more.

    `release` gives back what a holder still has; it may be asked for what is gone.
    """

    def __init__(self, release: Callable[[str], Awaitable[None]]) -> None:
        self._release = release
        self._owed: dict[str, Then] = {}
        self._stopping = asyncio.Event()
        self._work: asyncio.Task[None] | None = None

    @property
    def owed(self) -> tuple[str, ...]:
        """Who still holds something that nobody waits for any more."""
        return tuple(self._owed)

    async def release(self, holder_id: str, then: Then = nothing) -> bool:
        """Release all that one holds; False when that did not succeed in a minute, or the driver stops.

        It is tried once also by a driver that stops.
        """
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + RELEASE_LIMIT_S, FIRST_PAUSE_S
        while await self._failure(holder_id, then) is not None:
            if self._stopping.is_set() or loop.time() + pause > deadline:
                return False
            await self._pause(pause)
            pause = min(2 * pause, MOST_PAUSE_S)
        return True

    async def settle(self, holder_id: str, then: Then) -> None:
        """The same; what has not succeeded goes on without the caller."""
        if not await self.release(holder_id, then):
            self.owe(holder_id, then)

    def owe(self, holder_id: str, then: Then) -> None:
        """Release what one holds without anybody waiting for it."""
        self._owed[holder_id] = then
        if self._work is None or self._work.done():
            self._work = asyncio.ensure_future(self._settle())

    def stop(self) -> None:
        """Give up waiting; each release is tried once more at most."""
        self._stopping.set()

    async def aclose(self) -> None:
        """Stop, and return when nothing is under way."""
        self.stop()
        if self._work:
            await asyncio.wait([self._work])

    async def _settle(self) -> None:
        pause = FIRST_PAUSE_S
        while self._owed:
            for holder_id, then in list(self._owed.items()):
                failure = await self._failure(holder_id, then)
                del self._owed[holder_id]
                if failure is None:
                    pause = FIRST_PAUSE_S
                    continue
                self._owed[holder_id] = then  # behind the others
                if isinstance(failure, Unavailable | DeadlineExceeded | TimeoutError):
                    break  # the others would hear the same
            if self._stopping.is_set():
                return
            if self._owed:
                await self._pause(pause)
                pause = min(2 * pause, MOST_PAUSE_OWED_S)

    async def _failure(self, holder_id: str, then: Then) -> Exception | None:
        """Try a release: None, or why it did not succeed."""
        try:
            async with asyncio.timeout(RELEASE_LIMIT_S):
                await self._release(holder_id)
                await then()
        except (PenstockError, TimeoutError) as error:
            _log.warning("cannot release yet", holder=holder_id, error=repr(error))
            return error
        except Exception as error:  # noqa: BLE001 - a full disk is no reason to owe nothing any more
            _log.exception("cannot release", holder=holder_id)
            return error
        return None

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return
