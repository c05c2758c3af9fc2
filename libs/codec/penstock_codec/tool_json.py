"""Parses tool calls that a model wrote as JSON: bounded, strict, and exact about the text.

A call is an object with exactly `name` (a string) and `arguments` (an object), or its family's names for them. The
arguments are returned exactly as sampled. Nothing is repaired or guessed: anything else is malformed, with the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from penstock_codec.fast_dataclass import quick

MAX_CALL_CHARS = 1 << 20
MAX_DEPTH = 64
MAX_NAME_CHARS = 256

_BRACKET = re.compile(r"[\[\]{}]")
# None of these ever tries a second way.
_STRING = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
# Not one that repeats without a bound: what it keeps for each string would grow with the text. Nor a possessive one:
# Python before 3.11.5 goes on after a string that did not end (python/cpython#106052).
_STRINGS = re.compile(rf'[^"]*+(?:"{_STRING.pattern}"[^"]*+){{0,1000}}', re.DOTALL)
_WHOLE_STRING = re.compile(f'"{_STRING.pattern}"', re.DOTALL)
_SPACE = re.compile(r"[ \t\r\n]*")
# Every escape in JSON text, a whole surrogate pair as one; the group is there for half of one.
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
# The form of nearly every call; of its arguments only the boundaries are known.
_USUAL = re.compile(
    r'\{[ \t\r\n]*"name"[ \t\r\n]*:[ \t\r\n]*"([^"\\\x00-\x1f]*)"[ \t\r\n]*,'
    r'[ \t\r\n]*"arguments"[ \t\r\n]*:[ \t\r\n]*(\{.*\})[ \t\r\n]*\}',
    re.DOTALL,
)
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


@quick
@dataclass(frozen=True, slots=True)
class CallText:
    """A well-formed call: the tool's name, the arguments exactly as written, the id if the model wrote one."""

    name: str
    arguments_json: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Malformed:
    """Why a text is not a call: EMPTY, TOO_LARGE, TOO_DEEP, NOT_JSON, NOT_A_CALL, UNCLOSED, TOO_MANY."""

    reason: str


class StringTracker:
    """Follows streamed JSON text: does it end inside a string? Linear in the text, whatever it contains.

    It scans lazily, all text since the last question: usually once, when a call closes.
    """

    __slots__ = ("_escaping", "_inside", "_unread")

    def __init__(self) -> None:
        self._unread: list[str] = []
        self._inside = False
        self._escaping = False  # the scanned text ends in an escaping backslash

    def feed(self, text: str) -> None:
        """Adds the next piece of the text."""
        self._unread.append(text)

    @property
    def in_string(self) -> bool:
        """Whether the text ends inside a string."""
        if self._unread:
            self._read("".join(self._unread))
            self._unread.clear()
        return self._inside

    def _read(self, text: str) -> None:
        if not text:
            return
        at = 0
        if self._inside:
            at = _string_end(text, 1 if self._escaping else 0)
            self._escaping = False
            if at < len(text) and text[at] == '"':
                self._inside = False
                at += 1
        if not self._inside:
            at = _strings_end(text, at)
            if at == len(text):
                return
            self._inside = True
            at = _string_end(text, at + 1)
        self._escaping = at < len(text)


def _string_end(text: str, at: int) -> int:
    """Returns the end of the string that goes on at `at`: its quote, a trailing backslash, or the end of the text."""
    found = _STRING.match(text, at)
    return at if found is None else found.end()


def _strings_end(text: str, at: int) -> int:
    """Returns the quote that opens an unclosed string, or the text's end. `at` is outside of strings."""
    while (found := _STRINGS.match(text, at)) is not None and found.end() > at:
        at = found.end()
    return at


def depths(text: str) -> tuple[int, int]:
    """Returns the nesting depth of JSON text at its end, and the maximum."""
    depth = deepest = 0
    for match in _BRACKET.finditer(_WHOLE_STRING.sub("", text[: _strings_end(text, 0)])):
        if match.group() in "[{":
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth -= 1
    return depth, deepest


def parse_call(text: str) -> CallText | Malformed:
    """Reads one call. Never raises."""
    usual = _usual_call(text)
    if usual is not None:
        return usual
    calls = parse_calls(text)
    return calls if isinstance(calls, Malformed) else calls[0]


def _usual_call(text: str) -> CallText | None:
    """Reads a call as `parse_calls` does, in fewer steps; None for any other form."""
    checked = _checked(text)
    if isinstance(checked, Malformed) or (found := _USUAL.fullmatch(checked)) is None:
        return None
    name, arguments = found.groups()
    try:
        value = _DECODER.decode(arguments)
    except ValueError:
        return None
    return CallText(name, arguments) if type(value) is dict and name.strip() and len(name) <= MAX_NAME_CHARS else None


