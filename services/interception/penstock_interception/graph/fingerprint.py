"""Fingerprints of messages, so that a conversation that comes back is recognised without rendering it.

Two messages have the same key when they are the same turn of the conversation. For what the agent wrote that means the
same content. For what the model wrote it means the same visible text but for white space at its ends, and the same
calls with arguments equal as JSON values: clients re-serialise arguments, trim text and drop reasoning.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from penstock_codec.chat import ImagePart, Message, Role, TextPart, Tool, ToolCallPart, ToolResultPart
from penstock_codec.quick import quick
from penstock_interception.graph.model import PromptKey

SIZE = 16
KNOWN_REPLIES = 4096
# Rollouts of a group have the same tools: the keys of 128 sets are kept, longer sets are read anew.
KNOWN_TOOLS_CHARS = 256 << 10
_INLINE_THINKING = re.compile(r"^\s*<think>.*?</think>", re.DOTALL)
_SAFE_INTEGER = 2**53
_LENGTHS = [struct.Struct(f"<{count + 1}Q") for count in range(256)]


def digest(*parts: bytes) -> bytes:
    """A 16-byte digest of a list of byte strings, each delimited by its length."""
    count = len(parts)
    lengths = _LENGTHS[count] if count < len(_LENGTHS) else struct.Struct(f"<{count + 1}Q")
    return hashlib.blake2b(lengths.pack(count, *map(len, parts)) + b"".join(parts), digest_size=SIZE).digest()


_NO_KWARGS = digest(b"{}")


class Fingerprints:
    """Keys of messages, with those of the assistant's turns remembered: they come back with every call."""

    def __init__(self, *, with_call_ids: bool) -> None:
        """`with_call_ids` where the template shows tool-call ids, so that they matter."""
        self._with_call_ids = with_call_ids
        self._known: dict[bytes, bytes] = {}

    def key(self, message: Message) -> bytes:
        """The key of a message."""
        if message.role is not Role.ASSISTANT:
            return _context_key(message, self._with_call_ids)
        calls = message.tool_calls
        written = [message.text]
        for call in calls:
            written += (call.id, call.name, call.arguments_json)
        raw = digest(*map(_utf8, written))
        key = self._known.get(raw)
        if key is None:
            parts = [part for call in calls for part in _call_parts(call, self._with_call_ids)]
            key = digest(b"assistant", _utf8(visible_text(message)), *parts)
            if len(self._known) >= KNOWN_REPLIES:
                self._known.clear()
            self._known[raw] = key
        return key


@quick
@dataclass(frozen=True, slots=True, eq=False)
class Keyed:
    """A prompt's messages with the key of each, and the states: of the tools, and after each message.

    `plain`: no two replies follow each other, so that the states say nothing of what was committed.
    """

    messages: Sequence[Message] = ()
    keys: Sequence[bytes] = ()
    states: Sequence[bytes] = ()
    plain: bool = True


def visible_text(message: Message) -> str:
    """An assistant's visible text, trimmed, without reasoning that a client put back inline."""
    text = message.text
    return (_INLINE_THINKING.sub("", text, count=1) if "<think>" in text else text).strip()


def reasoning_text(message: Message) -> str:
    """An assistant's reasoning, trimmed, wherever the client put it."""
    if message.reasoning:
        return message.reasoning.strip()
    found = _INLINE_THINKING.match(message.text)
    return found.group().strip().removeprefix("<think>").removesuffix("</think>").strip() if found else ""


def prompt_key(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    template_kwargs: Mapping[str, Any],
    states: Sequence[bytes],
    keys: Sequence[bytes],
) -> PromptKey:
    """The fingerprints of a whole prompt; `states` begin with that of the tools, `keys` are one per message."""
    leading = 0
    while leading < len(messages) and messages[leading].role in (Role.SYSTEM, Role.DEVELOPER):
        leading += 1
    first_user = next((keys[i] for i in range(leading, len(messages)) if messages[i].role is Role.USER), b"")
    kwargs = _NO_KWARGS
    if template_kwargs:
        kwargs = digest(json.dumps(template_kwargs, sort_keys=True, default=repr).encode())
    return PromptKey(
        state=states[-1],
        bare=digest(*keys),
        tools=states[0],
        kwargs=kwargs,
        system=digest(*keys[:leading]),
        first_user=first_user,
        messages=len(messages),
        has_tools=bool(tools),
    )


def tools_key(tools: Sequence[Tool]) -> bytes:
    """The key of a tool list, in its order; schemas are compared as text, since that is what is rendered."""
    size = sum(len(tool.description) + len(tool.parameters_json_schema) for tool in tools)
    return _known_tools(tuple(tools)) if size <= KNOWN_TOOLS_CHARS else _all_tools(tools)


@lru_cache(maxsize=128)
def _known_tools(tools: tuple[Tool, ...]) -> bytes:
    return _all_tools(tools)


def _all_tools(tools: Sequence[Tool]) -> bytes:
    parts = (text for tool in tools for text in (tool.name, tool.description, tool.parameters_json_schema))
    return digest(*(_utf8(text) for text in parts))


def next_state(state: bytes, key: bytes) -> bytes:
    """The state of a conversation after one more message."""
    return hashlib.blake2b(state + key, digest_size=SIZE).digest()


def canonical_json(text: str) -> bytes:
    """Arguments as a value: key order, spacing, escapes and the ways to write a number do not matter.

    Numbers are compared as JavaScript holds them (doubles), because that is what most agents re-serialise with. Text
    that is no JSON stands for itself.
    """
    try:
        return _ENCODER.encode(_DECODER.decode(text)).encode()
    except (ValueError, RecursionError):
        return b"!" + _utf8(text)


def _number(text: str) -> int | float:
    try:
        value = float(text)
    except OverflowError:
        value = math.inf
    if math.isfinite(value) and value.is_integer() and abs(value) <= _SAFE_INTEGER:
        return int(value)
    return value


_DECODER = json.JSONDecoder(parse_int=_number, parse_float=_number)
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def _context_key(message: Message, with_call_ids: bool) -> bytes:
    parts = message.parts
    if len(parts) == 1:  # as below, for what most messages are
        only = parts[0]
        if type(only) is TextPart:
            return digest(_utf8(message.role.value), _utf8(message.name), _utf8(only.text))
        if type(only) is ToolResultPart and not only.images:
            call_id = _utf8(only.call_id) if with_call_ids else b""
            return digest(_utf8(message.role.value), _utf8(message.name), b"", b"result", call_id, _utf8(only.text))
    text: list[str] = []
    others: list[str] = []
    for part in parts:
        if isinstance(part, TextPart):
            text.append(part.text)
        elif isinstance(part, ImagePart):
            others.extend(("image", part.ref))
        elif isinstance(part, ToolResultPart):
            others.extend(("result", part.call_id if with_call_ids else "", part.text))
            others.extend(image.ref for image in part.images)
    return digest(*[_utf8(part) for part in (message.role.value, message.name, "".join(text), *others)])


def _call_parts(call: ToolCallPart, with_call_ids: bool) -> tuple[bytes, bytes, bytes]:
    # Clients write no arguments as `{}` or as nothing at all.
    arguments = canonical_json(call.arguments_json if call.arguments_json.strip() else "{}")
    return _utf8(call.id) if with_call_ids else b"", _utf8(call.name), arguments


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
