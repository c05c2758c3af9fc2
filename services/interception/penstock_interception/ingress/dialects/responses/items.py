"""The items of a Responses conversation: their shapes, and how items become messages.

One turn of the model comes back as several items (reasoning, text, calls). They are joined into one `Message` again, so
that the graph recognises the sampled turn (R82). Two adjacent turns are separated by their item ids, which begin with
the id of the call that they answered.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Tag

from penstock_codec.chat import (
    ImagePart,
    Message,
    Part,
    ReasoningPart,
    Role,
    TextPart,
    ToolCallPart,
    ToolResultPart,
)
from penstock_interception.ingress.dialects.base import BadRequest
from penstock_interception.ingress.dialects.images import image_at
from penstock_interception.ingress.dialects.reading import json_text
from penstock_interception.ingress.dialects.responses.shapes import (
    SHAPES,
    LocalShellAction,
    PatchOperation,
    ShellAction,
    Strict,
)
from penstock_interception.ingress.dialects.responses.tools import (
    AnyTool,
    custom_arguments,
    flat_name,
    shaped_arguments,
)

_SEAL: Final = "penstock.1."
_OUR_ID: Final = re.compile(r"[a-z]{2,4}_([0-9a-f]{32})(?:_\d+)?")
_HOSTED: Final = frozenset(
    {
        "web_search_call",
        "file_search_call",
        "computer_call",
        "computer_call_output",
        "code_interpreter_call",
        "image_generation_call",
        "mcp_call",
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_response",
        "tool_search_call",
        "tool_search_output",
        "program",
        "program_output",
    }
)


class _Text(Strict):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class _Refusal(Strict):
    type: Literal["refusal"]
    refusal: str


class _Image(Strict):
    type: Literal["input_image"]
    image_url: str


Content = str | list[Annotated[_Text | _Refusal | _Image, Discriminator("type")]]


class _Item(Strict):
    id: str | None = None


class MessageItem(_Item):
    """A text message of any role."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class ReasoningItem(_Item):
    summary: list[_Text] | None = None
    content: list[_Text] | None = None
    encrypted_content: str | None = None


class FunctionCallItem(_Item):
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class CustomCallItem(_Item):
    """A call with free text."""

    call_id: str
    name: str
    input: str
    namespace: str | None = None


class LocalShellCallItem(_Item):
    """A command to run."""

    call_id: str
    action: LocalShellAction


class ShellCallItem(_Item):
    """Shell lines to run."""

    call_id: str
    action: ShellAction


class PatchCallItem(_Item):
    """A file change to make."""

    call_id: str
    operation: PatchOperation


class OutputItem(_Item):
    """A call's result: text, parts, or a structure of the tool's kind."""

    call_id: str
    output: Content


class LocalShellOutputItem(_Item):
    """A command's result. Older clients identify the call by `id`."""

    call_id: str | None = None
    output: str


class ShellOutputItem(_Item):
    """The result of shell lines: a list of outputs and exits."""

    call_id: str
    output: str | list[dict[str, Any]]


class PatchOutputItem(_Item):
    """A file change's result."""

    call_id: str
    output: str | None = None
    status: Literal["completed", "failed"] = "completed"


class ToolsItem(_Item):
    tools: list[AnyTool]


class HostedItem(_Item):
    """A trace of a provider's own tool."""

    type: str


class ReferenceItem(_Item):
    """An item that is stored only at the provider."""


