"""Conversations, sampling and completions to and from protos; helpers that the other conversions share.

Enums are lower-case words here and `PREFIX_WORD` there.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message as ProtoMessage
from google.protobuf.timestamp_pb2 import Timestamp

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.client import chat
from penstock.client.errors import InvalidArgument

_SAMPLING_SCALARS: Final = tuple(
    field.name for field in chat_pb2.Sampling.DESCRIPTOR.fields if field.name not in ("stop", "stop_token_ids")
)


def word(enum: Any, number: int, prefix: str) -> str:
    """The lower-case word of an enum's value; `unspecified` for its zero, the number itself when it is unknown."""
    try:
        return str(enum.Name(number)).removeprefix(prefix).lower()
    except ValueError:
        return str(number)


def number(enum: Any, value: str, prefix: str) -> Any:
    """The enum's value for a word.

    Raises:
        InvalidArgument: there is no such word; lists those that there are.
    """
    try:
        return enum.Value(prefix + str(value).upper())
    except ValueError:
        words = [name.removeprefix(prefix).lower() for name, number in enum.items() if number]
        raise InvalidArgument(f"{value!r} is none of {', '.join(words)}", reason="ENUM_VALUE") from None


def optional(message: ProtoMessage, name: str) -> Any:
    """A field's value, or None when it is unset."""
    return getattr(message, name) if message.HasField(name) else None


def duration(seconds: float | None) -> Duration | None:
    """Seconds as a Duration; None stays unset."""
    if seconds is None:
        return None
    result = Duration()
    result.FromNanoseconds(round(seconds * 1e9))
    return result


def seconds(message: ProtoMessage, name: str) -> float | None:
    """A Duration field in seconds, or None when it is unset."""
    return getattr(message, name).ToNanoseconds() / 1e9 if message.HasField(name) else None


def time(message: ProtoMessage, name: str) -> datetime | None:
    """A Timestamp field in UTC, or None when it is unset."""
    if not message.HasField(name):
        return None
    stamp: Timestamp = getattr(message, name)
    return stamp.ToDatetime(tzinfo=UTC)


def token_ids(data: bytes) -> chat.TokenIds:
    """Token ids from their wire form, a read-only view."""
    return np.frombuffer(data, "<i4")


def logprobs(data: bytes) -> chat.Logprobs:
    """Logprobs from their wire form, a read-only view."""
    return np.frombuffer(data, "<f4")


def token_bytes(ids: Any) -> bytes:
    """Token ids in their wire form; takes whatever numpy takes.

    Raises:
        InvalidArgument: not one dimension of integers that fit into 32 bits.
    """
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise InvalidArgument("Token ids are a list of integers or a one-dimensional array", reason="TOKEN_IDS")
    if array.size and array.dtype != np.int32 and (array.min() < 0 or array.max() > 2**31 - 1):
        raise InvalidArgument("A token id is not in [0, 2^31)", reason="TOKEN_IDS")
    return array.astype("<i4", copy=False).tobytes()


def versions_from(spans: Iterable[completion_pb2.PolicyVersionSpan]) -> tuple[chat.VersionSpan, ...]:
    """Version spans."""
    return tuple(chat.VersionSpan(span.policy_version, span.start, span.end) for span in spans)


def sampling_to(value: chat.Sampling | None) -> chat_pb2.Sampling | None:
    """Sampling, what is None unset."""
    if value is None:
        return None
    fields = {name: item for name in _SAMPLING_SCALARS if (item := getattr(value, name)) is not None}
    return chat_pb2.Sampling(stop=value.stop, stop_token_ids=value.stop_token_ids, **fields)


def sampling_from(message: chat_pb2.Sampling) -> chat.Sampling:
    """Sampling, what is unset None."""
    fields: dict[str, Any] = {field.name: item for field, item in message.ListFields()}
    for name in ("stop", "stop_token_ids"):
        if name in fields:
            fields[name] = tuple(fields[name])
    return chat.Sampling(**{name: item for name, item in fields.items() if name in _SAMPLING_FIELDS})


_SAMPLING_FIELDS: Final = frozenset(chat.Sampling.__dataclass_fields__)


def part_to(part: chat.Part) -> chat_pb2.Part:
    """One part of a message."""
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
    """One part of a message."""
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
    """One message."""
    role = number(chat_pb2.Role, message.role, "ROLE_")
    return chat_pb2.Message(role=role, parts=[part_to(part) for part in message.parts], name=message.name)


