"""Records one running rollout: its phase and its events, numbered in order.

Invariant: a sequence number has one event, and none comes after `close`, which assigns the outcome's. Agent output and
model calls are limited; what decides the rollout is always recorded.
"""

from __future__ import annotations

from dataclasses import replace

import structlog

from penstock.driver.v1 import rollout_pb2
from penstock_driver import metrics
from penstock_driver.agents.output_events import AgentEvent
from penstock_driver.domain.records import Record
from penstock_driver.domain.rollout import (
    AttemptFailed,
    CallFinished,
    Failure,
    Outcome,
    Phase,
    PhaseChanged,
    Progress,
    RolloutEvent,
    RunProgress,
)
from penstock_driver.rollouts.event_limits import Allowance, EventLimits
from penstock_driver.store.event_log import EventLog

_log = structlog.get_logger("penstock.driver")


class RolloutRecorder:
    """Records one rollout. `output` limits the recorded agent output, over all attempts."""

    __slots__ = (
        "_calls",
        "_calls_without_event",
        "_closed",
        "_log",
        "_sequence",
        "fork_kind",
        "output",
        "progress",
        "record",
    )

    def __init__(self, record: Record, log: EventLog, limits: EventLimits) -> None:
        self.record = record
        self.progress = RunProgress()
        self.output = Allowance(limits)
        self.fork_kind = 0
        self._log = log
        self._calls = Allowance(limits)
        self._calls_without_event = 0
        self._sequence = 0
        self._closed = False
        self.append(PhaseChanged(Phase.QUEUED))

    @property
    def current(self) -> Record:
        """The record with the current phase and times."""
        return replace(
            self.record,
            phase=self.progress.phase,
            phase_times=self.progress.times(),
            last_sequence=self._sequence,
            fork_kind=self.fork_kind,
            attempts=self.progress.attempt,
        )

    def locate(self, **known: str) -> None:
        """Record names of services, or the sandbox, that have the rollout now: fields of Home."""
        home = rollout_pb2.Home()
        if self.record.home is not None:
            home.CopyFrom(self.record.home)
        for field, value in known.items():
            setattr(home, field, value)
        self.record = replace(self.record, home=home)
        self._log.set_home(self.record.rollout_id, home)

    def append(self, event: RolloutEvent) -> None:
        """Append an event; agent output counts against `output`."""
        is_summary = isinstance(event, PhaseChanged | AttemptFailed)
        record = self.record
        size = self._log.append(record.rollout_id, record.group_id, self._sequence + 1, event, is_summary=is_summary)
        self._sequence += 1
        if isinstance(event, AgentEvent):
            self.output.took(size)
        elif isinstance(event, CallFinished):
            self._calls.took(size)

    def append_call(self, call: CallFinished) -> None:
        """Append an ended model call; beyond the limit it is only counted, in the summary row and at the end.

        The last call of an agent that has just ended may arrive after `close`: the trajectory has it.
        """
        if self._closed:
            return
        if self._calls.is_used_up:
            self._log.count(self.record.rollout_id, self.record.group_id, call)
            self._calls_without_event += 1
        else:
            self.append(call)

    def enter(self, phase: Phase) -> None:
        took = self._enter(phase)
        self._log.set_phase(self.record.rollout_id, phase, self.progress.attempt, self.fork_kind)
        self.append(PhaseChanged(phase, took))

    def retry(self, failure: Failure) -> None:
        """Record that the current attempt failed, and begin the next one."""
        attempt = self.progress.attempt
        self.append(AttemptFailed(attempt, failure))
        metrics.ATTEMPTS_FAILED.labels(failure.caused_by.value.lower()).inc()
        _log.info("attempt failed", rollout_id=self.record.rollout_id, attempt=attempt, reason=failure.reason)
        self.progress.begin_anew()
        self.fork_kind = 0

    def move(self, failure: Failure) -> None:
        """Record that the attempt begins again at another place, because this one drains."""
        self.append(Progress(f"the attempt begins again at another place: {failure.message}"))
        self.progress.begin_anew(counted=False)
        self.fork_kind = 0

    def close(self) -> int:
        """Enter the last phase; return the sequence number of the outcome, which the caller records with the end."""
        if self._calls_without_event:
            self.append(Progress(f"{self._calls_without_event} further model calls were counted and have no event"))
        self.append(PhaseChanged(Phase.ENDED, self._enter(Phase.ENDED)))
        self._closed = True
        self._sequence += 1
        return self._sequence

    def _enter(self, phase: Phase) -> float:
        """Enter a phase; count and return the duration of the one before."""
        before = self.progress.phase
        took = self.progress.enter(phase)
        metrics.PHASE_SECONDS.labels(before.name.lower()).observe(took)
        return took


def count_end(record: Record, outcome: Outcome) -> None:
    """Count and log a rollout's outcome, also of one that a restart ended and that has no recorder."""
    failure = outcome.failure
    end, caused_by = ("completed", "") if failure is None else (failure.cause.value, failure.caused_by.value)
    metrics.ENDED.labels(end.lower(), caused_by.lower()).inc()
    _log.info(
        "rollout ended",
        rollout_id=record.rollout_id,
        group_id=record.group_id,
        end=end.lower(),
        reason=None if failure is None else failure.reason,
        reward=None if outcome.reward is None else outcome.reward.value,
    )
