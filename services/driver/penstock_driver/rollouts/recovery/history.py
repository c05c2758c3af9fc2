"""What is recorded of a rollout that an earlier driver process ran: its phases, and which events not to record again.

Invariant: an event is recorded once, whichever process saw what it reports. Agents' events are counted, because they
are a function of the agent's output; the others have a name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.values import from_proto
from penstock_driver.domain.records import Record
from penstock_driver.domain.rollout import (
    AgentExit,
    ArtifactCollected,
    Phase,
    RolloutEvent,
    RunProgress,
)
from penstock_driver.domain.users import UserTurn
from penstock_driver.rollouts.event_limits import Allowance, EventLimits
from penstock_driver.store.event_log import EventLog
from penstock_driver.wire.outcomes import phase_from_proto


@dataclass(slots=True)
class History:
    """The events of a rollout so far. `output` and `calls` are what they used of the limits.

    `agent_events` has the sizes of the agent events of this attempt, since its user's last instruction, in bytes, in
    order; they are not in `output` yet. `user_turns` are of this attempt.
    """

    progress: RunProgress
    output: Allowance
    calls: Allowance
    last_sequence: int = 0
    agent_events: list[int] = field(default_factory=list)
    user_turns: list[UserTurn] = field(default_factory=list)
    _calls: set[str] = field(default_factory=set)
    _artifacts: set[str] = field(default_factory=set)
    _has_exit: bool = False

    @classmethod
    async def read(cls, log: EventLog, record: Record, limits: EventLimits) -> History:
        """Read what the journal has."""
        history = cls(RunProgress(), Allowance(limits), Allowance(limits))
        phase, since, seconds = Phase.QUEUED, record.create_time, dict[Phase, float]()

        def leave(at: float, took: float | None = None) -> None:
            seconds[phase] = seconds.get(phase, 0.0) + (max(0.0, at - since) if took is None else took)

        while page := await log.history(record.rollout_id, history.last_sequence):
            for size, event in page:
                history.last_sequence, at = event.sequence, event.time.ToNanoseconds() / 1e9
                match event.WhichOneof("event"):
                    case "phase_changed":
                        change = event.phase_changed
                        if change.HasField("previous_duration"):
                            leave(at, change.previous_duration.ToNanoseconds() / 1e9)
                        phase, since = phase_from_proto(change.phase), at
                        if phase is Phase.PREPARING:
                            history._begin_attempt()
                    case "attempt_failed":
                        leave(at)
                        phase, since = Phase.QUEUED, at
                        history._begin_attempt()
                    case "agent_event":
                        history.agent_events.append(size)
                    case "agent_exited":
                        history._has_exit = True
                    case "user_turn":
                        history.user_turns.append(from_proto(UserTurn, event.user_turn))
                        if event.user_turn.instruction:
                            history._begin_turn()
                    case "call_finished":
                        history.calls.took(size)
                        history._calls.add(event.call_finished.call.call_id)
                    case "artifact":
                        history._artifacts.add(event.artifact.name)
        if phase > record.phase:  # it began again, which is no event
            leave(since)
            phase = record.phase
        history.progress = RunProgress.continued(phase, record.attempts, since, seconds)
        return history

    def has(self, event: RolloutEvent) -> bool:
        """Whether what an event reports is recorded already."""
        match event:
            case ArtifactCollected():
                return event.name in self._artifacts
            case AgentExit():
                return self._has_exit
            case UserTurn(instruction=instruction) if instruction:
                self.agent_events.clear()  # `output` has counted them: the agent's whole output was read
                self._has_exit = False
                return False
            case _:
                return False

    def is_new(self, call_id: str) -> bool:
        """Whether a call has not been recorded, whichever process saw its end; from now on it is."""
        if call_id in self._calls:
            return False
        self._calls.add(call_id)
        return True

    def began_anew(self) -> None:
        """Forget the attempt: another one begins."""
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        self._begin_turn()
        self.user_turns.clear()
        self._artifacts.clear()

    def _begin_turn(self) -> None:
        """What was printed so far is not read again: the agent is another process from now on."""
        for size in self.agent_events:
            self.output.took(size)
        self.agent_events.clear()
        self._has_exit = False
