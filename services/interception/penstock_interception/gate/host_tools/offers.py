"""Checks a trainer's offer of host tools, their names, sizes and schemas, before anything is stored (R15)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from penstock_chassis.errors import InvalidArgument, Violation
from penstock_chassis.validation import invalid
from penstock_interception.domain.host_tools import HostTool
from penstock_interception.gate.host_tools import schemas
from penstock_interception.gate.host_tools.bounded import Steps

MAX_TOOLS: Final = 64
MAX_DESCRIPTION_BYTES: Final = 16 << 10

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,47}")
_RESERVED_PREFIXES: Final = ("penstock", "mcp")
# Agents' own tool names: the model or the agent would mistake a host's tool of such a name for them.
_RESERVED: Final = frozenset(
    [
        "agent",
        "apply_patch",
        "bash",
        "batch",
        "edit",
        "exec",
        "exec_command",
        "glob",
        "google_web_search",
        "grep",
        "invalid",
        "list",
        "ls",
        "lsp",
        "multiedit",
        "notebookedit",
        "patch",
        "question",
        "read",
        "read_file",
        "read_many_files",
        "replace",
        "run_shell_command",
        "save_memory",
        "shell",
        "skill",
        "str_replace_based_edit_tool",
        "str_replace_editor",
        "subagent",
        "task",
        "todoread",
        "todowrite",
        "update_plan",
        "view",
        "view_image",
        "web_fetch",
        "web_search",
        "webfetch",
        "websearch",
        "write",
        "write_file",
        "write_stdin",
    ]
)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A tool as a trainer describes it; `schema` is JSON text, empty for any object."""

    name: str
    description: str
    schema: str


def accepted(proposals: Sequence[Proposal], allowed: Iterable[str]) -> tuple[HostTool, ...]:
    """Returns the tools if every one may be offered.

    Args:
        proposals: the tools that a trainer offers.
        allowed: the operator's patterns of names (`*` and `?`).

    Raises:
        InvalidArgument: FIELD_INVALID, TOOL_NAME_RESERVED, TOOL_NOT_ALLOWED; violations name every field.
    """
    broken: list[Violation] = []
    tools: list[HostTool] = []
    if len(proposals) > MAX_TOOLS:
        broken.append(Violation("tools", f"at most {MAX_TOOLS}"))
    seen: set[str] = set()
    steps = Steps(schemas.MAX_OFFER_STEPS)
    for index, proposal in enumerate(proposals[:MAX_TOOLS]):
        here = f"tools[{index}]"
        if not _NAME.fullmatch(proposal.name):
            broken.append(Violation(f"{here}.name", "a letter, then letters, digits, _ and -, 48 at most"))
        elif proposal.name in seen:
            broken.append(Violation(f"{here}.name", "is used twice"))
        seen.add(proposal.name)
        if len(proposal.description.encode(errors="replace")) > MAX_DESCRIPTION_BYTES:
            broken.append(Violation(f"{here}.description", f"at most {MAX_DESCRIPTION_BYTES >> 10} KiB"))
        try:
            tools.append(HostTool(proposal.name, proposal.description, schemas.canonical(proposal.schema, steps)))
        except schemas.SchemaRefused as error:
            broken.append(Violation(f"{here}.parameters_json_schema", str(error)))
    if broken:
        raise invalid(broken)
    if reserved := [i for i, tool in enumerate(tools) if _is_reserved(tool.name)]:
        text = "is reserved: agents have their own tools with this name"
        broken = [Violation(f"tools[{i}].name", text) for i in reserved]
        raise InvalidArgument(_summary(broken), reason="TOOL_NAME_RESERVED", violations=broken)
    patterns = tuple(allowed)
    if barred := [i for i, tool in enumerate(tools) if not any(fnmatchcase(tool.name, each) for each in patterns)]:
        text = "is not among the names that the operator allows (host_tools)"
        broken = [Violation(f"tools[{i}].name", text) for i in barred]
        raise InvalidArgument(_summary(broken), reason="TOOL_NOT_ALLOWED", violations=broken)
    return tuple(tools)


def _is_reserved(name: str) -> bool:
    plain = name.lower().replace("-", "_")
    return plain in _RESERVED or plain.replace("_", "") in _RESERVED or plain.startswith(_RESERVED_PREFIXES)


def _summary(violations: Sequence[Violation]) -> str:
    return "; ".join(f"{item.field}: {item.description}" for item in violations[:3])