def _item_tag(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    if kind is None:
        return "message" if "role" in value else "item_reference"
    return "hosted" if isinstance(kind, str) and kind in _HOSTED else kind if isinstance(kind, str) else None


AnyItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[LocalShellCallItem, Tag("local_shell_call")]
    | Annotated[ShellCallItem, Tag("shell_call")]
    | Annotated[PatchCallItem, Tag("apply_patch_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[OutputItem, Tag("custom_tool_call_output")]
    | Annotated[LocalShellOutputItem, Tag("local_shell_call_output")]
    | Annotated[ShellOutputItem, Tag("shell_call_output")]
    | Annotated[PatchOutputItem, Tag("apply_patch_call_output")]
    | Annotated[ToolsItem, Tag("additional_tools")]
    | Annotated[HostedItem, Tag("hosted")]
    | Annotated[ReferenceItem, Tag("item_reference")],
    Discriminator(_item_tag, custom_error_type="item_type", custom_error_message="No item of this type is known"),
]


def sealed(reasoning: str) -> str:
    """Wraps reasoning as `encrypted_content`: opaque to clients, which send it back; not actually secret."""
    return _SEAL + base64.urlsafe_b64encode(reasoning.encode("utf-8", "surrogatepass")).decode()


def unsealed(text: str) -> str | None:
    """Reverses `sealed`; None for any other text, such as one that is no Unicode: no message can hold it."""
    if not text.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(text.removeprefix(_SEAL), b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def messages_of(items: list[Any], notes: list[str]) -> list[Message]:
    """Returns the messages of these items (AnyItem), in order. Raises BadRequest for a reference to a stored item."""
    messages: list[Message] = []
    turn_parts: list[Part] = []  # the model's parts in the current turn
    turn_author = ""
    for index, item in enumerate(items):
        parts = _model_parts(item)
        if parts is not None:
            found = _OUR_ID.fullmatch(item.id or "")
            if found is not None:
                if turn_parts and turn_author and found[1] != turn_author:
                    messages.append(Message(Role.ASSISTANT, tuple(turn_parts)))
                    turn_parts = []
                turn_author = found[1]
            turn_parts += parts
            continue
        if isinstance(item, ReferenceItem):
            path = f"input[{index}]"
            raise BadRequest(f"{path}: items are not stored: send them whole.", path, "unsupported_value")
        if isinstance(item, HostedItem):
            notes.append(f"input[{index}], a {item.type} of a hosted tool, was left out")
            continue
        if isinstance(item, ToolsItem):
            continue
        if turn_parts:
            messages.append(Message(Role.ASSISTANT, tuple(turn_parts)))
        turn_parts, turn_author = [], ""
        messages.append(_input_message(item, index))
    if turn_parts:
        messages.append(Message(Role.ASSISTANT, tuple(turn_parts)))
    return messages


def _model_parts(item: Any) -> list[Part] | None:
    """Returns the model's parts in an item; None for an item that is not the model's."""
    match item:
        case MessageItem(role="assistant"):
            return _parts(item.content)
        case ReasoningItem():
            return _reasoning(item)
        case FunctionCallItem():
            return [ToolCallPart(item.call_id, flat_name(item.name, item.namespace), item.arguments)]
        case CustomCallItem():
            arguments = custom_arguments(item.input, item.id)
            return [ToolCallPart(item.call_id, flat_name(item.name, item.namespace), arguments)]
        case LocalShellCallItem():
            return [ToolCallPart(item.call_id, SHAPES["local_shell"].tool.name, shaped_arguments(item.action))]
        case ShellCallItem():
            return [ToolCallPart(item.call_id, SHAPES["shell"].tool.name, shaped_arguments(item.action))]
        case PatchCallItem():
            return [ToolCallPart(item.call_id, SHAPES["apply_patch"].tool.name, shaped_arguments(item.operation))]
    return None


def _reasoning(item: ReasoningItem) -> list[Part]:
    seal = item.encrypted_content or ""
    ours = unsealed(seal)
    content = "".join(part.text for part in item.content or ())
    text = content or ours or "\n\n".join(part.text for part in item.summary or ())
    foreign = b"" if ours is not None else seal.encode("utf-8", "surrogatepass")
    return [ReasoningPart(text, foreign)] if text or foreign else []


def _input_message(item: Any, index: int) -> Message:
    """Returns the message of an item that is not the model's."""
    match item:
        case MessageItem():
            return Message(Role(item.role), tuple(_parts(item.content)))
        case OutputItem():
            parts = _parts(item.output)
            text = "".join(part.text for part in parts if isinstance(part, TextPart))
            images = tuple(part for part in parts if isinstance(part, ImagePart))
            return _result(item.call_id, text, images=images)
        case LocalShellOutputItem():
            return _result(item.call_id or item.id or "", item.output)
        case ShellOutputItem():
            text = item.output if isinstance(item.output, str) else json_text(item.output, f"input[{index}].output")
            return _result(item.call_id, text)
        case PatchOutputItem():
            return _result(item.call_id, item.output or item.status, is_error=item.status == "failed")
    raise TypeError(f"{type(item).__name__} is no item")


def _result(call_id: str, text: str, *, is_error: bool = False, images: tuple[ImagePart, ...] = ()) -> Message:
    return Message(Role.TOOL, (ToolResultPart(call_id, text, is_error, None, images),))


def _parts(content: Content) -> list[Part]:
    if isinstance(content, str):
        return [TextPart(content)] if content else []
    parts: list[Part] = []
    for part in content:
        match part:
            case _Text():
                parts.append(TextPart(part.text))
            case _Refusal():
                parts.append(TextPart(part.refusal))
            case _Image():
                parts.append(image_at(part.image_url, "input.content.image_url"))
    return parts
