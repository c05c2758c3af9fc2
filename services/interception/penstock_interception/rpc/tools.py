"""Host tools on the trainers' stream and in trajectories, as messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import orjson
from google.protobuf import struct_pb2

from penstock.chat.v1 import chat_pb2
from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis import times
from penstock_interception.domain.host_tools import ToolCallRecord, ToolResult
from penstock_interception.domain.results import Rejection, RejectionReason
from penstock_interception.domain.state import ToolCall
from penstock_interception.gate.host_tools.offers import Proposal
from penstock_interception.wire import convert

MAX_WHOLE = 2**53


def proposals_from(tools: Sequence[chat_pb2.Tool]) -> list[Proposal]:
    """Returns the tools that a trainer offers."""
    return [Proposal(tool.name, tool.description, tool.parameters_json_schema) for tool in tools]


def call_to(call: ToolCall) -> pb.HostToolCall:
    """Returns a call for the trainer."""
    spec = call.rollout.spec
    message = pb.HostToolCall(
        tool_call_id=call.id,
        rollout_id=call.rollout.id,
        name=call.tool.name,
        arguments_json=call.arguments.decode(),
        group_id=spec.group_id,
        run_id=spec.run_id,
        namespace=spec.namespace,
        labels=dict(spec.labels),
        task_id=spec.task_id,
        group_index=spec.group_index,
        receive_time=times.timestamp(call.received),
        expire_time=times.timestamp(call.expires),
    )
    message.arguments.update(orjson.loads(call.arguments))
    return message


def result_from(message: pb.HostToolResult) -> ToolResult | Rejection:
    """Returns the trainer's result."""
    try:
        content = orjson.dumps(_object(message.result))
    except ValueError as error:
        reasons = (f"result: {error}",)
        return Rejection(message.tool_call_id, RejectionReason.INVALID, "The result is not valid.", reasons)
    return ToolResult(content, message.is_error)


def record_to(record: ToolCallRecord, *, bodies: bool) -> trajectory_pb2.HostToolCall:
    """Returns a call for a trajectory."""
    result = record.result
    message = trajectory_pb2.HostToolCall(
        tool_call_id=record.id,
        rollout_id=record.rollout_id,
        index=record.index,
        name=record.name,
        state=convert.STATES[record.state],
        arguments_json=record.arguments.decode(),
        end_reason=record.end_reason,
        receive_time=times.timestamp(record.received),
    )
    if result is not None:
        message.is_error = result.is_error
        message.result_sha256 = result.sha256
        message.result_bytes = len(result.content)
        if bodies:
            message.result_json = result.content.decode()
    if record.origin:
        message.replayed_from.ParseFromString(record.origin)
    if record.ended_at is not None:
        message.end_time.CopyFrom(times.timestamp(record.ended_at))
    return message


def frames_of(calls: Iterable[ToolCall], limit: int) -> Iterable[pb.InterceptResponse]:
    """Yields calls in frames of at most `limit` bytes, or one larger call."""
    frame, size = pb.ToolCalls(), 0
    for call in calls:
        item = call_to(call)
        if size and size + item.ByteSize() > limit:
            yield pb.InterceptResponse(tool_calls=frame)
            frame, size = pb.ToolCalls(), 0
        size += item.ByteSize()
        frame.calls.append(item)
    if size:
        yield pb.InterceptResponse(tool_calls=frame)


def _object(struct: struct_pb2.Struct) -> dict[str, Any]:
    return {key: _value(value) for key, value in struct.fields.items()}


def _value(value: struct_pb2.Value) -> Any:
    """Returns a value as JSON has it: whole numbers without a point, which a Struct cannot express."""
    match value.WhichOneof("kind"):
        case "number_value":
            number = value.number_value
            if not math.isfinite(number):
                raise ValueError("a number is not finite")
            return int(number) if number.is_integer() and abs(number) <= MAX_WHOLE else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "struct_value":
            return _object(value.struct_value)
        case "list_value":
            return [_value(item) for item in value.list_value.values]
    return None
