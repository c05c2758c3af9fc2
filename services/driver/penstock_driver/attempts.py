"""One rollout that runs: its attempts one after another, and what it tells.

Invariants: a rollout is tried again only for what says nothing about the policy, under the same id, with all of the
attempt before released; what one attempt could not release is owed, whatever the next one does.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from penstock_driver import observing
from penstock_driver.allowance import Allowance
from penstock_driver.events import AgentEvent
from penstock_driver.grading import DEFAULT_MAX_CHANGES_BYTES
from penstock_driver.history import History
from penstock_driver.phases import Conductor
from penstock_driver.ports import Gate, Sandboxes
from penstock_driver.preparations import Preparations
from penstock_driver.records import Record
from penstock_driver.rollouts import (
    AttemptFailed,
    CallFinished,
    Course,
    Failure,
    Happening,
    Outcome,
    Phase,
    PhaseChanged,
    Progress,
    RolloutOrder,
)
from penstock_driver.shaping import Shaper

FIRST_PAUSE_S: Final = 0.5
MOST_PAUSE_S: Final = 30.0


@dataclass(slots=True)
class End:
    """The end of a rollout: `come` when nothing of it runs any more, `recorded` when it is on disk as well."""

    come: asyncio.Event = field(default_factory=asyncio.Event)
    recorded: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class Live:
    """A rollout that runs; `key` is the digest of what its preparation depends on."""

    record: Record
    order: RolloutOrder
    key: str
    output: Allowance
    """For what its agent says, in all attempts."""
    calls: Allowance
    calls_left_out: int = 0
    course: Course = field(default_factory=Course)
    conductor: Conductor | None = None
    sequence: int = 0
    is_over: bool = False
    """Its last event has its number: nothing more may be told of it."""
    owes: bool = False
    task: asyncio.Task[Outcome] | None = None
    end: End = field(default_factory=End)
    cancelled: Failure | None = None

    def cancel(self, failure: Failure) -> None:
        """End it, with this failure; the first one counts."""
        if self.cancelled is None and self.task:
            self.cancelled = failure
            if self.conductor:
                self.conductor.cancel_failure = failure
            self.task.cancel()


class Attempts:
    """Conducts rollouts, each as one task of somebody else's, and shapes what they all ask of the same backend.

    `labels` gives the labels of what a rollout holds elsewhere. An agent finds its model endpoint at `agent_port` of
    its sandbox's own loopback. `spool` is where temporary files of grading lie, at most `max_changes_bytes` of each
    kind.
    """

    def __init__(
        self,
        history: History,
        sandboxes: Sandboxes,
        gate: Gate,
        labels: Callable[[str], dict[str, str]],
        *,
        agent_port: int,
        spool: Path | None = None,
        max_changes_bytes: int = DEFAULT_MAX_CHANGES_BYTES,
    ) -> None:
        self._history = history
        self._sandboxes = sandboxes
        self._gate = gate
        self._labels = labels
        self._agent_port = agent_port
        self._spool = spool
        self._max_changes_bytes = max_changes_bytes
        self._preparations = Preparations(sandboxes)
        self._forks: dict[str, Shaper] = {}
        self._openings = Shaper()

    async def conduct(self, live: Live) -> Outcome:
        """All attempts, up to one that counts."""
        pause = FIRST_PAUSE_S
        while True:
            live.conductor = conductor = self._conductor(live)
            outcome = await conductor.run()
            live.owes |= conductor.owes
            failure = outcome.failure
            is_last = live.course.attempt >= live.order.max_attempts or live.cancelled is not None
            if failure is None or not failure.retriable or outcome.reward or is_last:
                return outcome
            self.tell(live, AttemptFailed(live.course.attempt, failure))
            observing.attempt_failed(live.record, live.course.attempt, failure)
            live.course.begin_anew()
            await asyncio.sleep(pause * random.uniform(1.0, 1.25))  # noqa: S311 - jitter
            pause = min(2 * pause, MOST_PAUSE_S)

    def tell(self, live: Live, event: Happening) -> None:
        """Add an event to those of a rollout."""
        is_summary = isinstance(event, PhaseChanged | AttemptFailed | Outcome)
        record = live.record
        if isinstance(event, CallFinished) and live.calls.is_used_up:
            self._history.count(record.rollout_id, record.group_id, event)
            live.calls_left_out += 1
            return
        size = self._history.append(record.rollout_id, record.group_id, live.sequence + 1, event, is_summary=is_summary)
        live.sequence += 1
        if isinstance(event, AgentEvent):
            live.output.took(size)
        elif isinstance(event, CallFinished):
            live.calls.took(size)

    def tell_left_out(self, live: Live) -> None:
        """Say of a rollout that ends how many of its calls have no event; its row counts all of them."""
        if live.calls_left_out:
            self.tell(live, Progress(f"{live.calls_left_out} further model calls were counted and have no event"))

    def _conductor(self, live: Live) -> Conductor:
        """For the next attempt."""
        record, backend = live.record, live.order.sandbox.backend

        def tell(event: Happening) -> None:
            self.tell(live, event)

        conductor = Conductor(
            record.rollout_id,
            record.group_id,
            record.index,
            live.order,
            live.key,
            sandboxes=self._sandboxes,
            gate=self._gate,
            preparations=self._preparations,
            forks=self._forks.setdefault(backend, Shaper()),
            openings=self._openings,
            attempt=live.course.attempt,
            labels=self._labels(record.rollout_id),
            agent_port=self._agent_port,
            spool=self._spool,
            max_changes_bytes=self._max_changes_bytes,
            output=live.output,
            enter=lambda phase: self._enter(live, phase),
            record=tell,
        )
        if live.cancelled:
            conductor.cancel_failure = live.cancelled
        return conductor

    def _enter(self, live: Live, phase: Phase) -> None:
        took = observing.enter(live.course, phase)
        self._history.set_phase(live.record.rollout_id, phase, live.course.attempt)
        self.tell(live, PhaseChanged(phase, took))


def order_of(order: RolloutOrder, index: int) -> RolloutOrder:
    """The order of one rollout of a group: its seed is the group's plus its index."""
    if order.choice.seed is None or index == 0:
        return order
    return replace(order, choice=replace(order.choice, seed=order.choice.seed + index))
