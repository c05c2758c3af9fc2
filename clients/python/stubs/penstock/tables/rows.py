"""Rows of exported tables, made from a trajectory's message, for services and clients. docs/exports.md documents each
column.

Invariants of a row of `sequences`: input_ids, loss_mask and logprobs have one length; the mask is 1 exactly on sampled
tokens that may be trained; there the logprob is finite and <= 0, elsewhere it is 0.0.
Advantages, if there are any, are as many, and 0.0 where the mask is 0.
"""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC
from functools import cache
from types import MappingProxyType
from typing import Any, Final, cast

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.tables.columns import SCHEMA_VERSION, Row, Table, sealed
from penstock.trajectory.v1 import trajectory_pb2
from penstock.values import times
from penstock.values.provisional import is_provisional
from penstock.values.token_tensors import TokenTensor, read


class BrokenSample(ValueError):
    """A sample breaks an invariant of this module."""


_EXACT: Final = (trajectory_pb2.CAPTURE_LEVEL_TOKENS, trajectory_pb2.CAPTURE_LEVEL_TOKENS_AND_LOGPROBS)
_INT32, _FLOAT32 = "i", "f"


def turns(trajectory: trajectory_pb2.Trajectory) -> Iterator[Row]:
    """Yields a row per model call, in order of arrival."""
    calls = {call.call_id: call for call in trajectory.calls}
    rewards = {turn.call_id: turn for turn in trajectory.reward.turns}
    policies = _policies(trajectory)
    for call in trajectory.calls:
        done = call.completion if call.HasField("completion") else None
        span = completion_pb2.TokenSpan() if done is None else done.span
        top = (None, None) if done is None or not span.top_count else _top(span)
        row = {
            **common(trajectory),
            "turn_index": call.index,
            "call_id": call.call_id,
            "parent_call_id": _optional(call, "parent_call_id"),
            "branch_id": call.branch_id,
            "role": word(trajectory_pb2.CallClass, call.call_class),
            "state": word(trajectory_pb2.CallState, call.state),
            "dialect": word(trajectory_pb2.Dialect, call.dialect),
            "capture_level": word(trajectory_pb2.CaptureLevel, call.capture_level),
            "answerer": word(trajectory_pb2.Answerer, call.answerer),
            "injected": call.injected,
            "prompt_token_ids": _prompt(calls, call) if call.capture_level in _EXACT else None,
            "prompt_shared_count": call.prompt_shared_count,
            "completion_token_ids": None if done is None else _sampled(done),
            "completion_logprobs": _numbers(_FLOAT32, span.logprobs) if span.logprobs else None,
            "completion_top_token_ids": top[0],
            "completion_top_logprobs": top[1],
            "completion_top_count": span.top_count,
            "completion_top_sha256": span.top_sha256.hex() or None,
            "completion_tensors": None if done is None else _tensors(done.tensors),
            "prompt_images": _images(call.media),
            "logprobs_mode": None if done is None else word(completion_pb2.LogprobsMode, span.logprobs_mode),
            "policy_spans": _versions(span.versions),
            "finish_reason": None if done is None else word(chat_pb2.FinishReason, done.finish_reason),
            "stop_token_id": None if done is None else _optional(done, "stop_token_id"),
            "stop_text": None if done is None else _optional(done, "stop_text"),
            "sampling_requested": _sampling(call.sampling_requested),
            "sampling_used": None if done is None else _sampling_used(done),
            "engine": None if done is None else done.engine,
            "engine_version": None if done is None else done.engine_version,
            "model": None if done is None else done.model,
            "model_requested": call.model_requested,
            "cached_tokens": _optional(done.usage, "cached_tokens") if done and done.HasField("usage") else None,
            "normalisations": list(call.normalisations),
            "tools": [
                {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters_json_schema": tool.parameters_json_schema,
                    "strict": _optional(tool, "strict"),
                }
                for tool in call.tools
            ],
            "tools_sha256": call.tools_sha256.hex(),
            "response_message": message_row(done.message) if done and done.HasField("message") else None,
            "request_body": call.request_body.decode("utf-8", errors="replace") or None,
            "request_body_sha256": call.request_body_sha256.hex(),
            "http_attempts": call.http_attempts,
            "end_reason": call.end_reason or None,
            "receive_time": _time(call, "receive_time"),
            "lease_time": _time(call, "lease_time"),
            "end_time": _time(call, "end_time"),
            "chain_index": _optional(call, "chain_index"),
            "chain_sha256": call.chain_sha256.hex() or None,
            "rollout_chain_sha256": trajectory.chain_sha256.hex() or None,
            "replayed_from": _origin(call.replayed_from) if call.HasField("replayed_from") else None,
            "branch_point": call.branch_point,
            **_turn_reward(rewards.get(call.call_id)),
            "policy_id": call.policy_id or None,
            "model_name": _optional(call, "model_name"),
            "trained": _optional(call, "trained"),
            "policies": policies,
        }
        yield sealed(row, len(trajectory.calls))


