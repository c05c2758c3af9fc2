"""What happened to calls and rollouts, by sequence number: what WatchCalls reads.

A bounded ring. A reader that fell behind it is told so by type and never silently misses a change (R26). Sequences grow
across restarts too, since each life of the service starts at its time in microseconds.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from penstock_codec.quick import quick
from penstock_interception.calls import Call, CallState, Rollout

KEPT = 8192
READ_AT_ONCE = 1024


@quick
@dataclass(frozen=True, slots=True)
class CallChange:
    """A call was opened or changed state."""

    sequence: int
    rollout: Rollout
    call: Call
    state: CallState


@dataclass(frozen=True, slots=True)
class RolloutClosed:
    """A rollout was closed."""

    sequence: int
    rollout: Rollout
    reason: str


Change = CallChange | RolloutClosed


class Changes:
    """The ring and those who wait for its next entry: any, or the next end of a call or a rollout."""

    def __init__(self, start: int, kept: int = KEPT) -> None:
        self._ring: deque[Change] = deque(maxlen=kept)
        self.last = start
        self._last_end = start
        self._waiting: list[asyncio.Future[bool]] = []
        self._waiting_for_ends: list[asyncio.Future[bool]] = []

    @property
    def oldest_resumable(self) -> int:
        """The smallest sequence after which nothing is missing."""
        return self._ring[0].sequence - 1 if self._ring else self.last

    def call_changed(self, call: Call) -> None:
        """Records the call's present state."""
        self.last += 1
        state = call.state
        self._append(CallChange(self.last, call.rollout, call, state), end=state.terminal)

    def rollout_closed(self, rollout: Rollout) -> None:
        """Records that a rollout was closed."""
        self.last += 1
        self._append(RolloutClosed(self.last, rollout, rollout.close_reason), end=True)

    def after(self, sequence: int) -> Sequence[Change] | None:
        """Changes after `sequence`, at most 1024 of them; None when some of them are no longer kept."""
        if sequence < self.oldest_resumable:
            return None
        behind = self.last - sequence
        if behind <= 0:
            return ()
        if behind <= READ_AT_ONCE:  # from the young end: a deque is walked to where a slice begins
            found = list(itertools.islice(reversed(self._ring), behind))
            found.reverse()
            return found
        skip = len(self._ring) - behind
        return list(itertools.islice(self._ring, skip, skip + READ_AT_ONCE))

    async def wait(self, sequence: int, timeout_s: float, *, ended_only: bool = False) -> bool:
        """Waits until there is a change after `sequence`, or `wake` is called; False when the time was over first.

        With `ended_only` until a call or a rollout ended after it: changes in between wake nobody.
        """
        if (self._last_end if ended_only else self.last) > sequence:
            return True
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[bool] = loop.create_future()
        waiting = self._waiting_for_ends if ended_only else self._waiting
        waiting.append(woken)
        timer = loop.call_later(timeout_s, _settle, woken, False)
        try:
            return await woken
        finally:
            timer.cancel()
            if woken in waiting:
                waiting.remove(woken)

    def wake(self) -> None:
        """Lets all who wait look around."""
        _settle_all(self._waiting)
        _settle_all(self._waiting_for_ends)

    def _append(self, change: Change, *, end: bool) -> None:
        self._ring.append(change)
        _settle_all(self._waiting)
        if end:
            self._last_end = change.sequence
            _settle_all(self._waiting_for_ends)


def _settle_all(waiting: list[asyncio.Future[bool]]) -> None:
    for woken in waiting:
        _settle(woken, True)
    waiting.clear()


def _settle(woken: asyncio.Future[bool], value: bool) -> None:
    if not woken.done():
        woken.set_result(value)
