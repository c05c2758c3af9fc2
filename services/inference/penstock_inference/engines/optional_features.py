"""Optional features of engines beyond `base.Engine`: a flag in `Capabilities` plus the protocol's methods.

Missing features are refused by name (`missing_capability`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from penstock_chassis.errors import Unsupported
from penstock_codec.chat import FinishReason, Message, Tool, Usage
from penstock_inference.domain.generation import Sampling, Timings
from penstock_inference.domain.weights import PauseMode, UpdatePhases


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter to load: `directory` has `adapter_config.json` and `adapter_model.safetensors`."""

    name: str
    policy_version: int
    directory: Path
    temporary: bool = False
    """The directory is removed when the adapter is no more in force, although completions may still use it."""


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter in force."""

    name: str
    policy_version: int
    rank: int


@runtime_checkable
class Adapters(Protocol):
    """LoRA adapters beside the base weights. A completion keeps the adapter version with which it began."""

    async def load_adapter(self, source: AdapterSource, mode: PauseMode = PauseMode.KEEP) -> AdapterInfo:
        """Put an adapter, or a newer version of one, in force.

        With WAIT the completions of its older version end first, with ABORT they are aborted. The files must stay while
        it is in force. Raises FailedPrecondition (POLICY_VERSION_NOT_NEWER), ResourceExhausted (ADAPTER_LIMIT),
        InvalidArgument (ADAPTER_INVALID).
        """

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; its completions in flight continue. Idempotent."""

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """The adapters in force, by name."""


@runtime_checkable
class Sleeper(Protocol):
    """Frees the accelerator's memory for a while."""

    async def sleep(self, level: int) -> None:
        """Level 1 moves the weights to the host, 2 drops them: then a full update must precede any generation."""

    async def wake(self) -> None:
        """Take the memory again. Harmless when awake."""


@runtime_checkable
class WeightFiles(Protocol):
    """Accepts an update as safetensors files, never loading all of them at once. See `Engine.begin_update`."""

    async def push_file(self, path: Path) -> None:
        """Add a file to the open update; the engine moves it away."""

    async def push_path(self, path: Path) -> None:
        """Like `push_file`, for a file or all files of a directory that stay in place and must not change."""


@runtime_checkable
class StagedUpdates(Protocol):
    """Checks an open update before its commit, so that several engines can check before any of them changes."""

    async def stage_update(self) -> None:
        """Check the complete open update and have it ready; `commit_update` then only swaps.

        Raises the errors of a commit for weights that do not fit, and closes the update.
        """


@runtime_checkable
class WeightTransfers(Protocol):
    """Weights that the trainer moves by its own means, such as NCCL, in four calls."""

    async def init_transfer(self, backend: str, options: Mapping[str, Any]) -> None:
        """Set up the backend. Raises Unsupported for one that is not in `Capabilities.transfer_backends`."""

    async def start_transfer(self, version: int, mode: PauseMode) -> None:
        """Stop sampling and open a transfer. Raises the errors of `Engine.begin_update`."""

    async def transfer_tensors(self, descriptor: Mapping[str, Any] | list[Mapping[str, Any]]) -> None:
        """Receive the tensors that the descriptor lists."""
        ...

    async def finish_transfer(self, commit: bool) -> UpdatePhases:
        """Put the version in force and resume, or roll back."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation to answer. `request_id` is the caller's and unique among those in flight."""

    request_id: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    sampling: Sampling
    """`max_tokens` applies if `limited`; otherwise the engine's own limit does."""
    limited: bool
    template_options: Mapping[str, Any]
    session_id: str = ""


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The answer, as text. `message` is None when it was aborted."""

    message: Message | None
    finish_reason: FinishReason
    usage: Usage
    timings: Timings

    @classmethod
    def aborted(cls, waited_s: float) -> ChatAnswer:
        """The answer of an aborted call, without a message."""
        return cls(None, FinishReason.ABORT, Usage(0, 0), Timings(waited_s, 0.0, 0.0))


@runtime_checkable
class Chats(Protocol):
    """The interface of an engine without token ids (`Capabilities.token_ids` is false): messages in, a message out.

    The answers are unusable for training: there are no sampled tokens, and none are made from the text.
    """

    async def chat(self, request: ChatRequest) -> ChatAnswer:
        """Answer. Cancelling it aborts. Raises the errors of `Engine.generate`."""


def missing_capability(name: str) -> Unsupported:
    """The error for a feature that the engine does not have."""
    return Unsupported(
        f"the engine does not support {name}; GetInfo.capabilities lists what it supports",
        reason="CAPABILITY_MISSING",
        metadata={"capability": name},
    )
