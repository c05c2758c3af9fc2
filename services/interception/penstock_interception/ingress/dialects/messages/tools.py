"""Tools of the Messages dialect: the client's own, those whose schema only the provider's models know, and hosted ones.

A hosted tool would run at the provider, past the gate: it is removed, which is recorded. For a provider's tool that the
client runs itself (a shell, an editor, a memory), the schema is written out, so that any model can call it.

A tool with `defer_loading` is not in the prompt until a result of the client's own tool search names it; its definition
then replaces the name. The tools at the head of the prompt thus stay the same for the whole conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import orjson
from pydantic import StringConstraints

from penstock_codec.chat import Tool
from penstock_interception.ingress.dialects.base import BadRequest
from penstock_interception.ingress.dialects.messages.blocks import Strict
from penstock_interception.ingress.dialects.reading import json_text

NAME: Final = r"^[a-zA-Z0-9_.:/-]{1,128}$"
_PATH: Final = {"type": "string", "description": "Absolute path of a file or directory."}
_TEXT: Final = {"type": "string"}
_LINES: Final = {"type": "array", "items": {"type": "integer"}, "description": "First and last line; -1 is the end."}


class ToolDefinition(Strict):
    """One entry of `tools`, of any kind."""

    type: str | None = None
    name: Annotated[str, StringConstraints(pattern=NAME)] | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


@dataclass(frozen=True, slots=True)
class Toolbox:
    """`loaded` are in the prompt; `deferred`, by name, only once something refers to them; `hosted` were removed."""

    loaded: tuple[Tool, ...] = ()
    deferred: Mapping[str, Tool] = field(default_factory=dict)
    hosted: tuple[str, ...] = ()

    def named(self, name: str) -> Tool | None:
        """Returns a tool that the model may call, whether it is in the prompt or not."""
        return next((tool for tool in self.loaded if tool.name == name), self.deferred.get(name))

    def definition(self, name: str, path: str) -> str:
        """Returns a tool as text, to replace a reference to it. Raises BadRequest for a tool that is not in `tools`."""
        tool = self.named(name)
        if tool is None:
            raise BadRequest(f"{path}: refers to a tool that is not in tools.", path, "invalid_value")
        return definition_text(tool)


def definition_text(tool: Tool) -> str:
    """Returns a tool's definition as shown to models within a conversation: one line of JSON."""
    function = {"name": tool.name, "description": tool.description, "parameters": orjson.Fragment(_schema(tool))}
    return orjson.dumps({"type": "function", "function": function}).decode() + "\n"


def read_tools(definitions: Sequence[ToolDefinition]) -> Toolbox:
    """Parses the tools of a request. Raises BadRequest."""
    found: list[tuple[Tool, bool]] = []
    hosted: list[str] = []
    for index, definition in enumerate(definitions):
        tool = read_tool(definition, f"tools[{index}]")
        if tool is None:
            hosted.append(definition.type or "")
        else:
            found.append((tool, bool(definition.defer_loading)))
    if len({tool.name for tool, _ in found}) != len(found):
        raise BadRequest("tools: two tools have the same name.", "tools", "invalid_value")
    # Tools that only the provider's own search would reveal must be in the prompt from the start.
    search = any(kind.startswith("tool_search_tool") for kind in hosted)
    loaded = tuple(tool for tool, deferred in found if search or not deferred)
    return Toolbox(loaded, {tool.name: tool for tool, deferred in found if deferred and not search}, tuple(hosted))


def read_tool(definition: ToolDefinition, path: str) -> Tool | None:
    """Parses one tool; None for a hosted one. Raises BadRequest."""
    kind = definition.type or "custom"
    known = next((tool for prefix, tool in _RUN_BY_CLIENTS.items() if kind.startswith(prefix)), None)
    if kind != "custom" and known is None:
        return None
    if definition.name is None:
        raise BadRequest(f"{path}.name: Field required.", f"{path}.name", "invalid_value")
    if known is not None:
        return Tool(definition.name, known.description, known.parameters_json_schema)
    if definition.input_schema is None:
        raise BadRequest(f"{path}.input_schema: Field required.", f"{path}.input_schema", "invalid_value")
    schema = json_text(definition.input_schema, f"{path}.input_schema")
    return Tool(definition.name, definition.description or "", schema, definition.strict)


def _schema(tool: Tool) -> bytes:
    return tool.parameters_json_schema.encode()


def _client_tool(description: str, required: list[str], **properties: Any) -> Tool:
    schema = {"type": "object", "properties": properties, "required": required}
    return Tool("", description, orjson.dumps(schema).decode())


def _commands(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names)}


# By type prefix: the types end in dates. The parameters are those of Anthropic's public documentation.
_RUN_BY_CLIENTS: Final = {
    "bash_": _client_tool(
        "Run a command in a persistent bash session.",
        [],
        command={**_TEXT, "description": "The command."},
        restart={"type": "boolean", "description": "Start the session anew."},
    ),
    "text_editor_": _client_tool(
        "View, create and edit text files.",
        ["command", "path"],
        command=_commands("view", "create", "str_replace", "insert"),
        path=_PATH,
        view_range=_LINES,
        file_text={**_TEXT, "description": "The content of a file to create."},
        old_str={**_TEXT, "description": "The text to replace, which occurs exactly once."},
        new_str={**_TEXT, "description": "What replaces it."},
        insert_line={"type": "integer", "description": "The line after which to insert; 0 is the beginning."},
        insert_text={**_TEXT, "description": "The text to insert."},
    ),
    "memory_": _client_tool(
        "Keep notes in files below /memories.",
        ["command"],
        command=_commands("view", "create", "str_replace", "insert", "delete", "rename"),
        path=_PATH,
        view_range=_LINES,
        file_text=_TEXT,
        old_str=_TEXT,
        new_str=_TEXT,
        insert_line={"type": "integer"},
        insert_text=_TEXT,
        old_path=_PATH,
        new_path=_PATH,
    ),
}
