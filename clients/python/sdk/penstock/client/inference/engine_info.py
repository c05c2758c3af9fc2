"""An inference service's engine: its identity, capabilities and load."""

from dataclasses import dataclass
from typing import Final

from penstock.client.types import chat
from penstock.inference.v1 import inference_service_pb2 as pb
from penstock.values import reader


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The model of an inference service, its capabilities, and the weights in force."""

    engine: str
    engine_version: str
    model: str
    max_context_tokens: int
    vocabulary_size: int
    stop_token_ids: tuple[int, ...]
    tokenizer_sha256: bytes
    chat_template_sha256: bytes
    logprobs_mode: chat.LogprobsMode
    policy_version: int
    paused: bool
    dtype: str
    parameter_count: int
    tool_call_parser: str
    reasoning_parser: str
    capabilities: frozenset[str]
    """Names of its capabilities: token_ids, logprobs, version_spans, in_flight_update, adapters, score, seed, ..."""
    sampling_fields: frozenset[str]
    """Fields of `Sampling` that it supports."""
    transfer_backends: tuple[str, ...]
    """Transports by which a trainer may move weights itself (`InferenceClient.init_transfer`)."""
    token_tensors: tuple[str, ...]
    """Names for `Sampling.token_tensors`."""
    modalities: frozenset[str] = frozenset()
    """What prompts may have beside text: "image"."""
    processor_sha256: bytes = b""
    """Identifies how many tokens an image takes; empty = prompts have no images."""


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """One of the replicas behind a service; counters are since the service started."""

    name: str
    live: bool
    """False while it is being restarted; it then gets no requests."""
    restarts: int
    running: int
    waiting: int
    load_tokens: int
    """The routing weight: prompt tokens to compute and tokens to sample of all its requests."""
    sampled_tokens: int
    cached_prompt_tokens: int
    cache_use: float
    """Share of its key-value cache in use, 0 to 1."""


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """A gap that a trainer reported; `penstock.analysis.logprob_diff.Gap` defines the figures."""

    policy_version: int
    tokens: int
    mean: float
    mean_abs: float
    max_abs: float
    kl: float
    ratio_mean: float
    clipped_share: float
    effective_share: float


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine's load; counters are since its start."""

    running: int
    waiting: int
    prompt_tokens: int
    cached_prompt_tokens: int
    sampled_tokens: int
    aborted: int
    policy_version: int
    cache_use: float
    """Share of the key-value cache in use, 0 to 1; the mean over replicas."""
    replicas: tuple[ReplicaStats, ...]
    """Each replica, if the service has several; the figures above are their sums."""
    gaps: tuple[LogprobGap, ...]
    """Gaps reported by trainers (`report_gap`), oldest version first."""


info_from: Final = reader(
    EngineInfo,
    pb.GetInfoResponse,
    renamed={
        "sampling_fields": "capabilities.sampling_fields",
        "transfer_backends": "capabilities.transfer_backends",
        "token_tensors": "capabilities.token_tensors",
        "modalities": "capabilities.modalities",
    },
    by={
        "capabilities": lambda answer: frozenset(
            field.name for field, value in answer.capabilities.ListFields() if value is True
        )
    },
)
"""Converts the model and its capabilities."""

stats_from: Final = reader(EngineStats, pb.WatchStatsResponse)
"""Converts an engine's load."""
