"""Converts rollouts, groups, terminal episodes, events and outcomes to messages, for clients and for the journal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp
from google.protobuf.unknown_fields import UnknownFieldSet

from penstock.driver.v1 import rollout_pb2, terminal_service_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock.values import to_proto, writer
from penstock_chassis import times
from penstock_driver.agents.output_events import AgentEvent
from penstock_driver.domain.pauses import RolloutPaused, RolloutResumed
from penstock_driver.domain.records import GroupRecord, Record
from penstock_driver.domain.rollout import (
    FIRST_GRADE,
    AgentExit,
    ArtifactCollected,
    AttemptFailed,
    CallFinished,
    Changes,
    CommandFinished,
    Component,
    Failure,
    Grading,
    Outcome,
    Phase,
    PhaseChanged,
    Progress,
    RolloutEvent,
    TurnReward,
)
from penstock_driver.domain.terminal_episode import Observation, TerminalSpec
from penstock_driver.domain.users import UserTurn
from penstock_driver.wire.agents import EVENT_KINDS
from penstock_driver.wire.converters import command_to_proto, exit_to_proto
from penstock_driver.wire.specs import make_effective

PHASES: Final = {phase: rollout_pb2.Phase.Value(f"PHASE_{phase.name}") for phase in Phase}
_COMPONENTS: Final = {party: rollout_pb2.Party.Value(f"PARTY_{party.value}") for party in Component}
_GRADING_COMMANDS: Final = 64
_GRADING_TAIL_BYTES: Final = 1024

failure_to_proto: Final = writer(
    Failure,
    rollout_pb2.Failure,
    left_out=("component",),
    by={"caused_by": lambda failure: _COMPONENTS[failure.caused_by]},
)
"""Why a rollout, or an attempt, did not complete."""

command_finished: Final = writer(
    CommandFinished,
    rollout_pb2.CommandFinished,
    by={"command": lambda event: command_to_proto(event.command, with_secrets=False)},
)
"""The event of a command that ended."""

_grading: Final = writer(
    Grading,
    rollout_pb2.Grading,
    left_out=("fresh_fork",),
    by={
        "place": lambda grading: (
            rollout_pb2.GRADING_PLACE_FRESH_FORK if grading.fresh_fork else rollout_pb2.GRADING_PLACE_AGENT_SANDBOX
        ),
        "passed": lambda grading: sum(command.exit.ok for command in grading.commands),
        "commands": lambda grading: [
            rollout_pb2.Grading.Command(
                exit=exit_to_proto(command.exit),
                stdout_tail=command.stdout_tail[-_GRADING_TAIL_BYTES:],
                stderr_tail=command.stderr_tail[-_GRADING_TAIL_BYTES:],
            )
            for command in grading.commands[:_GRADING_COMMANDS]
        ],
    },
)

changes_to_proto: Final = writer(Changes, rollout_pb2.Grading.Changes)
"""What was copied of an agent's work."""

writer(TurnReward, trajectory_pb2.TurnReward, left_out=("call_index",))

outcome_to_proto: Final = writer(Outcome, rollout_pb2.Outcome)
"""How a rollout ended."""

_call_finished: Final = writer(CallFinished, rollout_pb2.CallFinished, left_out=("spent",))

artifact_to_proto: Final = writer(
    ArtifactCollected,
    rollout_pb2.ArtifactCollected,
    by={"truncated": lambda event: event.size_bytes > len(event.content)},
)
"""A fetched file."""

rollout_to_proto: Final = writer(
    Record,
    rollout_pb2.Rollout,
    renamed={"agent_sha256": "agent_spec_sha256"},
    left_out=("run_id", "task_id", "agent", "labels", "is_result", "paused_s", "pauses"),
    by={
        "grades": lambda record: record.grades,
        "paused": lambda record: record.pause is not None,
        "phase_times": lambda record: [
            rollout_pb2.PhaseTime(phase=PHASES[phase], duration=times.duration(seconds))
            for phase, seconds in sorted(record.phase_times.items())
        ],
    },
)
"""A rollout in its current state."""


