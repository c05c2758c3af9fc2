"""Messages, tools and answers in the format of OpenAI's Chat Completions API, for clients of such an endpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import orjson

from penstock_codec.chat import (
    MOST_TOKENS,
    FinishReason,
    ImagePart,
    Message,
    ReasoningPart,
    Role,
    TextPart,
    Tool,
    ToolCallPart,
    ToolChoice,
    ToolChoiceMode,
    Usage,
)
from penstock_codec.parsers.grammar import new_call_id

_FINISH = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "tool_calls": FinishReason.TOOL_CALLS,
    "function_call": FinishReason.TOOL_CALLS,
    "content_filter": FinishReason.CONTENT_FILTER,
}


def write_messages(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Converts a conversation; a message with several tool results becomes several."""
    return [item for message in messages for item in _written(message)]


def write_tool(tool: Tool) -> dict[str, Any]:
    """Converts a tool, its schema unchanged. To be serialised by orjson."""
    function: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": orjson.Fragment(tool.parameters_json_schema),
    }
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def write_tool_choice(choice: ToolChoice) -> Any:
    if choice.mode is ToolChoiceMode.NAMED:
        return {"type": "function", "function": {"name": choice.name}}
    return choice.mode.value


def read_message(value: Mapping[str, Any]) -> Message:
    """Reads an endpoint's assistant message. Raises KeyError, TypeError or similar for an invalid one.

    A call without arguments has the empty object, and one without an id gets one: agents refer to calls by their ids.
    """
    parts: list[TextPart | ReasoningPart | ToolCallPart] = []
    reasoning = value.get("reasoning_content") or value.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        parts.append(ReasoningPart(reasoning))
    parts += _read_content(value.get("content"))
    for call in value.get("tool_calls") or ():
        function = call["function"]
        arguments, given = function.get("arguments"), call.get("id")
        call_id = given if isinstance(given, str) and given else new_call_id()
        parts.append(ToolCallPart(call_id, str(function["name"]), str(arguments or "{}")))
    return Message(Role.ASSISTANT, tuple(parts))


def _read_content(content: Any) -> Iterator[TextPart | ReasoningPart]:
    """Reads a text, or a list of texts and thinking as Mistral's API gives it. Raises TypeError for anything else.

    What nobody can show must not pass for an empty answer.
    """
    if content is None:
        return
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else _listed(content):
        kind = part.get("type")
        if kind == "text" and isinstance(text := part.get("text"), str):
            if text:
                yield TextPart(text)
        elif kind == "thinking":
            thought = part.get("thinking")
            shown = thought if isinstance(thought, str) else "".join([item["text"] for item in _listed(thought)])
            if shown:
                yield ReasoningPart(shown)
        else:
            raise TypeError("a part of the content is neither text nor thinking")


def _listed(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise TypeError("neither a text nor a list of parts")
    return value


def read_finish_reason(value: Any) -> FinishReason:
    """Reads a finish reason; an unknown one counts as the model's own end."""
    return _FINISH.get(value or "stop", FinishReason.STOP)


def read_usage(value: Any) -> Usage:
    """Reads token counts, 0 where missing. Raises TypeError, ValueError or similar for invalid ones.

    A count is at least 0 and at most `MOST_TOKENS`: budgets add them up, and a negative one would give tokens back.
    """
    reported = value or {}
    usage = Usage(int(reported.get("prompt_tokens", 0)), int(reported.get("completion_tokens", 0)))
    if not (0 <= usage.prompt_tokens <= MOST_TOKENS and 0 <= usage.completion_tokens <= MOST_TOKENS):
        raise ValueError("a token count is out of range")
    return usage


def _written(message: Message) -> Iterator[dict[str, Any]]:
    for result in message.tool_results:
        shown = [TextPart(result.text)] if result.text or not result.images else []
        yield {"role": "tool", "tool_call_id": result.call_id, "content": _content([*shown, *result.images])}
    visible = [part for part in message.parts if isinstance(part, TextPart | ImagePart)]
    if message.role is Role.TOOL and not visible:
        return
    role = Role.USER if message.role is Role.TOOL else message.role
    item: dict[str, Any] = {"role": role.value, "content": _content(visible)}
    if message.name:
        item["name"] = message.name
    if message.role is Role.ASSISTANT:
        if message.reasoning:
            item["reasoning_content"] = message.reasoning
        if message.tool_calls:
            item["content"] = item["content"] or None
            item["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
                for call in message.tool_calls
            ]
    yield item


def _content(parts: Sequence[TextPart | ImagePart]) -> str | list[dict[str, Any]]:
    """Returns a plain string where there is only one text, since not every server accepts a list."""
    if not any(isinstance(part, ImagePart) for part in parts):
        return "".join(part.text for part in parts if isinstance(part, TextPart))
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, TextPart)
        else {"type": "image_url", "image_url": {"url": part.url}}
        for part in parts
    ]
