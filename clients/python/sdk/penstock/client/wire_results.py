"""What the services report (rollouts, events, trajectories) as values."""

import shlex
from typing import Any

import numpy as np
from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct

from penstock.chat.v1 import completion_pb2
from penstock.client import chat, results, trajectories
from penstock.client.wire import (
    completion_from,
    logprobs,
    optional,
    sampling_from,
    seconds,
    time,
    token_ids,
    tool_from,
    versions_from,
    word,
)
from penstock.driver.v1 import agent_pb2, rollout_pb2
from penstock.sandbox.v1 import process_service_pb2
from penstock.trajectory.v1 import trajectory_pb2


def values(message: Struct) -> dict[str, Any]:
    """A Struct as JSON values; whole numbers come out as int."""
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
    """A phase."""
    return results.Phase(word(rollout_pb2.Phase, number, "PHASE_"))


def exit_from(message: process_service_pb2.Exit) -> results.Exit:
    """The end of a process."""
    status = message.WhichOneof("status")
    return results.Exit(
        reason=word(process_service_pb2.ExitReason, message.reason, "EXIT_REASON_"),
        code=message.code if status == "code" else None,
        signal=message.signal if status == "signal" else None,
        message=message.message,
        duration=seconds(message, "duration") or 0.0,
        stdout_bytes=message.stdout_bytes,
        stderr_bytes=message.stderr_bytes,
    )


def reward(message: trajectory_pb2.Reward) -> trajectories.Reward:
    """A reward."""
    return trajectories.Reward(message.value, message.range_min, message.range_max, dict(message.components))


def outcome(message: rollout_pb2.Outcome) -> results.Outcome:
    """How a rollout ended."""
    return results.Outcome(
        failure=failure(message.failure) if message.HasField("failure") else None,
        reward=reward(message.reward) if message.HasField("reward") else None,
        agent_exit=exit_from(message.agent_exit.exit) if message.HasField("agent_exit") else None,
        agent_stderr=message.agent_exit.stderr_tail,
        grading=_grading(message.grading) if message.HasField("grading") else None,
    )


def _grading(message: rollout_pb2.Grading) -> results.Grading:
    changes = message.changes
    return results.Grading(
        fresh_fork=message.place == rollout_pb2.GRADING_PLACE_FRESH_FORK,
        passed=message.passed,
        total=message.total,
        commands=tuple(
            results.VerifierCommand(exit_from(item.exit), item.stdout_tail, item.stderr_tail)
            for item in message.commands
        ),
        restored=message.restored,
        changes=results.Changes(
            changes.entries, changes.size_bytes, changes.removed, changes.left_out, tuple(changes.left_out_paths)
        )
        if message.HasField("changes")
        else None,
    )


def failure(message: rollout_pb2.Failure) -> results.Failure:
    """Why a rollout, or an attempt at it, failed."""
    return results.Failure(
        cause=results.FailureCause(word(rollout_pb2.FailureCause, message.cause, "FAILURE_CAUSE_")),
        reason=message.reason,
        message=message.message,
        retriable=message.retriable,
        phase=phase(message.phase) if message.phase else None,
        caused_by=results.Party(word(rollout_pb2.Party, message.caused_by, "PARTY_")) if message.caused_by else None,
    )


def rollout(message: rollout_pb2.Rollout) -> results.Rollout:
    """A rollout."""
    return results.Rollout(
        rollout_id=message.rollout_id,
        group_id=optional(message, "group_id"),
        index=message.index,
        phase=phase(message.phase),
        outcome=outcome(message.outcome) if message.HasField("outcome") else None,
        agent=message.spec.agent.name,
        agent_spec_sha256=message.agent_spec_sha256,
        task_id=message.spec.task.task_id,
        labels=dict(message.spec.labels),
        create_time=time(message, "create_time"),
        end_time=time(message, "end_time"),
        phase_times={phase(item.phase): seconds(item, "duration") or 0.0 for item in message.phase_times},
        last_sequence=message.last_sequence,
        attempts=message.attempts or 1,
    )


