"""The contract between the service and every engine, in plain data.

Invariants of every engine:

- Token ids pass unchanged: an engine never re-tokenises. A logprob is the value of the distribution that the token was
  drawn from (`LogprobsMode.PROCESSED`) unless `EngineInfo.logprobs_mode` states otherwise.
- Every sampled token is covered by exactly one `VersionSpan`; spans are contiguous, ordered, and start at 0. An engine
  with foreign weights of unknown version has no spans at all.
- Every accepted request ends with exactly one `Done`, or its iterator raises a `PenstockError`.
- A weight update either takes effect completely, under its version, or leaves weights and version unchanged.
- A missing feature is a flag in `Capabilities` and an `Unsupported` error, never a silent downgrade.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.values.token_tensors import TokenTensor
from penstock_inference.engines.response_format import ResponseFormat

TokenIds = NDArray[np.int32]
Logprobs = NDArray[np.float32]
Tensors = Mapping[str, NDArray[Any]]


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


class PauseMode(Enum):
    """What happens to generations in flight; in every mode new requests queue until `resume`."""

    ABORT = "abort"
    """End every accepted request with `FinishReason.ABORT` and the tokens sampled so far."""
    WAIT = "wait"
    """Let running generations finish; queued ones stay queued."""
    KEEP = "keep"
    """Freeze between two tokens and continue at `resume`, with the KV cache kept."""


class UpdateFormat(Enum):
    """The contents of a weight update."""

    FULL = "full"
    """Every tensor of the model."""
    DELTA = "delta"
    """Complete replacement tensors for some names; the others stay."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do; calls with a false flag are refused as `Unsupported`."""

    token_ids: bool = True
    logprobs: bool = True
    version_spans: bool = False
    in_flight_update: bool = False
    weight_update: bool = False
    score: bool = False
    seed: bool = False
    batch_invariant: bool = False
    """Tokens and logprobs of a request are bit-identical for any other requests in the batch."""
    abort: bool = True
    adapters: bool = False
    sleep: bool = False
    structured_output: bool = False
    transfer_backends: tuple[str, ...] = ()
    """Means by which a trainer may move weights itself (`optional.WeightTransfers`), such as "nccl"."""
    token_tensors: tuple[str, ...] = ()
    """Names for `Sampling.token_tensors`."""
    modalities: tuple[str, ...] = ()
    """What a prompt may have beside text: "image"."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine's properties and state."""

    engine: str
    engine_version: str
    model: str
    vocab_size: int
    max_context_tokens: int
    """Prompt and completion together; 0 if an engine without token ids does not know it."""
    max_concurrency: int
    stop_token_ids: tuple[int, ...]
    """Sampling one of these ends a generation unless `Sampling.ignore_eos`."""
    sampling_fields: tuple[str, ...]
    """Names of the `Sampling` fields that take effect."""
    dtype: str
    parameter_count: int
    logprobs_mode: LogprobsMode
    capabilities: Capabilities
    policy_version: int
    policy_label: str
    paused: bool


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


@dataclass(frozen=True, slots=True)
class UpdatePhases:
    """How many seconds each step of a commit took."""

    load_s: float
    """Checking and laying out the tensors, while generation continues."""
    pause_s: float
    """From the request to stop sampling until the new weights were in force."""


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """One of several engines behind one service; counters are since the service started."""

    name: str
    live: bool
    """False while it is restarted."""
    restarts: int
    running: int
    waiting: int
    load_tokens: int
    """The load that routing counts: prompt tokens to compute and tokens to sample of all its requests."""
    sampled_tokens: int
    cached_tokens: int
    cache_use: float


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine opened, and current gauges."""

    running: int = 0
    waiting: int = 0
    slots: int = 0
    cache_use: float = 0.0
    """Share of the key-value cache in use, 0 to 1."""
    policy_version: int = 0
    paused: bool = False
    steps: int = 0
    prompt_tokens: int = 0
    """Computed prompt tokens, not counting cached ones."""
    cached_tokens: int = 0
    sampled_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    busy_s: float = 0.0
    """Seconds spent inside steps."""
    tokens_by_version: Mapping[int, int] = field(default_factory=dict)
    """Sampled tokens of the most recent policy versions."""
    replicas: tuple[ReplicaStats, ...] = ()
    """Empty for a single engine."""
    failure: str = ""
    """Why an engine without replicas does not answer, and what happens next; empty while it lives."""


class Engine(Protocol):
    """What the service drives. Every method may be called from one event loop only.

    Features of only some engines (adapters, sleep, weights as files, transfers) are in `optional`.
    """

    def info(self) -> EngineInfo:
        """The engine's properties and current state."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Sample a completion. Closing the iterator aborts; close one that is left early (`contextlib.aclosing`).

        Raises InvalidArgument before anything starts when a value is out of range, FailedPrecondition
        (POLICY_VERSION_UNAVAILABLE) when another exact version was required, AlreadyExists (REQUEST_IN_FLIGHT),
        ResourceExhausted (QUEUE_FULL).
        """

    async def score(
        self, token_ids: TokenIds, temperature: float = 1.0, adapter: str = "", top_logprobs: int = 0
    ) -> Scores:
        """Logprobs of `token_ids[1:]` under the current policy, or an adapter's, at `temperature` (> 0).

        With `top_logprobs`, also the so many likeliest tokens of each position, the whole vocabulary if it has fewer.
        """

    async def abort(
        self, *, request_ids: Sequence[str] = (), session_id: str | None = None, everything: bool = False
    ) -> int:
        """Abort the named generations (those of the session, or all); return their number."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling; returns once it has stopped."""

    async def resume(self) -> None:
        """Continue sampling. Harmless when not paused."""

    async def begin_update(self, version: int, label: str, update_format: UpdateFormat) -> None:
        """Open the update; only one may be open.

        Raises Aborted (UPDATE_IN_PROGRESS) when one is, FailedPrecondition (POLICY_VERSION_NOT_NEWER).
        """

    async def push_tensors(self, tensors: Tensors) -> None:
        """Add tensors, in the model's published names, to the open update."""

    async def commit_update(self, mode: PauseMode = PauseMode.KEEP) -> UpdatePhases:
        """Check the complete update, then swap weights and version between two steps.

        On any error nothing changes; either way the update is closed.
        """

    async def abort_update(self) -> None:
        """Drop the open update, if any."""

    def stats(self) -> EngineStats:
        """Counters and gauges."""

    async def aclose(self) -> None:
        """End everything in flight and release what the engine holds. Idempotent."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """An operator's choices for an engine. An engine refuses unknown `extra` keys."""

    model_dir: Path
    model_name: str
    max_concurrency: int = 64
    max_waiting: int = 4096
    """Requests that may queue; more are refused (QUEUE_FULL)."""
    max_context_tokens: int | None = None
    """Unset: the engine's default."""
    upstream_api_key: str | None = field(default=None, repr=False)
    """For an engine that calls a foreign endpoint."""
    kv_cache_bytes: int | None = None
    """Unset: the engine's default."""
    work_dir: Path | None = None
    """Directory for files while the engine runs; unset, a temporary one."""
    waits_for_itself: bool = True
    """True: requests in flight wait for the engine's dead processes to restart. False: they fail with ENGINE_DIED, so
    that another engine can continue them.
    """
    extra: Mapping[str, str] = field(default_factory=dict)


class EngineFactory(Protocol):
    """The type of entry points in the group `penstock.inference.engines`."""

    async def __call__(self, options: EngineOptions) -> Engine:
        """Open an engine; raises a PenstockError that explains a fault in the options or the model."""
