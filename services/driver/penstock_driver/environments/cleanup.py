"""Cleanup of what rollouts and terminal episodes hold in other services: sandboxes and open rollouts, found by labels.

Invariants: nothing is reported as released before it is. What is still held stays pending until it is released, and its
holder has that on disk for the next driver (R50, R70). A service that is down for an hour delays a cleanup and prevents
none. One task handles all pending cleanups with growing pauses; a cleanup that keeps failing does not block the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Final

import structlog

from penstock_chassis.aio.retry import Backoff, Delays, retry
from penstock_chassis.auth import acting_in
from penstock_chassis.errors import DeadlineExceeded, PenstockError, Unavailable
from penstock_chassis.journal import refusal
from penstock_chassis.membership.peers import PeerLost

DRIVER_LABEL: Final = "penstock_driver"
"""Label for the owner of a sandbox or of a rollout at the gate: the driver's instance id."""
RELEASE_LIMIT_S: Final = 60.0
"""Limit on waiting for a release, and on one attempt."""
FIRST_PAUSE_S: Final = 0.2
MOST_PAUSE_S: Final = 5.0
"""Longest pause between attempts while a caller waits for the release."""
MOST_PAUSE_OWED_S: Final = 60.0

_log = structlog.get_logger("penstock.driver")

Then = Callable[[], Awaitable[None]]
"""Called once all is released, to record it."""


async def nothing() -> None:
    """For holders whose release is not recorded."""


class Cleanups:
    """All cleanups of one kind of holder. Stop with `aclose()`, after the last request.

    `release` frees whatever a holder still has; it must succeed if that is gone already.
    """

    def __init__(self, release: Callable[[str], Awaitable[None]]) -> None:
        self._release = release
        self._owed: dict[str, Then] = {}
        self._failed: set[str] = set()
        self._stopping = asyncio.Event()
        self._awake = asyncio.Event()
        """Set by what ends a pause between two attempts in the background."""
        self._work: asyncio.Task[None] | None = None

    @property
    def owed(self) -> tuple[str, ...]:
        """Ids of the holders with a pending cleanup that no caller waits for."""
        return tuple(self._owed)

    async def release(self, holder_id: str, then: Then = nothing) -> bool:
        """Release everything a holder has; False if that fails for a minute, or the driver stops.

        A stopping driver still tries once. False at once, too, for what a lost peer has, which waits for that peer, and
        for a disk that refuses to record the release, which may stay full for long.
        """

        async def once() -> bool:
            if (failure := await self._failure(holder_id, then)) is not None:
                raise failure
            return True

        delays = Delays(FIRST_PAUSE_S, MOST_PAUSE_S)
        try:
            return await retry(
                once, delays, patience_s=self._patience_s, retry_info=False, pause=partial(_until, self._stopping)
            )
        except Exception:  # noqa: BLE001 - logged by `_failure`
            return False

    def _patience_s(self, failure: Exception) -> float:
        at_once = refusal(failure) or isinstance(failure, PeerLost) or self._stopping.is_set()
        return 0.0 if at_once else RELEASE_LIMIT_S

    async def settle(self, holder_id: str, then: Then) -> None:
        """Like `release`; a release that fails continues in the background."""
        if not await self.release(holder_id, then):
            self.owe(holder_id, then)

    def owe(self, holder_id: str, then: Then) -> None:
        """Release a holder in the background."""
        self._owed[holder_id] = then
        if self._work is None or self._work.done():
            self._work = asyncio.ensure_future(self._settle())

    def look_again(self) -> None:
        """Try the pending releases at once: a service that had some of them is back."""
        self._awake.set()

    def stop(self) -> None:
        """Stop waiting; each release is tried at most once more."""
        self._stopping.set()
        self._awake.set()

    async def aclose(self) -> None:
        """Stop, and return when nothing is in progress."""
        self.stop()
        if self._work:
            await asyncio.wait([self._work])

    async def _settle(self) -> None:
        backoff = Backoff(Delays(FIRST_PAUSE_S, MOST_PAUSE_OWED_S), pause=partial(_until, self._awake))
        while self._owed:
            self._awake.clear()
            for holder_id, then in list(self._owed.items()):
                failure = await self._failure(holder_id, then)
                del self._owed[holder_id]
                if failure is None:
                    backoff.reset()
                    continue
                self._owed[holder_id] = then  # to the end of the queue
                if isinstance(failure, Unavailable | DeadlineExceeded | TimeoutError):
                    break  # the others would fail the same way
            if self._stopping.is_set():
                return
            if self._owed:
                await backoff.wait()
                if self._awake.is_set():
                    backoff.reset()

    async def _failure(self, holder_id: str, then: Then) -> Exception | None:
        """Try a release; return None, or the error."""
        try:
            # The task may have been started for another namespace than the holder's.
            with acting_in(None):
                async with asyncio.timeout(RELEASE_LIMIT_S):
                    await self._release(holder_id)
                    await then()
        except (PenstockError, PeerLost, TimeoutError) as error:
            # A host may be away for long, with many holders: one line for each is enough.
            log = _log.debug if holder_id in self._failed else _log.warning
            self._failed.add(holder_id)
            log("cannot release yet", holder=holder_id, error=repr(error))
            return error
        except Exception as error:  # noqa: BLE001 - also after a full disk the cleanup stays pending
            _log.exception("cannot release", holder=holder_id)
            return error
        self._failed.discard(holder_id)
        return None


async def _until(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, at most so many seconds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
