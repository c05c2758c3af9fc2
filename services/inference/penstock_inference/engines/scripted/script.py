"""The script of the scripted engine (YAML or JSON).

    logprob: -1.0              # of every token, unless its turn sets another; <= 0
    strict: true               # whether entries left over are an error
    turns:
      - when: {prompt_contains: You are a title generator}
        repeat: true           # for any number of calls, including none
        reply: A title
      - when: {has_tool_result: false}
        reply: |-
          <tool_call>
          {"name": "bash", "arguments": {"command": "cat note.txt"}}
          </tool_call>
      - reply: [17, 4, 2]      # token ids, unchanged

Each session replays the whole script; requests without a session share one. A call takes the first entry that its
session has not used and whose `when` matches the decoded prompt. A text is encoded by the model's tokenizer and ends
with its end-of-turn token, unless `finish: length`.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock_chassis.errors import FailedPrecondition, InvalidArgument
from penstock_chassis.validation import violations_of

MAX_BYTES: Final = 4 << 20
MAX_NODES: Final = 200_000
MAX_DEPTH: Final = 100
"""Nesting limit of a script; its values are counted with all aliases expanded."""

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

TOOL_RESULT_MARK = "</tool_response>"


class When(BaseModel):
    """Conditions on the decoded prompt; all that are set must hold."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    prompt_contains: str | tuple[str, ...] = ()
    prompt_lacks: str | tuple[str, ...] = ()
    has_tool_result: bool | None = None

    def holds(self, prompt: str) -> bool:
        """Whether this prompt matches."""
        return (
            all(text in prompt for text in _texts(self.prompt_contains))
            and not any(text in prompt for text in _texts(self.prompt_lacks))
            and self.has_tool_result in (None, TOOL_RESULT_MARK in prompt)
        )


class Turn(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    when: When = When()
    reply: str | tuple[int, ...]
    finish: Literal["stop", "length"] = "stop"
    logprob: float | None = Field(None, le=0, allow_inf_nan=False)
    repeat: bool = False


class Script(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    logprob: float = Field(-1.0, le=0, allow_inf_nan=False)
    strict: bool = True
    turns: tuple[Turn, ...] = Field(min_length=1)

    @classmethod
    def parse(cls, text: str) -> Script:
        """Raises InvalidArgument (SCRIPT_INVALID) naming every field at fault."""
        try:
            _check_size(text)
            return cls.model_validate(yaml.load(text, Loader=_LOADER))  # noqa: S506 - a safe loader
        except (yaml.YAMLError, RecursionError) as error:
            raise InvalidArgument(f"the script is not YAML: {error}", reason="SCRIPT_INVALID") from error
        except ValidationError as error:
            violations = violations_of(error, "script")
            raise InvalidArgument(
                f"the script is invalid: {violations[0].field} {violations[0].description}",
                reason="SCRIPT_INVALID",
                violations=violations,
            ) from error


def read_script(path: Path) -> str:
    """A script's text. Raises FailedPrecondition (SCRIPT_UNREADABLE), also for more than `MAX_BYTES`."""
    try:
        # Non-blocking: a pipe without a writer would block the start.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _unreadable(path, "it is not a regular file")
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise _unreadable(path, f"it has more than {MAX_BYTES} bytes")
        return data.decode("utf-8")
    except OSError as error:
        raise _unreadable(path, error.strerror or "it is broken") from error
    except UnicodeDecodeError as error:
        raise _unreadable(path, "it is not UTF-8") from error


def _unreadable(path: Path, why: str) -> FailedPrecondition:
    return FailedPrecondition(f"cannot read the script {path.name}: {why}", reason="SCRIPT_UNREADABLE")


def _check_size(text: str) -> None:
    """Refuse more than `MAX_NODES` values with all aliases expanded, before any object is built."""
    opened: list[tuple[str | None, int]] = []
    sizes: dict[str, int] = {}
    count = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent):
            count += sizes.get(event.anchor or "", MAX_NODES)  # a recursive alias has no end
        elif isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, count))
            count += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor:
                sizes[anchor] = count - before
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
            if event.anchor:
                sizes[event.anchor] = 1
        if count > MAX_NODES or len(opened) > MAX_DEPTH:
            raise InvalidArgument(
                f"the script has more than {MAX_NODES} values, or nests them deeper than {MAX_DEPTH}",
                reason="SCRIPT_INVALID",
            )


def _texts(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value
