"""Values of sampling: what a generation is asked for, and what comes back of it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from penstock.values.token_tensors import TokenTensor
from penstock_inference.domain.response_format import ResponseFormat

TokenIds = NDArray[np.int32]
Logprobs = NDArray[np.float32]


class LogprobsMode(Enum):
    """The distribution of the reported logprobs."""

    PROCESSED = "processed"
    """Log-probability under the distribution sampled from: after temperature, penalties, top-k, top-p and min-p."""
    RAW = "raw"
    """Log-probability under the model's distribution, before temperature, penalties and filters."""
    SCRIPTED = "scripted"
    """Numbers from a test script; never train on them."""
    NONE = "none"


class FinishReason(Enum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample; every field takes effect or the engine refuses the request.

    Order of the filters: penalties, temperature, min-p, top-k, top-p, then renormalisation.
    """

    max_tokens: int
    """Most tokens to sample, >= 1."""
    temperature: float = 1.0
    """In [0, 5]; 0 is greedy, with the logprobs of the unfiltered distribution at temperature 1."""
    top_p: float = 1.0
    """In (0, 1]."""
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    """In [0, 1]: drop tokens less likely than this share of the most likely one."""
    min_tokens: int = 0
    """No stop token is sampled before this many tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """In addition to the model's own."""
    stop: tuple[str, ...] = ()
    """Texts that end the completion, at the token that completes one of them."""
    ignore_eos: bool = False
    """Do not stop at the model's own stop tokens."""
    seed: int | None = None
    """In [0, 2**63); unset draws one from the operating system."""
    repetition_penalty: float = 1.0
    """> 0; over prompt and completion."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_logprobs: int = 0
    """Alternatives to report per sampled token, most likely first; 0 to 20."""
    response_format: ResponseFormat | None = None
    """The required form of the completion, for engines with `Capabilities.structured_output`. Logprobs are those of the
    constrained distribution.
    """
    token_tensors: tuple[str, ...] = ()
    """Names of the tensors to return, each in `Capabilities.token_tensors`."""


_OF_CAPABILITIES = ("response_format", "token_tensors")
SAMPLING_FIELDS = tuple(each.name for each in fields(Sampling) if each.name not in ("ignore_eos", *_OF_CAPABILITIES))


"""Field names that callers may use; the others of the proto's have their own capabilities instead."""


IMAGE = "image"


@dataclass(frozen=True, slots=True)
class Media:
    """An image of a prompt; its tokens [token_start, token_start + token_count) stand for it, one for each position."""

    media_type: str
    sha256: bytes
    data: bytes = field(repr=False)
    """The file's bytes."""
    token_start: int
    token_count: int
    placeholder_token_id: int

    @property
    def token_end(self) -> int:
        """The first token after it."""
        return self.token_start + self.token_count


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation. `request_id` is the caller's and unique among those in flight."""

    request_id: str
    prompt_token_ids: TokenIds
    sampling: Sampling
    session_id: str = ""
    stream: bool = True
    """False: no `Started` and no `Delta`, everything in `Done`."""
    min_policy_version: int | None = None
    """Wait in the queue until at least this version is in force."""
    exact_policy_version: int | None = None
    """Refuse the request if another version is in force, or fail it if another one samples its first token."""
    adapter: str = ""
    """A loaded adapter's name; versions are then the adapter's. Empty: the base weights."""
    tensor_start: int = 0
    """First position of which `Sampling.token_tensors` wants a row, 0 to the prompt's length."""
    media: tuple[Media, ...] = ()
    """Images in the order of their tokens, for engines with this modality in `Capabilities.modalities`."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of the completion were sampled by `policy_version`."""

    policy_version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Alternatives for consecutive tokens: `token_ids` and `logprobs` are (tokens, k), most likely first."""

    token_ids: TokenIds
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class Started:
    """The request left the queue. `cached_tokens` of its prompt came from the cache."""

    policy_version: int | None
    """None: unknown."""
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens sampled since the last event, all by one policy version (None: unknown)."""

    token_ids: TokenIds
    logprobs: Logprobs
    policy_version: int | None
    top: TopLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds, by the engine's monotonic clock."""

    queue_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a generation, with everything that it sampled (stop token included)."""

    finish_reason: FinishReason
    token_ids: TokenIds
    logprobs: Logprobs
    version_spans: tuple[VersionSpan, ...]
    stop_token_id: int | None
    """The stop token that ended it, or None."""
    prompt_tokens: int
    cached_tokens: int
    timings: Timings
    seed: int | None
    """The seed in use, drawn or given: the same seed repeats the completion. None: the engine's own randomness."""
    top: TopLogprobs | None = None
    stop_text: str | None = None
    """The stop text that ended it."""
    tensors: tuple[TokenTensor, ...] = ()
    """As requested, without digests: from `tensor_start` to the token before the last one, where they were captured."""


GenerateEvent = Started | Delta | Done


@dataclass(frozen=True, slots=True)
class Scores:
    """Logprobs of given tokens: `logprobs[i]` is that of token i + 1 given tokens [0, i].

    `top` has the alternatives to each, if they were requested.
    """

    logprobs: Logprobs
    policy_version: int
    top: TopLogprobs | None = None
