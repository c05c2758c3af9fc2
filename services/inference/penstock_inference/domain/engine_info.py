"""What an engine says of itself: what it can do, its current state, and its counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock_inference.domain.generation import LogprobsMode


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
