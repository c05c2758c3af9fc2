"""Converts conversations, sampling and completions to and from protos; helpers that the other conversions share.

Enums are lower-case words here and `PREFIX_WORD` there.
"""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message as ProtoMessage
from google.protobuf.timestamp_pb2 import Timestamp
from numpy.typing import NDArray

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.client.errors import InvalidArgument
from penstock.client.types import chat
from penstock.inference.v1 import inference_service_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock.values import OpenEnum, reader, writer

_WithTop = completion_pb2.TokenSpan | trajectory_pb2.Sample | inference_service_pb2.ScoreResponse

_sampling_to: Final = writer(chat.Sampling, chat_pb2.Sampling)
_version_to: Final = writer(chat.VersionSpan, completion_pb2.PolicyVersionSpan)
_version_from: Final = reader(chat.VersionSpan, completion_pb2.PolicyVersionSpan)
_timings_to: Final = writer(chat.Timings, completion_pb2.Timings)
_timings_from: Final = reader(chat.Timings, completion_pb2.Timings)
_usage_to: Final = writer(chat.Usage, chat_pb2.Usage)
_usage_from: Final = reader(chat.Usage, chat_pb2.Usage)
sampling_from: Final = reader(chat.Sampling, chat_pb2.Sampling)
"""Converts sampling; unset becomes None."""
tool_to: Final = writer(chat.Tool, chat_pb2.Tool)
tool_from: Final = reader(chat.Tool, chat_pb2.Tool)
"""Convert a tool."""
tool_choice_from: Final = reader(chat.ToolChoice, chat_pb2.ToolChoice)
"""Converts the tool choice."""


def word(enum: Any, number: int, prefix: str) -> str:
    """Returns the lower-case word of an enum's value; `unspecified` for its zero, the number itself if unknown."""
    try:
        return str(enum.Name(number)).removeprefix(prefix).lower()
    except ValueError:
        return str(number)


def number(enum: Any, value: str, prefix: str) -> Any:
    """Returns the enum's value for a word.

    Raises:
        InvalidArgument: there is no such word; lists the valid ones.
    """
    try:
        return enum.Value(prefix + str(value).upper())
    except ValueError:
        words = [name.removeprefix(prefix).lower() for name, number in enum.items() if number]
        raise InvalidArgument(f"{value!r} is not one of {', '.join(words)}", reason="ENUM_VALUE") from None


def read_number(enum: Any, value: OpenEnum, prefix: str) -> Any:
    """Returns the enum's value for a word that was read, whether or not this client knows it."""
    if value.known:
        return number(enum, value, prefix)
    return int(value) if value.isdecimal() else 0


def optional(message: ProtoMessage, name: str) -> Any:
    """Returns a field's value, or None when it is unset."""
    return getattr(message, name) if message.HasField(name) else None


def duration(seconds: float | None) -> Duration | None:
    """Returns seconds as a Duration; None stays unset."""
    if seconds is None:
        return None
    result = Duration()
    result.FromNanoseconds(round(seconds * 1e9))
    return result


def seconds(message: ProtoMessage, name: str) -> float | None:
    """Returns a Duration field in seconds, or None when it is unset."""
    return getattr(message, name).ToNanoseconds() / 1e9 if message.HasField(name) else None


def time(message: ProtoMessage, name: str) -> datetime | None:
    """Returns a Timestamp field in UTC, or None when it is unset."""
    if not message.HasField(name):
        return None
    stamp: Timestamp = getattr(message, name)
    return stamp.ToDatetime(tzinfo=UTC)


def token_ids(data: bytes) -> chat.TokenIds:
    """Decodes token ids to a read-only view."""
    return np.frombuffer(data, "<i4")


def logprobs(data: bytes) -> chat.Logprobs:
    """Decodes logprobs to a read-only view."""
    return np.frombuffer(data, "<f4")


def top_ids(message: _WithTop) -> NDArray[np.int32] | None:
    """Decodes the ids of alternatives to a read-only view, (rows, top_count); None if they were left out."""
    data = message.top_token_ids
    return np.frombuffer(data, "<i4").reshape(-1, message.top_count) if data and message.top_count else None


def top_logprobs(message: _WithTop) -> NDArray[np.float32] | None:
    """Decodes the logprobs of alternatives, as `top_ids` does their ids."""
    data = message.top_logprobs
    return np.frombuffer(data, "<f4").reshape(-1, message.top_count) if data and message.top_count else None


