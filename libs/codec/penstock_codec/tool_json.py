"""Tool calls written as JSON by a model: bounded, strict, and exact about what was written.

A call is an object with exactly `name` (a string) and `arguments` (an object). The arguments come back as the very text
that was sampled. Nothing is repaired or guessed: what is not such an object is malformed, with the reason.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

MAX_CALL_CHARS = 1 << 20
MAX_DEPTH = 64
MAX_NAME_CHARS = 256

_STRUCTURAL = re.compile(r'["\\\[\]{}]')
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class CallText:
    """A well-formed call: the tool's name and the arguments exactly as written."""

    name: str
    arguments_json: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """Why a text is no call: EMPTY, TOO_LARGE, TOO_DEEP, NOT_JSON, NOT_A_CALL, UNCLOSED, TOO_MANY."""

    reason: str


class JsonTracker:
    """Follows JSON text as it comes: inside a string or not, and how deep. Linear in the text, whatever it holds."""

    __slots__ = ("_skip", "deepest", "depth", "in_string")

    def __init__(self) -> None:
        self.in_string = False
        self.depth = 0
        self.deepest = 0
        self._skip = False  # the text so far ends in an escaping backslash

    def feed(self, text: str) -> None:
        """Take the next piece of the text."""
        after_escape = 1 if self._skip and text else 0
        if text:
            self._skip = False
        for match in _STRUCTURAL.finditer(text):
            position = match.start()
            if position < after_escape:
                continue
            char = text[position]
            if self.in_string:
                if char == "\\":
                    after_escape = position + 2
                    self._skip = after_escape > len(text)
                elif char == '"':
                    self.in_string = False
            elif char == '"':
                self.in_string = True
            elif char in "[{":
                self.depth += 1
                self.deepest = max(self.deepest, self.depth)
            elif char in "]}":
                self.depth -= 1


def parse_call(text: str) -> CallText | Malformed:
    """Read one call. Never raises."""
    if len(text) > MAX_CALL_CHARS:
        return Malformed("TOO_LARGE")
    text = text.strip(" \t\r\n")
    if not text:
        return Malformed("EMPTY")
    tracker = JsonTracker()
    tracker.feed(text)
    if tracker.deepest > MAX_DEPTH:
        return Malformed("TOO_DEEP")
    try:
        members = _members(text)
    except ValueError:
        return Malformed("NOT_JSON")
    if members is None or set(members) != {"name", "arguments"}:
        return Malformed("NOT_A_CALL")
    name_text, arguments = members["name"], members["arguments"]
    if not name_text.startswith('"') or not arguments.startswith("{"):
        return Malformed("NOT_A_CALL")
    name: str = json.loads(name_text)
    if not name.strip() or len(name) > MAX_NAME_CHARS:
        return Malformed("NOT_A_CALL")
    return CallText(name, arguments)


def _members(text: str) -> dict[str, str] | None:
    """Each member of the object `text`, its value as written; None when it is no object or names a member twice."""
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    if not text.startswith("{"):
        decoder.decode(text)
        return None
    members: dict[str, str] = {}
    unique = True
    at = _skip_space(text, 1)
    if text[at : at + 1] == "}":
        at += 1
    else:
        while True:
            if text[at : at + 1] != '"':
                raise ValueError("a member's name is a string")
            key, at = decoder.raw_decode(text, at)
            at = _skip_space(text, at)
            if text[at : at + 1] != ":":
                raise ValueError("a member's value follows a colon")
            start = _skip_space(text, at + 1)
            _, at = decoder.raw_decode(text, start)
            unique = unique and key not in members
            members[key] = text[start:at]
            at = _skip_space(text, at)
            mark = text[at : at + 1]
            at += 1
            if mark == "}":
                break
            if mark != ",":
                raise ValueError("members are separated by commas")
            at = _skip_space(text, at)
    if at != len(text):
        raise ValueError("text after the object")
    return members if unique else None


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