def sequences(
    trajectory: trajectory_pb2.Trajectory, advantages: Mapping[str, Sequence[float]] = MappingProxyType({})
) -> Iterator[Row]:
    """Yields a row per sample. BrokenSample: one breaks an invariant of this module.

    `advantages` has those of the tokens of a sample, by its id. A trajectory has none: who estimates them passes them.
    """
    samplings = {
        call.call_id: _sampling(call.completion.sampling_used)
        for call in trajectory.calls
        if call.HasField("completion") and call.completion.HasField("sampling_used")
    }
    for index, sample in enumerate(trajectory.samples):
        ids, mask = _numbers(_INT32, sample.input_ids), list(sample.loss_mask)
        logprobs = _numbers(_FLOAT32, sample.logprobs) if sample.logprobs else None
        top = _top(sample)
        _check(sample.sample_id, ids, mask, logprobs, top)
        others = [turn for turn in sample.turns if turn.policy_id != sample.policy_id]
        versions = [
            span.policy_version
            for span in sample.versions
            if not any(turn.start <= span.start and span.end <= turn.end for turn in others)
        ]
        row = {
            **common(trajectory),
            "sequence_index": index,
            "sample_id": sample.sample_id,
            "branch_id": sample.branch_id,
            "role": word(trajectory_pb2.CallClass, sample.branch_class),
            "input_ids": ids,
            "loss_mask": mask,
            "logprobs": logprobs,
            "top_token_ids": top[0],
            "top_logprobs": top[1],
            "logprobs_mode": word(completion_pb2.LogprobsMode, sample.logprobs_mode),
            "prompt_len": sample.prompt_count,
            "turn_spans": [
                {
                    "call_id": turn.call_id,
                    "start": turn.start,
                    "end": turn.end,
                    "untrained_reason": turn.untrained_reason,
                }
                for turn in sample.turns
            ],
            "policy_version_min": min(versions, default=None),
            "policy_version_max": max(versions, default=None),
            "policy_spans": _versions(sample.versions),
            "weight": sample.weight,
            **reward(trajectory),
            "truncated": sample.truncated,
            "grade": word(trajectory_pb2.Grade, trajectory.grade),
            "findings": _findings(trajectory),
            "temperatures": [(samplings.get(turn.call_id) or {}).get("temperature") for turn in sample.turns],
            "samplings": [samplings.get(turn.call_id) for turn in sample.turns],
            "parent_rollout_id": sample.parent_rollout_id or None,
            "branch_call_id": sample.branch_call_id or None,
            "advantages": _advantages(sample.sample_id, mask, advantages.get(sample.sample_id)),
            "turn_rewards": [_optional(turn, "reward") for turn in sample.turns],
            "token_rewards": _token_rewards(sample),
            "tensors": _tensors(sample.tensors),
            "images": _images(sample.media),
            "policy_id": sample.policy_id or None,
            "turn_policies": [turn.policy_id for turn in sample.turns] if sample.policy_id else None,
        }
        yield sealed(row, len(trajectory.samples))


def tool_calls(trajectory: trajectory_pb2.Trajectory) -> Iterator[Row]:
    """Yields a row per call of a host tool, in order of arrival."""
    for call in trajectory.host_tool_calls:
        row = {
            **common(trajectory),
            "tool_call_index": call.index,
            "tool_call_id": call.tool_call_id,
            "name": call.name,
            "state": word(trajectory_pb2.CallState, call.state),
            "arguments_json": call.arguments_json,
            "is_error": call.is_error,
            "result_json": call.result_json or None,
            "result_sha256": call.result_sha256.hex() or None,
            "result_bytes": call.result_bytes,
            "end_reason": call.end_reason or None,
            "receive_time": _time(call, "receive_time"),
            "end_time": _time(call, "end_time"),
        }
        yield sealed(row, len(trajectory.host_tool_calls))


