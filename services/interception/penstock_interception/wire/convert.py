"""Converts values of `penstock.chat.v1` and `penstock.trajectory.v1` to domain values and back. No decisions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock.values import numbers, reader, token_tensors, writer
from penstock.values.token_tensors import TokenTensor
from penstock_chassis.errors import InvalidArgument, Violation
from penstock_chassis.validation import invalid_field
from penstock_codec.chat import (
    FinishReason,
    ImagePart,
    Message,
    Part,
    ReasoningPart,
    Role,
    Sampling,
    TextPart,
    Tool,
    ToolCallPart,
    ToolChoice,
    ToolChoiceMode,
    ToolResultPart,
    Usage,
)
from penstock_interception.domain.calls import Answerer, CallState, Dialect
from penstock_interception.domain.completions import Completion, Timings, Tokens
from penstock_interception.graph.values import (
    MAX_TOP,
    CallClass,
    IntArray,
    LogprobsMode,
    Media,
    TopLogprobs,
    VersionSpan,
    little_endian,
)

IMAGE = "image"
"""The modality of images."""

_ROLES = numbers(Role, chat_pb2.Role)
_ROLES_BACK = {value: key for key, value in _ROLES.items()}
_FINISH = numbers(FinishReason, chat_pb2.FinishReason)
_FINISH_BACK = {value: key for key, value in _FINISH.items()}
_MODES = numbers(LogprobsMode, completion_pb2.LogprobsMode)
_MODES_BACK = {value: key for key, value in _MODES.items()}
_CHOICES = numbers(ToolChoiceMode, chat_pb2.ToolChoice.Mode)
DIALECTS = numbers(Dialect, trajectory_pb2.Dialect)
DIALECTS_BACK = {value: key for key, value in DIALECTS.items()}
CLASSES = numbers(CallClass, trajectory_pb2.CallClass)
CLASSES_BACK = {value: key for key, value in CLASSES.items()}
STATES = numbers(CallState, trajectory_pb2.CallState)
ANSWERERS = numbers(Answerer, trajectory_pb2.Answerer)
ANSWERERS_BACK = {value: key for key, value in ANSWERERS.items()}

# Made by `penstock.values`, these take no longer than written ones would: they run for every call.
sampling_to = writer(Sampling, chat_pb2.Sampling, renamed={"response_format": "response_format_json"})
sampling_from = reader(Sampling, chat_pb2.Sampling, renamed={"response_format": "response_format_json"})
"""Unset stays unset (R64)."""
tool_to = writer(Tool, chat_pb2.Tool)
"""A tool's definition."""
_usage_to = writer(Usage, chat_pb2.Usage)
_usage_from = reader(Usage, chat_pb2.Usage)
_timings_to = writer(Timings, completion_pb2.Timings)
_timings_from = reader(Timings, completion_pb2.Timings)
_version_to = writer(VersionSpan, completion_pb2.PolicyVersionSpan)
_version_from = reader(VersionSpan, completion_pb2.PolicyVersionSpan)


def message_to(message: Message, *, image_data: bool = True) -> chat_pb2.Message:
    """A conversation's message. Without `image_data`, its inline images are named by digest."""
    parts = [_part_to(part, image_data) for part in message.parts]
    return chat_pb2.Message(role=_ROLES[message.role], parts=parts, name=message.name)


def message_from(message: chat_pb2.Message) -> Message:
    """Converts a message. Raises InvalidArgument for an invalid role or part."""
    role = _ROLES_BACK.get(message.role)
    if role is None:
        raise invalid_field("message.role", "unspecified")
    return Message(role, tuple(_part_from(part) for part in message.parts), message.name)


def media_to(media: Media, data: bytes = b"") -> chat_pb2.Media:
    """An image of a prompt, with its bytes if they are given."""
    return chat_pb2.Media(
        modality=IMAGE,
        media_type=media.media_type,
        sha256=media.sha256,
        data=data,
        token_start=media.token_start,
        token_count=media.token_count,
        placeholder_token_id=media.placeholder_token_id,
        grid=media.grid,
        processor_sha256=media.processor_sha256,
    )


def choice_to(choice: ToolChoice) -> chat_pb2.ToolChoice:
    """A tool choice."""
    return chat_pb2.ToolChoice(
        mode=_CHOICES[choice.mode], name=choice.name or "", parallel_tool_calls=choice.parallel_tool_calls
    )


