"""Anthropic Messages: the content blocks of a request, each kind with the fields that mean something here.

Kinds that are not here are refused by pydantic with the block's path: among them images and documents by file id, and
documents as PDF, which nothing here can read.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field


class Strict(BaseModel):
    """No coercion; fields that are not named are left out; errors do not repeat the input."""

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)


class TextBlock(Strict):
    """Text; marks for caches and citations mean nothing here."""

    type: Literal["text"]
    text: str


class Base64Image(Strict):
    """An image in the body itself."""

    type: Literal["base64"]
    media_type: str
    data: str


class UrlImage(Strict):
    """An image elsewhere."""

    type: Literal["url"]
    url: str


class ImageBlock(Strict):
    """An image."""

    type: Literal["image"]
    source: Annotated[Base64Image | UrlImage, Discriminator("type")]


class PlainDocument(Strict):
    """A document as one text."""

    type: Literal["text"]
    data: str


class ContentDocument(Strict):
    """A document as blocks."""

    type: Literal["content"]
    content: str | list[Annotated[TextBlock | ImageBlock, Discriminator("type")]]


class DocumentBlock(Strict):
    """A document that is text."""

    type: Literal["document"]
    source: Annotated[PlainDocument | ContentDocument, Discriminator("type")]
    title: str | None = None
    context: str | None = None


class SearchResultBlock(Strict):
    """A passage that the client found."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]


class ToolReferenceBlock(Strict):
    """The name of a deferred tool that the client's tool search found."""

    type: Literal["tool_reference"]
    tool_name: str


class ToolResultBlock(Strict):
    """What a tool of the client answered."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[ResultItem] | None = None
    is_error: bool | None = None


class ThinkingBlock(Strict):
    """Reasoning that comes back; empty when the client was shown none."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Strict):
    """Reasoning of the provider's that nobody but it can read."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Strict):
    """A call of a tool of the client, whose input was read and written again."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class HostedBlock(Strict):
    """What a hosted tool left behind in a conversation that began elsewhere."""

    type: Literal[
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "advisor_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
        "container_upload",
        "browser_state",
        "fallback",
    ]


class NamedTool(Strict):
    """A tool of `tools`, by its name."""

    type: Literal["tool_reference"]
    name: str


class ToolAddition(Strict):
    """From here on the model may call this deferred tool."""

    type: Literal["tool_addition"]
    tool: NamedTool


class ToolRemoval(Strict):
    """From here on the model should not call this tool."""

    type: Literal["tool_removal"]
    tool: NamedTool


ResultItem = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock | HostedBlock,
    Discriminator("type"),
]
UserBlock = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolResultBlock | HostedBlock, Discriminator("type")
]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | HostedBlock, Discriminator("type")
]
SystemBlock = Annotated[TextBlock | ToolAddition | ToolRemoval, Discriminator("type")]
Shown = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock


class UserMessage(Strict):
    """What the user, or the agent for him, says."""

    role: Literal["user"]
    content: str | list[UserBlock]


class AssistantMessage(Strict):
    """What the model said."""

    role: Literal["assistant"]
    content: str | list[AssistantBlock]


class SystemMessage(Strict):
    """Instructions in the midst of a conversation."""

    role: Literal["system"]
    content: str | list[SystemBlock] = ""
    clear_at: str | None = None


AnyMessage = Annotated[UserMessage | AssistantMessage | SystemMessage, Discriminator("role")]


class Thinking(Strict):
    """Whether and how much the model may think, and whether the client wants to see it."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    display: str | None = None


class ToolChoiceParam(Strict):
    """Whether and which tool the model has to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Strict):
    """A JSON schema that the answer has to fit."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    """How to answer."""

    effort: str | None = None
    format: OutputFormat | None = None
