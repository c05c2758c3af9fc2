"""The outcome of a trainer's or an engine's answer to a call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from penstock_codec.chat import Message
from penstock_codec.fast_dataclass import quick
from penstock_interception.domain.calls import Answerer, Prompt
from penstock_interception.domain.completions import Completion, Failure


class RejectionReason(StrEnum):
    """Why a result was rejected."""

    UNKNOWN_CALL = "unknown_call"
    ALREADY_DELIVERED = "already_delivered"
    CALL_ENDED = "call_ended"
    NOT_LEASED = "not_leased"
    INVALID = "invalid"
    STALE_POLICY = "stale_policy"


@dataclass(frozen=True, slots=True)
class Rejection:
    call_id: str
    reason: RejectionReason
    message: str = ""
    violations: tuple[str, ...] = ()


@quick
@dataclass(frozen=True, slots=True)
class Accepted:
    """An accepted result. It takes effect once `committed` is done and `recorded` confirms it."""

    call_id: str
    committed: asyncio.Future[list[int]]


@quick
@dataclass(frozen=True, slots=True)
class PreparedAnswer:
    """A validated completion: the message for the agent, and the record that rebuilds it after a crash.

    It is not in the rollout's graph yet. Call `settle` once, with whether the journal has the record: the record is
    then applied to the graph or dropped. Until then no other answer of the rollout is prepared.
    """

    completion: Completion
    message: Message
    prompt: Prompt
    injected: bool
    record: bytes
    chain_sha256: bytes
    chain_index: int
    settle: Callable[[bool], None]


@quick
@dataclass(frozen=True, slots=True)
class Answered:
    """An accepted answer whose commit is pending; the call gets it once it is on disk."""

    answer: Completion | Failure
    digest: bytes
    answerer: Answerer
    at: float
    # Set for a completion.
    prepared: PreparedAnswer | None = None


class CompletionRefused(Exception):
    """A completion breaks rules; `violations` lists them."""

    def __init__(self, violations: Iterable[str]) -> None:
        super().__init__("the completion breaks a rule")
        self.violations = tuple(violations)