def judgements(trajectory: trajectory_pb2.Trajectory) -> Iterator[Row]:
    """Yields a row per annotation, in the order of their creation."""
    for index, one in enumerate(trajectory.annotations):
        row = {
            **common(trajectory),
            "annotation_index": index,
            "name": one.name,
            "author": one.author,
            "call_id": _optional(one, "call_id"),
            "value": _optional(one, "value"),
            "token_values": _numbers(_FLOAT32, one.token_values) if one.token_values else None,
            "details": _whole(MessageToDict(one.details)),
            "create_time": _time(one, "create_time"),
            "judged_chain_sha256": one.chain_sha256.hex() or None,
            "rollout_chain_sha256": trajectory.chain_sha256.hex() or None,
        }
        yield sealed(row, len(trajectory.annotations))


def rollouts(trajectory: trajectory_pb2.Trajectory, cost: Row | None = None) -> Iterator[Row]:
    """Yields the one row of the rollout, which exists also for one without a call.

    `cost` is of its calls. A trajectory has none: who knows prices passes it.
    """
    seconds = times.seconds(trajectory.duration) if trajectory.HasField("duration") else None
    row = {
        **common(trajectory),
        "namespace": trajectory.namespace,
        "agent_spec_sha256": trajectory.agent_spec_sha256,
        "task_metadata": _whole(MessageToDict(trajectory.task_metadata)),
        **reward(trajectory),
        "grade": word(trajectory_pb2.Grade, trajectory.grade),
        "findings": _findings(trajectory),
        "capture_level": word(trajectory_pb2.CaptureLevel, trajectory.capture_level),
        "calls": len(trajectory.calls),
        "samples": len(trajectory.samples),
        "host_tool_calls": len(trajectory.host_tool_calls),
        "chat_template_sha256": trajectory.chat_template_sha256.hex(),
        "rollout_chain_sha256": trajectory.chain_sha256.hex() or None,
        "create_time": _time(trajectory, "create_time"),
        "end_time": _time(trajectory, "end_time"),
        "seconds": seconds,
        "branched_from": _branch(trajectory.branched_from) if trajectory.HasField("branched_from") else None,
        "policies": _policies(trajectory),
        "cost": cost,
    }
    yield sealed(row, 1)


ROWS: Final[Mapping[Table, Callable[[trajectory_pb2.Trajectory], Iterator[Row]]]] = {
    Table.TURNS: turns,
    Table.SEQUENCES: sequences,
    Table.TOOL_CALLS: tool_calls,
    Table.ANNOTATIONS: judgements,
    Table.ROLLOUTS: rollouts,
}
"""The function that makes each table's rows. `rollouts` is last: it has a row for each rollout. Clients alone make
`chat` (`penstock.analysis.interchange.chat_rows`), which needs the agents' request bodies."""


def common(trajectory: trajectory_pb2.Trajectory) -> Row:
    """Returns the columns that every table has."""
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": _optional(trajectory, "run_id"),
        "group_id": _optional(trajectory, "group_id"),
        "group_index": _optional(trajectory, "group_index"),
        "rollout_id": trajectory.rollout_id,
        "attempt": trajectory.attempt or None,
        "task_id": trajectory.task_id,
        "agent": trajectory.agent,
        "labels": dict(trajectory.labels),
        "tokenizer_sha256": trajectory.tokenizer_sha256.hex(),
        "error": trajectory.failure_reason or None,
        "error_cause": trajectory.failure_cause or None,
        "error_caused_by": trajectory.failure_caused_by or None,
    }


def reward(trajectory: trajectory_pb2.Trajectory) -> Row:
    """Returns the columns of the rollout's reward."""
    given = trajectory.reward if trajectory.HasField("reward") else None
    return {
        "reward": None if given is None else given.value,
        "reward_components": {} if given is None else dict(given.components),
    }


def _policies(trajectory: trajectory_pb2.Trajectory) -> list[Row] | None:
    """Returns what each policy of the rollout has; None where its calls are of one without a name."""
    found: dict[str, Row] = {}
    for call in (call for call in trajectory.calls if call.policy_id):
        own = found.setdefault(call.policy_id, {"policy_id": call.policy_id, "trained": None, "calls": 0, "samples": 0})
        own["calls"] += 1
        if call.HasField("trained"):
            own["trained"] = call.trained or bool(own["trained"])
    for sample in trajectory.samples:
        if sample.policy_id in found:
            found[sample.policy_id]["samples"] += 1
    return [found[policy_id] for policy_id in sorted(found)] or None


