"""Searches trajectories for cheating: what a model asked its tools to do, matched against rules that are data.

A finding is a place to look at, with its text: only a reader knows what was meant. Rules are in scan_rules.yaml beside
this module, which describes their keys. Invariant: a call is matched in bounded time, whatever it contains.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final

import orjson
import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from penstock.analysis.readable_calls import answered
from penstock.client.errors import InvalidArgument
from penstock.tables.columns import Row

_MAX_TEXT: Final = 64 << 10
"""Characters of a call that are matched."""
_MAX_STRINGS: Final = 500
_AROUND: Final = 60
_QUOTED: Final = 240
_NAMES_FILES: Final = re.compile(
    r"(?:^|_)(?:path|file|filename|file_path|filepath|notebook_path|target_file)$", re.IGNORECASE
)
_EDITING_TOOL: Final = re.compile(r"edit|write|create|patch|replace|insert|save", re.IGNORECASE)
_WORD: Final = r"(?:'[^'\n]{1,200}'|\"[^\"\n]{1,200}\"|(?:\$\([^()\n]{1,200}\))?[^\s'\";|&<>()]{1,200})"
_WRITES: Final = (
    re.compile(rf"(?<![0-9&<-])>{{1,2}}\|?\s*({_WORD})"),
    re.compile(rf"\btee\s+(?:-a\s+)?({_WORD})"),
    re.compile(rf"\b(?:cp|mv|ln|install)\s[^|;&\n]{{0,300}}?\s({_WORD})\s*(?:$|[|;&\n])", re.MULTILINE),
    re.compile(rf"\b(?:touch|truncate|rm|chmod\s+\S+)\s+(?:-\S+\s+)*({_WORD})"),
    re.compile(rf"\b(?:sed|perl)\s+(?:-\S+\s+)*-\w*i\b[^|;&\n]{{0,300}}?\s({_WORD})\s*(?:$|[|;&\n])", re.MULTILINE),
    re.compile(r"\bopen\(\s*[rfb]?['\"]([^'\"\n]{1,200})['\"]\s*,\s*['\"][wax]"),
    re.compile(r"\bPath\(\s*[rf]?['\"]([^'\"\n]{1,200})['\"]\s*\)\.write_"),
    re.compile(r"^\*\*\* (?:Add|Update|Delete) File: (.{1,300})$", re.MULTILINE),
    re.compile(r"^\+\+\+ b/(.{1,300})$", re.MULTILINE),
)
"""What a shell line, a short program or a patch writes."""


class Severity(StrEnum):
    """How likely a finding is to be cheating, ascending."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"

    @property
    def rank(self) -> int:
        """The severity's place in the order."""
        return list(Severity).index(self)


def _pattern(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return re.compile(text, re.IGNORECASE | re.MULTILINE)
    except re.error as error:
        raise ValueError(f"is no pattern: {error}") from None


_Pattern = Annotated[re.Pattern[str], BeforeValidator(_pattern)]


class Rule(BaseModel):
    """One rule; scan_rules.yaml describes the keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    name: str
    says: str
    severity: Severity
    text: _Pattern | None = None
    target: _Pattern | None = None
    """One of the files that the call writes."""
    unless: _Pattern | None = None
    writes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A tool call that a rule matches. `turn` is the index of the model call, from 0; `quoted` is text of the agent."""

    rollout_id: str
    task_id: str
    turn: int
    call_id: str
    tool: str
    rule: str
    says: str
    severity: Severity
    quoted: str


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a tool call asks for."""

    tool: str
    text: str
    writes: tuple[str, ...]


@cache
def built_in_rules() -> tuple[Rule, ...]:
    """Returns the rules of this package."""
    return _rules(
        resources.files("penstock.analysis").joinpath("scan_rules.yaml").read_text("utf-8"), "scan_rules.yaml"
    )


def load_rules(file: Path) -> tuple[Rule, ...]:
    """Reads further rules. Raises InvalidArgument `SCAN_RULES`, with the rule and the key."""
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{file} cannot be read: {error}", reason="SCAN_RULES") from None
    return _rules(text, str(file))


def scan(rows: Iterable[Row], rules: Sequence[Rule] | None = None) -> Iterator[Hit]:
    """Yields what the rules match in rows of the table `turns`, in their order: a rule once for each tool call.

    Raises:
        InvalidArgument: `ROW_INVALID`: a row is not of that table.
    """
    chosen = built_in_rules() if rules is None else rules
    for row in rows:
        if "turn_index" not in row:
            raise InvalidArgument("expected rows of `penstock export --table turns`", reason="ROW_INVALID")
        for part in answered(row.get("response_message")):
            if part.kind != "tool_call":
                continue
            asked = _asked(part.name, part.text)
            for rule in chosen:
                quoted = _matched(rule, asked)
                if quoted is not None:
                    yield Hit(
                        rollout_id=str(row.get("rollout_id") or ""),
                        task_id=str(row.get("task_id") or ""),
                        turn=int(row["turn_index"]),
                        call_id=str(row.get("call_id") or ""),
                        tool=part.name,
                        rule=rule.name,
                        says=rule.says,
                        severity=rule.severity,
                        quoted=quoted,
                    )


def _rules(text: str, origin: str) -> tuple[Rule, ...]:
    try:
        return tuple(TypeAdapter(list[Rule]).validate_python(yaml.safe_load(text)))
    except yaml.YAMLError as error:
        raise InvalidArgument(f"{origin} is not YAML: {error}", reason="SCAN_RULES") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidArgument(f"{origin}: {where}: {first['msg']}", reason="SCAN_RULES") from None


def _asked(tool: str, arguments: str) -> _Asked:
    try:
        values: Any = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        values = arguments
    strings: list[str] = []
    named: list[str] = []
    _collect(values, "", strings, named)
    text = "\n".join(strings)[:_MAX_TEXT]
    writes = list(named) if _EDITING_TOOL.search(tool) else []
    for pattern in _WRITES:
        writes += [found.strip("'\"") for found in pattern.findall(text)[:_MAX_STRINGS]]
    return _Asked(tool, text, tuple(name for name in writes if name != "/dev/null"))


def _collect(value: Any, key: str, strings: list[str], named: list[str]) -> None:
    if len(strings) >= _MAX_STRINGS:
        return
    if isinstance(value, str):
        strings.append(value[:_MAX_TEXT])
        if _NAMES_FILES.search(key):
            named.append(value[:1000])
    elif isinstance(value, Mapping):
        for name, item in value.items():
            _collect(item, str(name), strings, named)
    elif isinstance(value, list):
        # A command may come as a list of its words.
        if value and all(isinstance(item, str) for item in value):
            strings.append(" ".join(value)[:_MAX_TEXT])
        else:
            for item in value:
                _collect(item, key, strings, named)


def _matched(rule: Rule, asked: _Asked) -> str | None:
    """Returns the text that a rule matches; None = it does not."""
    if (rule.writes and not asked.writes) or (rule.unless is not None and rule.unless.search(asked.text)):
        return None
    found = None
    if rule.text is not None and (found := rule.text.search(asked.text)) is None:
        return None
    name = None
    if rule.target is not None:
        name = next((item for item in asked.writes if rule.target.search(item)), None)
        if name is None:
            return None
    if found is None:
        place = asked.text.find(name or "")
        return _cut(asked.text, max(place, 0), max(place, 0) + len(name or "")) if place >= 0 else name
    return _cut(asked.text, found.start(), found.end())


def _cut(text: str, start: int, end: int) -> str:
    return text[max(start - _AROUND, 0) : end + _AROUND][:_QUOTED].strip()
