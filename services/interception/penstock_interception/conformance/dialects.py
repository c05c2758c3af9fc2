"""A conversation's round trip through a client: one function per dialect.

Each converts the messages that a client means into the messages that the service reads from that dialect's wire. To put
a dialect under the suite, add its function to DIALECTS.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from penstock_codec.chat import Message, Part, ReasoningPart, Role, TextPart, ToolCallPart, ToolResultPart
from penstock_interception.ingress.dialects.base import Ask, Route
from penstock_interception.ingress.dialects.chat.dialect import ChatCompletions
from penstock_interception.ingress.dialects.generate_content.dialect import GenerateContent
from penstock_interception.ingress.dialects.messages.body import signature_of
from penstock_interception.ingress.dialects.messages.dialect import Messages
from penstock_interception.ingress.dialects.responses.dialect import Responses

Dialect: TypeAlias = Callable[[Sequence[Message]], Sequence[Message]]


def over_chat_completions(messages: Sequence[Message]) -> Sequence[Message]:
    """Writes the conversation as an OpenAI SDK does, and parses it as the ingress does."""
    written: list[dict[str, Any]] = []
    for message in messages:
        item: dict[str, Any] = {"role": message.role.value, "content": message.text}
        if message.tool_calls:
            item["content"] = message.text or None
            item["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
                for call in message.tool_calls
            ]
        if message.reasoning:
            item["reasoning_content"] = message.reasoning
        for result in message.tool_results:
            item["tool_call_id"] = result.call_id
        written.append(item)
    body = json.dumps({"model": "m", "messages": written}).encode()
    return ChatCompletions().parse(body, Route(Ask.COMPLETION)).messages


def over_messages(messages: Sequence[Message]) -> Sequence[Message]:
    """Writes the conversation as an Anthropic SDK does, and parses it as the ingress does."""
    written: list[dict[str, Any]] = []
    for message in messages:
        role = "user" if message.role is Role.TOOL else message.role.value
        written.append({"role": role, "content": [_block(part) for part in message.parts]})
    body: dict[str, Any] = {"model": "m", "max_tokens": 100, "messages": written}
    if messages[0].role is Role.SYSTEM:
        body["system"] = written.pop(0)["content"]
    return Messages().parse(json.dumps(body).encode(), Route(Ask.COMPLETION)).messages


def _block(part: Part) -> dict[str, Any]:
    match part:
        case ReasoningPart():
            return {"type": "thinking", "thinking": part.text, "signature": signature_of(part.text)}
        case ToolCallPart():
            return {"type": "tool_use", "id": part.id, "name": part.name, "input": json.loads(part.arguments_json)}
        case ToolResultPart():
            return {"type": "tool_result", "tool_use_id": part.call_id, "content": part.text}
        case TextPart():
            return {"type": "text", "text": part.text}
    raise ValueError(part)


def over_responses(messages: Sequence[Message]) -> Sequence[Message]:
    """Writes the conversation as a response's input items, as an OpenAI SDK does, and parses it as the ingress does."""
    written: list[dict[str, Any]] = []
    for message in messages:
        if message.reasoning:
            thought = {"type": "reasoning_text", "text": message.reasoning}
            written.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": [thought]})
        written += [
            {"type": "function_call_output", "call_id": result.call_id, "output": result.text}
            for result in message.tool_results
        ]
        if message.text and not message.tool_results:
            kind = "output_text" if message.role is Role.ASSISTANT else "input_text"
            content = [{"type": kind, "text": message.text}]
            written.append({"type": "message", "role": message.role.value, "content": content})
        written += [
            {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments_json}
            for call in message.tool_calls
        ]
    body = json.dumps({"model": "m", "input": written}).encode()
    return Responses().parse(body, Route(Ask.COMPLETION)).messages


def over_generate_content(messages: Sequence[Message]) -> Sequence[Message]:
    """Writes the conversation as google-genai does, and parses it as the ingress does."""
    # Instructions are only allowed at the head: later ones are sent as the user's.
    head = next((index for index, message in enumerate(messages) if message.role is not Role.SYSTEM), len(messages))
    system = [{"text": message.text} for message in messages[:head]]
    contents: list[dict[str, Any]] = []
    for message in messages[head:]:
        parts: list[dict[str, Any]] = []
        for part in message.parts:
            match part:
                case TextPart():
                    parts.append({"text": part.text})
                case ReasoningPart():
                    parts.append({"text": part.text, "thought": True, "thoughtSignature": "c2lnbmF0dXJl"})
                case ToolCallPart():
                    call = {"id": part.id, "name": part.name, "args": json.loads(part.arguments_json)}
                    parts.append({"functionCall": call})
        for result in message.tool_results:
            response = {"id": result.call_id, "name": "bash", "response": {"output": result.text}}
            parts.append({"functionResponse": response})
        contents.append({"role": "model" if message.role is Role.ASSISTANT else "user", "parts": parts})
    body = {"contents": contents, **({"systemInstruction": {"parts": system}} if system else {})}
    return GenerateContent().parse(json.dumps(body).encode(), Route(Ask.COMPLETION, "m", False)).messages


DIALECTS: Final[Mapping[str, Dialect]] = {
    "domain": lambda messages: messages,
    "chat_completions": over_chat_completions,
    "messages": over_messages,
    "responses": over_responses,
    "generate_content": over_generate_content,
}
"""The dialects by name; "domain" uses no wire format."""
