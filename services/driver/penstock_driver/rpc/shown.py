"""What clients see: rollouts, groups, events and outcomes of the domain as protos."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp
from google.protobuf.unknown_fields import UnknownFieldSet

from penstock.driver.v1 import rollout_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis import times
from penstock_driver.events import AgentEvent
from penstock_driver.records import GroupRecord, Record
from penstock_driver.rollouts import (
    AgentExit,
    ArtifactCollected,
    AttemptFailed,
    CallFinished,
    Cause,
    CommandFinished,
    Failure,
    Grading,
    Happening,
    Outcome,
    Party,
    Phase,
    PhaseChanged,
    Progress,
    Reward,
)
from penstock_driver.rpc.agents import EVENT_KINDS
from penstock_driver.rpc.values import command_to_proto, exit_to_proto

PHASES: Final = {phase: rollout_pb2.Phase.Value(f"PHASE_{phase.name}") for phase in Phase}
PARTIES: Final = {party: rollout_pb2.Party.Value(f"PARTY_{party.value}") for party in Party}
_GRADING_COMMANDS: Final = 64
_GRADING_TAIL_BYTES: Final = 1024
CAUSES: Final = {cause: rollout_pb2.FailureCause.Value(f"FAILURE_CAUSE_{cause.value}") for cause in Cause}


def encode_event(rollout_id: str, sequence: int, time: float, event: Happening) -> bytes:
    """An event as it is kept and sent: a serialised RolloutEvent."""
    wire = rollout_pb2.RolloutEvent(sequence=sequence, rollout_id=rollout_id, time=times.timestamp(time))
    match event:
        case PhaseChanged():
            wire.phase_changed.phase = PHASES[event.phase]
            if event.previous_s is not None:
                wire.phase_changed.previous_duration.CopyFrom(times.duration(event.previous_s))
        case AgentEvent():
            wire.agent_event.kind = EVENT_KINDS[event.kind]
            wire.agent_event.data.update(event.data)
            wire.agent_event.raw_line = event.raw_line
        case CommandFinished():
            wire.command_finished.CopyFrom(command_finished(event))
        case AgentExit():
            wire.agent_exited.CopyFrom(_agent_exit(event))
        case AttemptFailed():
            wire.attempt_failed.CopyFrom(
                rollout_pb2.AttemptFailed(attempt=event.attempt, failure=_failure(event.failure))
            )
        case CallFinished():
            wire.call_finished.call.MergeFromString(event.call)
        case ArtifactCollected():
            wire.artifact.CopyFrom(
                rollout_pb2.ArtifactCollected(
                    name=event.name,
                    content=event.content,
                    truncated=event.size_bytes > len(event.content),
                    size_bytes=event.size_bytes,
                )
            )
        case Progress():
            wire.progress.message = event.message
        case Outcome():
            wire.ended.CopyFrom(outcome_to_proto(event))
    return wire.SerializeToString()


def decode_event(payload: bytes) -> rollout_pb2.RolloutEvent:
    """An event as it was kept.

    Drivers once kept events that are nested deeper than anybody reads; such a one comes without its data.
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
        said = {field.field_number: field.data for field in _fields(kept[names["agent_event"].number])}
        numbers = rollout_pb2.AgentEvent.DESCRIPTOR.fields_by_name
        event.agent_event.kind = said.get(numbers["kind"].number, 0)
        event.agent_event.raw_line = said.get(numbers["raw_line"].number, b"")
        return event


def _fields(payload: bytes) -> Any:
    """The fields of any message, one level of it."""
    return UnknownFieldSet(Empty.FromString(payload))


def command_finished(event: CommandFinished) -> rollout_pb2.CommandFinished:
    """A command that ended."""
    return rollout_pb2.CommandFinished(
        phase=PHASES[event.phase],
        index=event.index,
        command=command_to_proto(event.command, with_secrets=False),
        exit=exit_to_proto(event.exit),
        stdout_tail=event.stdout_tail,
        stderr_tail=event.stderr_tail,
    )


def encode_outcome(outcome: Outcome) -> bytes:
    """An outcome as it is kept: a serialised Outcome."""
    return outcome_to_proto(outcome).SerializeToString()


def outcome_to_proto(outcome: Outcome) -> rollout_pb2.Outcome:
    """How a rollout ended."""
    wire = rollout_pb2.Outcome()
    if outcome.failure:
        wire.failure.CopyFrom(_failure(outcome.failure))
    if outcome.reward:
        wire.reward.CopyFrom(_reward(outcome.reward))
    if outcome.agent_exit:
        wire.agent_exit.CopyFrom(_agent_exit(outcome.agent_exit))
    if outcome.grading:
        wire.grading.CopyFrom(_grading(outcome.grading))
    return wire


