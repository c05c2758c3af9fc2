"""Conversations and completions as values.

Token ids and logprobs are numpy arrays (int32 and float32, one dimension); those received from a service are read-only
views of the message that carried them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.client.errors import InvalidArgument
from penstock.values import OpenEnum
from penstock.values.token_tensors import DTYPES

TokenIds: TypeAlias = NDArray[np.int32]
"""Token ids, shape (n,)."""

Logprobs: TypeAlias = NDArray[np.float32]
"""Natural logarithms, finite and <= 0, shape (n,)."""


class Role(OpenEnum):
    """The author of a message."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class FinishReason(OpenEnum):
    """Why a completion ended. UNSPECIFIED is only ever read, from an answer without a reason."""

    UNSPECIFIED = "unspecified"
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"
    CONTENT_FILTER = "content_filter"


class LogprobsMode(OpenEnum):
    """The distribution of the logprobs: the model's, the one sampled from, or none (a script)."""

    UNSPECIFIED = "unspecified"
    RAW = "raw"
    PROCESSED = "processed"
    SCRIPTED = "scripted"


W = TypeVar("W", FinishReason, LogprobsMode)


def _word(kind: type[W], word: str, field: str) -> W:
    """Returns the member. Raises InvalidArgument that names all of them."""
    try:
        return kind(word)
    except ValueError:
        known = ", ".join(repr(item.value) for item in kind)
        raise InvalidArgument(f"{field} must be one of {known}, not {word!r}", reason="COMPLETION_SHAPE") from None


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The model's reasoning before its answer; `signature` is a provider's opaque seal over it."""

    text: str
    signature: bytes = b""


@dataclass(frozen=True, slots=True)
class Image:
    """An image: `data` inline, or a `url`."""

    media_type: str
    data: bytes = field(default=b"", repr=False)
    url: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A request to run a tool; `arguments_json` is exactly as the model wrote it and need not be JSON."""

    id: str
    name: str
    arguments_json: str


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool's result: text and image parts."""

    tool_call_id: str
    parts: tuple["Part", ...]
    is_error: bool = False


