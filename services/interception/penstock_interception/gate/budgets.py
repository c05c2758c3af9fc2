"""Applies the budgets of rollouts and runs: whether another call is admitted, and its `max_tokens` (R35, R88).

A run exists from the first rollout that gives it budgets until `retention_s` after its last rollout was deleted. Its
usage is the sum over its rollouts, deleted ones included.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Final

from penstock_chassis.errors import FailedPrecondition, ResourceExhausted, Violation
from penstock_interception.domain.audit import Event
from penstock_interception.domain.budgets import CallRate, RunBudgets, Spent, exhausted, tokens_left
from penstock_interception.domain.calls import CallRequest, RolloutSpec, RolloutState
from penstock_interception.domain.requests import with_max_tokens
from penstock_interception.domain.state import Call, Rollout
from penstock_interception.domain.totals import journal_bytes, new_images, tokens_of
from penstock_interception.gate.context import GateContext
from penstock_interception.metrics import BUDGET_STOPS
from penstock_interception.store.runs import Run

MAX_DELAY_S = 60.0
"""The longest delay that SDKs respect; they ignore a longer one and retry at once."""

_RUN: Final = "run."
JOURNAL: Final = "journal_bytes"
"""Public name of the operator's limit on every rollout's journal size."""


@dataclass(slots=True)
class _Running:
    """A run's state in memory."""

    run: Run
    spent: Spent
    bucket: Bucket | None
    rollouts: set[str] = field(default_factory=set)