def event_to_proto(rollout_id: str, sequence: int, time: float, event: RolloutEvent) -> rollout_pb2.RolloutEvent:
    """An event as stored and sent; `time` in seconds since the epoch."""
    wire = rollout_pb2.RolloutEvent(sequence=sequence, rollout_id=rollout_id, time=times.timestamp(time))
    match event:
        case PhaseChanged():
            wire.phase_changed.CopyFrom(to_proto(event, rollout_pb2.PhaseChanged))
        case AgentEvent():
            wire.agent_event.kind = EVENT_KINDS[event.kind]
            wire.agent_event.data.update(event.data)
            wire.agent_event.raw_line = event.raw_line
        case CommandFinished():
            wire.command_finished.CopyFrom(command_finished(event))
        case AgentExit():
            wire.agent_exited.CopyFrom(to_proto(event, rollout_pb2.AgentExit))
        case AttemptFailed():
            wire.attempt_failed.CopyFrom(to_proto(event, rollout_pb2.AttemptFailed))
        case CallFinished():
            wire.call_finished.CopyFrom(_call_finished(event))
        case ArtifactCollected():
            wire.artifact.CopyFrom(artifact_to_proto(event))
        case Progress():
            wire.progress.message = event.message
        case RolloutPaused():
            wire.paused.CopyFrom(to_proto(event, rollout_pb2.RolloutPaused))
        case RolloutResumed():
            wire.resumed.CopyFrom(to_proto(event, rollout_pb2.RolloutResumed))
        case UserTurn():
            wire.user_turn.CopyFrom(to_proto(event, rollout_pb2.UserTurn))
        case Outcome():
            wire.ended.CopyFrom(outcome_to_proto(event))
    return wire


def decode_event(payload: bytes) -> rollout_pb2.RolloutEvent:
    """Parse a stored event.

    Earlier drivers stored events nested deeper than any reader accepts; those are returned without their data.
    """
    try:
        return rollout_pb2.RolloutEvent.FromString(payload)
    except DecodeError:
        kept = {field.field_number: field.data for field in _fields(payload)}
        names = rollout_pb2.RolloutEvent.DESCRIPTOR.fields_by_name
        event = rollout_pb2.RolloutEvent(
            sequence=kept[names["sequence"].number],
            rollout_id=kept[names["rollout_id"].number].decode(),
            time=Timestamp.FromString(kept[names["time"].number]),
        )
        agent_fields = {field.field_number: field.data for field in _fields(kept[names["agent_event"].number])}
        numbers = rollout_pb2.AgentEvent.DESCRIPTOR.fields_by_name
        event.agent_event.kind = agent_fields.get(numbers["kind"].number, 0)
        event.agent_event.raw_line = agent_fields.get(numbers["raw_line"].number, b"")
        return event


def _fields(payload: bytes) -> Any:
    """The fields of any message, one level deep."""
    return UnknownFieldSet(Empty.FromString(payload))


def listed_to_proto(record: Record) -> rollout_pb2.Rollout:
    """A rollout as lists have it: further grades are without what an agent makes long."""
    wire = rollout_to_proto(record)
    for grade in wire.grades:
        grade.grading.ClearField("commands")
        if grade.grading.HasField("changes"):
            grade.grading.changes.ClearField("left_out_paths")
    return wire


def group_to_proto(group: GroupRecord, ended: Sequence[Record], paused: int = 0, *, is_over: bool) -> rollout_pb2.Group:
    """A group in its current state; `ended` has its ended rollouts in the order in which they ended.

    `paused` is how many of its rollouts are paused. `is_over`: whether all have ended, those too that were deleted
    since, which `group` still names.
    """
    results = [record.rollout_id for record in ended if record.is_result]
    plan = group.plan
    wire = rollout_pb2.Group(
        group_id=group.group_id,
        namespace=group.namespace,
        spec=group.spec,
        size=plan.size,
        spares=plan.spares,
        quorum=plan.quorum,
        rollout_ids=group.rollout_ids,
        ended_count=len(ended),
        ended=is_over,
        create_time=times.timestamp(group.create_time),
        paused_count=paused,
        complete=is_over and len(results) >= plan.quorum,
        result_rollout_ids=results[: plan.size],
    )
    if group.branched_from is not None:
        wire.branched_from.CopyFrom(group.branched_from)
    if plan.grace_s is not None:
        wire.stragglers.grace.CopyFrom(times.duration(plan.grace_s))
    if is_over and ended:
        wire.end_time.CopyFrom(times.timestamp(max(record.end_time or 0.0 for record in ended)))
    return wire


