"""Tools of OpenAI Responses: their kinds, the model's view of each, and how their calls are written.

The model only knows functions with JSON arguments. A kind with a shape of its own (free text, shell commands, patches)
is shown to the model as a function. Its calls are written in that shape if their arguments fit exactly, so that an echo
of the item is the same call again. Otherwise the client gets the model's output (arguments as free text, or a plain
function call) and reports the error to the model in its own words.

A tool of a namespace is named `namespace__tool`: both names joined by two underscores.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import Discriminator, StringConstraints, Tag, ValidationError

from penstock_codec.chat import Tool, ToolCallPart
from penstock_interception.ingress.dialects.reading import json_text
from penstock_interception.ingress.dialects.responses.shapes import SHAPES, Arguments, Strict

ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]

MAX_TOOLS = 4096
_JOINT: Final = "__"
# Id prefixes of free-text calls: with the text in `input`, and with other arguments (raw).
_CUSTOM: Final = "ctc_"
_CUSTOM_RAW: Final = "ctx_"
_HOSTED: Final = (
    "web_search",
    "file_search",
    "computer",
    "code_interpreter",
    "image_generation",
    "mcp",
    "tool_search",
    "programmatic_tool_calling",
)
_INPUT_SCHEMA: Final = orjson.dumps(
    {
        "type": "object",
        "properties": {"input": {"type": "string", "description": "The whole input, as plain text."}},
        "required": ["input"],
        "additionalProperties": False,
    }
).decode()


class FunctionTool(Strict):
    """A function with JSON arguments."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Grammar(Strict):
    type: Literal["text", "grammar"]
    syntax: str | None = None
    definition: str | None = None


class CustomTool(Strict):
    """A function whose only argument is free text, possibly with a grammar."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: _Grammar | None = None


class NamespaceTool(Strict):
    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: list[AnyTool]


class LocalShellTool(Strict):
    """Commands that the client runs, by argument vector."""

    type: Literal["local_shell"]


class _Environment(Strict):
    type: str


class ShellTool(Strict):
    """Shell lines; run by the client if the environment is local, else by the provider."""

    type: Literal["shell"]
    environment: _Environment | None = None


class ApplyPatchTool(Strict):
    """Changes of files that the client makes."""

    type: Literal["apply_patch"]


class HostedTool(Strict):
    """A tool that the provider itself would run."""

    type: str


def _tool_tag(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        return None
    return "hosted" if kind.startswith(_HOSTED) else kind


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[LocalShellTool, Tag("local_shell")]
    | Annotated[ShellTool, Tag("shell")]
    | Annotated[ApplyPatchTool, Tag("apply_patch")]
    | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_tool_tag, custom_error_type="tool_type", custom_error_message="No tool of this type is known"),
]


@dataclass(frozen=True, slots=True)
class Known:
    """A tool as the client defined it."""

    kind: str
    name: str
    namespace: str | None = None


@dataclass(slots=True)
class Toolbox:
    """The tools of a request: the model's functions, and by their names the client's tools."""

    tools: list[Tool]
    known: dict[str, Known]
    notes: list[str]
    # The kinds of the removed tools.
    hosted: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, definitions: list[Any]) -> Toolbox:
        """Parses definitions (of AnyTool), in order. Raises BadRequest."""
        box = cls([], {}, [])
        for definition in definitions:
            box.add(definition, None)
        return box

    def add(self, definition: Any, namespace: str | None) -> None:
        """Adds the tools of one definition. Raises BadRequest for a schema that nests too deeply."""
        match definition:
            case NamespaceTool():
                inner = flat_name(definition.name, namespace)
                for member in definition.tools:
                    self.add(member, inner)
            case FunctionTool():
                name = flat_name(definition.name, namespace)
                schema = json_text(definition.parameters or {}, f"tools.{definition.name}.parameters")
                tool = Tool(name, definition.description or "", schema, definition.strict)
                self._keep(tool, Known("function", definition.name, namespace))
            case CustomTool():
                name = flat_name(definition.name, namespace)
                tool = Tool(name, _described(definition), _INPUT_SCHEMA)
                self._keep(tool, Known("custom", definition.name, namespace))
            case ShellTool() if definition.environment is not None and definition.environment.type != "local":
                self._leave_out("shell")
            case LocalShellTool() | ShellTool() | ApplyPatchTool():
                shape = SHAPES[definition.type]
                self._keep(shape.tool, Known(definition.type, shape.tool.name))
            case HostedTool():
                self._leave_out(definition.type)

    def _keep(self, tool: Tool, known: Known) -> None:
        self.tools.append(tool)
        self.known[tool.name] = known

    def _leave_out(self, kind: str) -> None:
        self.hosted.append(kind)
        self.notes.append(f"the hosted tool {kind} was left out: it would leave the gate")


def flat_name(name: str, namespace: str | None) -> str:
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith(_JOINT) else f"{namespace}{_JOINT}{name}"


def custom_arguments(text: str, item_id: str | None) -> str:
    """Returns a free-text call's arguments; an item id with the raw prefix means that the text is the arguments."""
    return text if (item_id or "").startswith(_CUSTOM_RAW) else orjson.dumps({"input": text}).decode()


def shaped_arguments(action: Arguments) -> str:
    return orjson.dumps(action.arguments()).decode()


def call_item(call: ToolCallPart, known: Known | None, mark: str) -> dict[str, Any]:
    """Returns the output item of a call; its id is made from `mark`."""
    arguments = _object(call.arguments_json)
    if known is not None and known.kind == "custom":
        text = arguments.get("input") if arguments is not None and len(arguments) == 1 else None
        kind, text = (_CUSTOM, text) if isinstance(text, str) else (_CUSTOM_RAW, call.arguments_json)
        item = {"type": "custom_tool_call", "id": f"{kind}{mark}", "call_id": call.id, "name": known.name}
        return {**item, "input": text, **_namespace(known)}
    shape = SHAPES.get(known.kind) if known is not None else None
    if shape is not None and arguments is not None:
        try:
            action = shape.model.model_validate({**arguments, **shape.model.constants})
        except ValidationError:
            action = None
        if action is not None and action.arguments() == arguments:
            item = {"type": shape.item, "id": f"{shape.id_prefix}_{mark}", "call_id": call.id, "status": "completed"}
            return {**item, shape.member: action.model_dump()}
    name = known.name if known is not None else call.name
    item = {"type": "function_call", "id": f"fc_{mark}", "call_id": call.id, "name": name}
    return {**item, "arguments": call.arguments_json, "status": "completed", **_namespace(known)}


def _namespace(known: Known | None) -> dict[str, str]:
    return {"namespace": known.namespace} if known is not None and known.namespace else {}


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = orjson.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _described(tool: CustomTool) -> str:
    parts = [tool.description or "", "The input is free text, not JSON."]
    if tool.format is not None and tool.format.definition:
        parts[1] = f"The input is free text that follows this {tool.format.syntax or ''} grammar:".replace("  ", " ")
        parts.append(tool.format.definition)
    return "\n\n".join(part for part in parts if part)
