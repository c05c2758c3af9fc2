"""Google generateContent: the shape of a request, checked by pydantic; names in camelCase or snake_case.

A null is an unset field, as in all of Google's JSON. `generate_content.request` translates the body.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

MAX_CONTENTS: Final = 20_000
INT32: Final = 2**31 - 1
INT64: Final = 2**63 - 1


def _whole(value: Any) -> Any:
    """Protobuf's JSON has one kind of number: 64.0 is an integer too."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _member(value: Any) -> Any:
    """Enum values are upper case; older clients write them in lower case."""
    return value.upper() if isinstance(value, str) else value


def _system(value: Any) -> Any:
    """A bare text or part is accepted as a content of one part."""
    if isinstance(value, str):
        return {"parts": [{"text": value}]}
    return {"parts": [value]} if isinstance(value, dict) and "text" in value and "parts" not in value else value


ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]
Count = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=INT32)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class _Strict(BaseModel):
    model_config = ConfigDict(
        strict=True,
        extra="ignore",
        hide_input_in_errors=True,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
    )


class _Open(_Strict):
    """A part of a body whose unknown fields are recorded."""

    model_config = ConfigDict(extra="allow")


class Blob(_Strict):
    """Bytes in base64, of either alphabet."""

    mime_type: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9!#$&^_.+-]{1,100}/[A-Za-z0-9!#$&^_.+-]{1,100}$")]
    data: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+/_-]*={0,2}$")]


class FileData(_Strict):
    """Bytes by reference."""

    file_uri: str
    mime_type: str | None = None


class FunctionCall(_Strict):
    """A tool call; many clients write no id."""

    name: Annotated[str, StringConstraints(min_length=1)]
    args: dict[str, Any] | None = None
    id: str | None = None


class ResponsePart(_Strict):
    """A non-text piece of a tool's result."""

    inline_data: Blob | None = None
    file_data: FileData | None = None


class FunctionResponse(_Strict):
    """A tool's result; the keys `output` and `error` have a meaning, otherwise the whole object is the output."""

    name: Annotated[str, StringConstraints(min_length=1)]
    response: dict[str, Any] | None = None
    id: str | None = None
    parts: list[ResponsePart] | None = None


class Part(_Open):
    """One piece of a content: at most one of its data fields is set."""

    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    inline_data: Blob | None = None
    file_data: FileData | None = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None
    # Traces of the provider's own tools in a history.
    executable_code: dict[str, Any] | None = None
    code_execution_result: dict[str, Any] | None = None
    tool_call: dict[str, Any] | None = None
    tool_response: dict[str, Any] | None = None


class Content(_Strict):
    """One side's content; without a role it is the user's."""

    role: Literal["user", "model", "function", "system"] | None = None
    parts: list[Part] | None = None


class FunctionDeclaration(_Strict):
    """A tool; its parameters as Google's Schema or as JSON Schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None


class Tools(_Open):
    """Functions, and under other names the provider's own tools."""

    function_declarations: list[FunctionDeclaration] | None = None


class FunctionCallingConfig(_Strict):
    """Whether tools must be called."""

    mode: (
        Annotated[Literal["MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED"], BeforeValidator(_member)] | None
    ) = None
    allowed_function_names: list[str] | None = None


class ToolConfig(_Strict):
    function_calling_config: FunctionCallingConfig | None = None


class ThinkingConfig(_Strict):
    """A budget of 0 is off, -1 leaves it to the model."""

    include_thoughts: bool | None = None
    thinking_budget: Annotated[int, BeforeValidator(_whole), Field(ge=-1, le=INT32)] | None = None
    thinking_level: (
        Annotated[Literal["THINKING_LEVEL_UNSPECIFIED", "MINIMAL", "LOW", "MEDIUM", "HIGH"], BeforeValidator(_member)]
        | None
    ) = None


class GenerationConfig(_Open):
    """Sampling and the form of the answer."""

    temperature: Annotated[float, Field(ge=0, le=5)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, BeforeValidator(_whole), Field(ge=0, le=INT32)] | None = None
    candidate_count: Annotated[int, BeforeValidator(_whole)] | None = None
    max_output_tokens: Count | None = None
    stop_sequences: Annotated[list[str], Field(max_length=16)] | None = None
    seed: Annotated[int, BeforeValidator(_whole), Field(ge=-(2**63), le=INT64)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    response_logprobs: bool | None = None
    logprobs: Annotated[int, BeforeValidator(_whole), Field(ge=0, le=20)] | None = None
    response_mime_type: str | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: dict[str, Any] | None = None
    response_modalities: list[Annotated[str, BeforeValidator(_member)]] | None = None
    thinking_config: ThinkingConfig | None = None


class GenerateContentBody(_Open):
    """The fields that have an effect here."""

    contents: Annotated[list[Content], Field(min_length=1, max_length=MAX_CONTENTS)]
    system_instruction: Annotated[Content, BeforeValidator(_system)] | None = None
    tools: list[Tools] | None = None
    tool_config: ToolConfig | None = None
    generation_config: GenerationConfig | None = None
    cached_content: str | None = None
