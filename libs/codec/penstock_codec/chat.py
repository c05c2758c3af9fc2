"""The chat vocabulary of Penstock's domain: messages, tools, sampling, completions.

Plain immutable values, free of any wire format. Ingress dialects and the rpc layers convert to and from them; the codec
renders them to token ids and parses them back. A value holds the content, never a client's serialisation, with one
exception: `ToolCallPart.arguments_json` is the text exactly as it was sampled (or received).
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

from penstock_codec.fast_dataclass import quick

_DIGEST = "sha256:"


class Role(StrEnum):
    """The author of a message."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@quick
@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@quick
@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """The model's reasoning before its answer; `signature` is a provider's opaque mark, to be echoed verbatim."""

    text: str
    signature: bytes = b""


@quick
@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image: inline, with its file's bytes, or by address alone, which only upstreams take.

    `ref` identifies it: "sha256:" and the hex digest of an inline image's bytes, or the address. `size` is the width
    and height in pixels, if its file was measured.
    """

    ref: str
    media_type: str = ""
    data: bytes = field(default=b"", repr=False)
    size: tuple[int, int] | None = field(default=None, compare=False)

    @classmethod
    def inline(cls, data: bytes, media_type: str, size: tuple[int, int] | None = None) -> ImagePart:
        """An image with its bytes, of an IANA media type."""
        return cls(f"{_DIGEST}{hashlib.sha256(data).hexdigest()}", media_type, data, size)

    @property
    def sha256(self) -> bytes:
        """SHA-256 of an inline image's bytes; empty for one by address."""
        return bytes.fromhex(self.ref.removeprefix(_DIGEST)) if self.data else b""

    @property
    def url(self) -> str:
        """The address, or a data URL with the bytes."""
        if not self.data:
            return self.ref
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"


@quick
@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """A call of a tool by the assistant; `arguments_json` is the sampled text, spacing included."""

    id: str
    name: str
    arguments_json: str


@quick
@dataclass(frozen=True, slots=True)
class ToolResultPart:
    """A tool's result for the call `call_id`."""

    call_id: str
    text: str
    is_error: bool = False
    name: str | None = None
    images: tuple[ImagePart, ...] = ()


Part: TypeAlias = TextPart | ReasoningPart | ImagePart | ToolCallPart | ToolResultPart


@quick
@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation: a role, its parts in order, and the speaker's name where a dialect has one."""

    role: Role
    parts: tuple[Part, ...] = ()
    name: str = ""

    @property
    def text(self) -> str:
        """All visible text, joined without a separator; a tool message's text is its results' text."""
        return "".join([part.text for part in self.parts if isinstance(part, (TextPart, ToolResultPart))])

    @property
    def reasoning(self) -> str:
        """All reasoning, joined without a separator."""
        return "".join([part.text for part in self.parts if isinstance(part, ReasoningPart)])

    @property
    def tool_calls(self) -> tuple[ToolCallPart, ...]:
        """The tool calls, in the order sampled."""
        return tuple([part for part in self.parts if isinstance(part, ToolCallPart)])

    @property
    def images(self) -> tuple[ImagePart, ...]:
        """All images in the order in which they are shown: those of results, then the others."""
        for part in self.parts:  # few messages have any, and this runs for each message of each call
            kind = type(part)
            if kind is ImagePart or (kind is ToolResultPart and part.images):  # type: ignore[union-attr]
                break
        else:
            return ()
        shown: list[ImagePart] = []
        for part in self.parts:
            if type(part) is ToolResultPart:
                shown += part.images
        return (*shown, *[part for part in self.parts if type(part) is ImagePart])

    @property
    def tool_results(self) -> tuple[ToolResultPart, ...]:
        """The tool results, in order."""
        return tuple([part for part in self.parts if isinstance(part, ToolResultPart)])

    @classmethod
    def system(cls, text: str) -> Message:
        """A system message of one text part."""
        return cls(Role.SYSTEM, (TextPart(text),))

    @classmethod
    def user(cls, text: str) -> Message:
        """A user message of one text part."""
        return cls(Role.USER, (TextPart(text),))

    @classmethod
    def assistant(cls, text: str = "", *calls: ToolCallPart, reasoning: str = "") -> Message:
        """An assistant message: reasoning, text and tool calls, each only if given."""
        parts: list[Part] = []
        if reasoning:
            parts.append(ReasoningPart(reasoning))
        if text:
            parts.append(TextPart(text))
        return cls(Role.ASSISTANT, (*parts, *calls))

    @classmethod
    def tool(cls, call_id: str, text: str, *, is_error: bool = False, name: str | None = None) -> Message:
        """A tool message that answers one call."""
        return cls(Role.TOOL, (ToolResultPart(call_id, text, is_error, name),))


@quick
@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call; `parameters_json_schema` is the JSON text of an object, as the agent sent it."""

    name: str
    description: str
    parameters_json_schema: str
    strict: bool | None = None


class ToolChoiceMode(StrEnum):
    """Whether and how the model must call a tool."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The client's tool choice; `name` is set exactly when the mode is NAMED."""

    mode: ToolChoiceMode = ToolChoiceMode.AUTO
    name: str | None = None
    parallel_tool_calls: bool | None = None

    def __post_init__(self) -> None:
        if (self.mode is ToolChoiceMode.NAMED) != (self.name is not None):
            raise ValueError("ToolChoice.name must be set if mode is 'named', and only then")


@quick
@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling as requested or as used. None means unset, which differs from any value (R64).

    temperature >= 0 (0 is greedy); top_p in (0, 1], min_p in [0, 1]; top_k >= 1; token counts >= 1; `top_logprobs` is
    the number of alternatives requested per token; `response_format` is JSON text as the OpenAI API writes it;
    `token_tensors` names what the engine returns beside tokens. In an override, top_k 0 turns the agent's off.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    n: int | None = None
    top_logprobs: int | None = None
    thinking: bool | None = None
    thinking_budget_tokens: int | None = None
    response_format: str | None = None
    token_tensors: tuple[str, ...] | None = None


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"
    CONTENT_FILTER = "content_filter"

    @property
    def truncated(self) -> bool:
        """Whether the model was cut off before it ended its turn."""
        return self in (FinishReason.LENGTH, FinishReason.ABORT)


MOST_TOKENS: Final = 2**31 - 1
"""The most that a count of `Usage` may be where others report it: their sums must fit int64."""


@quick
@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one call."""

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def total_tokens(self) -> int:
        """Prompt plus completion."""
        return self.prompt_tokens + self.completion_tokens