def _grading(grading: Grading) -> rollout_pb2.Grading:
    wire = rollout_pb2.Grading(
        place=rollout_pb2.GRADING_PLACE_FRESH_FORK if grading.fresh_fork else rollout_pb2.GRADING_PLACE_AGENT_SANDBOX,
        passed=sum(command.exit.ok for command in grading.commands),
        total=grading.total,
        commands=[
            rollout_pb2.Grading.Command(
                exit=exit_to_proto(command.exit),
                stdout_tail=command.stdout_tail[-_GRADING_TAIL_BYTES:],
                stderr_tail=command.stderr_tail[-_GRADING_TAIL_BYTES:],
            )
            for command in grading.commands[:_GRADING_COMMANDS]
        ],
        restored=grading.restored,
    )
    if grading.changes:
        taken = grading.changes
        wire.changes.CopyFrom(
            rollout_pb2.Grading.Changes(
                entries=taken.entries,
                size_bytes=taken.size_bytes,
                removed=taken.removed,
                left_out=taken.left_out,
                left_out_paths=taken.left_out_paths,
            )
        )
    return wire


def rollout_to_proto(record: Record) -> rollout_pb2.Rollout:
    """A rollout as it stands."""
    wire = rollout_pb2.Rollout(
        rollout_id=record.rollout_id,
        group_id=record.group_id,
        index=record.index,
        phase=PHASES[record.phase],
        create_time=times.timestamp(record.create_time),
        phase_times=[
            rollout_pb2.PhaseTime(phase=PHASES[phase], duration=times.duration(seconds))
            for phase, seconds in sorted(record.phase_times.items())
        ],
        agent_spec_sha256=record.agent_sha256,
        fork_kind=record.fork_kind,  # type: ignore[arg-type]
        last_sequence=record.last_sequence,
        attempts=record.attempts,
    )
    wire.spec.MergeFromString(record.spec)
    if record.outcome is not None:
        wire.outcome.MergeFromString(record.outcome)
    if record.end_time is not None:
        wire.end_time.CopyFrom(times.timestamp(record.end_time))
    return wire


def group_to_proto(group: GroupRecord, ended: Sequence[Record]) -> rollout_pb2.Group:
    """A group as it stands; `ended` has its ended rollouts in the order in which they ended."""
    results = [record.rollout_id for record in ended if record.is_result]
    is_over = len(ended) == len(group.rollout_ids)
    wire = rollout_pb2.Group(
        group_id=group.group_id,
        size=group.size,
        spares=group.spares,
        quorum=group.quorum,
        rollout_ids=group.rollout_ids,
        ended_count=len(ended),
        ended=is_over,
        create_time=times.timestamp(group.create_time),
        complete=is_over and len(results) >= group.quorum,
        result_rollout_ids=results[: group.size],
    )
    wire.spec.MergeFromString(group.spec)
    if group.grace_s is not None:
        wire.stragglers.grace.CopyFrom(times.duration(group.grace_s))
    if is_over and ended:
        wire.end_time.CopyFrom(times.timestamp(max(record.end_time or 0.0 for record in ended)))
    return wire


def fill_in(trajectory: trajectory_pb2.Trajectory, record: Record) -> None:
    """Add what only the driver knows to a trajectory's first fragment."""
    outcome = rollout_pb2.Outcome.FromString(record.outcome or b"")
    spec = rollout_pb2.RolloutSpec.FromString(record.spec)
    trajectory.rollout_id = record.rollout_id
    # The gate's own record also has the labels by which the driver finds what it left there.
    trajectory.labels.clear()
    trajectory.labels.update(record.labels)
    if record.group_id:
        trajectory.group_id = record.group_id
        trajectory.group_index = record.index
    if outcome.HasField("reward"):
        trajectory.reward.CopyFrom(outcome.reward)
    if outcome.HasField("failure"):
        trajectory.failure_cause = rollout_pb2.FailureCause.Name(outcome.failure.cause).removeprefix("FAILURE_CAUSE_")
        trajectory.failure_reason = outcome.failure.reason
        trajectory.failure_caused_by = rollout_pb2.Party.Name(outcome.failure.caused_by).removeprefix("PARTY_")
    trajectory.agent = record.agent
    trajectory.agent_spec_sha256 = record.agent_sha256
    trajectory.task_id = record.task_id
    if spec.task.HasField("metadata"):
        trajectory.task_metadata.CopyFrom(spec.task.metadata)
    if record.end_time is not None:
        trajectory.duration.CopyFrom(times.duration(record.end_time - record.create_time))


def _failure(failure: Failure) -> rollout_pb2.Failure:
    return rollout_pb2.Failure(
        cause=CAUSES[failure.cause],
        reason=failure.reason,
        message=failure.message,
        retriable=failure.retriable,
        phase=PHASES[failure.phase],
        caused_by=PARTIES[failure.caused_by],
    )


def _agent_exit(agent_exit: AgentExit) -> rollout_pb2.AgentExit:
    return rollout_pb2.AgentExit(exit=exit_to_proto(agent_exit.exit), stderr_tail=agent_exit.stderr_tail)


def _reward(reward: Reward) -> trajectory_pb2.Reward:
    return trajectory_pb2.Reward(
        value=reward.value, range_min=reward.range_min, range_max=reward.range_max, components=reward.components
    )
