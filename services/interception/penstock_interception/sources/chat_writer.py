"""A request of any dialect as a body of OpenAI Chat Completions, for upstreams that speak nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from penstock_codec.chat import ImagePart, Message, Role, TextPart, Tool, ToolChoice, ToolChoiceMode
from penstock_interception.requests import ChatRequest

_SAMPLING = ("temperature", "top_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty")


def chat_body(request: ChatRequest) -> dict[str, Any]:
    """The body, without a model and without streaming."""
    body: dict[str, Any] = {"messages": [item for message in request.messages for item in _messages(message)]}
    sampling = request.sampling
    body |= {name: value for name in _SAMPLING if (value := getattr(sampling, name)) is not None}
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.response_format is not None:
        body["response_format"] = orjson.loads(sampling.response_format)
    if request.tools:
        body["tools"] = [_tool(tool) for tool in request.tools]
        body["tool_choice"] = _choice(request.tool_choice)
        if request.tool_choice.parallel_tool_calls is not None:
            body["parallel_tool_calls"] = request.tool_choice.parallel_tool_calls
    return body


def _messages(message: Message) -> Iterator[dict[str, Any]]:
    for result in message.tool_results:
        shown = [TextPart(result.text)] if result.text or not result.images else []
        yield {"role": "tool", "tool_call_id": result.call_id, "content": _content([*shown, *result.images])}
    said = [part for part in message.parts if isinstance(part, TextPart | ImagePart)]
    if message.role is Role.TOOL and not said:
        return
    role = Role.USER if message.role is Role.TOOL else message.role
    item: dict[str, Any] = {"role": role.value, "content": _content(said)}
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
    """One text where there is nothing else, since not every server takes a list."""
    if not any(isinstance(part, ImagePart) for part in parts):
        return "".join(part.text for part in parts if isinstance(part, TextPart))
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, TextPart)
        else {"type": "image_url", "image_url": {"url": part.ref}}
        for part in parts
    ]


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": orjson.Fragment(tool.parameters_json_schema),
    }
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> Any:
    if choice.mode is ToolChoiceMode.NAMED:
        return {"type": "function", "function": {"name": choice.name}}
    return choice.mode.value