Part: TypeAlias = Text | Reasoning | Image | ToolCall | ToolResult
"""One part of a message."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message: a role and its parts in order."""

    role: Role
    parts: tuple[Part, ...]
    name: str = ""

    @classmethod
    def of(cls, role: Role | str, text: str) -> Self:
        """Returns a message of one text."""
        return cls(Role(role), (Text(text),))

    @property
    def text(self) -> str:
        """All text parts, joined."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls among the parts."""
        return tuple(part for part in self.parts if isinstance(part, ToolCall))


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call; the schema is JSON text, byte for byte as the agent sent it."""

    name: str
    description: str = ""
    parameters_json_schema: str = ""
    strict: bool | None = None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools the model may use: mode `auto`, `none`, `required`, or `named` with a `name`."""

    mode: str
    name: str = ""
    parallel_tool_calls: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters. None (or an empty tuple) = unset: the sampler's default applies.

    Ranges: temperature [0, 5], 0 being greedy; top_p (0, 1]; top_k >= 1; min_p [0, 1]; max_tokens >= 1; n is 1 wherever
    a conversation is captured; top_logprobs 0 to 20; token_tensors: "routed_experts", of an engine that has it. Where
    it overrides the agent's sampling, top_k 0 turns the agent's off, while None leaves it.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    n: int | None = None
    top_logprobs: int | None = None
    thinking: bool | None = None
    thinking_budget_tokens: int | None = None
    response_format_json: str | None = None
    token_tensors: tuple[str, ...] = ()

    def replace(self, **changes: Any) -> "Sampling":
        """Returns a copy with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) were sampled by the weights of `policy_version`."""

    policy_version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a completion; None = unknown."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of a completion's stages in seconds; None = not measured."""

    queued: float | None = None
    prefill: float | None = None
    decode: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptImage:
    """An image of a prompt, and the tokens that stand for it. These are part of the prompt and never trained.

    Attributes:
        sha256: of the file's bytes.
        media_type: IANA media type, for example image/png.
        data: the file's bytes, as the agent sent them; empty where they were left out.
        token_start: the first of its tokens, of the prompt or the sample.
        token_count: how many stand for it.
        placeholder_token_id: those of its tokens that take an embedding.
        grid: its patches before they are merged: time, height, width; empty = the model has no grid.
        processor_sha256: identifies how the model's preprocessor counts tokens; empty = not known.
    """

    sha256: bytes
    media_type: str
    token_start: int
    token_count: int
    placeholder_token_id: int
    grid: tuple[int, ...] = ()
    processor_sha256: bytes = b""
    data: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class TokenTensor:
    """What an engine computed beside tokens, one row for each of consecutive tokens.

    Attributes:
        name: "routed_experts": the experts that computed each token; a row is (layers, experts per token).
        dtype: numpy's name, such as "uint8".
        start: the first row's token: among those of prompt and completion, or of the sample. A sequence's last token
            has no row, since the model was not run on it.
        shape: the number of rows, then the shape of a row.
        rows: of that shape and type, read-only; None where they were left out.
        sha256: of the rows as little-endian bytes; empty = not known.
    """

    name: str
    dtype: str
    start: int
    shape: tuple[int, ...]
    rows: NDArray[Any] | None = None
    sha256: bytes = b""

    @classmethod
    def of(cls, name: str, rows: ArrayLike, start: int = 0) -> Self:
        """Returns a tensor of whole numbers, with rows for the tokens from `start` on.

        Raises:
            InvalidArgument: `TENSOR_SHAPE`, the rows are not (rows, layers, experts per token), or no whole numbers.
        """
        array = np.ascontiguousarray(rows)
        if array.ndim != 3 or array.dtype.name not in DTYPES:
            raise InvalidArgument(
                f"{name} must be (rows, layers, experts per token) of {', '.join(DTYPES)}, not {array.shape} of "
                f"{array.dtype.name}",
                reason="TENSOR_SHAPE",
            )
        return cls(name, array.dtype.name, start, array.shape, array)

    @property
    def end(self) -> int:
        """The token after the last row's."""
        return self.start + self.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """The answer of an engine or a trainer to a call: every sampled token, the stop token included.

    Attributes:
        token_ids: int32, shape (n,); None from a source without tokens, which then gives a `message`.
        logprobs: float32, shape (n,); None where the engine gives none.
        versions: the policy version of each token span; ascending, without gaps over [0, n). Empty = unknown.
        message: shown to the agent instead of the parsed tokens.
        top_token_ids, top_logprobs: alternatives, int32 and float32 of shape (n, k), if sampling.top_logprobs requested
            them; likeliest first. A row with fewer ends with id -1 and -inf. None = none, or they were left out.
        top_count: k, also if the rows were left out; `top_sha256` then identifies them.
        tensors: as sampling.token_tensors asked, for tokens of prompt and completion. Rows that an earlier call of the
            conversation has may be missing.
    """

    token_ids: TokenIds | None = None
    logprobs: Logprobs | None = None
    logprobs_mode: LogprobsMode = LogprobsMode.UNSPECIFIED
    versions: tuple[VersionSpan, ...] = ()
    message: Message | None = None
    finish_reason: FinishReason = FinishReason.STOP
    stop_token_id: int | None = None
    stop_text: str | None = None
    sampling_used: Sampling | None = None
    engine: str = ""
    engine_version: str = ""
    model: str = ""
    timings: Timings | None = None
    usage: Usage | None = None
    top_token_ids: NDArray[np.int32] | None = None
    top_logprobs: NDArray[np.float32] | None = None
    top_count: int = 0
    top_sha256: bytes = b""
    tensors: tuple[TokenTensor, ...] = ()

    @classmethod
    def of_tokens(
        cls,
        token_ids: ArrayLike,
        logprobs: ArrayLike | None = None,
        *,
        policy_version: int | None = None,
        finish_reason: FinishReason | str = FinishReason.STOP,
        logprobs_mode: LogprobsMode | str = LogprobsMode.PROCESSED,
        engine: str = "trainer",
        sampling_used: Sampling | None = None,
        top_token_ids: ArrayLike | None = None,
        top_logprobs: ArrayLike | None = None,
        tensors: Sequence[TokenTensor] = (),
    ) -> Self:
        """Returns a completion from a trainer's own engine: any array-like, all sampled by one policy version.

        `top_token_ids` and `top_logprobs` are alternatives, shape (n, k), k at most 20, likeliest first in each row.
        `tensors` count positions from the prompt's first token.

        Raises:
            InvalidArgument: the arrays are not one-dimensional or differ in length; the alternatives are not (n, k);
                `finish_reason` or `logprobs_mode` is no word of its enum.
        """
        ids = np.ascontiguousarray(token_ids, dtype=np.int32)
        probabilities = None if logprobs is None else np.ascontiguousarray(logprobs, dtype=np.float32)
        if ids.ndim != 1 or (probabilities is not None and probabilities.shape != ids.shape):
            shape = None if probabilities is None else probabilities.shape
            raise InvalidArgument(
                f"token_ids and logprobs must be one-dimensional and of one length, not {ids.shape} and {shape}",
                reason="COMPLETION_SHAPE",
            )
        versions = () if policy_version is None or not len(ids) else (VersionSpan(policy_version, 0, len(ids)),)
        top_ids = None if top_token_ids is None else np.ascontiguousarray(top_token_ids, dtype=np.int32)
        top = None if top_logprobs is None else np.ascontiguousarray(top_logprobs, dtype=np.float32)
        mode = _word(LogprobsMode, logprobs_mode, "logprobs_mode")
        return cls(
            token_ids=ids,
            logprobs=probabilities,
            logprobs_mode=LogprobsMode.UNSPECIFIED if probabilities is None and top is None else mode,
            versions=versions,
            finish_reason=_word(FinishReason, finish_reason, "finish_reason"),
            engine=engine,
            sampling_used=sampling_used,
            top_token_ids=top_ids,
            top_logprobs=top,
            top_count=check_top(len(ids), top_ids, top),
            tensors=tuple(tensors),
        )

    @classmethod
    def of_text(cls, text: str, tool_calls: Sequence[ToolCall] = (), *, engine: str = "trainer") -> Self:
        """Returns a completion without tokens: shown to the agent, recorded as injected, never trained on."""
        parts: tuple[Part, ...] = ((Text(text),) if text else ()) + tuple(tool_calls)
        return cls(
            message=Message(Role.ASSISTANT, parts),
            finish_reason=FinishReason.TOOL_CALLS if tool_calls else FinishReason.STOP,
            engine=engine,
        )

    @property
    def policy_version(self) -> int | None:
        """The oldest policy version that sampled a part; None = unknown."""
        return min((span.policy_version for span in self.versions), default=None)

    def __len__(self) -> int:
        return 0 if self.token_ids is None else len(self.token_ids)


def check_top(count: int, ids: NDArray[np.int32] | None, logprobs: NDArray[np.float32] | None) -> int:
    """Returns the number of alternatives of each token; 0 without any.

    Raises:
        InvalidArgument: `COMPLETION_SHAPE`, not both are given, or they are not (count, k).
    """
    if ids is None and logprobs is None:
        return 0
    shapes = [None if array is None else np.shape(array) for array in (ids, logprobs)]
    if None in shapes or shapes[0] != shapes[1] or len(shapes[0] or ()) != 2 or (shapes[0] or ())[0] != count:
        raise InvalidArgument(
            f"top_token_ids and top_logprobs must both be ({count}, k), not {shapes[0]} and {shapes[1]}",
            reason="COMPLETION_SHAPE",
        )
    return int((shapes[0] or (0, 0))[1])
