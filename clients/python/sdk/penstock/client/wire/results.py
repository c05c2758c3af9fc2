"""Converts the services' reports (rollouts, events, trajectories) to values."""

import shlex
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct
from numpy.typing import ArrayLike

from penstock.chat.v1 import completion_pb2
from penstock.client.errors import InvalidArgument
from penstock.client.types import results, trajectories
from penstock.client.wire.chat import (
    completion_from,
    float_bytes,
    int_bytes,
    logprobs,
    read_number,
    recorded_to,
    tensor_from,
    tensor_to,
    time,
    token_ids,
    top_ids,
    top_logprobs,
    word,
)
from penstock.driver.v1 import rollout_pb2
from penstock.sandbox.v1 import process_service_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock.values import from_proto, reader, writer


def values(message: Struct) -> dict[str, Any]:
    """Returns a Struct as JSON values; whole numbers become int."""
    result = MessageToDict(message)
    return {name: _whole(value) for name, value in result.items()}


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return value


def phase(number: int) -> results.Phase:
    """Converts a phase."""
    return results.Phase.of(word(rollout_pb2.Phase, number, "PHASE_"))


exit_from: Final = reader(
    results.Exit,
    process_service_pb2.Exit,
    left_out=(
        *("cpu_time", "max_rss_bytes", "stdout_truncated", "stderr_truncated", "pipes_open", "end_time"),
        *("ended_inside", "all_killed"),
    ),
)
"""Converts the exit of a process."""

reader(
    trajectories.TurnReward,
    trajectory_pb2.TurnReward,
    by={
        "token_values": lambda message: tuple(logprobs(message.token_values).tolist()) if message.token_values else None
    },
)
writer(
    trajectories.TurnReward,
    trajectory_pb2.TurnReward,
    by={"token_values": lambda value: _floats_of(value.token_values)},
)
reward: Final = reader(trajectories.Reward, trajectory_pb2.Reward)
"""Converts a reward."""

_grading: Final = reader(
    results.Grading,
    rollout_pb2.Grading,
    left_out=("place",),
    by={"fresh_fork": lambda message: message.place == rollout_pb2.GRADING_PLACE_FRESH_FORK},
)

failure: Final = reader(results.Failure, rollout_pb2.Failure)
"""Converts the failure of a rollout or an attempt."""

outcome: Final = reader(
    results.Outcome,
    rollout_pb2.Outcome,
    renamed={"agent_stderr": "agent_exit.stderr_tail"},
    by={"agent_exit": lambda message: exit_from(message.agent_exit.exit) if message.HasField("agent_exit") else None},
)
"""Converts the outcome of a rollout."""

grade: Final = reader(results.Grade, rollout_pb2.Grade)
"""Converts a further grade."""

rollout: Final = reader(
    results.Rollout,
    rollout_pb2.Rollout,
    renamed={"agent": "spec.agent.name", "task_id": "spec.task.task_id", "labels": "spec.labels"},
    left_out=("fork_kind", "paused"),
    by={
        "phase_times": lambda message: {
            phase(item.phase): item.duration.ToNanoseconds() / 1e9 for item in message.phase_times
        },
        "attempts": lambda message: message.attempts or 1,
    },
)
"""Converts a rollout."""

summary: Final = reader(
    results.RolloutSummary,
    rollout_pb2.RolloutSummary,
    renamed={
        "calls": "calls.calls",
        "prompt_tokens": "calls.prompt_tokens",
        "completion_tokens": "calls.completion_tokens",
        "min_version": "calls.oldest_policy_version",
        "max_version": "calls.newest_policy_version",
    },
    by={"attempts": lambda message: message.attempts or 1},
)
"""Converts a rollout's summary."""

group: Final = reader(results.Group, rollout_pb2.Group, left_out=("spec", "stragglers"))
"""Converts a group."""


def command_line(command: process_service_pb2.Command) -> str:
    """Returns a command as one line for people."""
    return command.shell if command.WhichOneof("command") == "shell" else shlex.join(command.argv.args)


command_finished: Final = reader(
    results.CommandFinished, rollout_pb2.CommandFinished, by={"command": lambda message: command_line(message.command)}
)
"""Converts a finished command."""

reader(results.AgentEvent, rollout_pb2.AgentEvent, by={"data": lambda message: values(message.data)})

_PAYLOADS: Final[Mapping[str, type[results.EventPayload]]] = {
    "phase_changed": results.PhaseChanged,
    "command_finished": results.CommandFinished,
    "agent_event": results.AgentEvent,
    "agent_exited": results.AgentExited,
    "attempt_failed": results.AttemptFailed,
    "call_finished": results.CallFinished,
    "artifact": results.ArtifactCollected,
    "progress": results.Progress,
    "paused": results.RolloutPaused,
    "resumed": results.RolloutResumed,
    "user_turn": results.UserTurn,
}