def _turn_reward(turn: trajectory_pb2.TurnReward | None) -> Row:
    return {
        "turn_reward": None if turn is None else _optional(turn, "value"),
        "turn_reward_components": {} if turn is None else dict(turn.components),
        "token_rewards": None if turn is None or not turn.token_values else _numbers(_FLOAT32, turn.token_values),
    }


def _token_rewards(sample: trajectory_pb2.Sample) -> list[float] | None:
    if not sample.token_rewards:
        return None
    values = _numbers(_FLOAT32, sample.token_rewards)
    if len(values) != sample.count or not all(map(math.isfinite, values)):
        raise BrokenSample(f"sample {sample.sample_id} has rewards of other tokens, or ones that are no numbers")
    return values


def _findings(trajectory: trajectory_pb2.Trajectory) -> list[Row]:
    return [
        {
            "severity": word(trajectory_pb2.Finding.Severity, finding.severity),
            "reason": finding.reason,
            "message": finding.message,
            "call_id": _optional(finding, "call_id"),
        }
        for finding in trajectory.findings
    ]


def _check(
    sample_id: str,
    ids: Sequence[int],
    mask: Sequence[int],
    logprobs: Sequence[float] | None,
    top: tuple[Sequence[Any] | None, Sequence[Any] | None],
) -> None:
    if len(mask) != len(ids) or (logprobs is not None and len(logprobs) != len(ids)):
        raise BrokenSample(f"sample {sample_id} has arrays of several lengths")
    if logprobs is not None and not all(
        math.isfinite(value) and value <= 0 for value, trained in zip(logprobs, mask, strict=True) if trained
    ):
        raise BrokenSample(f"sample {sample_id} has invalid logprobs")
    trained = sum(mask)
    if any(rows is not None and len(rows) != trained for rows in top) or (top[0] is None) != (top[1] is None):
        raise BrokenSample(f"sample {sample_id} has alternatives of other tokens")


def _advantages(sample_id: str, mask: Sequence[int], values: Sequence[float] | None) -> list[float] | None:
    if values is None:
        return None
    if len(values) != len(mask) or not all(
        math.isfinite(value) and (trained or value == 0.0) for value, trained in zip(values, mask, strict=True)
    ):
        raise BrokenSample(f"sample {sample_id} has advantages of other tokens, or ones that are no numbers")
    return list(values)


def _numbers(kind: str, data: bytes) -> list[Any]:
    values = array(kind, data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def _top(holder: completion_pb2.TokenSpan | trajectory_pb2.Sample) -> tuple[list[Any] | None, list[Any] | None]:
    """Rows of alternatives, None where they were left out; JSON has no -infinity, so its logprob is null."""
    ids = _numbers(_INT32, holder.top_token_ids) if holder.top_token_ids and holder.top_count else None
    logprobs = _numbers(_FLOAT32, holder.top_logprobs) if holder.top_logprobs and holder.top_count else None
    if logprobs is not None:
        logprobs = [None if value == -math.inf else value for value in logprobs]
    return _in_rows(ids, holder.top_count), _in_rows(logprobs, holder.top_count)


def _tensors(tensors: Sequence[completion_pb2.TokenTensor]) -> list[Row] | None:
    """Tensors of tokens, with their rows as base64 unless they were left out; None without any."""
    return [tensor_row(read(tensor), with_data=bool(tensor.data)) for tensor in tensors] or None


def _images(media: Sequence[chat_pb2.Media]) -> list[Row] | None:
    """Images of a prompt by their digests, without their bytes; None without any."""
    return [
        {
            "sha256": one.sha256.hex(),
            "media_type": one.media_type,
            "token_start": one.token_start,
            "token_count": one.token_count,
            "placeholder_token_id": one.placeholder_token_id,
            "grid": list(one.grid) or None,
            "processor_sha256": one.processor_sha256.hex(),
        }
        for one in media
    ] or None


def tensor_row(tensor: TokenTensor, *, with_data: bool) -> Row:
    """Returns a tensor of tokens as the columns `tensors` and `completion_tensors` have it."""
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "start": tensor.start,
        "shape": list(tensor.shape),
        "sha256": tensor.sha256.hex(),
        "data": base64.b64encode(tensor.data).decode() if with_data else None,
    }