def message_from(message: chat_pb2.Message) -> chat.Message:
    """One message."""
    role = chat.Role(word(chat_pb2.Role, message.role, "ROLE_"))
    return chat.Message(role, tuple(map(part_from, message.parts)), message.name)


def tool_to(tool: chat.Tool) -> chat_pb2.Tool:
    """A tool."""
    return chat_pb2.Tool(
        name=tool.name,
        description=tool.description,
        parameters_json_schema=tool.parameters_json_schema,
        strict=tool.strict,
    )


def tool_from(tool: chat_pb2.Tool) -> chat.Tool:
    """A tool."""
    return chat.Tool(tool.name, tool.description, tool.parameters_json_schema, optional(tool, "strict"))


def tool_choice_from(choice: chat_pb2.ToolChoice) -> chat.ToolChoice:
    """Which tools may be used."""
    mode = word(chat_pb2.ToolChoice.Mode, choice.mode, "MODE_")
    return chat.ToolChoice(mode, choice.name, optional(choice, "parallel_tool_calls"))


def completion_to(value: chat.Completion) -> completion_pb2.Completion:
    """A completion."""
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
        timings = value.timings
        message.timings.CopyFrom(
            completion_pb2.Timings(
                queued=duration(timings.queued), prefill=duration(timings.prefill), decode=duration(timings.decode)
            )
        )
    if value.usage is not None:
        usage = value.usage
        message.usage.CopyFrom(
            chat_pb2.Usage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                reasoning_tokens=usage.reasoning_tokens,
            )
        )
    return message


def completion_from(message: completion_pb2.Completion) -> chat.Completion:
    """A completion."""
    span = message.span
    stop = message.WhichOneof("matched_stop")
    top = span.top_count if message.HasField("span") else 0
    left_out = span.count > 0 and not span.token_ids  # as in events: only counted
    return chat.Completion(
        token_ids=token_ids(span.token_ids) if message.HasField("span") and not left_out else None,
        logprobs=logprobs(span.logprobs) if span.logprobs else None,
        logprobs_mode=chat.LogprobsMode(word(completion_pb2.LogprobsMode, span.logprobs_mode, "LOGPROBS_MODE_")),
        versions=versions_from(span.versions),
        message=message_from(message.message) if message.HasField("message") else None,
        finish_reason=chat.FinishReason(word(chat_pb2.FinishReason, message.finish_reason, "FINISH_REASON_")),
        stop_token_id=message.stop_token_id if stop == "stop_token_id" else None,
        stop_text=message.stop_text if stop == "stop_text" else None,
        sampling_used=sampling_from(message.sampling_used) if message.HasField("sampling_used") else None,
        engine=message.engine,
        engine_version=message.engine_version,
        model=message.model,
        timings=_timings_from(message.timings) if message.HasField("timings") else None,
        usage=_usage_from(message.usage) if message.HasField("usage") else None,
        top_token_ids=token_ids(span.top_token_ids).reshape(-1, top) if top else None,
        top_logprobs=logprobs(span.top_logprobs).reshape(-1, top) if top else None,
    )


def _span_to(value: chat.Completion) -> completion_pb2.TokenSpan:
    ids = np.asarray(value.token_ids)
    span = completion_pb2.TokenSpan(
        token_ids=token_bytes(ids),
        count=len(ids),
        logprobs_mode=number(completion_pb2.LogprobsMode, value.logprobs_mode, "LOGPROBS_MODE_"),
        versions=[
            completion_pb2.PolicyVersionSpan(policy_version=item.policy_version, start=item.start, end=item.end)
            for item in value.versions
        ],
    )
    if value.logprobs is not None:
        span.logprobs = np.asarray(value.logprobs).astype("<f4", copy=False).tobytes()
    if value.top_token_ids is not None and value.top_logprobs is not None:
        span.top_count = value.top_token_ids.shape[1]
        span.top_token_ids = value.top_token_ids.astype("<i4", copy=False).tobytes()
        span.top_logprobs = value.top_logprobs.astype("<f4", copy=False).tobytes()
    return span


def _timings_from(message: completion_pb2.Timings) -> chat.Timings:
    return chat.Timings(seconds(message, "queued"), seconds(message, "prefill"), seconds(message, "decode"))


def _usage_from(message: chat_pb2.Usage) -> chat.Usage:
    return chat.Usage(
        message.prompt_tokens,
        message.completion_tokens,
        optional(message, "cached_tokens"),
        optional(message, "reasoning_tokens"),
    )
