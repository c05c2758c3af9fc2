"""An answer to a model call, as a domain value.

Token ids are int32 and logprobs float32, each stored once as a read-only numpy array over the received bytes: nothing
is tokenised again and nothing is filled in (R82).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from penstock.values.token_tensors import TokenTensor
from penstock_codec.chat import (
    MOST_TOKENS,
    FinishReason,
    Message,
    ReasoningPart,
    Role,
    Sampling,
    TextPart,
    ToolCallPart,
    Usage,
)
from penstock_codec.fast_dataclass import quick
from penstock_interception.domain.recordings import Origin
from penstock_interception.graph.values import FloatArray, IntArray, LogprobsMode, TopLogprobs, VersionSpan

_MOST_SECONDS: Final = 315_576_000_000
"""The longest google.protobuf.Duration."""
_REASONS: Final = {reason: repr(reason) for reason in FinishReason}


@quick
@dataclass(frozen=True, slots=True)
class Tokens:
    """Sampled tokens: `ids` int32, and `logprobs` float32 of the same length or None; `top` has a row per token.

    `tensors`, with digests, have rows of prompt tokens too.
    """

    ids: IntArray
    logprobs: FloatArray | None = None
    logprobs_mode: LogprobsMode | None = None
    versions: tuple[VersionSpan, ...] = ()
    top: TopLogprobs | None = None
    tensors: tuple[TokenTensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations in seconds; None if not measured."""

    queued_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None


@quick
@dataclass(frozen=True, slots=True)
class Completion:
    """An engine's or trainer's answer: tokens, a message (from a source without tokens), or both."""

    tokens: Tokens | None = None
    # The prompt as the engine tokenised it, if the source renders the conversation itself.
    prompt_ids: IntArray | None = None
    message: Message | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    stop_text: str | None = None
    sampling_used: Sampling | None = None
    engine: str = ""
    engine_version: str = ""
    model: str = ""
    timings: Timings | None = None
    usage: Usage | None = None
    # Set if it was replayed: not sampled for this call.
    origin: Origin | None = None

    @property
    def count(self) -> int:
        """The number of sampled tokens: counted if they are present, else as reported."""
        if self.tokens is not None:
            return int(self.tokens.ids.size)
        return self.usage.completion_tokens if self.usage is not None else 0

    def taken(self, tokens: Tokens | None, finish_reason: FinishReason, usage: Usage) -> Completion:
        """Returns the completion as it is stored: without the prompt, which the graph has."""
        return Completion(
            tokens,
            None,
            self.message,
            finish_reason,
            self.stop_token_id,
            self.stop_text,
            self.sampling_used,
            self.engine,
            self.engine_version,
            self.model,
            self.timings,
            usage,
            self.origin,
        )

    def digest(self) -> bytes:
        """Identifies an answer by what the agent sees and what is trained on; timings are excluded."""
        state = hashlib.sha256()
        if self.tokens is not None:
            state.update(self.tokens.ids.tobytes())
            if self.tokens.logprobs is not None:
                state.update(b"l" + self.tokens.logprobs.tobytes())
            if self.tokens.top is not None:
                state.update(b"t" + self.tokens.top.sha256)
            for tensor in self.tokens.tensors:
                state.update(repr((tensor.name, tensor.dtype, tensor.start, tensor.shape)).encode() + tensor.sha256)
            state.update(_versions_text(self.tokens.versions).encode())
        # Equals `repr` of the four values, but is faster.
        reason = "None" if self.finish_reason is None else _REASONS[self.finish_reason]
        state.update(f"({self.message!r}, {reason}, {self.stop_token_id!r}, {self.stop_text!r})".encode())
        return state.digest()


@dataclass(frozen=True, slots=True)
class Failure:
    """The answerer cannot answer. `reason` is recorded; the agent only learns that the model failed (R8)."""

    reason: str
    message: str = ""
    retriable: bool = True

    def digest(self) -> bytes:
        """Identifies a failure, as Completion.digest identifies an answer."""
        return hashlib.sha256(repr(("failure", self.reason, self.retriable)).encode()).digest()


def _versions_text(versions: tuple[VersionSpan, ...]) -> str:
    """Equals `repr(versions)`, but is faster. Digests in journals depend on this text."""
    spans = [f"VersionSpan(policy_version={v.policy_version}, start={v.start}, end={v.end})" for v in versions]
    return f"({', '.join(spans)}{',' if len(spans) == 1 else ''})"


def violations_of(completion: Completion) -> list[str]:
    """Returns the rules that a completion breaks, except those on its tokens, which the graph checks."""
    found: list[str] = []
    if completion.tokens is None and completion.message is None:
        found.append("completion: set a span or a message")
    if completion.tokens is not None and completion.tokens.ids.size == 0:
        found.append("completion.span: must have tokens")
    if completion.finish_reason is None:
        found.append("completion.finish_reason: must be set, to a reason that this version knows")
    elif completion.finish_reason is FinishReason.ABORT:
        found.append("completion.finish_reason: ABORT cannot answer an agent: fail or release the call instead")
    usage, took = completion.usage, completion.timings
    if usage is not None:
        counts = (usage.prompt_tokens, usage.completion_tokens, usage.reasoning_tokens, usage.cached_tokens)
        if not all(0 <= count <= MOST_TOKENS for count in counts if count is not None):
            found.append(f"completion.usage: every count must be from 0 to {MOST_TOKENS}")
    durations = () if took is None else (took.queued_s, took.prefill_s, took.decode_s)
    if not all(abs(duration) <= _MOST_SECONDS for duration in durations if duration is not None):
        found.append(f"completion.timings: no duration may be longer than {_MOST_SECONDS} s")
    if completion.message is not None and completion.message.role is not Role.ASSISTANT:
        found.append("completion.message.role: must be the assistant")
    parts = () if completion.message is None else completion.message.parts
    for index, part in enumerate(parts):
        if not isinstance(part, TextPart | ReasoningPart | ToolCallPart):
            found.append(f"completion.message.parts[{index}]: must be a text, reasoning or a tool call")
            break  # the first is enough: a message may have many
    return found
