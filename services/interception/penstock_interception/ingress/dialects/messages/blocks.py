"""Anthropic Messages: a request's content blocks, each kind with the fields that have an effect here.

pydantic refuses other kinds with the block's path: among them images and documents by file id, and PDF documents, which
the service cannot read.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field


class Strict(BaseModel):
    """No coercion; unknown fields are dropped; errors do not repeat the input."""

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)


class TextBlock(Strict):
    """Text; cache and citation marks have no effect here."""

    type: Literal["text"]
    text: str


class Base64Image(Strict):
    type: Literal["base64"]
    media_type: str
    data: str


class UrlImage(Strict):
    type: Literal["url"]
    url: str


class ImageBlock(Strict):
    type: Literal["image"]
    source: Annotated[Base64Image | UrlImage, Discriminator("type")]


class PlainDocument(Strict):
    """A document as a single text."""

    type: Literal["text"]
    data: str


class ContentDocument(Strict):
    type: Literal["content"]
    content: str | list[Annotated[TextBlock | ImageBlock, Discriminator("type")]]


class DocumentBlock(Strict):
    type: Literal["document"]
    source: Annotated[PlainDocument | ContentDocument, Discriminator("type")]
    title: str | None = None
    context: str | None = None


class SearchResultBlock(Strict):
    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]


class ToolReferenceBlock(Strict):
    """The name of a deferred tool that the client's tool search found."""

    type: Literal["tool_reference"]
    tool_name: str


class ToolResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[ResultItem] | None = None
    is_error: bool | None = None


class ThinkingBlock(Strict):
    """Returned reasoning; empty if it was not shown to the client."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Strict):
    """The provider's reasoning, readable only by the provider."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Strict):
    """A call of a client's tool; its input was parsed and re-serialised."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class HostedBlock(Strict):
    """A hosted tool's trace in a conversation that began elsewhere."""

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
    """A tool in `tools`, by name."""

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
    """A message of the user, or of the agent on the user's behalf."""

    role: Literal["user"]
    content: str | list[UserBlock]


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: str | list[AssistantBlock]


class SystemMessage(Strict):
    """Instructions within a conversation."""

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
    """Whether the model must call a tool, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Strict):
    """A JSON schema for the answer."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    effort: str | None = None
    format: OutputFormat | None = None