def token_bytes(ids: Any) -> bytes:
    """Encodes token ids for the wire; accepts any array-like.

    Raises:
        InvalidArgument: not one dimension of integers that fit into 32 bits.
    """
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise InvalidArgument("Token ids must be a list of integers or a one-dimensional array", reason="TOKEN_IDS")
    if array.size and array.dtype != np.int32 and (array.min() < 0 or array.max() > 2**31 - 1):
        raise InvalidArgument("A token id is not in [0, 2^31)", reason="TOKEN_IDS")
    return array.astype("<i4", copy=False).tobytes()


def int_bytes(array: NDArray[np.int32] | None) -> bytes:
    """Encodes an array of received token ids; None becomes unset."""
    return b"" if array is None else array.astype("<i4", copy=False).tobytes()


def float_bytes(array: NDArray[np.float32] | None) -> bytes:
    """Encodes an array of logprobs; None becomes unset."""
    return b"" if array is None else array.astype("<f4", copy=False).tobytes()


prompt_image: Final = reader(chat.PromptImage, chat_pb2.Media, left_out=("modality",))
"""Converts an image of a prompt."""

prompt_image_to: Final = writer(chat.PromptImage, chat_pb2.Media, by={"modality": lambda value: "image"})
"""Converts an image of a prompt back."""


def tensor_from(message: completion_pb2.TokenTensor) -> chat.TokenTensor:
    """Converts a tensor of tokens, its rows to a read-only view; without them if they were left out."""
    shape = tuple(message.shape)
    rows = None
    if message.data:
        rows = np.frombuffer(message.data, np.dtype(message.dtype).newbyteorder("<")).reshape(shape)
    return chat.TokenTensor(message.name, message.dtype, message.start, shape, rows, message.sha256)


def tensor_to(value: chat.TokenTensor) -> completion_pb2.TokenTensor:
    """Converts a tensor of tokens, with its rows if it has them."""
    message = completion_pb2.TokenTensor(
        name=value.name, dtype=value.dtype, start=value.start, shape=value.shape, sha256=value.sha256
    )
    if value.rows is not None:
        message.data = value.rows.astype(np.dtype(value.dtype).newbyteorder("<"), copy=False).tobytes()
    return message


def sampling_to(value: chat.Sampling | None) -> chat_pb2.Sampling | None:
    """Converts sampling; None becomes unset."""
    return None if value is None else _sampling_to(value)


def part_to(part: chat.Part) -> chat_pb2.Part:
    """Converts one part of a message."""
    match part:
        case chat.Text(text):
            return chat_pb2.Part(text=chat_pb2.Text(text=text))
        case chat.Reasoning(text, signature):
            return chat_pb2.Part(reasoning=chat_pb2.Reasoning(text=text, signature=signature))
        case chat.Image(media_type, data, url):
            image = chat_pb2.Image(media_type=media_type, **({"url": url} if url else {"data": data}))
            return chat_pb2.Part(image=image)
        case chat.ToolCall(id=call_id, name=name, arguments_json=arguments):
            return chat_pb2.Part(tool_call=chat_pb2.ToolCall(id=call_id, name=name, arguments_json=arguments))
        case chat.ToolResult(call_id, parts, is_error):
            result = chat_pb2.ToolResult(
                tool_call_id=call_id, parts=[part_to(item) for item in parts], is_error=is_error
            )
            return chat_pb2.Part(tool_result=result)


def part_from(part: chat_pb2.Part) -> chat.Part:
    """Converts one part of a message."""
    match part.WhichOneof("part"):
        case "reasoning":
            return chat.Reasoning(part.reasoning.text, part.reasoning.signature)
        case "image":
            return chat.Image(part.image.media_type, part.image.data, part.image.url)
        case "tool_call":
            return chat.ToolCall(part.tool_call.id, part.tool_call.name, part.tool_call.arguments_json)
        case "tool_result":
            result = part.tool_result
            return chat.ToolResult(result.tool_call_id, tuple(map(part_from, result.parts)), result.is_error)
        case _:
            return chat.Text(part.text.text)


def message_to(message: chat.Message) -> chat_pb2.Message:
    """Converts one message."""
    role = number(chat_pb2.Role, message.role, "ROLE_")
    return chat_pb2.Message(role=role, parts=[part_to(part) for part in message.parts], name=message.name)


def message_from(message: chat_pb2.Message) -> chat.Message:
    """Converts one message."""
    role = chat.Role.of(word(chat_pb2.Role, message.role, "ROLE_"))
    return chat.Message(role, tuple(map(part_from, message.parts)), message.name)


