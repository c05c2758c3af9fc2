"""Input and output values of a rollout's token graph.

Token ids are int32, logprobs float32 (natural logarithms, finite, <= 0). Spans are half open, [start, end).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.values.token_tensors import TokenTensor
from penstock_codec.chat import FinishReason, Message, Sampling
from penstock_codec.fast_dataclass import quick
from penstock_interception.cache import sha256

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
MaskArray = NDArray[np.uint8]
_LITTLE = sys.byteorder == "little"


def little_endian(array: IntArray | FloatArray) -> bytes:
    """Returns the array's bytes as used in journals, chains and on the wire."""
    if _LITTLE:
        return array.tobytes()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


class CallClass(StrEnum):
    """The purpose of a call. Every call has a class; none is dropped."""

    MAIN = "main"
    SUB_AGENT = "sub_agent"
    COMPACTION = "compaction"
    TITLE = "title"
    PROBE = "probe"
    EDIT = "edit"
    RETRY = "retry"
    JUDGE = "judge"
    USER = "user"


class LogprobsMode(StrEnum):
    """How logprobs were computed: see penstock.chat.v1.LogprobsMode."""

    RAW = "raw"
    PROCESSED = "processed"
    SCRIPTED = "scripted"


@quick
@dataclass(frozen=True, slots=True)
class CallHints:
    """What the ingress knows about a call besides its messages.

    `call_class` is set if the agent's spec or headers state it, and is final. `session` is the agent's own session id,
    "" if it sends none. `max_tokens` helps to recognise probes.
    """

    call_class: CallClass | None = None
    session: str = ""
    max_tokens: int | None = None


@quick
@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The policy version that sampled tokens [start, end)."""

    policy_version: int
    start: int
    end: int


MAX_TOP: Final = 20
"""The most alternatives of a token."""


@quick
@dataclass(frozen=True, slots=True, eq=False)
class TopLogprobs:
    """Alternatives of consecutive tokens: `token_ids` int32 and `logprobs` float32, both (tokens, k), likeliest first.

    A row with fewer than k alternatives ends with entries of id -1 and logprob -inf. 8 * k bytes per token.
    """

    token_ids: IntArray
    logprobs: FloatArray
    # SHA-256 of the ids, then the logprobs, as little-endian bytes: identifies them in the chain.
    sha256: bytes = field(init=False)

    def __post_init__(self) -> None:
        state = hashlib.sha256(little_endian(self.token_ids))
        state.update(little_endian(self.logprobs))
        object.__setattr__(self, "sha256", state.digest())

    @property
    def count(self) -> int:
        """The number of alternatives of each token."""
        return int(self.token_ids.shape[1])


@quick
@dataclass(frozen=True, slots=True)
class Media:
    """An image of a prompt, without its bytes; as the message of this name."""

    sha256: bytes
    media_type: str
    token_start: int
    token_count: int
    placeholder_token_id: int
    grid: tuple[int, ...] = ()
    processor_sha256: bytes = b""

    @property
    def token_end(self) -> int:
        """The first token after it."""
        return self.token_start + self.token_count


def prompt_identity(prompt_sha256: bytes, media: Iterable[bytes]) -> bytes:
    """Returns what identifies a prompt: the digest of its ids and, with images, of theirs.

    Two images of one size have the same ids.
    """
    digests = b"".join(media)
    return hashlib.sha256(prompt_sha256 + digests).digest() if digests else prompt_sha256


@quick
@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """One completion as delivered, with the message that the codec parsed from it.

    `token_ids`, `logprobs` and `top` are None if the source gave none. `versions` cover the tokens without a gap.
    `injected`: written by the trainer, not sampled. `usable`: False keeps the turn as context only. `tensors` have
    digests, and positions among the tokens of prompt and completion.
    """

    message: Message
    finish_reason: FinishReason
    token_ids: IntArray | None = None
    logprobs: FloatArray | None = None
    logprobs_mode: LogprobsMode | None = None
    versions: tuple[VersionSpan, ...] = ()
    sampling_used: Sampling | None = None
    engine: str = ""
    engine_version: str = ""
    injected: bool = False
    usable: bool = True
    top: TopLogprobs | None = None
    tensors: tuple[TokenTensor, ...] = ()
    policy_id: str = ""
    """The policy that sampled it, of which `versions` are; "" = the rollout's only one."""

    @property
    def count(self) -> int:
        """The number of sampled tokens; 0 without tokens."""
        return 0 if self.token_ids is None else int(self.token_ids.size)


@quick
@dataclass(frozen=True, slots=True)
class PromptKey:
    """A prompt's fingerprints: 16-byte digests, equal if the template renders the same.

    `state` covers the tools and all messages, `bare` only the messages.
    """

    state: bytes
    bare: bytes
    tools: bytes
    kwargs: bytes
    system: bytes
    first_user: bytes
    messages: int
    has_tools: bool