def parse_calls(
    text: str,
    *,
    separator: str | None = None,
    brackets: bool = False,
    arguments: str = "arguments",
    identifier: str | None = None,
    constants: Mapping[str, str] = _NOTHING,
) -> Sequence[CallText] | Malformed:
    """Reads one call, or with a `separator` one or more, all or none. Never raises.

    With `brackets` they may be in a list. `arguments` is the member that holds them. Allowed beside it and `name` are
    `identifier`, a string, and the members of `constants` with exactly that JSON.
    """
    checked = _checked(text)
    if isinstance(checked, Malformed):
        return checked
    text = checked
    try:
        listed = brackets and text.startswith("[")
        at = _skip_space(text, 1) if listed else 0
        objects: list[dict[str, str] | None] = []
        while True:
            members, at = _members(text, at)
            objects.append(members)
            at = _skip_space(text, at)
            if separator is None or text[at : at + 1] != separator:
                break
            at = _skip_space(text, at + 1)
            if at == len(text):
                break  # a separator may also end
        if listed:
            if text[at : at + 1] != "]":
                raise ValueError("a list is closed")
            at = _skip_space(text, at + 1)
        if at != len(text):
            raise ValueError("text after the object")
    except ValueError:
        return Malformed("NOT_JSON")
    calls = [None if item is None else _call(item, arguments, identifier, constants) for item in objects]
    whole = [call for call in calls if call is not None]
    return whole if len(whole) == len(calls) else Malformed("NOT_A_CALL")


def read_arguments(text: str) -> str | Malformed:
    """Reads a standalone object of arguments, verbatim but for white space around it. Never raises."""
    checked = _checked(text)
    if isinstance(checked, Malformed):
        return checked
    try:
        value = _DECODER.decode(checked)
    except ValueError:
        return Malformed("NOT_JSON")
    return checked if isinstance(value, dict) else Malformed("NOT_A_CALL")


@dataclass(frozen=True, slots=True)
class JsonValue:
    """A JSON value and the text that it was read from."""

    value: Any
    text: str


def parse_value(text: str) -> JsonValue | None:
    """Parses a JSON value; None if it is invalid, too deep or too large. Never raises."""
    checked = _checked(text)
    if isinstance(checked, Malformed):
        return None
    try:
        return JsonValue(_DECODER.decode(checked), checked)
    except ValueError:
        return None


def _checked(text: str) -> str | Malformed:
    """Strips the text; Malformed if it is empty, too large or too deep, or spells half of a surrogate pair.

    JSON can spell such a half, but no message or journal can hold it, and strict readers of JSON refuse it.
    """
    if len(text) > MAX_CALL_CHARS:
        return Malformed("TOO_LARGE")
    text = text.strip(" \t\r\n")
    if not text:
        return Malformed("EMPTY")
    if ("\\ud" in text or "\\uD" in text) and any(escape[1] for escape in _ESCAPE.finditer(text)):
        return Malformed("NOT_JSON")
    if text.count("{") + text.count("[") <= MAX_DEPTH:
        return text
    _, deepest = depths(text)
    return Malformed("TOO_DEEP") if deepest > MAX_DEPTH else text


def _call(
    members: Mapping[str, str], arguments: str, identifier: str | None, constants: Mapping[str, str]
) -> CallText | None:
    extra = members.keys() - {"name", arguments}
    call_id = ""
    if identifier is not None and identifier in extra:
        extra.discard(identifier)
        if not members[identifier].startswith('"'):
            return None
        call_id = json.loads(members[identifier])
        if len(call_id) > MAX_NAME_CHARS:
            return None
    if any(constants.get(key) != members[key] for key in extra):
        return None
    name_text, value = members.get("name", ""), members.get(arguments, "")
    if not name_text.startswith('"') or not value.startswith("{"):
        return None
    name: str = json.loads(name_text)
    if not name.strip() or len(name) > MAX_NAME_CHARS:
        return None
    return CallText(name, value, call_id)


def _members(text: str, at: int) -> tuple[dict[str, str] | None, int]:
    """Returns each member of the object at `at`, its value verbatim, and where the object ends.

    None for members when it is no object or names a member twice. Raises ValueError for invalid JSON.
    """
    if text[at : at + 1] != "{":
        _, end = _DECODER.raw_decode(text, at)
        return None, end
    members: dict[str, str] = {}
    unique = True
    at = _skip_space(text, at + 1)
    if text[at : at + 1] == "}":
        return members, at + 1
    while True:
        if text[at : at + 1] != '"':
            raise ValueError("a member's name is a string")
        key, at = _DECODER.raw_decode(text, at)
        at = _skip_space(text, at)
        if text[at : at + 1] != ":":
            raise ValueError("a member's value follows a colon")
        start = _skip_space(text, at + 1)
        _, at = _DECODER.raw_decode(text, start)
        unique = unique and key not in members
        members[key] = text[start:at]
        at = _skip_space(text, at)
        mark = text[at : at + 1]
        at += 1
        if mark == "}":
            return (members if unique else None), at
        if mark != ",":
            raise ValueError("members are separated by commas")
        at = _skip_space(text, at)


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse_constant)