def completion_to(value: chat.Completion) -> completion_pb2.Completion:
    """Converts a completion."""
    message = completion_pb2.Completion(
        finish_reason=number(chat_pb2.FinishReason, value.finish_reason, "FINISH_REASON_"),
        sampling_used=sampling_to(value.sampling_used),
        engine=value.engine,
        engine_version=value.engine_version,
        model=value.model,
    )
    if value.token_ids is not None:
        message.span.CopyFrom(_span_to(value))
    if value.message is not None:
        message.message.CopyFrom(message_to(value.message))
    if value.stop_token_id is not None:
        message.stop_token_id = value.stop_token_id
    elif value.stop_text is not None:
        message.stop_text = value.stop_text
    if value.timings is not None:
        message.timings.CopyFrom(_timings_to(value.timings))
    if value.usage is not None:
        message.usage.CopyFrom(_usage_to(value.usage))
    message.tensors.extend(map(tensor_to, value.tensors))
    return message


def recorded_to(value: chat.Completion, sampled: int) -> completion_pb2.Completion:
    """Converts a completion that was read of a trajectory, `sampled` tokens long, which may have been left out."""
    known = replace(value, token_ids=None, message=None, finish_reason=chat.FinishReason.UNSPECIFIED)
    message = completion_to(known)
    message.finish_reason = read_number(chat_pb2.FinishReason, value.finish_reason, "FINISH_REASON_")
    if value.message is not None:
        message.message.role = read_number(chat_pb2.Role, value.message.role, "ROLE_")
        message.message.parts.extend(map(part_to, value.message.parts))
        message.message.name = value.message.name
    if value.token_ids is None and not sampled:
        return message
    span = completion_pb2.TokenSpan(
        count=sampled if value.token_ids is None or len(value.token_ids) else 0,
        logprobs_mode=read_number(completion_pb2.LogprobsMode, value.logprobs_mode, "LOGPROBS_MODE_"),
        versions=map(_version_to, value.versions),
        top_count=value.top_count,
        top_sha256=value.top_sha256,
        top_token_ids=int_bytes(value.top_token_ids),
        top_logprobs=float_bytes(value.top_logprobs),
        token_ids=int_bytes(value.token_ids),
        logprobs=float_bytes(value.logprobs),
    )
    message.span.CopyFrom(span)
    return message


def completion_from(message: completion_pb2.Completion) -> chat.Completion:
    """Converts a completion."""
    span = message.span
    stop = message.WhichOneof("matched_stop")
    left_out = span.count > 0 and not span.token_ids  # as in events: only the count is sent
    return chat.Completion(
        token_ids=token_ids(span.token_ids) if message.HasField("span") and not left_out else None,
        logprobs=logprobs(span.logprobs) if span.logprobs else None,
        logprobs_mode=chat.LogprobsMode.of(word(completion_pb2.LogprobsMode, span.logprobs_mode, "LOGPROBS_MODE_")),
        versions=tuple(map(_version_from, span.versions)),
        message=message_from(message.message) if message.HasField("message") else None,
        finish_reason=chat.FinishReason.of(word(chat_pb2.FinishReason, message.finish_reason, "FINISH_REASON_")),
        stop_token_id=message.stop_token_id if stop == "stop_token_id" else None,
        stop_text=message.stop_text if stop == "stop_text" else None,
        sampling_used=sampling_from(message.sampling_used) if message.HasField("sampling_used") else None,
        engine=message.engine,
        engine_version=message.engine_version,
        model=message.model,
        timings=_timings_from(message.timings) if message.HasField("timings") else None,
        usage=_usage_from(message.usage) if message.HasField("usage") else None,
        top_token_ids=top_ids(span) if span.top_count else None,
        top_logprobs=top_logprobs(span) if span.top_count else None,
        top_count=span.top_count,
        top_sha256=span.top_sha256,
        tensors=tuple(map(tensor_from, message.tensors)),
    )


def _span_to(value: chat.Completion) -> completion_pb2.TokenSpan:
    ids = np.asarray(value.token_ids)
    span = completion_pb2.TokenSpan(
        token_ids=token_bytes(ids),
        count=len(ids),
        logprobs_mode=number(completion_pb2.LogprobsMode, value.logprobs_mode, "LOGPROBS_MODE_"),
        versions=map(_version_to, value.versions),
    )
    if value.logprobs is not None:
        span.logprobs = np.asarray(value.logprobs).astype("<f4", copy=False).tobytes()
    if value.top_token_ids is not None or value.top_logprobs is not None:
        span.top_count = chat.check_top(len(ids), value.top_token_ids, value.top_logprobs)
        span.top_token_ids = np.asarray(value.top_token_ids).astype("<i4", copy=False).tobytes()
        span.top_logprobs = np.asarray(value.top_logprobs).astype("<f4", copy=False).tobytes()
    return span