def completion_to(
    completion: Completion, message: Message | None, *, include_top: bool = True, tensor_data: bool = False
) -> completion_pb2.Completion:
    """A completion with the message that the agent was shown.

    `include_top`: with the rows of alternatives. `tensor_data`: with the rows of tensors.
    """
    result = completion_pb2.Completion(
        engine=completion.engine,
        engine_version=completion.engine_version,
        model=completion.model,
    )
    if completion.finish_reason is not None:
        result.finish_reason = _FINISH[completion.finish_reason]
    if completion.tokens is not None:
        result.span.CopyFrom(span_to(completion.tokens, include_top=include_top))
        result.tensors.extend(token_tensors.write(one, with_data=tensor_data) for one in completion.tokens.tensors)
    if message is not None:
        result.message.CopyFrom(message_to(message))
    if completion.stop_token_id is not None:
        result.stop_token_id = completion.stop_token_id
    elif completion.stop_text is not None:
        result.stop_text = completion.stop_text
    if completion.sampling_used is not None:
        result.sampling_used.CopyFrom(sampling_to(completion.sampling_used))
    if completion.timings is not None:
        result.timings.CopyFrom(_timings_to(completion.timings))
    if completion.usage is not None:
        result.usage.CopyFrom(_usage_to(completion.usage))
    return result


def completion_from(message: completion_pb2.Completion) -> Completion:
    """Converts a completion. Raises InvalidArgument COMPLETION_INVALID if its bytes do not match their count."""
    tensors = _tensors_from(message) if message.tensors else ()
    stop = message.WhichOneof("matched_stop")
    return Completion(
        tokens=_span_from(message.span, tensors) if message.HasField("span") else None,
        message=message_from(message.message) if message.HasField("message") else None,
        finish_reason=_FINISH_BACK.get(message.finish_reason),
        stop_token_id=message.stop_token_id if stop == "stop_token_id" else None,
        stop_text=message.stop_text if stop == "stop_text" else None,
        sampling_used=sampling_from(message.sampling_used) if message.HasField("sampling_used") else None,
        engine=message.engine,
        engine_version=message.engine_version,
        model=message.model,
        timings=_timings_from(message.timings) if message.HasField("timings") else None,
        usage=_usage_from(message.usage) if message.HasField("usage") else None,
    )


def span_to(tokens: Tokens, *, include_top: bool) -> completion_pb2.TokenSpan:
    """Sampled tokens as little-endian bytes."""
    span = completion_pb2.TokenSpan(
        token_ids=ids_to(tokens.ids),
        count=int(tokens.ids.size),
        logprobs=little_endian(tokens.logprobs) if tokens.logprobs is not None else b"",
        logprobs_mode=mode_to(tokens.logprobs_mode),
        versions=versions_to(tokens.versions),
    )
    if tokens.top is not None:
        span.top_count, span.top_sha256 = tokens.top.count, tokens.top.sha256
        if include_top:
            span.top_token_ids, span.top_logprobs = ids_to(tokens.top.token_ids), little_endian(tokens.top.logprobs)
    return span


def versions_to(versions: Iterable[VersionSpan]) -> list[completion_pb2.PolicyVersionSpan]:
    """Policy version spans."""
    return [*map(_version_to, versions)]


def mode_to(mode: LogprobsMode | None) -> completion_pb2.LogprobsMode.ValueType:
    """Unset is UNSPECIFIED."""
    return _MODES[mode] if mode is not None else completion_pb2.LOGPROBS_MODE_UNSPECIFIED


def ids_to(ids: IntArray) -> bytes:
    """An int32 array as little-endian bytes."""
    return little_endian(ids)


def texts(values: Sequence[str]) -> tuple[str, ...]:
    """A repeated string field."""
    return tuple(values)


def _tensors_from(message: completion_pb2.Completion) -> tuple[TokenTensor, ...]:
    """The tensors of a completion, with digests."""
    found = [
        Violation(f"completion.tensors{field}", problem)
        for field, problem in token_tensors.problems_of(message.tensors)
    ]
    if not message.HasField("span"):
        found.append(Violation("completion.tensors", "tensors of tokens without tokens"))
    if found:
        raise InvalidArgument("The completion's tensors are malformed.", reason="COMPLETION_INVALID", violations=found)
    return tuple(one.digested() for one in token_tensors.merged(map(token_tensors.read, message.tensors)))


