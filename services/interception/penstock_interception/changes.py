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
    """The ring and those who wait for its next entry."""

    def __init__(self, start: int, kept: int = KEPT) -> None:
        self._ring: deque[Change] = deque(maxlen=kept)
        self.last = start
        self._next: asyncio.Future[None] | None = None

    @property
    def oldest_resumable(self) -> int:
        """The smallest sequence after which nothing is missing."""
        return self._ring[0].sequence - 1 if self._ring else self.last

    def call_changed(self, call: Call) -> None:
        """Records the call's present state."""
        self.last += 1
        self._append(CallChange(self.last, call.rollout, call, call.state))

    def rollout_closed(self, rollout: Rollout) -> None:
        """Records that a rollout was closed."""
        self.last += 1
        self._append(RolloutClosed(self.last, rollout, rollout.close_reason))

    def after(self, sequence: int) -> Sequence[Change] | None:
        """Changes after `sequence`, at most 1024 of them; None when some of them are no longer kept."""
        if sequence < self.oldest_resumable:
            return None
        if not self._ring or sequence >= self.last:
            return ()
        skip = max(0, sequence + 1 - self._ring[0].sequence)
        return list(itertools.islice(self._ring, skip, skip + READ_AT_ONCE))

    async def wait(self, sequence: int) -> None:
        """Waits until there is a change after `sequence`, or `wake` is called."""
        if self.last <= sequence:
            if self._next is None:
                self._next = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._next)

    def wake(self) -> None:
        """Lets those who wait look around."""
        if self._next is not None:
            self._next.set_result(None)
            self._next = None

    def _append(self, change: Change) -> None:
        self._ring.append(change)
        self.wake()