def summary(message: rollout_pb2.RolloutSummary) -> results.RolloutSummary:
    """A rollout in a line."""
    calls = message.calls
    return results.RolloutSummary(
        rollout_id=message.rollout_id,
        group_id=optional(message, "group_id"),
        index=message.index,
        run_id=optional(message, "run_id"),
        task_id=message.task_id,
        agent=message.agent,
        labels=dict(message.labels),
        phase=phase(message.phase),
        create_time=time(message, "create_time"),
        end_time=time(message, "end_time"),
        failure=failure(message.failure) if message.HasField("failure") else None,
        reward=reward(message.reward) if message.HasField("reward") else None,
        calls=calls.calls,
        prompt_tokens=calls.prompt_tokens,
        completion_tokens=calls.completion_tokens,
        min_version=optional(calls, "oldest_policy_version"),
        max_version=optional(calls, "newest_policy_version"),
        attempts=message.attempts or 1,
    )


def group(message: rollout_pb2.Group) -> results.Group:
    """A group."""
    return results.Group(
        group_id=message.group_id,
        size=message.size,
        spares=message.spares,
        quorum=message.quorum,
        rollout_ids=tuple(message.rollout_ids),
        ended_count=message.ended_count,
        ended=message.ended,
        complete=message.complete,
        result_rollout_ids=tuple(message.result_rollout_ids),
        create_time=time(message, "create_time"),
        end_time=time(message, "end_time"),
    )


def event(message: rollout_pb2.RolloutEvent) -> results.RolloutEvent | None:
    """An event; None for one of a kind that this client does not know."""
    payload: results.EventPayload
    match message.WhichOneof("event"):
        case "phase_changed":
            changed = message.phase_changed
            payload = results.PhaseChanged(phase(changed.phase), seconds(changed, "previous_duration"))
        case "command_finished":
            payload = command_finished(message.command_finished)
        case "agent_event":
            said = message.agent_event
            kind = word(agent_pb2.AgentEventKind, said.kind, "AGENT_EVENT_KIND_")
            payload = results.AgentEvent(kind, values(said.data), said.raw_line)
        case "agent_exited":
            payload = results.AgentExited(exit_from(message.agent_exited.exit), message.agent_exited.stderr_tail)
        case "attempt_failed":
            failed = message.attempt_failed
            payload = results.AttemptFailed(failed.attempt, failure(failed.failure))
        case "call_finished":
            payload = results.CallFinished(call(message.call_finished.call))
        case "artifact":
            file = message.artifact
            payload = results.ArtifactCollected(file.name, file.content, file.truncated, file.size_bytes)
        case "progress":
            payload = results.Progress(message.progress.message)
        case "ended":
            payload = results.Ended(outcome(message.ended))
        case _:
            return None
    return results.RolloutEvent(message.sequence, message.rollout_id, time(message, "time"), payload)


def command_finished(message: rollout_pb2.CommandFinished) -> results.CommandFinished:
    """A command that ended."""
    command = message.command
    line = command.shell if command.WhichOneof("command") == "shell" else shlex.join(command.argv.args)
    return results.CommandFinished(
        phase=phase(message.phase),
        index=message.index,
        command=line,
        exit=exit_from(message.exit),
        stdout_tail=message.stdout_tail,
        stderr_tail=message.stderr_tail,
    )


def call(message: trajectory_pb2.Call) -> trajectories.Call:
    """A model call."""
    return trajectories.Call(
        call_id=message.call_id,
        rollout_id=message.rollout_id,
        index=message.index,
        state=word(trajectory_pb2.CallState, message.state, "CALL_STATE_"),
        dialect=word(trajectory_pb2.Dialect, message.dialect, "DIALECT_"),
        call_class=word(trajectory_pb2.CallClass, message.call_class, "CALL_CLASS_"),
        branch_id=message.branch_id,
        parent_call_id=optional(message, "parent_call_id"),
        prompt_shared_count=message.prompt_shared_count,
        prompt_suffix_token_ids=token_ids(message.prompt_suffix_token_ids),
        prompt_count=message.prompt_count,
        completion=completion_from(message.completion) if message.HasField("completion") else None,
        sampled_count=message.completion.span.count or message.completion.usage.completion_tokens,
        capture_level=word(trajectory_pb2.CaptureLevel, message.capture_level, "CAPTURE_LEVEL_"),
        sampling_requested=sampling_from(message.sampling_requested),
        normalisations=tuple(message.normalisations),
        tools=tuple(map(tool_from, message.tools)),
        tools_sha256=message.tools_sha256,
        request_body=message.request_body,
        request_body_sha256=message.request_body_sha256,
        model_requested=message.model_requested,
        http_attempts=message.http_attempts,
        leases=message.leases,
        injected=message.injected,
        answerer=word(trajectory_pb2.Answerer, message.answerer, "ANSWERER_"),
        end_reason=message.end_reason,
        receive_time=time(message, "receive_time"),
        lease_time=time(message, "lease_time"),
        end_time=time(message, "end_time"),
        chain_sha256=message.chain_sha256,
        chain_index=optional(message, "chain_index"),
    )