def reward_of(record: Record, grade: str = "") -> trajectory_pb2.Reward | None:
    """The reward of the further grade of the name `grade`; empty or "first" = the one that the rollout ended with. None
    = there is no such grade, or it has no reward.
    """
    graded: rollout_pb2.Outcome | rollout_pb2.Grade | None = record.outcome
    if grade not in ("", FIRST_GRADE):
        graded = next((one for one in record.grades if one.name == grade), None)
    return graded.reward if graded is not None and graded.HasField("reward") else None


def add_driver_fields(
    trajectory: trajectory_pb2.Trajectory, record: Record, grade: str = ""
) -> trajectory_pb2.Trajectory:
    """Add the fields that only the driver knows to a trajectory's first fragment, and return it.

    The reward is that of `reward_of`.
    """
    outcome, spec = record.outcome or rollout_pb2.Outcome(), record.spec
    trajectory.rollout_id = record.rollout_id
    trajectory.namespace = record.namespace
    # The gate's record also has the driver's own labels, used to find resources for cleanup.
    trajectory.labels.clear()
    trajectory.labels.update(record.labels)
    if record.group_id:
        trajectory.group_id = record.group_id
        trajectory.group_index = record.index
    if (reward := reward_of(record, grade)) is not None:
        trajectory.reward.CopyFrom(reward)
    if outcome.HasField("failure"):
        trajectory.failure_cause = rollout_pb2.FailureCause.Name(outcome.failure.cause).removeprefix("FAILURE_CAUSE_")
        trajectory.failure_reason = outcome.failure.reason
        trajectory.failure_caused_by = rollout_pb2.Party.Name(outcome.failure.caused_by).removeprefix("PARTY_")
    trajectory.agent = record.agent
    trajectory.agent_spec_sha256 = record.agent_sha256
    trajectory.task_id = record.task_id
    trajectory.attempt = record.attempts
    if record.branched_from is not None:
        trajectory.branched_from.CopyFrom(record.branched_from)
    if record.run_id is not None:
        trajectory.run_id = record.run_id
    if not trajectory.HasField("create_time"):  # it never reached a gate
        trajectory.create_time.CopyFrom(times.timestamp(record.create_time))
    if spec.task.HasField("metadata"):
        trajectory.task_metadata.CopyFrom(spec.task.metadata)
    if record.end_time is not None:
        trajectory.duration.CopyFrom(times.duration(record.end_time - record.create_time))
        if not trajectory.HasField("end_time"):
            trajectory.end_time.CopyFrom(times.timestamp(record.end_time))
    return trajectory


def public_terminal(spec: TerminalSpec) -> terminal_service_pb2.Terminal:
    """The part of an episode's spec that is stored and returned, as a Terminal: without secrets and file contents."""
    wire = terminal_service_pb2.Terminal(task=spec.request.task, labels=spec.labels, namespace=spec.namespace)
    make_effective(wire.task, spec.task)
    return wire


def recovery_request(spec: TerminalSpec) -> terminal_service_pb2.OpenTerminalRequest:
    """The request from which a restarted driver continues an open episode, with its secrets: it is stored sealed."""
    wire = terminal_service_pb2.OpenTerminalRequest()
    wire.CopyFrom(spec.request)
    wire.task.ClearField("files")  # the sandbox has them
    return wire


_observation: Final = writer(Observation, terminal_service_pb2.StepResponse, left_out=("step_id",))


def observation_to_proto(step_id: str, observation: Observation) -> terminal_service_pb2.StepResponse:
    """A step's result."""
    wire = _observation(observation)
    wire.step_id = step_id
    return wire


def commands_to_proto(commands: Sequence[CommandFinished]) -> terminal_service_pb2.Terminal:
    """The results of setup or verifier commands: a Terminal with only its field `verifier_commands`."""
    return terminal_service_pb2.Terminal(verifier_commands=[command_finished(command) for command in commands])