@quick
@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The place of a call in the graph, and the engine's prompt. Making a plan does not change the graph.

    The prompt is `shared_prefix_len` tokens of the parent's prompt and completion, then `suffix_ids`. `exact` is False
    if there are no tokens at all (a source without a tokenizer). `reason` explains a new branch. The class is
    provisional; `TokenGraph.branches` has the final one. `tensor_starts`: by policy, the first position whose rows of
    tensors the graph lacks; a policy that is not there has no rows. `media` are all images of the prompt, in the order
    of their tokens.
    """

    rollout_id: str
    branch_id: str
    new_branch: bool
    call_class: CallClass
    parent_call_id: str | None
    shared_prefix_len: int
    prompt_ids: IntArray
    suffix_ids: IntArray
    exact: bool
    reason: str
    key: PromptKey
    hints: CallHints
    # Control tokens spelled in texts could not be distinguished from the template's own.
    mixed_up: bool = False
    # What the call's record says about how its texts were taken.
    notes: tuple[str, ...] = ()
    tensor_starts: Mapping[str, int] = field(default_factory=dict)
    media: tuple[Media, ...] = ()
    # SHA-256 of the prompt's ids as little-endian int32: identifies the prompt in the chain and in the journal.
    prompt_sha256: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_sha256", sha256(little_endian(self.prompt_ids)))

    @property
    def new_media(self) -> tuple[Media, ...]:
        """The images that the parent's prompt does not have."""
        return tuple([one for one in self.media if one.token_start >= self.shared_prefix_len])

    @property
    def identity(self) -> bytes:
        """See `prompt_identity`."""
        return prompt_identity(self.prompt_sha256, [one.sha256 for one in self.media])


@quick
@dataclass(frozen=True, slots=True, eq=False)
class CallNode:
    """One committed call: the tokens that it added, and a link to the path that it continues.

    Its prompt is the first `keep` tokens of the parent's path, then `suffix`; its path is the prompt, then its sampled
    tokens. `media` are the images of the suffix. `planned_class` is the class at commit; `hinted` means that it was
    given, not inferred.
    """

    call_id: str
    index: int
    branch_id: str
    parent: CallNode | None
    keep: int
    suffix: IntArray
    sampled: Sampled
    key: PromptKey
    planned_class: CallClass
    hinted: bool
    session: str
    reason: str
    chain: bytes
    media: tuple[Media, ...] = ()
    prompt_count: int = field(init=False)  # length of the whole prompt in tokens
    total: int = field(init=False)  # length of prompt and completion in tokens
    has_tensors: bool = field(init=False)  # whether a call of its path has tensors

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_count", self.keep + int(self.suffix.size))
        object.__setattr__(self, "total", self.prompt_count + self.sampled.count)
        inherits = self.parent is not None and self.keep > 0 and self.parent.has_tensors
        object.__setattr__(self, "has_tensors", bool(self.sampled.tensors) or inherits)

    @property
    def continues_parent(self) -> bool:
        """Whether its prompt starts with the parent's whole prompt and completion."""
        return self.parent is not None and self.keep == self.parent.total


@dataclass(frozen=True, slots=True)
class Branch:
    """A line of calls. `fork_call_id` is the call after which it left another branch; None for a root."""

    branch_id: str
    call_class: CallClass
    fork_call_id: str | None
    shared_count: int
    call_ids: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """One call's sampled tokens, [start, end) of a sample; `untrained` is the reason for a mask of 0, "" for 1."""

    call_id: str
    start: int
    end: int
    untrained: str = ""
    policy_id: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One root-to-leaf token sequence for a trainer: three arrays of equal length.

    The mask is 1 exactly on sampled tokens to train; there the logprob is finite and <= 0, elsewhere 0.0. Tokens shared
    by several samples are masked 1 in only one of them. `weight` is the sample's share of the rollout's trained tokens.
    `logprobs_mode` is None if trained turns have different modes; `modes_mixed` is then set. `top` has a row for each
    token whose mask is 1, in order; None if no trained turn has alternatives, or they were not requested. `tensors` are
    those of its policy's calls, joined, with digests. Trained tokens are of one policy, `policy_id` ("" = the only
    one), and `weight` is the share of its trained tokens. `media` are the images of its prompts, in the order of their
    tokens.
    """

    sample_id: str
    branch_id: str
    call_class: CallClass
    input_ids: IntArray
    loss_mask: MaskArray
    logprobs: FloatArray
    logprobs_mode: LogprobsMode | None
    versions: tuple[VersionSpan, ...]
    turns: tuple[TurnSpan, ...]
    prompt_count: int
    weight: float
    truncated: bool
    modes_mixed: bool = False
    top: TopLogprobs | None = None
    tensors: tuple[TokenTensor, ...] = ()
    policy_id: str = ""
    media: tuple[Media, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplePolicy:
    """The turns to train; default: the classes that act on the task, and turns that the model ended itself."""

    classes: frozenset[CallClass] = field(
        default=frozenset({CallClass.MAIN, CallClass.SUB_AGENT, CallClass.COMPACTION, CallClass.EDIT})
    )
    train_truncated: bool = False
