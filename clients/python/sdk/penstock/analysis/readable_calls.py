"""Shows agents' requests and recorded answers to people: the messages of a body in any dialect of the gate.

A body may have any shape; parts that are not understood are shown as JSON, never dropped.
"""

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import orjson

_SEAL: Final = "penstock.1."


@dataclass(frozen=True, slots=True)
class MessagePart:
    """One part of a message. `kind` is text, reasoning, tool_call, tool_result, or other (JSON text)."""

    role: str
    kind: str
    text: str
    name: str = ""
    """Of the tool."""
    tool_call_id: str = field(default="", compare=False)
    """Of a call, or of the call that a result answers; empty where the dialect has none."""
    place: int = field(default=0, compare=False)
    """Number of its message, or item, among those of the body."""


def messages(body: object) -> tuple[MessagePart, ...]:
    """Returns all parts of a parsed request body, in order; nothing if it is no object."""
    if not isinstance(body, Mapping):
        return ()
    keys = ("system", "instructions", "systemInstruction", "system_instruction")
    items: list[Iterable[MessagePart]] = [_content("system", body[key]) for key in keys if body.get(key)]
    for key in ("messages", "input", "contents"):
        given = body.get(key)
        if isinstance(given, str):
            items.append([MessagePart("user", "text", given)])
        elif isinstance(given, Sequence):
            items += (_message(item, is_content=key == "contents") for item in given)
    return tuple(replace(part, place=place) for place, item in enumerate(items) for part in item)


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
        return MessagePart(
            "assistant", "tool_call", _text(part.get("arguments_json", "")), str(part.get("name", "")), _id(part, "id")
        )
    if isinstance(part, Mapping) and kind in ("text", "reasoning"):
        return MessagePart("assistant", kind, _text(part.get("text", "")))
    return _part("assistant", part) if isinstance(part, Mapping) else MessagePart("assistant", "other", _text(part))


def _message(item: object, *, is_content: bool = False) -> Iterator[MessagePart]:
    """Yields the parts of a message or item; `is_content`: it is a content of generateContent."""
    if not isinstance(item, Mapping):
        yield MessagePart("", "other", _text(item))
        return
    role = str(item.get("role") or "")
    if is_content and role in ("", "function"):
        role = "user"  # as the gate reads them
    kind = str(item.get("type", ""))
    if kind.endswith("_call"):
        yield _called(kind, item)
    elif kind.endswith("_call_output"):
        yield from _result(_output(kind, item), "", _id(item, "call_id"))
    elif kind == "reasoning":
        thought = item.get("content") or _unsealed(item.get("encrypted_content")) or item.get("summary") or ""
        yield MessagePart("assistant", "reasoning", _text(_joined(thought)))
    elif role == "tool":
        yield from _result(item.get("content", ""), str(item.get("name", "")), _id(item, "tool_call_id"))
    else:
        thought = item.get("reasoning_content") or item.get("reasoning") or item.get("reasoning_text")
        if thought:
            yield MessagePart(role, "reasoning", _text(thought))
        yield from _content(role, item.get("content", item.get("parts", "")))
        calls = item.get("tool_calls")
        for call in calls if isinstance(calls, Sequence) and not isinstance(calls, str) else ():
            asked = call.get("function", call) if isinstance(call, Mapping) else call
            if isinstance(asked, Mapping):
                name = str(asked.get("name", ""))
                yield MessagePart(role, "tool_call", _text(asked.get("arguments", "")), name, _id(call, "id"))
            else:
                yield MessagePart(role, "other", _text(call))


def _called(kind: str, item: Mapping[str, Any]) -> MessagePart:
    """Reads a call's item of Responses as the model wrote the call, which is how the gate reads it: free text is the
    argument `input`, and what a shell or a patch needs has no constants and nothing empty."""
    asked: object = item.get("arguments", "")
    if kind == "custom_tool_call":
        text = item.get("input", "")
        asked = text if _id(item, "id").startswith("ctx_") else {"input": text}
    elif "arguments" not in item:
        found = item.get("action") or item.get("operation") or {}
        is_exec = isinstance(found, Mapping) and found.get("type") == "exec"
        asked = found
        if isinstance(found, Mapping):
            kept = {key: value for key, value in found.items() if value is not None and value != {}}
            asked = {key: value for key, value in kept.items() if not (is_exec and key == "type")}
    name, space = str(item.get("name") or kind.removesuffix("_call")), _id(item, "namespace")
    if space:
        name = f"{space.removesuffix('__')}__{name}"
    return MessagePart("assistant", "tool_call", _text(asked), name, _id(item, "call_id"))


