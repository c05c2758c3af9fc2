"""OpenAI Chat Completions: a request's fields, as clients send them and pydantic validates them.

Classes and fields are named as in that API's reference.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints

MAX_MESSAGES = 20_000
INT32 = 2**31 - 1
INT64 = 2**63 - 1

ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]


class Strict(BaseModel):
    """A part of a body: types are not coerced, unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)


class TextPart(Strict):
    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(Strict):
    type: Literal["refusal"]
    refusal: str


class ImageUrl(Strict):
    url: str


class ImagePart(Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


class Function(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: Function


Content = str | list[Annotated[TextPart | ImagePart | RefusalPart, Discriminator("type")]]
TextContent = str | list[TextPart]


class System(Strict):
    role: Literal["system", "developer"]
    content: TextContent
    name: str | None = None


class User(Strict):
    role: Literal["user"]
    content: Content
    name: str | None = None


class Assistant(Strict):
    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_text: str | None = None
    name: str | None = None


class Tool(Strict):
    role: Literal["tool"]
    tool_call_id: str
    content: Content
    name: str | None = None


AnyMessage = Annotated[System | User | Assistant | Tool, Discriminator("role")]


class ToolFunction(Strict):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Strict):
    type: Literal["function"]
    function: ToolFunction


class NamedFunction(Strict):
    name: str


class NamedChoice(Strict):
    type: Literal["function"]
    function: NamedFunction


class StreamOptions(Strict):
    include_usage: bool | None = None


class TemplateOptions(Strict):
    enable_thinking: bool | None = None


class Settings(Strict):
    """All fields that have an effect here, except the conversation and the tools."""

    model_config = ConfigDict(strict=True, extra="allow", hide_input_in_errors=True)

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=5)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=INT32)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, le=INT32)]], Field(max_length=64)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=INT64)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    # Servers disagree on what these two may be, and they decide nothing but the template's arguments: any other value
    # than those that are known is ignored, not refused.
    reasoning_effort: Any = None
    thinking: Any = None
    functions: Any = None
    function_call: Any = None


class ChatBody(Settings):
    messages: Annotated[list[AnyMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: list[ToolDefinition] | None = None
