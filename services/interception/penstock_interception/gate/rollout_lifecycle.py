"""A rollout's life at the gate: opened, closed, kept for a while, deleted; restored after a restart.

The journal decides: an opening or a deletion whose write fails is undone.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from functools import partial
from typing import Final

from penstock_chassis.auth import Quotas
from penstock_chassis.errors import ResourceExhausted, Unavailable
from penstock_interception.domain.agent_keys import AgentKey
from penstock_interception.domain.calls import ModelFacts, RolloutSpec, RolloutState
from penstock_interception.domain.host_tools import HostTool
from penstock_interception.domain.kept_captures import Discarded
from penstock_interception.domain.state import Call, Rollout
from penstock_interception.gate.budgets import BudgetEnforcer
from penstock_interception.gate.call_timeouts import CallTimeouts
from penstock_interception.gate.context import DeadlineKind, GateContext
from penstock_interception.gate.driver_leases import DriverLeases
from penstock_interception.gate.leasing import Leasing
from penstock_interception.store.commits import failed
from penstock_interception.store.runs import Run

LOOK_S: Final = 60.0
"""How often captures are looked for that are kept beyond the limits."""
HURRY_S: Final = 5.0
"""The same while rollouts are refused for them."""


class RolloutLifecycle:
    """Opens, closes, deletes and restores rollouts. Belongs to the gate."""

    def __init__(
        self,
        context: GateContext,
        leasing: Leasing,
        budgets: BudgetEnforcer,
        timeouts: CallTimeouts,
        drivers: DriverLeases,
    ) -> None:
        self._store = context.store
        self._registry = context.registry
        self._clock = context.clock
        self._deadlines = context.deadlines
        self._limits = context.limits
        self._quotas = Quotas(dict(context.limits.quotas), "open rollouts")
        self._leasing = leasing
        self._budgets = budgets
        self._timeouts = timeouts
        self._drivers = drivers
        self._looks_at: float | None = None
        self._looked_at = -math.inf
        """When captures beyond the limits are looked for next, and were last, on the steady clock."""

    def open(
        self, spec: RolloutSpec, facts: ModelFacts, caller_key: str | None, key: AgentKey, tools: Iterable[HostTool]
    ) -> tuple[Rollout, asyncio.Future[list[int]]]:
        """Opens a rollout with its first key and its tools; returns it, and its write. If that fails, it is undone.

        Raises what BudgetEnforcer.check raises, and:
            Unavailable: DRAINING.
            ResourceExhausted: ROLLOUT_LIMIT, NAMESPACE_QUOTA, CAPTURES_FULL.
        """
        if self._registry.draining:
            raise Unavailable("The service is stopping.", reason="DRAINING", retry_after_s=5.0)
        if self._registry.closed_to_new and not self._budgets.counts(spec):
            raise Unavailable("This gate drains: it opens no rollouts.", reason="DRAINING", retry_after_s=5.0)
        if spec.keep_capture:
            self._check_room_for_captures()
        if self._registry.open_rollouts >= self._limits.max_rollouts:
            raise ResourceExhausted("Too many rollouts are open.", reason="ROLLOUT_LIMIT", retry_after_s=5.0)
        self._quotas.check(spec.namespace, self._registry.open_in[spec.namespace])
        self._budgets.check(spec)
        rollout = Rollout(spec, self._clock.wall(), facts=facts, caller_key=caller_key)
        rollout.keys[key.id] = key
        run = self._budgets.open(rollout, self._registry.rollouts())
        written = rollout.opened = self._store.put_rollout(rollout, tools, run)
        written.add_done_callback(partial(self._opened, rollout))
        self._registry.keep(rollout)
        self._leasing.link(rollout)
        self._drivers.opened(rollout)
        return rollout, written

    def close(self, rollout: Rollout, reason: str) -> None:
        """Closes an open rollout; its calls are still open."""
        rollout.state = RolloutState.CLOSED
        rollout.closed = self._clock.wall()
        rollout.close_reason = reason
        self._registry.ended(rollout)
        self._leasing.unlink(rollout)

    def retain(self, rollout: Rollout) -> None:
        """Sets when a closed rollout is deleted: after the retention, once nothing else keeps its capture."""
        if rollout.is_kept:
            self._look_for_captures(LOOK_S)
        else:
            age = self._clock.wall() - (rollout.closed or rollout.created)
            self.delete_in(rollout.id, max(0.0, self._limits.retention_s - age))

    def delete_in(self, rollout_id: str, in_s: float) -> None:
        """Sets when a closed rollout is deleted."""
        self._set_deadline(DeadlineKind.RETENTION, rollout_id, in_s)

    def capture_stored(self, rollout: Rollout) -> asyncio.Future[list[int]] | None:
        """Ends what keeps the capture of a closed rollout; returns the write, None if nothing kept it."""
        if not rollout.spec.keep_capture or rollout.stored:
            return None
        written = self._store.put_stored(rollout)
        self._registry.stored(rollout)
        self.retain(rollout)
        return written

    def delete(self, rollout: Rollout) -> asyncio.Future[list[int]]:
        """Deletes a closed rollout and its whole capture; returns the write, the same one while it is pending."""
        written = rollout.deleted
        if written is None:
            written = rollout.deleted = self._store.delete_rollout(rollout.id, self._budgets.remove_rollout(rollout))
            written.add_done_callback(partial(self._deleted, rollout))
        return written

    def captures_beyond(self) -> list[Discarded]:
        """Returns the kept captures that are to be discarded now. Looks again as long as any are kept."""
        self._looks_at = None
        self._looked_at = self._clock.steady()
        kept, limits = self._registry.kept_captures, self._limits
        if kept:
            self._look_for_captures(LOOK_S)
        return kept.beyond(limits.captures, self._clock.wall(), limits.retention_s, self._drivers.is_lost)

    def discard(self, rollout: Rollout, record: Discarded) -> asyncio.Future[list[int]]:
        """Deletes a rollout whose capture is kept beyond the limits, and journals that with it; returns the write."""
        written = rollout.deleted = self._store.delete_rollout(
            rollout.id, self._budgets.remove_rollout(rollout), record
        )
        written.add_done_callback(partial(self._discarded, rollout, record))
        return written

    def forget_run(self, run_id: str) -> None:
        """Deletes a run after its retention, unless it has rollouts again."""
        if self._budgets.forget(run_id):
            self._store.runs.delete(run_id)

    # After a restart -------------------------------------------------------------------------------------------------

    def restore_runs(self, runs: Iterable[Run]) -> None:
        """Restores runs from the journal. Called after all rollouts are restored."""
        for idle in self._budgets.restore(runs, self._registry.rollouts()):
            self._set_deadline(DeadlineKind.RUN, idle, self._limits.retention_s)

    def restore(self, rollout: Rollout, calls: list[Call]) -> None:
        """Restores a rollout from the journal. Retries of its agent can join its open calls.

        How long they may take is counted from `Gate.await_returns` on.
        """
        self._registry.keep(rollout)
        rollout.calls = calls
        self._timeouts.restore(rollout)
        for call in calls:
            self._registry.add_call(call)
            rollout.by_retry_key[call.request.retry_key] = call
        if rollout.state is RolloutState.CLOSED:
            self.retain(rollout)
        else:
            rollout.restored = True
            self._leasing.link(rollout)
        if rollout.state is not RolloutState.CLOSED or rollout.is_kept:
            self._drivers.restored(rollout)

    def evict(self, rollout: Rollout) -> None:
        """Evicts a closed rollout's calls from memory; the journal has them."""
        self._registry.drop_calls(rollout)
        rollout.calls, rollout.by_retry_key, rollout.evicted = [], {}, True

    def reload(self, rollout: Rollout, calls: list[Call]) -> None:
        """Puts reloaded calls of an evicted rollout back into memory."""
        rollout.calls, rollout.evicted = calls, False
        for call in calls:
            self._registry.add_call(call)

    # Private ---------------------------------------------------------------------------------------------------------

    def _check_room_for_captures(self) -> None:
        kept = self._registry.kept_captures
        if not kept.is_full(self._limits.captures):
            return
        if self._clock.steady() - self._looked_at >= HURRY_S:
            self._look_for_captures(0.0)
        raise ResourceExhausted(
            f"This gate keeps {len(kept)} captures, {kept.size_bytes >> 20} MiB, that drivers have not exported yet:"
            " it opens no rollout whose capture it would have to keep.",
            reason="CAPTURES_FULL",
            retry_after_s=HURRY_S,
        )

    def _look_for_captures(self, in_s: float) -> None:
        at = self._clock.steady() + in_s
        if self._looks_at is None or at < self._looks_at:
            self._looks_at = at
            self._set_deadline(DeadlineKind.CAPTURES, "", in_s)

    def _opened(self, rollout: Rollout, done: asyncio.Future[list[int]]) -> None:
        rollout.opened = None
        if not failed(done):
            return
        # The write failed: the opening is undone, since a crash would lose the rollout.
        if rollout.state is not RolloutState.CLOSED:
            rollout.state = RolloutState.CLOSED
            self._registry.ended(rollout)
        self._leasing.unlink(rollout)
        self._budgets.remove_rollout(rollout)
        self._drop(rollout)

    def _deleted(self, rollout: Rollout, done: asyncio.Future[list[int]]) -> None:
        rollout.deleted = None
        if failed(done):
            self._budgets.put_back(rollout)
        else:
            self._drop(rollout)

    def _discarded(self, rollout: Rollout, record: Discarded, done: asyncio.Future[list[int]]) -> None:
        self._deleted(rollout, done)
        if not failed(done):
            self._registry.kept_captures.record([record])

    def _drop(self, rollout: Rollout) -> None:
        """Removes a rollout that is no longer in the journal from memory."""
        self._registry.drop(rollout)
        self._deadlines.drop((DeadlineKind.RETENTION, rollout.id))
        if (run_id := self._budgets.idle_run(rollout)) is not None:
            self._set_deadline(DeadlineKind.RUN, run_id, self._limits.retention_s)

    def _set_deadline(self, kind: DeadlineKind, key: str, in_s: float) -> None:
        self._deadlines.set((kind, key), self._clock.steady() + in_s)
