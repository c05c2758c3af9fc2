"""OpenAI Responses tools with a predefined shape and no definition, and the functions that the model sees for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

import orjson
from pydantic import BaseModel, ConfigDict

from penstock_codec.chat import Tool


class Strict(BaseModel):
    """A part of a body: types are not coerced, unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)


class Arguments(Strict):
    """The payload of a shaped call, both in the client's item and in the model's arguments."""

    constants: ClassVar[dict[str, Any]] = {}

    def arguments(self) -> dict[str, Any]:
        """Returns the payload as the model writes it, without unset fields."""
        return {
            name: value
            for name, value in self.model_dump().items()
            if name not in self.constants and value is not None and value != {}
        }


class LocalShellAction(Arguments):
    """A command with its arguments; times in milliseconds."""

    constants: ClassVar[dict[str, Any]] = {"type": "exec"}

    type: Literal["exec"] = "exec"
    command: list[str]
    env: dict[str, str] = {}
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class ShellAction(Arguments):
    """Shell lines; times in milliseconds, lengths in characters."""

    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class PatchOperation(Arguments):
    """One change to one file."""

    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """A client-run tool without a definition of its own: `member` is the field of its item that holds `model`."""

    tool: Tool
    item: str
    member: str
    model: type[Arguments]
    id_prefix: str


def _fixed(name: str, description: str, schema: dict[str, Any]) -> Tool:
    return Tool(name, description, orjson.dumps({"type": "object", **schema}).decode())


_STRING: Final = {"type": "string"}
_INTEGER: Final = {"type": "integer"}
_STRINGS: Final = {"type": "array", "items": _STRING}
SHAPES: Final[Mapping[str, Shape]] = {
    "local_shell": Shape(
        _fixed(
            "local_shell",
            "Runs a command, given as a list of its arguments, and returns its output.",
            {
                "properties": {
                    "command": _STRINGS,
                    "working_directory": _STRING,
                    "timeout_ms": _INTEGER,
                    "env": {"type": "object", "additionalProperties": _STRING},
                },
                "required": ["command"],
            },
        ),
        "local_shell_call",
        "action",
        LocalShellAction,
        "lsh",
    ),
    "shell": Shape(
        _fixed(
            "shell",
            "Runs shell commands and returns their output.",
            {
                "properties": {"commands": _STRINGS, "timeout_ms": _INTEGER, "max_output_length": _INTEGER},
                "required": ["commands"],
            },
        ),
        "shell_call",
        "action",
        ShellAction,
        "sh",
    ),
    "apply_patch": Shape(
        _fixed(
            "apply_patch",
            "Creates, updates or deletes one file; diff is a unified diff without file headers.",
            {
                "properties": {
                    "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
                    "path": _STRING,
                    "diff": _STRING,
                },
                "required": ["type", "path"],
            },
        ),
        "apply_patch_call",
        "operation",
        PatchOperation,
        "ap",
    ),
}
