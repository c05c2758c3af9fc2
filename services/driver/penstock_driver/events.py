"""An agent's own output lines, mapped to Penstock's events by the rules of its spec.

Invariants: rules are JMESPath expressions that are compiled when the spec is loaded; a line that no rule matches, or
that is not JSON, is an event of kind OUTPUT with its raw text, never lost; one malformed line cannot stop the stream;
memory is bounded by MAX_LINE_BYTES whatever the agent prints.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import jmespath
import jmespath.exceptions
from pydantic import BaseModel, ConfigDict, JsonValue, field_validator

MAX_LINE_BYTES: Final = 1 << 20
"""Longest line that is parsed; the rest of a longer one is dropped and the event says so."""


class EventKind(StrEnum):
    """What an event says that the agent did. OUTPUT is a line that no rule understood."""

    ASSISTANT = "assistant"
    REASONING = "reasoning"
    TOOL_CALL = "tool_call"
    TOOL_RESULT = "tool_result"
    ERROR = "error"
    DONE = "done"
    OUTPUT = "output"


FIELDS: Final[Mapping[EventKind, frozenset[str]]] = {
    EventKind.ASSISTANT: frozenset({"text"}),
    EventKind.REASONING: frozenset({"text"}),
    EventKind.TOOL_CALL: frozenset({"id", "name", "arguments"}),
    EventKind.TOOL_RESULT: frozenset({"id", "name", "output", "exit_code", "is_error"}),
    EventKind.ERROR: frozenset({"message"}),
    EventKind.DONE: frozenset({"reason"}),
}


def _compiled(expression: str) -> Any:
    try:
        return jmespath.compile(expression)
    except jmespath.exceptions.JMESPathError as error:
        raise ValueError(f"not a JMESPath expression: {expression!r}: {str(error).splitlines()[0]}") from None


class EventRule(BaseModel):
    """If `when` holds for a line, each item of `each` (or the line itself) gives one event of `kind`.

    `fields` gives the event's fields as expressions over the item; a field whose expression is null is left out.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: EventKind
    when: str
    each: str = ""
    fields: dict[str, str] = {}

    @field_validator("when")
    @classmethod
    def _when_compiles(cls, expression: str) -> str:
        _compiled(expression)
        return expression

    @field_validator("each")
    @classmethod
    def _each_compiles(cls, expression: str) -> str:
        if expression:
            _compiled(expression)
        return expression

    @field_validator("fields")
    @classmethod
    def _fields_compile(cls, fields: dict[str, str]) -> dict[str, str]:
        for expression in fields.values():
            _compiled(expression)
        return fields

    def model_post_init(self, _context: Any) -> None:
        """Refuse fields that the kind does not have."""
        unknown = set(self.fields) - FIELDS.get(self.kind, frozenset())
        if unknown:
            raise ValueError(f"{self.kind} has no field {', '.join(sorted(unknown))}")


@dataclass(frozen=True, slots=True)
class AgentEvent:
    """One thing that the agent did; `fields` holds the keys that FIELDS lists, as far as the agent gave them."""

    kind: EventKind
    fields: Mapping[str, JsonValue]
    raw: str = ""


@dataclass(frozen=True, slots=True)
class _Rule:
    kind: EventKind
    when: Any
    each: Any
    fields: tuple[tuple[str, Any], ...]


@dataclass(slots=True)
class EventParser:
    """Turns chunks of an agent's standard output into events; feed() as they come, finish() at the end."""

    rules: tuple[EventRule, ...]
    _compiled: tuple[_Rule, ...] = field(init=False)
    _pending: bytearray = field(init=False, default_factory=bytearray)
    _skipping: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._compiled = tuple(
            _Rule(
                rule.kind,
                _compiled(rule.when),
                _compiled(rule.each) if rule.each else None,
                tuple((name, _compiled(expression)) for name, expression in rule.fields.items()),
            )
            for rule in self.rules
        )

    def feed(self, data: bytes) -> Iterator[AgentEvent]:
        """Yield the events of every line that `data` completes."""
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._append(data[start:end])
            yield from self._take()
            start = end + 1
        self._append(data[start:])

    def finish(self) -> Iterator[AgentEvent]:
        """Yield the events of a last line that has no end."""
        if self._pending:
            yield from self._take()

    def _append(self, data: bytes) -> None:
        room = MAX_LINE_BYTES - len(self._pending)
        if len(data) > room:
            self._skipping = True
        self._pending += data[:room]

    def _take(self) -> Iterator[AgentEvent]:
        line, cut = bytes(self._pending), self._skipping
        self._pending.clear()
        self._skipping = False
        text = line.decode("utf-8", "replace").rstrip("\r")
        if not text.strip():
            return
        events = [] if cut else self._events(text)
        yield from events or [AgentEvent(EventKind.OUTPUT, {"truncated": True} if cut else {}, text)]

    def _events(self, text: str) -> list[AgentEvent]:
        if not self._compiled or text[0] not in "{[":
            return []
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            return []
        events = []
        for rule in self._compiled:
            if not _search(rule.when, line):
                continue
            items = [line] if rule.each is None else _search(rule.each, line)
            for item in items if isinstance(items, list) else []:
                found = ((name, _search(expression, item)) for name, expression in rule.fields)
                fields = {name: value for name, value in found if value is not None}
                events.append(AgentEvent(rule.kind, fields, "" if events else text))
        return events


def _search(expression: Any, value: Any) -> Any:
    """The expression's value, or None where the line has another shape than the rule expects (R71: never an error)."""
    try:
        return expression.search(value)
    except (jmespath.exceptions.JMESPathError, RecursionError, TypeError):
        return None
