"""Records one running rollout: its phase and its events, numbered in order.

Invariants: a sequence number has one event, and none comes after `close`, which assigns the outcome's. Agent output and
model calls are limited; what decides the rollout is always recorded. The next driver process finds in the journal how
far the attempt is, and records nothing twice (`domain.unended`, `History`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from sqlite3 import OperationalError
from typing import Final

import structlog

from penstock.driver.v1 import rollout_pb2
from penstock_driver import metrics
from penstock_driver.agents.output_events import AgentEvent
from penstock_driver.domain.failures import internal_failure
from penstock_driver.domain.pauses import Pause, PauseEnd, RolloutPaused, RolloutResumed
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
from penstock_driver.domain.unended import AttemptPlace, Stage
from penstock_driver.domain.users import UserTurn
from penstock_driver.rollouts.event_limits import Allowance, EventLimits
from penstock_driver.rollouts.recovery.history import History
from penstock_driver.store.event_log import EventLog
from penstock_driver.wire.to_proto import outcome_to_proto

_NO_SPEC: Final = rollout_pb2.RolloutSpec()
_log = structlog.get_logger("penstock.driver")


class RolloutRecorder:
    """Records one rollout. `output` limits the recorded agent output, over all attempts.

    `record` is without the stored spec, which a rollout that runs or waits needs only on disk.
    `history` is of a rollout that an earlier process ran.
    """

    __slots__ = (
        "_calls",
        "_calls_without_event",
        "_closed",
        "_history",
        "_limits",
        "_log",
        "_output",
        "_place",
        "_recorded",
        "_replayed",
        "_sequence",
        "_so_far",
        "_stage",
        "_was_started",
        "fork_kind",
        "gates",
        "pause",
        "paused_s",
        "pauses",
        "progress",
        "record",
        "user_turns",
    )

    def __init__(self, record: Record, log: EventLog, limits: EventLimits, history: History | None = None) -> None:
        self.record = replace(record, spec=_NO_SPEC)
        self.progress = RunProgress() if history is None else history.progress
        self._limits = limits
        self._output = None if history is None else history.output
        self.fork_kind = record.fork_kind
        self.gates = record.gates
        """Names of the gates at which an attempt was opened, in that order."""
        self.pause, self.paused_s, self.pauses = record.pause, record.paused_s, record.pauses
        self._log = log
        self._history = history
        self._calls = None if history is None else history.calls
        self._calls_without_event = 0
        self._recorded = 0  # calls that the attempt replays; 0 also if an earlier process loaded them
        self._replayed = 0
        self._sequence = 0 if history is None else history.last_sequence
        self._closed = False
        self.user_turns: tuple[UserTurn, ...] = () if history is None else tuple(history.user_turns)
        """What the user of this attempt decided so far."""
        self._place: AttemptPlace | None = None
        self._was_started = False  # the agent of an attempt that is over
        self._stage = Stage.NONE
        self._so_far: rollout_pb2.Outcome | None = None
        if not self._sequence:
            self.append(PhaseChanged(Phase.QUEUED))

    @property
    def output(self) -> Allowance:
        """How much more agent output may be kept."""
        if self._output is None:
            self._output = Allowance(self._limits)
        return self._output

    @property
    def _allowed_calls(self) -> Allowance:
        if self._calls is None:
            self._calls = Allowance(self._limits)
        return self._calls

    def gates_to_report(self) -> tuple[str, ...]:
        """The gates that may have something of the rollout; empty = any may."""
        return self.record.gates_to_report(self.gates)

    def current(self, stored: Record) -> Record:
        """The stored record with the current phase and times."""
        return replace(
            self.record,
            spec=stored.spec,
            phase=self.progress.phase,
            phase_times=self.progress.times(),
            last_sequence=self._sequence,
            fork_kind=self.fork_kind,
            attempts=self.progress.attempt,
            pause=self.pause,
            paused_s=self.paused_s,
            pauses=self.pauses,
        )

    def locate(self, **known: str) -> None:
        """Record names of services, or the sandbox, that have the rollout now: fields of Home."""
        home = rollout_pb2.Home()
        if self.record.home is not None:
            home.CopyFrom(self.record.home)
        for field, value in known.items():
            setattr(home, field, value)
        self.record = replace(self.record, home=home)
        if gate := known.get("gate"):
            self.gates = (*(name for name in self.gates if name != gate), gate)
        self._log.set_home(self.record.rollout_id, home)

    def append(self, event: RolloutEvent) -> None:
        """Append an event; agent output counts against `output`. What an earlier process recorded is left out."""
        if isinstance(event, UserTurn):
            self.user_turns = (*self.user_turns, event)
        if self._history is not None and self._history.has(event):
            return
        is_summary = isinstance(event, PhaseChanged | AttemptFailed | RolloutPaused | RolloutResumed)
        record = self.record
        size = self._log.append(record.rollout_id, record.group_id, self._sequence + 1, event, is_summary=is_summary)
        self._sequence += 1
        if isinstance(event, AgentEvent):
            self.output.took(size)
        elif isinstance(event, CallFinished):
            self._allowed_calls.took(size)

    def replays(self, recorded: int) -> None:
        """Count the calls of an attempt that has so many recorded ones."""
        self._recorded, self._replayed = recorded, 0

    def append_call(self, call: CallFinished) -> None:
        """Append an ended model call; beyond the limit it is only counted, in the summary row and at the end.

        The last call of an agent that has just ended may arrive after `close`: the trajectory has it.
        """
        if self._closed:
            return
        if self._history is not None and not self._history.is_new(call.call.call_id):
            return
        if self._recorded:
            self._replayed += call.call.HasField("replayed_from") or call.call.given
            call = replace(call, recorded_count=self._recorded, replayed_count=self._replayed)
        if self._allowed_calls.is_used_up:
            self._log.count(self.record.rollout_id, self.record.group_id, call)
            self._calls_without_event += 1
        else:
            self.append(call)

    def enter(self, phase: Phase, *, place: AttemptPlace | None = None, so_far: Outcome | None = None) -> None:
        """Enter a phase. `place` is where the agent runs from now on; `so_far` is what is known of the outcome."""
        took = self._enter(phase)
        self._place = place or self._place
        self._so_far = self._so_far if so_far is None else outcome_to_proto(so_far)
        self._write_phase()
        self.append(PhaseChanged(phase, took))

    async def reach(self, stage: Stage, so_far: Outcome | None = None) -> None:
        """Record how far the attempt is, and wait for the disk."""
        self._stage = stage
        self._so_far = self._so_far if so_far is None else serializable(so_far, self)[1]
        self._write_phase()
        await self.secure()

    async def secure(self) -> bool:
        """Wait until everything is on disk, so that what follows may not be undone.

        While the disk is full it returns False, and a rollout goes on: one that runs is worth more than one that could
        be taken up.
        """
        try:
            await self._log.flush()
        except OperationalError as error:
            rollout_id = self.record.rollout_id
            _log.warning("a restart would lose what this rollout has done", rollout_id=rollout_id, error=repr(error))
            return False
        return True

    def continue_at(self, place: AttemptPlace | None, stage: Stage, so_far: rollout_pb2.Outcome | None) -> None:
        """Go on with the attempt of an earlier process."""
        self._place, self._stage, self._so_far = place, stage, so_far

    @property
    def is_better_awaited(self) -> bool:
        """Whether no other process could go on, as a verifier may run in the agent's own sandbox; or it ends."""
        return self._stage in (Stage.GRADING, Stage.DECIDED)

    @property
    def needed_sandbox(self) -> str:
        """Id of the sandbox without which the next process could not go on; empty if there is none."""
        is_needed = self._place is not None and self._stage in (Stage.NONE, Stage.GRADING)
        return self._place.sandbox.sandbox_id if self._place is not None and is_needed else ""

    @property
    def has_calls(self) -> bool:
        """Whether a model call of this rollout has ended."""
        return self._calls is not None and self._calls.events > 0

    @property
    def may_have_calls(self) -> bool:
        """Whether a gate may have answered this rollout: what ended while it was out of reach is not known here."""
        return self.has_calls or self._was_started

    @property
    def agent_events(self) -> Sequence[int]:
        """Sizes in bytes of the agent events of this attempt that an earlier process recorded."""
        return () if self._history is None else self._history.agent_events

    def begin_pause(self, pause: Pause) -> None:
        """Record that the rollout is paused."""
        self.pauses += 1
        self.set_pause(pause)
        self.append(RolloutPaused(pause.reason, pause.end_time - pause.start_time))

    def set_pause(self, pause: Pause | None) -> None:
        """Record what has changed of the pause."""
        self.pause = pause
        self._log.set_pause(self.record.rollout_id, pause, self.paused_s, self.pauses)

    def end_pause(self, why: PauseEnd) -> None:
        """Record that the pause is over."""
        assert self.pause is not None
        took = max(0.0, time.time() - self.pause.start_time)
        self.paused_s += took
        self.set_pause(None)
        self.append(RolloutResumed(took, why.value))

    def owe(self) -> None:
        """Record that an attempt left something in other services."""
        self._log.set_owed(self.record.rollout_id)

    def _write_phase(self) -> None:
        progress = self.progress
        self._log.set_phase(
            self.record.rollout_id,
            progress.phase,
            progress.attempt,
            self.fork_kind,
            place=self._place,
            stage=self._stage,
            so_far=self._so_far,
        )

    def _begin_anew(self, *, counted: bool) -> None:
        self.progress.begin_anew(counted=counted)
        self.fork_kind = 0
        self._was_started |= self._place is not None
        self.user_turns = ()
        self.continue_at(None, Stage.NONE, None)
        if self._history is not None:
            self._history.began_anew()
        self._write_phase()

    def retry(self, failure: Failure) -> None:
        """Record that the current attempt failed, and begin the next one."""
        attempt = self.progress.attempt
        self.append(AttemptFailed(attempt, failure))
        metrics.ATTEMPTS_FAILED.labels(failure.caused_by.value.lower()).inc()
        why = {"reason": failure.reason, "message": failure.message, "phase": failure.phase.name.lower()}
        _log.info("attempt failed", rollout_id=self.record.rollout_id, attempt=attempt, **why)
        self._begin_anew(counted=True)

    def begin_again(self, why: str) -> None:
        """Record that the same attempt begins again."""
        self.append(Progress(why))
        self._begin_anew(counted=False)

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


def serializable(outcome: Outcome, recorder: RolloutRecorder) -> tuple[Outcome, rollout_pb2.Outcome]:
    """The outcome with its message; an internal failure if no message can hold it."""
    try:
        message = outcome_to_proto(outcome)
        message.SerializeToString()
    except Exception:  # noqa: BLE001 - the rollout ends, whatever the error
        _log.exception("a rollout's outcome event failed", rollout_id=recorder.record.rollout_id)
        outcome = Outcome(failure=internal_failure(recorder.progress.phase))
        return outcome, outcome_to_proto(outcome)
    return outcome, message


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