class BudgetEnforcer:
    """Enforces the budgets and rate limits of rollouts and runs. Belongs to the gate."""

    def __init__(self, context: GateContext) -> None:
        self._store = context.store
        self._most_bytes = context.limits.max_rollout_bytes
        self._clock = context.clock
        self._audit = context.audit
        self._runs: dict[str, _Running] = {}
        self._buckets: dict[str, Bucket] = {}

    # Rollouts --------------------------------------------------------------------------------------------------------

    def check(self, spec: RolloutSpec) -> None:
        """Checks whether a rollout may be opened in its run.

        Raises:
            FailedPrecondition: RUN_BUDGETS_DIFFER, with the fields.
            ResourceExhausted: BUDGET_EXHAUSTED, the run's.
        """
        running = self._runs.get(spec.run_key or "")
        if running is None:
            return
        if spec.run_budgets is not None and spec.run_budgets != running.run.budgets:
            raise FailedPrecondition(
                "The run has other budgets: its first rollout with budgets fixed them.",
                reason="RUN_BUDGETS_DIFFER",
                violations=list(_differences(running.run.budgets, spec.run_budgets)),
            )
        if spec.attempt > 1:
            return  # what the last attempt paid for may be replayed; each call that is sampled is checked
        budget = self._run_budget(running, 0)
        if budget:
            raise _used_up(budget)

    def counts(self, spec: RolloutSpec) -> bool:
        """Whether the budgets of a rollout's run are counted here, so that it can be at no other gate."""
        return spec.run_budgets is not None and spec.run_key in self._runs

    def open(self, rollout: Rollout, others: Iterable[Rollout]) -> Run | None:
        """Adds a rollout to its run; returns the run, to be written with it. `others` may belong to the same run."""
        spec = rollout.spec
        run_key, budgets = spec.run_key, spec.run_budgets
        if run_key is None:
            return None
        running = self._runs.get(run_key)
        if running is None and budgets is not None:
            running = self._keep(Run(run_key, budgets, self._clock.wall()))
            for other in others:
                if other.spec.run_key == run_key:
                    self._count_in(running, other)
        if running is None:
            return None
        self._count_in(running, rollout)
        return running.run

    def remove_rollout(self, rollout: Rollout) -> Run | None:
        """Removes a deleted rollout from its run but keeps its usage; returns the run, to be written with that."""
        self._buckets.pop(rollout.id, None)
        running = self._runs.get(rollout.spec.run_key or "")
        if running is None or rollout.id not in running.rollouts:
            return None
        running.rollouts.discard(rollout.id)
        running.run.gone.add(rollout.totals.spent_of_run)
        return running.run

    def put_back(self, rollout: Rollout) -> None:
        """Undoes `remove_rollout` after the journal failed to delete the rollout."""
        running = self._runs.get(rollout.spec.run_key or "")
        if running is None or rollout.id in running.rollouts:
            return
        running.rollouts.add(rollout.id)
        running.run.gone.take(rollout.totals.spent_of_run)
        self._store.runs.update(running.run)  # a concurrent deletion may have written what this one had added

    def idle_run(self, rollout: Rollout) -> str | None:
        """Returns the run of a deleted rollout, if that has no rollouts left."""
        run_key = rollout.spec.run_key
        return run_key if run_key in self._runs and not self._runs[run_key].rollouts else None

    def forget(self, run_id: str) -> bool:
        """Drops a run after its retention, unless it has rollouts again. Returns whether it was dropped."""
        running = self._runs.get(run_id)
        if running is None or running.rollouts:
            return False
        del self._runs[run_id]
        return True

    def restore(self, runs: Iterable[Run], rollouts: Iterable[Rollout]) -> list[str]:
        """Restores runs from the journal and adds their rollouts' usage. Returns the ids of runs without rollouts."""
        now = self._clock.wall()
        for run in runs:
            run.created = min(run.created, now)  # it is later than `now` if the clock was set back
            self._keep(run)
        for rollout in rollouts:
            running = self._runs.get(rollout.spec.run_key or "")
            if running is not None:
                self._count_in(running, rollout)
        return [run_id for run_id, running in self._runs.items() if not running.rollouts]

    # Calls -----------------------------------------------------------------------------------------------------------

    def admit(self, rollout: Rollout, request_bytes: int, image_bytes: int = 0) -> None:
        """Checks whether a rollout may make another call. Marks the rollout as exhausted when a budget is used up.

        `image_bytes`: of images that are kept beside the body.

        Raises:
            ResourceExhausted: BUDGET_EXHAUSTED, permanent.
        """
        budgets = rollout.spec.budgets
        age = rollout.age_s(self._clock.wall())
        budget = rollout.exhausted_budget or exhausted(budgets, rollout.totals.spent, age, request_bytes)
        if not budget and not _replays(rollout) and (running := self._running(rollout)) is not None:
            budget = self._run_budget(running, request_bytes)
        if not budget and journal_bytes(rollout, 1, request_bytes + image_bytes) > self._most_bytes:
            budget = JOURNAL
        if not budget:
            return
        rollout.totals.refused += 1
        if rollout.state is RolloutState.OPEN:
            rollout.state, rollout.exhausted_budget = RolloutState.EXHAUSTED, budget
            self._store.update_rollout(rollout)
            BUDGET_STOPS.labels(budget).inc()
            self._audit.record(Event.BUDGET_EXHAUSTED, rollout_id=rollout.id, budget=budget)
        raise _used_up(budget)

    def pace(self, rollout: Rollout) -> None:
        """Takes one call from the rate limit's bucket. Raises ResourceExhausted RATE_LIMIT, with the retry delay."""
        buckets = self._buckets_of(rollout)
        if not buckets:
            return
        now = self._clock.steady()
        wait = max(bucket.wait(now) for bucket in buckets)
        if wait > 0.0:
            self._audit.record(Event.RATE_LIMITED, rollout_id=rollout.id)
            raise ResourceExhausted(
                f"Too many requests. Please try again in {wait:.3f}s.", reason="RATE_LIMIT", retry_after_s=wait
            )
        for bucket in buckets:
            bucket.take(now)

    def bounded(self, rollout: Rollout, request: CallRequest) -> CallRequest:
        """Returns the request with `max_tokens` lowered to what the budgets leave."""
        asked, budgets = request.sampling.max_tokens, rollout.spec.budgets
        most, name = tokens_left(budgets, rollout.totals.spent)
        running = self._runs.get(rollout.spec.run_key or "")
        if running is not None:
            left, which = tokens_left(running.run.budgets, running.spent)
            if left is not None and (most is None or left < most):
                most, name = left, _RUN + which
        if budgets.max_tokens_per_call is not None and (most is None or budgets.max_tokens_per_call <= most):
            most, name = budgets.max_tokens_per_call, ""
        if most is None or (asked is not None and asked <= most):
            return request
        notes = request.normalisations
        if name:
            notes = (*notes, f"max_tokens was lowered to {most}, the rest of the budget {name}")
        sampling = with_max_tokens(request.sampling, most)
        return replace(request, sampling=sampling, normalisations=notes, bounded_by=name)

    def count_admitted(self, call: Call) -> None:
        used = Spent(calls=1, request_bytes=call.request.body_bytes)
        call.rollout.totals.calls += 1
        call.rollout.totals.request_bytes += used.request_bytes
        call.rollout.image_bytes.update(new_images(call.rollout, call.request))
        running = self._running(call.rollout)
        call.is_charged = running is None or not _replays(call.rollout)
        if running is not None and call.is_charged:
            running.spent.add(used)

    def charge(self, call: Call) -> str:
        """Charges a call that may have been replayed, and is to be sampled now, to its run.

        Returns the run's exhausted budget, "" if there is none: a call that it forbids is not to be sampled.
        """
        running = self._running(call.rollout)
        if call.is_charged or running is None:
            return ""
        if budget := self._run_budget(running, call.request.body_bytes):
            return budget
        call.is_charged = True
        running.spent.add(Spent(calls=1, request_bytes=call.request.body_bytes))
        return ""

    def count_ended(self, call: Call) -> None:
        """Adds an ended call's tokens to its run's usage; the rollout's totals already include them."""
        running = self._running(call.rollout)
        if running is None:
            return
        own = Spent(calls=1, request_bytes=call.request.body_bytes)
        if call.completion is not None and call.completion.origin is not None:
            if call.is_charged:
                running.spent.take(own)
            return
        if not call.is_charged:
            running.spent.add(own)
        prompt, completion = tokens_of(call)
        running.spent.add(Spent(prompt_tokens=prompt, completion_tokens=completion))

    # Private ---------------------------------------------------------------------------------------------------------

    def _running(self, rollout: Rollout) -> _Running | None:
        return self._runs.get(rollout.spec.run_key or "")

    def _keep(self, run: Run) -> _Running:
        rate = run.budgets.call_rate
        bucket = Bucket(rate, self._clock.steady()) if rate is not None else None
        running = self._runs[run.id] = _Running(run, replace(run.gone), bucket)
        return running

    def _count_in(self, running: _Running, rollout: Rollout) -> None:
        if rollout.id not in running.rollouts:
            running.rollouts.add(rollout.id)
            running.spent.add(rollout.totals.spent_of_run)

    def _run_budget(self, running: _Running, request_bytes: int) -> str:
        """Returns the public name of the run's exhausted budget, or "". Journals the exhaustion the first time."""
        run = running.run
        if not run.exhausted:
            age = self._clock.wall() - run.created
            run.exhausted = exhausted(run.budgets, running.spent, age, request_bytes)
            if not run.exhausted:
                return ""
            self._store.runs.update(run)
            self._audit.record(Event.BUDGET_EXHAUSTED, run_id=run.name, budget=_RUN + run.exhausted)
        return _RUN + run.exhausted

    def _buckets_of(self, rollout: Rollout) -> list[Bucket]:
        found = []
        rate = rollout.spec.budgets.call_rate
        if rate is not None:
            bucket = self._buckets.get(rollout.id)
            if bucket is None:
                bucket = self._buckets[rollout.id] = Bucket(rate, self._clock.steady())
            found.append(bucket)
        running = self._runs.get(rollout.spec.run_key or "")
        if running is not None and running.bucket is not None:
            found.append(running.bucket)
        return found


