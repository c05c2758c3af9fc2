"""Maps an agent's output lines to Penstock's events by the rules of its spec.

Invariants: rules are JMESPath expressions, compiled when the spec is loaded. A line that matches no rule becomes an
event of kind OTHER with its raw text and is never lost. A malformed line cannot stop the stream. Memory is bounded by
MAX_LINE_BYTES whatever the agent prints.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Any, Final

import jmespath
import jmespath.exceptions
import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue

MAX_LINE_BYTES: Final = 1 << 20
"""Longest line that is parsed; the rest of a longer one is dropped and its event states this."""
MAX_RAW_BYTES: Final = 64 << 10
"""Maximum part of a line that its event carries."""
MAX_DEPTH: Final = 24
"""Nesting limit of objects and lists in one field of an event.

Proto readers accept at most 100 nested messages, and a level takes up to three.
"""
_KEPT_EVALUATORS: Final = 1024
"""Expressions of all agents that are kept in the form that evaluates them: some twenty an agent."""
_TOO_DEEP: Final = f"[nested in more than {MAX_DEPTH} levels: see the raw line]"


_CONTROLS: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Terminal control sequences for colours and cursor positions."""


class EventKind(StrEnum):
    """What the agent did, according to an event. OTHER is a line that matched no rule.

    IGNORED occurs only in rules: such a line makes no event. It is for lines that repeat others.
    """

    ASSISTANT = "assistant"
    REASONING = "reasoning"
    TOOL_CALL = "tool_call"
    TOOL_RESULT = "tool_result"
    ERROR = "error"
    DONE = "done"
    OTHER = "other"
    IGNORED = "ignored"


def compiled(expression: str) -> Any:
    """Compile a JMESPath expression; ValueError with the reason if it is invalid."""
    try:
        return jmespath.compile(expression)
    except jmespath.exceptions.JMESPathError as error:
        raise ValueError(f"not a JMESPath expression: {expression!r}: {str(error).splitlines()[0]}") from None


def search(expression: Any, value: Any) -> Any:
    """The expression's value, or None if `value` does not have the expected shape."""
    try:
        return expression.search(value)
    except (jmespath.exceptions.JMESPathError, RecursionError, TypeError, ValueError):
        return None


@lru_cache(maxsize=_KEPT_EVALUATORS)
def evaluator(expression: str) -> Callable[[Any], Any]:
    """A function that evaluates a JMESPath expression and returns None for a value that does not fit it.

    Names, and comparisons of a name with a constant, make up most rules and are evaluated directly: every rule is tried
    on a rollout's lines, and the library walks a tree for each. One function serves all rollouts of an agent: with one
    of its own, each held 7 KB while it ran.
    """
    parsed = compiled(expression)
    return _direct(parsed.parsed) or (lambda value: search(parsed, value))


def _direct(node: dict[str, Any]) -> Callable[[Any], Any] | None:
    children = node.get("children") or []
    if node["type"] == "field":
        name = node["value"]
        return lambda value: value.get(name) if isinstance(value, dict) else None
    if node["type"] == "comparator" and node["value"] == "eq" and children[1]["type"] == "literal":
        left, constant = _direct(children[0]), children[1]["value"]
        if left and isinstance(constant, str):
            return lambda value: left(value) == constant
    return None


def _compiles(expression: str) -> str:
    compiled(expression)
    return expression


Expression = Annotated[str, AfterValidator(_compiles)]


class EventRule(BaseModel):
    """The first rule of a spec whose `when` holds for a line makes the line's event.

    `fields` gives the event's data as expressions over the line; a field whose expression is null is left out. By
    convention: `text`; `id`, `name`, `arguments`; `output`, `exit_code`, `is_error`; `message`; `reason`; and `failed`
    in a DONE event, by which the agent reports a failure, whatever its exit code.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    when: Expression
    kind: Annotated[EventKind, Field(strict=False)]
    fields: dict[str, Expression] = {}


@dataclass(frozen=True, slots=True)
class AgentEvent:
    """An action of the agent, and the output line that reported it (at most MAX_RAW_BYTES of it)."""

    kind: EventKind
    data: Mapping[str, JsonValue]
    raw_line: bytes


class EventParser:
    """Turns chunks of an agent's standard output into events; call feed() for each chunk, finish() at the end.

    Rules see the JSON object of a line. Any other line, and with `text` every line, is passed to them as {line}.
    """

    def __init__(self, rules: Sequence[EventRule], *, text: bool = False) -> None:
        self._text = text
        self._rules = [
            (rule.kind, evaluator(rule.when), [(name, evaluator(field)) for name, field in rule.fields.items()])
            for rule in rules
        ]
        self._pending = bytearray()
        self._cut = False
        self.lines = 0
        """Lines read so far."""
        self.unread = b""
        """The part of `feed`'s input that was not read, with the beginning of the line that it cuts."""

    def feed(self, data: bytes, go_on: Callable[[], bool] = lambda: True) -> Iterator[AgentEvent]:
        """Yield the events of every line that `data` completes; once `go_on` returns false, the rest is `unread`."""
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            if not go_on():
                self.unread = bytes(self._pending) + data[start:]
                return
            self._append(data[start:end])
            yield from self._take()
            start = end + 1
        self._append(data[start:])
        if not go_on():
            self.unread = bytes(self._pending)

    def finish(self) -> Iterator[AgentEvent]:
        """Yield the event of a last line without a line feed."""
        yield from self._take()

    def _append(self, data: bytes) -> None:
        room = MAX_LINE_BYTES - len(self._pending)
        self._cut = self._cut or len(data) > room
        self._pending += data[:room]

    def _take(self) -> Iterator[AgentEvent]:
        self.lines += 1
        line, cut = bytes(self._pending).rstrip(b"\r"), self._cut
        self._pending.clear()
        self._cut = False
        if not line.strip():
            return
        event = None if cut else self._parsed(line)
        event = event or AgentEvent(EventKind.OTHER, {"truncated": True} if cut else {}, line[:MAX_RAW_BYTES])
        if event.kind is not EventKind.IGNORED:
            yield event

    def _parsed(self, line: bytes) -> AgentEvent | None:
        if not self._rules:
            return None
        value = None
        if not self._text and line[:1] == b"{":
            with contextlib.suppress(ValueError):
                value = orjson.loads(line)
        if value is None:
            value = {"line": _CONTROLS.sub("", line.decode("utf-8", "replace"))}
        for kind, when, fields in self._rules:
            if when(value):
                found = ((name, field(value)) for name, field in fields)
                data = {name: _plain(item) for name, item in found if item is not None}
                return AgentEvent(kind, data, line[:MAX_RAW_BYTES])
        return None


def _plain(value: Any, levels: int = MAX_DEPTH) -> JsonValue:
    """The value in a form that every reader accepts: bounded nesting, and null for anything that is not JSON.

    An expression may produce values that no line holds, such as `to_number('inf')`.
    """
    if isinstance(value, dict | list) and not levels:
        return _TOO_DEEP
    if isinstance(value, dict):
        return {str(name): _plain(item, levels - 1) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, levels - 1) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value if abs(value) <= sys.float_info.max else None
    return value if isinstance(value, str | bool) else None
