"""Shows agents' requests and recorded answers to people: the messages of a body in any dialect of the gate.

A body may have any shape; parts that are not understood are shown as JSON, never dropped.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class MessagePart:
    """One part of a message. `kind` is text, reasoning, tool_call, tool_result, or other (JSON text)."""

    role: str
    kind: str
    text: str
    name: str = ""
    """Of the tool."""


def messages(body: object) -> tuple[MessagePart, ...]:
    """Returns all parts of a parsed request body, in order; nothing if it is no object."""
    if not isinstance(body, Mapping):
        return ()
    found: list[MessagePart] = []
    for key in ("system", "instructions", "systemInstruction", "system_instruction"):
        if body.get(key):
            found += _content("system", body[key])
    for key in ("messages", "input", "contents"):
        given = body.get(key)
        if isinstance(given, str):
            found.append(MessagePart("user", "text", given))
        elif isinstance(given, Sequence):
            for item in given:
                found += _message(item)
    return tuple(found)


def news(body: object, former: object) -> tuple[int, tuple[MessagePart, ...]]:
    """Compares a body with an earlier one: returns how many parts at its beginning are equal, and the rest."""
    now, before = messages(body), messages(former)
    same = 0
    while same < min(len(now), len(before)) and now[same] == before[same]:
        same += 1
    return same, now[same:]


def answered(message: object) -> tuple[MessagePart, ...]:
    """Returns all parts of a recorded answer (`response_message` of docs/exports.md), in order."""
    parts = message.get("parts") if isinstance(message, Mapping) else None
    if isinstance(parts, Sequence) and not isinstance(parts, str):
        return tuple(_answered(part) for part in parts)
    return () if message is None else tuple(_message(message))


def _answered(part: object) -> MessagePart:
    kind = part.get("kind") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind == "toolcall":
        return MessagePart("assistant", "tool_call", _text(part.get("arguments_json", "")), str(part.get("name", "")))
    if isinstance(part, Mapping) and kind in ("text", "reasoning"):
        return MessagePart("assistant", kind, _text(part.get("text", "")))
    return _part("assistant", part) if isinstance(part, Mapping) else MessagePart("assistant", "other", _text(part))


def _message(item: object) -> Iterator[MessagePart]:
    if not isinstance(item, Mapping):
        yield MessagePart("", "other", _text(item))
        return
    role = str(item.get("role", ""))
    kind = item.get("type")
    if kind == "function_call":  # an item of Responses
        yield MessagePart("assistant", "tool_call", _text(item.get("arguments", "")), str(item.get("name", "")))
    elif kind == "function_call_output":
        yield MessagePart("tool", "tool_result", _text(_joined(item.get("output", ""))))
    elif kind == "reasoning":
        yield MessagePart("assistant", "reasoning", _text(_joined(item.get("summary") or item.get("content") or "")))
    elif role == "tool":
        yield MessagePart(role, "tool_result", _text(_joined(item.get("content", ""))), str(item.get("name", "")))
    else:
        thought = item.get("reasoning_content") or item.get("reasoning")
        if thought:
            yield MessagePart(role, "reasoning", _text(thought))
        yield from _content(role, item.get("content", item.get("parts", "")))
        calls = item.get("tool_calls")
        for call in calls if isinstance(calls, Sequence) and not isinstance(calls, str) else ():
            asked = call.get("function", call) if isinstance(call, Mapping) else call
            if isinstance(asked, Mapping):
                yield MessagePart(role, "tool_call", _text(asked.get("arguments", "")), str(asked.get("name", "")))
            else:
                yield MessagePart(role, "other", _text(call))


def _content(role: str, content: object) -> Iterator[MessagePart]:
    """A text, a part, or a list of parts."""
    if isinstance(content, str):
        if content:
            yield MessagePart(role, "text", content)
    elif isinstance(content, Mapping) and isinstance(content.get("parts"), Sequence):
        yield from _content(role, content["parts"])
    elif isinstance(content, Mapping):
        yield _part(role, content)
    elif isinstance(content, Sequence):
        for part in content:
            yield from _content(role, part)
    elif content is not None:
        yield MessagePart(role, "other", _text(content))


def _part(role: str, part: Mapping[str, Any]) -> MessagePart:
    kind = part.get("type")
    if kind == "tool_use":
        return MessagePart(role, "tool_call", _text(part.get("input", "")), str(part.get("name", "")))
    if kind == "tool_result":
        return MessagePart("tool", "tool_result", _text(_joined(part.get("content", ""))))
    if kind == "thinking":
        return MessagePart(role, "reasoning", _text(part.get("thinking", "")))
    for key, what in (("functionCall", "tool_call"), ("functionResponse", "tool_result")):
        called = part.get(key)
        if isinstance(called, Mapping):
            value = called.get("args" if what == "tool_call" else "response", "")
            return MessagePart(
                "tool" if what == "tool_result" else role, what, _text(value), str(called.get("name", ""))
            )
    if isinstance(part.get("text"), str):
        return MessagePart(role, "reasoning" if part.get("thought") is True else "text", part["text"])
    return MessagePart(role, "other", _text(part))


def _joined(content: object) -> object:
    """Returns the text of parts, if all of them are text."""
    if isinstance(content, Sequence) and not isinstance(content, str):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if texts and all(isinstance(text, str) for text in texts):
            return "\n".join(str(text) for text in texts)
    return content


def _text(value: object) -> str:
    return value if isinstance(value, str) else orjson.dumps(value, default=str).decode()


def counted(number: int, noun: str) -> str:
    """`1 call`, `2 calls`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