def _replays(rollout: Rollout) -> bool:
    """Whether its next call may be answered by a recording, for which its run has paid."""
    return rollout.recording is not None and rollout.recording.has_left


def _differences(fixed: RunBudgets, given: RunBudgets) -> Iterable[Violation]:
    for item in fields(RunBudgets):
        before = getattr(fixed, item.name)
        if before != getattr(given, item.name):
            name = item.name.removesuffix("_s")
            yield Violation(f"run_budgets.{name}", f"the run has {'none' if before is None else _shown(before)}")


def _shown(value: object) -> str:
    return str(value) if isinstance(value, int | float) else "another"


def _used_up(budget: str) -> ResourceExhausted:
    whose = "run" if budget.startswith(_RUN) else "rollout"
    return ResourceExhausted(
        f"The {whose}'s budget {budget.removeprefix(_RUN)} is used up.",
        reason="BUDGET_EXHAUSTED",
        metadata={"budget": budget},
    )


class Bucket:
    """Starts full. Times are in seconds on a clock that never jumps."""

    def __init__(self, rate: CallRate, now: float) -> None:
        self._interval = rate.period_s / rate.calls
        self._burst = float(rate.burst)
        self._level = self._burst
        self._at = now
        self._last_given = now

    def wait(self, now: float) -> float:
        """Returns 0.0 if a call may be taken now, else the retry delay in seconds.

        Staggers the delays over up to burst + 1 refused callers, so that they do not all retry at the same time.
        """
        self._fill(now)
        if self._level >= 1.0:
            return 0.0
        free = now + (1.0 - self._level) * self._interval
        self._last_given = min(max(free, self._last_given + self._interval), free + self._burst * self._interval)
        return min(self._last_given - now, MAX_DELAY_S)

    def take(self, now: float) -> None:
        """Takes one call from the bucket."""
        self._fill(now)
        self._level -= 1.0

    def _fill(self, now: float) -> None:
        # A small surplus, so that rounding does not refuse a caller that waited exactly the given delay.
        gained = (max(0.0, now - self._at) + 1e-6) / self._interval if now > self._at else 0.0
        self._level = min(self._burst, self._level + gained)
        self._at = max(self._at, now)