def sample(message: trajectory_pb2.Sample) -> trajectories.Sample:
    """A sample."""
    return trajectories.Sample(
        sample_id=message.sample_id,
        branch_id=message.branch_id,
        input_ids=token_ids(message.input_ids),
        loss_mask=np.frombuffer(message.loss_mask, np.bool_),
        logprobs=logprobs(message.logprobs) if message.logprobs else None,
        logprobs_mode=chat.LogprobsMode(word(completion_pb2.LogprobsMode, message.logprobs_mode, "LOGPROBS_MODE_")),
        versions=versions_from(message.versions),
        turns=tuple(
            trajectories.TurnSpan(item.call_id, item.start, item.end, item.untrained_reason) for item in message.turns
        ),
        prompt_count=message.prompt_count,
        weight=message.weight,
        branch_class=word(trajectory_pb2.CallClass, message.branch_class, "CALL_CLASS_"),
        truncated=message.truncated,
    )


def _branch(message: trajectory_pb2.Branch) -> trajectories.Branch:
    return trajectories.Branch(
        branch_id=message.branch_id,
        branch_class=word(trajectory_pb2.CallClass, message.branch_class, "CALL_CLASS_"),
        fork_call_id=optional(message, "fork_call_id"),
        shared_count=message.shared_count,
        call_ids=tuple(message.call_ids),
        reason=message.reason,
    )


def _tool_call(message: trajectory_pb2.HostToolCall) -> trajectories.RecordedToolCall:
    return trajectories.RecordedToolCall(
        tool_call_id=message.tool_call_id,
        index=message.index,
        name=message.name,
        state=word(trajectory_pb2.CallState, message.state, "CALL_STATE_"),
        arguments_json=message.arguments_json,
        is_error=message.is_error,
        result_json=message.result_json,
        result_sha256=message.result_sha256,
        result_bytes=message.result_bytes,
        end_reason=message.end_reason,
        receive_time=time(message, "receive_time"),
        end_time=time(message, "end_time"),
    )


def _finding(message: trajectory_pb2.Finding) -> trajectories.Finding:
    severity = word(trajectory_pb2.Finding.Severity, message.severity, "SEVERITY_")
    return trajectories.Finding(severity, message.reason, message.message, optional(message, "call_id"))


def trajectory(message: trajectory_pb2.Trajectory) -> trajectories.Trajectory:
    """A trajectory, of which all fragments were merged."""
    return trajectories.Trajectory(
        rollout_id=message.rollout_id,
        group_id=optional(message, "group_id"),
        run_id=optional(message, "run_id"),
        group_index=optional(message, "group_index"),
        labels=dict(message.labels),
        task_id=message.task_id,
        agent=message.agent,
        agent_spec_sha256=message.agent_spec_sha256,
        calls=tuple(map(call, message.calls)),
        branches=tuple(map(_branch, message.branches)),
        samples=tuple(map(sample, message.samples)),
        reward=reward(message.reward) if message.HasField("reward") else None,
        grade=word(trajectory_pb2.Grade, message.grade, "GRADE_"),
        findings=tuple(map(_finding, message.findings)),
        capture_level=word(trajectory_pb2.CaptureLevel, message.capture_level, "CAPTURE_LEVEL_"),
        tokenizer_sha256=message.tokenizer_sha256,
        chat_template_sha256=message.chat_template_sha256,
        chain_sha256=message.chain_sha256,
        create_time=time(message, "create_time"),
        end_time=time(message, "end_time"),
        duration=seconds(message, "duration"),
        task_metadata=values(message.task_metadata),
        failure_cause=message.failure_cause,
        failure_caused_by=message.failure_caused_by,
        failure_reason=message.failure_reason,
        host_tool_calls=tuple(map(_tool_call, message.host_tool_calls)),
    )