def _output(kind: str, item: Mapping[str, Any]) -> object:
    """Returns what a call's item of Responses gave, as the gate reads it: a shell's outputs are JSON, and a patch
    without an output has its status."""
    output = item.get("output")
    if kind == "apply_patch_call_output":
        return output or item.get("status", "completed")
    return _text(output) if kind == "shell_call_output" and output is not None else output


def _unsealed(text: object) -> str:
    """Returns reasoning that the gate handed to an agent as `encrypted_content`; a provider's own is not readable."""
    if not isinstance(text, str) or not text.startswith(_SEAL):
        return ""
    try:
        return base64.b64decode(text.removeprefix(_SEAL), b"-_", validate=True).decode("utf-8", "replace")
    except ValueError:
        return ""


def _content(role: str, content: object) -> Iterator[MessagePart]:
    """A text, a part, or a list of parts."""
    if isinstance(content, str):
        if content:
            yield MessagePart(role, "text", content)
    elif isinstance(content, Mapping) and isinstance(content.get("parts"), Sequence):
        yield from _content(role, content["parts"])
    elif isinstance(content, Mapping) and content.get("type") == "tool_result":
        yield from _result(content.get("content", ""), "", _id(content, "tool_use_id"))
    elif isinstance(content, Mapping):
        yield _part(role, content)
        response = _either(content, "functionResponse", "function_response")
        parts = response.get("parts") if isinstance(response, Mapping) else None
        for part in parts if isinstance(parts, Sequence) and not isinstance(parts, str) else ():
            yield MessagePart("tool", "other", _text(part))  # images, beside the response's object
    elif isinstance(content, Sequence):
        for part in content:
            yield from _content(role, part)
    elif content is not None:
        yield MessagePart(role, "other", _text(content))


def _part(role: str, part: Mapping[str, Any]) -> MessagePart:
    kind = part.get("type")
    if kind == "tool_use":
        return MessagePart(role, "tool_call", _text(part.get("input", "")), str(part.get("name", "")), _id(part, "id"))
    if kind == "thinking":
        return MessagePart(role, "reasoning", _text(part.get("thinking", "")))
    for called, what in (
        (_either(part, "functionCall", "function_call"), "tool_call"),
        (_either(part, "functionResponse", "function_response"), "tool_result"),
    ):
        if isinstance(called, Mapping):
            value = called.get("args" if what == "tool_call" else "response")
            value = "" if value is None else value
            author = "tool" if what == "tool_result" else role
            if what == "tool_result" and isinstance(value, Mapping) and set(value) in ({"output"}, {"error"}):
                value = next(iter(value.values()))  # the keys that have a meaning, as the gate reads them
            return MessagePart(author, what, _text(value), str(called.get("name", "")), _id(called, "id"))
    if isinstance(part.get("text"), str):
        return MessagePart(role, "reasoning" if part.get("thought") is True else "text", part["text"])
    return MessagePart(role, "other", _text(part))


def _result(content: object, name: str, tool_call_id: str) -> Iterator[MessagePart]:
    """Yields a tool's result: its texts as one part, then what is no text, such as images. Without any it is empty."""
    if content is None or content == []:
        content = ""
    blocks = content if isinstance(content, Sequence) and not isinstance(content, str) else ()
    texts = [block for block in blocks if isinstance(block, Mapping) and isinstance(block.get("text"), str)]
    others = [block for block in blocks if isinstance(block, Mapping) and block not in texts]
    if not others or len(texts) + len(others) < len(blocks):  # texts alone, or no list of blocks
        yield MessagePart("tool", "tool_result", _text(_joined(content)), name, tool_call_id)
        return
    yield MessagePart("tool", "tool_result", _text(_joined(texts)) if texts else "", name, tool_call_id)
    for block in others:
        yield _part("tool", block)


def _either(part: Mapping[str, Any], name: str, other: str) -> object:
    """Returns a field of generateContent, whose clients write names in camelCase or in snake_case."""
    value = part.get(name)
    return part.get(other) if value is None else value


def _id(holder: Mapping[str, Any], key: str) -> str:
    value = holder.get(key)
    return value if isinstance(value, str) else ""


def _joined(content: object) -> object:
    """Returns the text of parts, if all of them are text."""
    if isinstance(content, Sequence) and not isinstance(content, str):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if texts and all(isinstance(text, str) for text in texts):
            return "".join(str(text) for text in texts)
    return content


def _text(value: object) -> str:
    return value if isinstance(value, str) else orjson.dumps(value, default=str).decode()


def counted(number: int, noun: str) -> str:
    """`1 call`, `2 calls`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
