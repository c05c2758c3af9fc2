"""Applies the budgets of rollouts and runs: whether another call may come, and how much it may sample (R35, R88).

A run is there from the first rollout that gives it budgets on, and is kept for a while after its last rollout is gone.
What it has used is what its rollouts have, those included that were deleted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Final

from penstock_chassis.errors import FailedPrecondition, ResourceExhausted, Violation
from penstock_interception.audit import Audit, Event
from penstock_interception.budgets import RunBudgets, Spent, exhausted, tokens_left
from penstock_interception.calls import Arrival, Call, Opening, Rollout, RolloutState, tokens_of
from penstock_interception.clock import Clock
from penstock_interception.metrics import BUDGET_STOPS
from penstock_interception.ports import Store
from penstock_interception.rates import Bucket
from penstock_interception.runs import Run
from penstock_interception.sampling import with_max_tokens

_RUN: Final = "run."


@dataclass(slots=True)
class _Running:
    """A run while the service runs."""

    run: Run
    spent: Spent
    bucket: Bucket | None
    rollouts: set[str] = field(default_factory=set)


class Metering:
    """Belongs to the gate."""

    def __init__(self, store: Store, *, clock: Clock, audit: Audit) -> None:
        self._store = store
        self._clock = clock
        self._audit = audit
        self._runs: dict[str, _Running] = {}
        self._buckets: dict[str, Bucket] = {}

    # Rollouts --------------------------------------------------------------------------------------------------------

    def check(self, opening: Opening) -> None:
        """Whether a rollout may be opened in its run.

        Raises:
            FailedPrecondition: RUN_BUDGETS_DIFFER, with the fields.
            ResourceExhausted: BUDGET_EXHAUSTED, the run's.
        """
        running = self._runs.get(opening.run_id or "")
        if running is None:
            return
        if opening.run_budgets is not None and opening.run_budgets != running.run.budgets:
            raise FailedPrecondition(
                "The run has other budgets: the first rollout that gave some has fixed them.",
                reason="RUN_BUDGETS_DIFFER",
                violations=list(_differences(running.run.budgets, opening.run_budgets)),
            )
        budget = self._run_budget(running, 0)
        if budget:
            raise _used_up(budget)

    def open(self, rollout: Rollout, others: Iterable[Rollout]) -> Run | None:
        """Counts a rollout in; returns its run, to be written with it. `others` may be of the same run."""
        opening = rollout.opening
        run_id, budgets = opening.run_id, opening.run_budgets
        if run_id is None:
            return None
        running = self._runs.get(run_id)
        if running is None and budgets is not None:
            running = self._keep(Run(run_id, budgets, self._clock.wall()))
            for other in others:
                if other.opening.run_id == run_id:
                    self._count_in(running, other)
        if running is None:
            return None
        self._count_in(running, rollout)
        return running.run

    def gone(self, rollout: Rollout) -> Run | None:
        """A rollout is deleted: what it has used stays. Returns its run, to be written with that."""
        self._buckets.pop(rollout.id, None)
        running = self._runs.get(rollout.opening.run_id or "")
        if running is None or rollout.id not in running.rollouts:
            return None
        running.rollouts.discard(rollout.id)
        running.run.gone.add(rollout.totals.spent)
        return running.run

    def stays(self, rollout: Rollout) -> None:
        """The disk refused to delete a rollout that was `gone`."""
        running = self._runs.get(rollout.opening.run_id or "")
        if running is None or rollout.id in running.rollouts:
            return
        running.rollouts.add(rollout.id)
        running.run.gone.take(rollout.totals.spent)
        self._store.runs.update(running.run)  # another deletion may have written what this one had added

    def idle_run(self, rollout: Rollout) -> str | None:
        """The run of a rollout that is gone, when it has no other."""
        run_id = rollout.opening.run_id
        return run_id if run_id in self._runs and not self._runs[run_id].rollouts else None

    def forget(self, run_id: str) -> bool:
        """Nobody asked for a run for long: it is dropped unless it has rollouts again. Returns whether it was."""
        running = self._runs.get(run_id)
        if running is None or running.rollouts:
            return False
        del self._runs[run_id]
        return True

    def restore(self, runs: Iterable[Run], rollouts: Iterable[Rollout]) -> list[str]:
        """Takes runs back from the journal, with what their rollouts have used. Returns those without rollouts."""
        for run in runs:
            self._keep(run)
        for rollout in rollouts:
            running = self._runs.get(rollout.opening.run_id or "")
            if running is not None:
                self._count_in(running, rollout)
        return [run_id for run_id, running in self._runs.items() if not running.rollouts]

    # Calls -----------------------------------------------------------------------------------------------------------

    def admit(self, rollout: Rollout, request_bytes: int) -> None:
        """Whether a rollout may have another call. Marks it when a budget is used up.

        Raises:
            ResourceExhausted: BUDGET_EXHAUSTED, for good.
        """
        budgets = rollout.opening.budgets
        age = rollout.age_s(self._clock.wall())
        budget = rollout.exhausted_budget or exhausted(budgets, rollout.totals.spent, age, request_bytes)
        if not budget and (running := self._runs.get(rollout.opening.run_id or "")) is not None:
            budget = self._run_budget(running, request_bytes)
        if not budget:
            return
        rollout.totals.refused += 1
        if rollout.state is RolloutState.OPEN:
            rollout.state, rollout.exhausted_budget = RolloutState.EXHAUSTED, budget
            self._store.update_rollout(rollout)
            BUDGET_STOPS.labels(budget).inc()
            self._audit.tell(Event.BUDGET_EXHAUSTED, rollout_id=rollout.id, budget=budget)
        raise _used_up(budget)

    def pace(self, rollout: Rollout) -> None:
        """Takes one request from the rate's bucket. Raises ResourceExhausted RATE_LIMIT, with the delay."""
        buckets = self._buckets_of(rollout)
        if not buckets:
            return
        now = self._clock.steady()
        wait = max(bucket.wait(now) for bucket in buckets)
        if wait > 0.0:
            self._audit.tell(Event.RATE_LIMITED, rollout_id=rollout.id)
            raise ResourceExhausted(
                f"Too many requests. Please try again in {wait:.3f}s.", reason="RATE_LIMIT", retry_after_s=wait
            )
        for bucket in buckets:
            bucket.take(now)

    def bounded(self, rollout: Rollout, arrival: Arrival) -> Arrival:
        """The arrival with `max_tokens` bounded by what the budgets leave."""
        asked, budgets = arrival.sampling.max_tokens, rollout.opening.budgets
        most, name = tokens_left(budgets, rollout.totals.spent)
        running = self._runs.get(rollout.opening.run_id or "")
        if running is not None:
            left, which = tokens_left(running.run.budgets, running.spent)
            if left is not None and (most is None or left < most):
                most, name = left, _RUN + which
        if budgets.max_tokens_per_call is not None and (most is None or budgets.max_tokens_per_call <= most):
            most, name = budgets.max_tokens_per_call, ""
        if most is None or (asked is not None and asked <= most):
            return arrival
        notes = arrival.normalisations
        if name:
            notes = (*notes, f"max_tokens was lowered to {most}, which the budget {name} has left")
        sampling = with_max_tokens(arrival.sampling, most)
        return replace(arrival, sampling=sampling, normalisations=notes, bounded_by=name)

    def admitted(self, call: Call) -> None:
        """Counts a call."""
        used = Spent(calls=1, request_bytes=call.arrival.body_bytes)
        call.rollout.totals.calls += 1
        call.rollout.totals.request_bytes += used.request_bytes
        if (running := self._runs.get(call.rollout.opening.run_id or "")) is not None:
            running.spent.add(used)

    def ended(self, call: Call) -> None:
        """Counts what a call used, for its run; its rollout's totals have it."""
        if (running := self._runs.get(call.rollout.opening.run_id or "")) is not None:
            prompt, completion = tokens_of(call)
            running.spent.add(Spent(prompt_tokens=prompt, completion_tokens=completion))

    # Private ---------------------------------------------------------------------------------------------------------

    def _keep(self, run: Run) -> _Running:
        rate = run.budgets.call_rate
        bucket = Bucket(rate, self._clock.steady()) if rate is not None else None
        running = self._runs[run.id] = _Running(run, replace(run.gone), bucket)
        return running

    def _count_in(self, running: _Running, rollout: Rollout) -> None:
        if rollout.id not in running.rollouts:
            running.rollouts.add(rollout.id)
            running.spent.add(rollout.totals.spent)

    def _run_budget(self, running: _Running, request_bytes: int) -> str:
        """The run's budget that forbids another call, by its public name; it is written down the first time."""
        run = running.run
        if not run.exhausted:
            age = self._clock.wall() - run.created
            run.exhausted = exhausted(run.budgets, running.spent, age, request_bytes)
            if not run.exhausted:
                return ""
            self._store.runs.update(run)
            self._audit.tell(Event.BUDGET_EXHAUSTED, run_id=run.id, budget=_RUN + run.exhausted)
        return _RUN + run.exhausted

    def _buckets_of(self, rollout: Rollout) -> list[Bucket]:
        found = []
        rate = rollout.opening.budgets.call_rate
        if rate is not None:
            bucket = self._buckets.get(rollout.id)
            if bucket is None:
                bucket = self._buckets[rollout.id] = Bucket(rate, self._clock.steady())
            found.append(bucket)
        running = self._runs.get(rollout.opening.run_id or "")
        if running is not None and running.bucket is not None:
            found.append(running.bucket)
        return found


def _differences(fixed: RunBudgets, given: RunBudgets) -> Iterable[Violation]:
    for item in fields(RunBudgets):
        before = getattr(fixed, item.name)
        if before != getattr(given, item.name):
            name = item.name.removesuffix("_s")
            yield Violation(f"run_budgets.{name}", f"the run has {'none' if before is None else _told(before)}")


def _told(value: object) -> str:
    return str(value) if isinstance(value, int | float) else "another"


def _used_up(budget: str) -> ResourceExhausted:
    whose = "run" if budget.startswith(_RUN) else "rollout"
    return ResourceExhausted(
        f"The {whose}'s budget {budget.removeprefix(_RUN)} is used up.",
        reason="BUDGET_EXHAUSTED",
        metadata={"budget": budget},
    )
