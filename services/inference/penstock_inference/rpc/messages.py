"""Converts conversations between protos and the codec's plain data."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from penstock.chat.v1 import chat_pb2
from penstock.values import numbers
from penstock_chassis.errors import InvalidArgument
from penstock_chassis.validation import invalid_field
from penstock_codec.chat import (
    FinishReason,
    ImagePart,
    Message,
    Part,
    ReasoningPart,
    Role,
    TextPart,
    Tool,
    ToolCallPart,
    ToolResultPart,
)

_ROLES: dict[int, Role] = {number: role for role, number in numbers(Role, chat_pb2.Role).items()}
_FINISH_REASONS = numbers(FinishReason, chat_pb2.FinishReason)


def messages_from(messages: Iterable[chat_pb2.Message]) -> list[Message]:
    """Raises InvalidArgument for a role or a part that is not set."""
    result = []
    for n, message in enumerate(messages):
        where = f"messages[{n}]"
        if message.role not in _ROLES:
            raise _unset(f"{where}.role")
        parts = tuple(_part_from(part, f"{where}.parts[{k}]") for k, part in enumerate(message.parts))
        result.append(Message(_ROLES[message.role], parts, message.name))
    return result


def tools_from(tools: Iterable[chat_pb2.Tool]) -> list[Tool]:
    """Tool definitions as the agent sent them."""
    return [
        Tool(tool.name, tool.description, tool.parameters_json_schema, tool.strict if tool.HasField("strict") else None)
        for tool in tools
    ]


def assistant_message(message: Message) -> chat_pb2.Message:
    """The model's message: text, reasoning and tool calls."""
    parts = []
    for part in message.parts:
        if isinstance(part, TextPart):
            parts.append(chat_pb2.Part(text=chat_pb2.Text(text=part.text)))
        elif isinstance(part, ReasoningPart):
            parts.append(chat_pb2.Part(reasoning=chat_pb2.Reasoning(text=part.text, signature=part.signature)))
        elif isinstance(part, ToolCallPart):
            call = chat_pb2.ToolCall(id=part.id, name=part.name, arguments_json=part.arguments_json)
            parts.append(chat_pb2.Part(tool_call=call))
    return chat_pb2.Message(role=chat_pb2.ROLE_ASSISTANT, parts=parts)


def finish_reason(reason: FinishReason) -> chat_pb2.FinishReason.ValueType:
    return _FINISH_REASONS[reason]


def _part_from(part: chat_pb2.Part, where: str) -> Part:
    kind = part.WhichOneof("part")
    if kind == "text":
        return TextPart(part.text.text)
    if kind == "reasoning":
        return ReasoningPart(part.reasoning.text, part.reasoning.signature)
    if kind == "image":
        return _image_from(part.image)
    if kind == "tool_call":
        return ToolCallPart(part.tool_call.id, part.tool_call.name, part.tool_call.arguments_json)
    if kind == "tool_result":
        result = part.tool_result
        text = "".join(inner.text.text for inner in result.parts if inner.HasField("text"))
        images = tuple(_image_from(inner.image) for inner in result.parts if inner.HasField("image"))
        return ToolResultPart(result.tool_call_id, text, result.is_error, None, images)
    raise _unset(where)


def _image_from(image: chat_pb2.Image) -> ImagePart:
    if image.WhichOneof("source") == "data":
        return ImagePart.inline(image.data, image.media_type)
    return ImagePart(image.url, image.media_type)


def _unset(field: str) -> InvalidArgument:
    return invalid_field(field, "is not set")


def template_options(thinking: bool | None, options_json: str) -> dict[str, Any]:
    """Variables for the chat template. Raises InvalidArgument if they are not a JSON object."""
    try:
        options = json.loads(options_json) if options_json else {}
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise invalid_field("template_options_json", "must be a JSON object")
    return options if thinking is None else {**options, "enable_thinking": thinking}
