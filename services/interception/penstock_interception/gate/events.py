"""Events of calls and rollouts, by sequence number, for WatchCalls.

A bounded ring. A reader that falls behind it gets a distinct result and never misses a change silently (R26). Sequence
numbers grow across restarts: each start begins at the current time in microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock_chassis.aio.broadcast import Broadcast, Signal
from penstock_codec.fast_dataclass import quick
from penstock_interception.domain.calls import CallState
from penstock_interception.domain.state import Call, Rollout

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
    sequence: int
    rollout: Rollout
    reason: str


Change = CallChange | RolloutClosed


class CallEvents:
    """The ring, and its waiters: for any entry, or for the next end of a call or rollout."""

    def __init__(self, start: int, kept: int = KEPT) -> None:
        self._ring: Broadcast[Change] = Broadcast(keep=kept, start=start)
        self._ended = Signal(start)

    @property
    def last(self) -> int:
        """The last change's sequence number."""
        return self._ring.last

    @property
    def oldest_resumable(self) -> int:
        """The smallest sequence number after which no change is missing."""
        return self._ring.oldest_resumable

    def call_changed(self, call: Call) -> None:
        """Records the call's current state."""
        state = call.state
        sequence = self._ring.publish(CallChange(self._ring.last + 1, call.rollout, call, state))
        if state.terminal:
            self._ended.notify(sequence)

    def rollout_closed(self, rollout: Rollout) -> None:
        sequence = self._ring.publish(RolloutClosed(self._ring.last + 1, rollout, rollout.close_reason))
        self._ended.notify(sequence)

    def after(self, sequence: int) -> Sequence[Change] | None:
        """Returns up to 1024 changes after `sequence`; None if some of them are no longer in the ring."""
        return self._ring.after(sequence, READ_AT_ONCE)

    async def wait(self, sequence: int, timeout_s: float, *, ended_only: bool = False) -> bool:
        """Waits for a change after `sequence`, or for `wake`; returns False on timeout.

        With `ended_only`, only the end of a call or rollout wakes the waiter.
        """
        return await (self._ended if ended_only else self._ring.published).wait(sequence, timeout_s)

    def wake(self) -> None:
        self._ring.published.wake()
        self._ended.wake()