def event(message: rollout_pb2.RolloutEvent) -> results.RolloutEvent | None:
    """Converts an event; returns None for a kind that this client does not know."""
    kind = message.WhichOneof("event")
    payload: results.EventPayload
    if kind == "ended":
        payload = results.Ended(outcome(message.ended))
    elif kind is None or kind not in _PAYLOADS:
        return None
    else:
        payload = from_proto(_PAYLOADS[kind], getattr(message, kind))
    return results.RolloutEvent(message.sequence, message.rollout_id, time(message, "time"), payload)


call: Final = reader(
    trajectories.Call,
    trajectory_pb2.Call,
    renamed={"images": "media"},
    left_out=("agent_session",),
    by={
        "prompt_suffix_token_ids": lambda message: token_ids(message.prompt_suffix_token_ids),
        "completion": lambda message: completion_from(message.completion) if message.HasField("completion") else None,
        "sampled_count": lambda message: message.completion.span.count or message.completion.usage.completion_tokens,
    },
)
"""Converts a call."""

sample: Final = reader(
    trajectories.Sample,
    trajectory_pb2.Sample,
    renamed={"images": "media"},
    left_out=("count", "top_count", "advantages"),
    by={
        "input_ids": lambda message: token_ids(message.input_ids),
        "loss_mask": lambda message: np.frombuffer(message.loss_mask, np.bool_),
        "logprobs": lambda message: logprobs(message.logprobs) if message.logprobs else None,
        "top_token_ids": top_ids,
        "top_logprobs": top_logprobs,
        "token_rewards": lambda message: logprobs(message.token_rewards) if message.token_rewards else None,
        "tensors": lambda message: tuple(map(tensor_from, message.tensors)),
    },
)
"""Converts a sample."""

reader(
    trajectories.Annotation,
    trajectory_pb2.Annotation,
    by={
        "token_values": lambda message: logprobs(message.token_values) if message.token_values else None,
        "details": lambda message: values(message.details),
    },
)

annotation_to: Final = writer(
    trajectories.Annotation,
    trajectory_pb2.Annotation,
    by={
        "token_values": lambda value: _floats_of(value.token_values),
        "details": lambda value: _struct(value.details) if value.details else None,
    },
)
"""Converts an annotation."""

reader(trajectories.BranchPoint, trajectory_pb2.BranchPoint)
writer(trajectories.BranchPoint, trajectory_pb2.BranchPoint)
reader(trajectories.ReplayOrigin, trajectory_pb2.ReplayOrigin)
reader(trajectories.RecordedToolCall, trajectory_pb2.HostToolCall, left_out=("rollout_id",))

trajectory: Final = reader(
    trajectories.Trajectory,
    trajectory_pb2.Trajectory,
    by={"task_metadata": lambda message: values(message.task_metadata)},
)
"""Converts a trajectory whose fragments were all merged."""

writer(
    trajectories.Call,
    trajectory_pb2.Call,
    renamed={"images": "media"},
    left_out=("sampled_count", "agent_session"),
    by={
        "prompt_suffix_token_ids": lambda value: int_bytes(value.prompt_suffix_token_ids),
        "completion": lambda value: (
            None if value.completion is None else recorded_to(value.completion, value.sampled_count)
        ),
    },
)

writer(
    trajectories.Sample,
    trajectory_pb2.Sample,
    renamed={"images": "media"},
    left_out=("advantages",),
    by={
        "input_ids": lambda value: int_bytes(value.input_ids),
        "loss_mask": lambda value: value.loss_mask.astype("u1").tobytes(),
        "logprobs": lambda value: float_bytes(value.logprobs),
        "top_token_ids": lambda value: int_bytes(value.top_token_ids),
        "top_logprobs": lambda value: float_bytes(value.top_logprobs),
        "token_rewards": lambda value: float_bytes(value.token_rewards),
        "logprobs_mode": lambda value: read_number(completion_pb2.LogprobsMode, value.logprobs_mode, "LOGPROBS_MODE_"),
        "tensors": lambda value: map(tensor_to, value.tensors),
        "count": len,
        "top_count": lambda value: max(
            (array.shape[1] for array in (value.top_token_ids, value.top_logprobs) if array is not None), default=0
        ),
    },
)

writer(trajectories.RecordedToolCall, trajectory_pb2.HostToolCall, left_out=("rollout_id",))


def _floats_of(values: ArrayLike | None) -> bytes:
    """Encodes numbers for the wire.

    Raises:
        InvalidArgument: not one dimension of numbers.
    """
    if values is None:
        return b""
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise InvalidArgument("token_values must be a list or one-dimensional array of numbers", reason="TOKEN_VALUES")
    return array.astype("<f4").tobytes()


def _struct(value: Mapping[str, Any]) -> Struct:
    result = Struct()
    result.update(value)
    return result


trajectory_to: Final = writer(
    trajectories.Trajectory,
    trajectory_pb2.Trajectory,
    by={"task_metadata": lambda value: _struct(value.task_metadata)},
)
"""Converts a trajectory that was read back to its message."""
