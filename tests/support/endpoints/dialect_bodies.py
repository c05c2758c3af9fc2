"""One conversation as the request body of each dialect. It begins with a system message; its tools take a command."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from penstock_codec.chat import Message, Role, TextPart
from penstock_interception.ingress.dialects.base import DialectCodec
from penstock_interception.ingress.dialects.chat.dialect import ChatCompletions
from penstock_interception.ingress.dialects.generate_content.dialect import GenerateContent
from penstock_interception.ingress.dialects.messages.dialect import Messages
from penstock_interception.ingress.dialects.responses.dialect import Responses

SCHEMA: Final = {"type": "object", "properties": {"command": {"type": "string"}}}


def _chat(said: Sequence[Message], tools: Sequence[str]) -> dict[str, Any]:
    written = []
    for message in said:
        item: dict[str, Any] = {"role": message.role.value, "content": message.text}
        if message.tool_calls:
            item["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
                for call in message.tool_calls
            ]
        if message.tool_results:
            item["tool_call_id"] = message.tool_results[0].call_id
        written.append(item)
    named = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in tools]
    return {"messages": written, "tools": named}


def _messages(said: Sequence[Message], tools: Sequence[str]) -> dict[str, Any]:
    written = []
    for message in said[1:]:
        blocks: list[dict[str, Any]] = [
            {"type": "text", "text": part.text} for part in message.parts if type(part) is TextPart
        ]
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments_json)}
            for call in message.tool_calls
        ]
        blocks += [
            {"type": "tool_result", "tool_use_id": result.call_id, "content": result.text}
            for result in message.tool_results
        ]
        written.append({"role": "assistant" if message.role is Role.ASSISTANT else "user", "content": blocks})
    named = [{"name": name, "input_schema": SCHEMA} for name in tools]
    return {"model": "m", "max_tokens": 9, "system": said[0].text, "messages": written, "tools": named}


def _responses(said: Sequence[Message], tools: Sequence[str]) -> dict[str, Any]:
    written: list[dict[str, Any]] = []
    for message in said[1:]:
        if message.tool_results:
            result = message.tool_results[0]
            written.append({"type": "function_call_output", "call_id": result.call_id, "output": result.text})
            continue
        written.append({"type": "message", "role": message.role.value, "content": message.text})
        written += [
            {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments_json}
            for call in message.tool_calls
        ]
    named = [{"type": "function", "name": name, "parameters": SCHEMA} for name in tools]
    return {"instructions": said[0].text, "input": written, "tools": named}


def _generate_content(said: Sequence[Message], tools: Sequence[str]) -> dict[str, Any]:
    written = []
    for message in said[1:]:
        parts: list[dict[str, Any]] = [{"text": part.text} for part in message.parts if type(part) is TextPart]
        parts += [
            {"functionCall": {"id": call.id, "name": call.name, "args": json.loads(call.arguments_json)}}
            for call in message.tool_calls
        ]
        parts += [
            {"functionResponse": {"id": result.call_id, "name": "bash", "response": {"output": result.text}}}
            for result in message.tool_results
        ]
        written.append({"role": "model" if message.role is Role.ASSISTANT else "user", "parts": parts})
    named = [{"functionDeclarations": [{"name": name, "parameters": SCHEMA} for name in tools]}]
    return {"systemInstruction": {"parts": [{"text": said[0].text}]}, "contents": written, "tools": named}


DIALECTS: Final[dict[DialectCodec, Callable[[Sequence[Message], Sequence[str]], dict[str, Any]]]] = {
    ChatCompletions(): _chat,
    Messages(): _messages,
    Responses(): _responses,
    GenerateContent(): _generate_content,
}