def _span_from(span: completion_pb2.TokenSpan, tensors: tuple[TokenTensor, ...]) -> Tokens:
    found = []
    if len(span.token_ids) != 4 * span.count:
        found.append(Violation("completion.span.token_ids", f"{len(span.token_ids)} bytes for {span.count} int32"))
    if span.logprobs and len(span.logprobs) != 4 * span.count:
        found.append(Violation("completion.span.logprobs", f"{len(span.logprobs)} bytes for {span.count} float32"))
    top = _top_from(span, found) if span.top_count or span.top_token_ids or span.top_logprobs else None
    if found:
        raise InvalidArgument("The completion's arrays are malformed.", reason="COMPLETION_INVALID", violations=found)
    return Tokens(
        np.frombuffer(span.token_ids, dtype="<i4").astype(np.int32, copy=False),
        np.frombuffer(span.logprobs, dtype="<f4").astype(np.float32, copy=False) if span.logprobs else None,
        _MODES_BACK.get(span.logprobs_mode),
        tuple(map(_version_from, span.versions)),
        top,
        tensors,
    )


def _top_from(span: completion_pb2.TokenSpan, found: list[Violation]) -> TopLogprobs | None:
    """Reads the rows of alternatives; adds to `found` what breaks their shape."""
    count, size = span.top_count, 4 * span.count * span.top_count
    if not 0 < count <= MAX_TOP:
        found.append(Violation("completion.span.top_count", f"1 to {MAX_TOP} with alternatives, not {count}"))
        return None
    for name, data in (("top_token_ids", span.top_token_ids), ("top_logprobs", span.top_logprobs)):
        if len(data) != size:
            what = f"{len(data)} bytes for {span.count} tokens with {count} alternatives of 4 bytes"
            found.append(Violation(f"completion.span.{name}", what))
    if found:
        return None
    return TopLogprobs(
        np.frombuffer(span.top_token_ids, dtype="<i4").astype(np.int32, copy=False).reshape(-1, count),
        np.frombuffer(span.top_logprobs, dtype="<f4").astype(np.float32, copy=False).reshape(-1, count),
    )


def _part_to(part: Part, image_data: bool) -> chat_pb2.Part:
    match part:
        case TextPart(text):
            return chat_pb2.Part(text=chat_pb2.Text(text=text))
        case ReasoningPart(text, signature):
            return chat_pb2.Part(reasoning=chat_pb2.Reasoning(text=text, signature=signature))
        case ImagePart():
            return chat_pb2.Part(image=_image_to(part, image_data))
        case ToolCallPart(call_id, name, arguments):
            return chat_pb2.Part(tool_call=chat_pb2.ToolCall(id=call_id, name=name, arguments_json=arguments))
        case ToolResultPart():
            inner = [chat_pb2.Part(text=chat_pb2.Text(text=part.text))] if part.text else []
            inner += [chat_pb2.Part(image=_image_to(image, image_data)) for image in part.images]
            return chat_pb2.Part(
                tool_result=chat_pb2.ToolResult(tool_call_id=part.call_id, parts=inner, is_error=part.is_error)
            )


def _image_to(image: ImagePart, with_data: bool) -> chat_pb2.Image:
    if image.data and with_data:
        return chat_pb2.Image(media_type=image.media_type, data=image.data)
    return chat_pb2.Image(media_type=image.media_type, url=image.ref)


def _image_from(image: chat_pb2.Image) -> ImagePart:
    if image.WhichOneof("source") == "data":
        return ImagePart.inline(image.data, image.media_type)
    return ImagePart(image.url, image.media_type)


def _part_from(part: chat_pb2.Part) -> Part:
    match part.WhichOneof("part"):
        case "text":
            return TextPart(part.text.text)
        case "reasoning":
            return ReasoningPart(part.reasoning.text, part.reasoning.signature)
        case "image":
            return _image_from(part.image)
        case "tool_call":
            return ToolCallPart(part.tool_call.id, part.tool_call.name, part.tool_call.arguments_json)
        case "tool_result":
            result = part.tool_result
            text = "".join(item.text.text for item in result.parts if item.HasField("text"))
            images = tuple(_image_from(item.image) for item in result.parts if item.HasField("image"))
            return ToolResultPart(result.tool_call_id, text, result.is_error, None, images)
    raise invalid_field("message.parts", "a part is empty")
