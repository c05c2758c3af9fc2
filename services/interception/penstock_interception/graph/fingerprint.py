"""Fingerprints of messages: they identify a repeated conversation without rendering it.

Two messages have the same key if they are the same turn of the conversation. For the agent's messages that means equal
content. For the model's it means equal visible text, outer white space aside, and equal calls with their arguments
compared as JSON values: clients re-serialise arguments, trim text and drop reasoning. Images are compared by their
digests and their places among the texts, in messages of both.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from penstock_codec.chat import ImagePart, Message, Role, TextPart, Tool, ToolCallPart, ToolResultPart
from penstock_interception import cache
from penstock_interception.cache import Fingerprinted
from penstock_interception.graph.inline import Room
from penstock_interception.graph.values import PromptKey

SIZE = 16
_INLINE_THINKING = re.compile(r"^\s*<think>.*?</think>", re.DOTALL)
_SAFE_INTEGER = 2**53
_LENGTHS = [struct.Struct(f"<{count + 1}Q") for count in range(256)]


def digest(*parts: bytes) -> bytes:
    """Returns a 16-byte digest of byte strings, each delimited by its length."""
    count = len(parts)
    lengths = _LENGTHS[count] if count < len(_LENGTHS) else struct.Struct(f"<{count + 1}Q")
    return hashlib.blake2b(lengths.pack(count, *map(len, parts)) + b"".join(parts), digest_size=SIZE).digest()


_NO_KWARGS = digest(b"{}")


class Fingerprints:
    """Computes keys of messages."""

    def __init__(self, *, with_call_ids: bool) -> None:
        """`with_call_ids`: the template renders tool-call ids, so they are significant."""
        self._with_call_ids = with_call_ids

    def key(self, message: Message, room: Room | None = None) -> bytes:
        """Returns a message's key. Raises TooLongInline if `room` has not enough for calls that are not known yet."""
        if message.role is not Role.ASSISTANT:
            return _context_key(message, self._with_call_ids)
        calls = message.tool_calls
        written = ["ids" if self._with_call_ids else "", message.text]
        for call in calls:
            written += (call.id, call.name, call.arguments_json)
        shown = _shown(message, self._with_call_ids) if message.images else []
        if shown:
            written[0] += " images"
            written += shown
        raw = digest(*map(_utf8, written))
        key = cache.REPLY_KEYS.get(raw)
        if key is None:
            if room is not None:
                for call in calls:
                    room.take(call.arguments_json)
            parts = [part for call in calls for part in _call_parts(call, self._with_call_ids)]
            key = digest(b"assistant", _utf8(visible_text(message)), *parts, *map(_utf8, shown))
            cache.REPLY_KEYS.keep({raw: key})
        return key

    def of(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        before: Fingerprinted | None,
        *,
        room: Room | None = None,
    ) -> Fingerprinted:
        """Returns the fingerprints of a prompt; `before` are those of an earlier one, to be reused.

        Raises TooLongInline as `key` does.
        """
        first = tools_key(tools)
        known = at = 0
        keys: list[bytes] = []
        states = [first]
        split = len(messages)
        if before is not None and before.by is self:
            for message, other in zip(messages, before.messages, strict=False):
                if message is not other:
                    break
                known += 1
            keys += before.keys[:known]
            if before.states[0] == first:
                states, at = [*before.states[: known + 1]], known
            if before.split < known:
                split = before.split
        keys += [self.key(message, room) for message in messages[known:]]
        for key in keys[at:]:
            states.append(next_state(states[-1], key))
        if split == len(messages):
            for i in range(max(known, 1), len(messages)):
                if messages[i].role is Role.ASSISTANT and messages[i - 1].role is Role.ASSISTANT:
                    split = i
                    break
        return Fingerprinted(tuple(messages), keys, states, split, self)


def visible_text(message: Message) -> str:
    """Returns an assistant's visible text, trimmed, without reasoning that a client inserted inline."""
    text = message.text
    return (_INLINE_THINKING.sub("", text, count=1) if "<think>" in text else text).strip()


def reasoning_text(message: Message) -> str:
    """Returns an assistant's reasoning, trimmed, wherever the client put it."""
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
    """Returns the fingerprints of a whole prompt; `states` starts with the tools' state, `keys` has one per message."""
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
    """Returns the key of an ordered tool list; schemas are compared as text, since the text is rendered."""
    known = cache.TOOL_KEYS.get(id(tools))
    if known is not None and known[0] is tools:
        return known[1]
    parts = (text for tool in tools for text in (tool.name, tool.description, tool.parameters_json_schema))
    key = digest(*(_utf8(text) for text in parts))
    if type(tools) is tuple and cache.characters(tools) <= cache.TOOLS_CHARS:
        cache.TOOL_KEYS.keep({id(tools): (tools, key)})
    return key


def next_state(state: bytes, key: bytes) -> bytes:
    """Returns the state of a conversation after one more message."""
    return hashlib.blake2b(state + key, digest_size=SIZE).digest()


def canonical_json(text: str) -> bytes:
    """Returns arguments as a canonical value: key order, spacing, escapes and number formats do not matter.

    Numbers are compared as JavaScript stores them (doubles), because most agents re-serialise with that. Text that is
    not JSON is compared as text.
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
    if len(parts) == 1:  # as below, but faster for most messages
        only = parts[0]
        if type(only) is TextPart:
            return digest(_utf8(message.role.value), _utf8(message.name), _utf8(only.text))
        if type(only) is ToolResultPart and not only.images:
            call_id = _utf8(only.call_id) if with_call_ids else b""
            return digest(_utf8(message.role.value), _utf8(message.name), b"", b"result", call_id, _utf8(only.text))
    text = "".join([part.text for part in parts if isinstance(part, TextPart)])
    others: list[str] = []
    if message.images:
        others = _shown(message, with_call_ids)
    else:
        for result in message.tool_results:
            others += ("result", result.call_id if with_call_ids else "", result.text)
    return digest(*[_utf8(part) for part in (message.role.value, message.name, text, *others)])


def _shown(message: Message, with_call_ids: bool) -> list[str]:
    """Returns texts, results and images of a message in their order, each after what it is: a prompt shows them so."""
    shown: list[str] = []
    for part in message.parts:
        if isinstance(part, TextPart):
            shown += ("text", part.text)
        elif isinstance(part, ImagePart):
            shown += ("image", part.ref)
        elif isinstance(part, ToolResultPart):
            shown += ("result", part.call_id if with_call_ids else "", part.text)
            for image in part.images:
                shown += ("image of result", image.ref)
    return shown


def _call_parts(call: ToolCallPart, with_call_ids: bool) -> tuple[bytes, bytes, bytes]:
    # Clients write absent arguments as `{}` or as nothing.
    arguments = canonical_json(call.arguments_json if call.arguments_json.strip() else "{}")
    return _utf8(call.id) if with_call_ids else b"", _utf8(call.name), arguments


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
