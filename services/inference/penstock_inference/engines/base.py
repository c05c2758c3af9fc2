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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from penstock_inference.domain.engine_info import Capabilities, EngineInfo, EngineStats, ReplicaStats
from penstock_inference.domain.generation import (
    IMAGE,
    SAMPLING_FIELDS,
    Delta,
    Done,
    FinishReason,
    GenerateEvent,
    GenerateRequest,
    Logprobs,
    LogprobsMode,
    Media,
    Sampling,
    Scores,
    Started,
    Timings,
    TokenIds,
    TopLogprobs,
    VersionSpan,
)
from penstock_inference.domain.response_format import FormatKind, ResponseFormat
from penstock_inference.domain.weights import PauseMode, Tensors, UpdateFormat, UpdatePhases

__all__ = [
    "IMAGE",
    "SAMPLING_FIELDS",
    "Capabilities",
    "Delta",
    "Done",
    "Engine",
    "EngineFactory",
    "EngineInfo",
    "EngineOptions",
    "EngineStats",
    "FinishReason",
    "FormatKind",
    "GenerateEvent",
    "GenerateRequest",
    "Logprobs",
    "LogprobsMode",
    "Media",
    "PauseMode",
    "ReplicaStats",
    "ResponseFormat",
    "Sampling",
    "Scores",
    "Started",
    "Tensors",
    "Timings",
    "TokenIds",
    "TopLogprobs",
    "UpdateFormat",
    "UpdatePhases",
    "VersionSpan",
]
"""An engine of somebody else imports all of it from here, wherever the service keeps it."""


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
