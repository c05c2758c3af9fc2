"""When open calls expire. The time of a paused rollout's calls stands still, on disk too.

Invariant: nothing gains time beyond its limit, and a pause costs nothing, even if the machine's clock was set between
two runs of the service.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock_interception.domain.state import Call, Rollout
from penstock_interception.gate.context import DeadlineKind, GateContext


class CallTimeouts:
    """The expiry of all open calls."""

    def __init__(self, context: GateContext) -> None:
        self._store = context.store
        self._clock = context.clock
        self._deadlines = context.deadlines

    def start(self, call: Call) -> None:
        """Sets when a new call expires, unless its rollout is paused."""
        if not call.rollout.paused_by:
            self._deadlines.set(
                (DeadlineKind.EXPIRE, call.id), self._clock.steady() + call.rollout.spec.budgets.call_timeout_s
            )

    def stop(self, call: Call) -> None:
        """Drops the expiry of a call that has ended."""
        self._deadlines.drop((DeadlineKind.EXPIRE, call.id))

    def pause(self, rollout: Rollout) -> None:
        """Stops the clock for the calls of a paused rollout."""
        rollout.paused_since = self._clock.wall()
        for call in rollout.open_calls():
            self._deadlines.drop((DeadlineKind.EXPIRE, call.id))
        self._store.put_pause(rollout)

    def resume(self, rollout: Rollout) -> None:
        """Restarts the clock for the calls of a rollout that is no longer paused."""
        now = self._clock.wall()
        moved = rollout.open_calls()
        resume_times(rollout, moved, now)
        for call in moved:
            self._set(call, now)
        self._store.put_pause(rollout, moved)

    def restore(self, rollout: Rollout) -> None:
        """Restores the clock of a rollout and its calls after a restart."""
        now = self._clock.wall()
        restore_times(rollout, rollout.calls, now)
        if rollout.is_held:
            return
        if rollout.paused_since is not None:  # the session that paused it is gone; it pauses again when it resumes
            moved = rollout.open_calls()
            resume_times(rollout, moved, now)
            self._store.put_pause(rollout, moved)
        for call in rollout.calls:
            if not call.state.terminal:
                self._set(call, now)

    def _set(self, call: Call, now: float) -> None:
        self._deadlines.set((DeadlineKind.EXPIRE, call.id), self._clock.steady() + max(0.0, call.expires - now))


def resume_times(rollout: Rollout, calls: Iterable[Call], now: float) -> None:
    """Restarts the clock of a paused rollout and these calls of it. `now` in seconds since 1970."""
    since, rollout.paused_since = rollout.paused_since or now, None
    rollout.paused_s += max(0.0, now - since)
    for call in calls:
        call.expires += max(0.0, now - max(since, call.received))


def restore_times(rollout: Rollout, calls: Iterable[Call], now: float) -> None:
    """Clamps a restored rollout's and its calls' times to `now`: they lie in the future if the clock was set back."""
    rollout.created = min(rollout.created, now)
    if rollout.closed is not None:
        rollout.closed = min(rollout.closed, now)
    if rollout.paused_since is not None:
        rollout.paused_since = min(rollout.paused_since, now)
    most = rollout.spec.budgets.call_timeout_s
    for call in calls:
        if not call.state.terminal:
            call.received = min(call.received, now)
            call.expires = min(call.expires, now + most)