def _in_rows(values: list[Any] | None, length: int) -> list[list[Any]] | None:
    return None if values is None else [values[start : start + length] for start in range(0, len(values), length)]


def _prompt(calls: Mapping[str, trajectory_pb2.Call], call: trajectory_pb2.Call) -> list[int]:
    line = [call]
    while line[-1].HasField("parent_call_id") and line[-1].prompt_shared_count:
        line.append(calls[line[-1].parent_call_id])
    parent = line.pop()
    prompt = parent.prompt_suffix_token_ids
    while line:
        child = line.pop()
        whole = prompt + parent.completion.span.token_ids
        prompt = whole[: 4 * child.prompt_shared_count] + child.prompt_suffix_token_ids
        parent = child
    return _numbers(_INT32, prompt)


def _sampled(done: completion_pb2.Completion) -> list[int] | None:
    is_left_out = done.span.count > 0 and not done.span.token_ids
    return _numbers(_INT32, done.span.token_ids) if done.HasField("span") and not is_left_out else None


def _versions(spans: Sequence[completion_pb2.PolicyVersionSpan]) -> list[Row]:
    return [{"policy_version": span.policy_version, "start": span.start, "end": span.end} for span in spans]


def _sampling_used(done: completion_pb2.Completion) -> Row | None:
    return _sampling(done.sampling_used) if done.HasField("sampling_used") else None


def _sampling(sampling: chat_pb2.Sampling) -> Row:
    """The fields that are set, in the order of their numbers."""
    row: Row = {}
    for name, is_list in _sampling_fields():
        if is_list:
            if values := getattr(sampling, name):
                row[name] = list(values)
        elif sampling.HasField(cast("Any", name)):
            row[name] = getattr(sampling, name)
    return row


@cache
def _sampling_fields() -> tuple[tuple[str, bool], ...]:
    fields = chat_pb2.Sampling.DESCRIPTOR.fields
    return tuple((field.name, field.is_repeated) for field in fields if not is_provisional(field))


def message_row(message: chat_pb2.Message) -> Row:
    """Returns a message as the column `response_message` has it."""
    parts = [{"kind": _kind(part), **_part(part)} for part in message.parts]
    return {"role": word(chat_pb2.Role, message.role), "parts": parts}


def _kind(part: chat_pb2.Part) -> str:
    return (part.WhichOneof("part") or "text").replace("_", "")


def _part(part: chat_pb2.Part) -> Row:
    match part.WhichOneof("part"):
        case "reasoning":
            return {"text": part.reasoning.text, "signature": part.reasoning.signature.hex()}
        case "image":
            image = part.image
            return {"media_type": image.media_type, "data": image.data.hex(), "url": image.url}
        case "tool_call":
            call = part.tool_call
            return {"id": call.id, "name": call.name, "arguments_json": call.arguments_json}
        case "tool_result":
            result = part.tool_result
            parts = [_part(item) for item in result.parts]
            return {"tool_call_id": result.tool_call_id, "parts": parts, "is_error": result.is_error}
        case _:
            return {"text": part.text.text}


def _optional(message: Message, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None


def _origin(origin: trajectory_pb2.ReplayOrigin) -> Row:
    return {"rollout_id": origin.rollout_id, "attempt": origin.attempt, "call_id": origin.call_id}


def _branch(point: trajectory_pb2.BranchPoint) -> Row:
    return {
        "parent_rollout_id": point.parent_rollout_id,
        "call_id": point.call_id,
        "call_index": point.call_index,
        "answer_given": point.answer_given,
        "train_prefix": point.train_prefix,
        "seed": _optional(point, "seed"),
    }


def _time(message: Message, name: str) -> str | None:
    if not message.HasField(name):
        return None
    moment: str = getattr(message, name).ToDatetime(tzinfo=UTC).isoformat()
    return moment


def word(enum: Any, number: int) -> str:
    """Returns the lower-case word of an enum's value; the number itself if it is unknown."""
    return _words(enum).get(number, str(number))


@cache
def _words(enum: Any) -> dict[int, str]:
    prefix = enum.DESCRIPTOR.values[0].name.removesuffix("UNSPECIFIED")
    return {value.number: value.name.removeprefix(prefix).lower() for value in enum.DESCRIPTOR.values}


def _whole(value: Any) -> Any:
    """A Struct's value as JSON has it: whole numbers are integers."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return value
