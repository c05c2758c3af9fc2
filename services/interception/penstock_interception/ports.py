"""What the gate needs of others, and how it answers those who deliver.

`Recorder` knows tokens, graphs and model sources; `Store` makes things durable. The gate sees them only through these.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from penstock_chassis.errors import Unavailable
from penstock_codec.chat import Message
from penstock_codec.quick import quick
from penstock_interception.calls import Answerer, Call, Prompt, Rollout
from penstock_interception.completions import Completion, Failure
from penstock_interception.runs import Run, RunStore
from penstock_interception.token_store import TokenStore
from penstock_interception.tools.model import HostTool
from penstock_interception.tools.store import ToolStore


class RejectionReason(StrEnum):
    """Why a result is not taken."""

    UNKNOWN_CALL = "unknown_call"
    ALREADY_DELIVERED = "already_delivered"
    CALL_ENDED = "call_ended"
    NOT_LEASED = "not_leased"
    INVALID = "invalid"
    STALE_POLICY = "stale_policy"


@dataclass(frozen=True, slots=True)
class Rejection:
    """A result that was not taken."""

    call_id: str
    reason: RejectionReason
    message: str = ""
    violations: tuple[str, ...] = ()


@quick
@dataclass(frozen=True, slots=True)
class Accepted:
    """A result that was taken. It counts once `committed` is done and `recorded` says so."""

    call_id: str
    committed: asyncio.Future[list[int]]


@quick
@dataclass(frozen=True, slots=True)
class Recorded:
    """What a completion becomes: the message for the agent, and the record that rebuilds it after a crash.

    It is not in the rollout's graph yet. `settle` is called once, with whether the journal has the record: then it is,
    or nothing of it is left. Until then no other answer of the rollout is recorded.
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
    """An answer that was accepted, on its way to the disk: the call has it when it is there."""

    answer: Completion | Failure
    digest: bytes
    answerer: Answerer
    at: float
    # Of a completion.
    recorded: Recorded | None = None


def recorded(written: asyncio.Future[list[int]]) -> bool:
    """Whether a write that is over is in the journal: it was not refused, and no row that it changes was missing."""
    return not written.cancelled() and written.exception() is None and 0 not in written.result()


async def durable(written: asyncio.Future[list[int]]) -> None:
    """Waits until a write is on disk. Cancelling the wait does not take the write back.

    Raises Unavailable JOURNAL_FAILED when the disk refused it: then nothing of it happened.
    """
    try:
        await asyncio.shield(written)
    except sqlite3.Error as error:
        raise Unavailable(
            "The service could not record this, so it did not happen. Look at its disk and its log, and try again.",
            reason="JOURNAL_FAILED",
            retry_after_s=2.0,
        ) from error


class CompletionRefused(Exception):
    """A completion that breaks rules; `violations` says which."""

    def __init__(self, violations: Iterable[str]) -> None:
        super().__init__("the completion breaks a rule")
        self.violations = tuple(violations)


class Recorder(Protocol):
    """Knows tokens, graphs and model sources."""

    async def record(self, call: Call, completion: Completion, answerer: Answerer) -> Recorded:
        """Checks and parses a completion, and makes its record when no other answer of its rollout is under way.

        Raises CompletionRefused.
        """
        ...

    def forget(self, rollout: Rollout) -> None:
        """The rollout is deleted."""
        ...

    def answer_by_source(self, call: Call) -> None:
        """The rollout's model source shall answer this call, from now on and without waiting."""
        ...


class Store(Protocol):
    """Durable state. Every method fixes its place in the order of writes before it returns."""

    @property
    def tools(self) -> ToolStore: ...
    @property
    def tokens(self) -> TokenStore: ...
    @property
    def runs(self) -> RunStore: ...
    def put_rollout(
        self, rollout: Rollout, tools: Iterable[HostTool] = (), run: Run | None = None
    ) -> asyncio.Future[list[int]]: ...
    def update_rollout(self, rollout: Rollout) -> asyncio.Future[list[int]]: ...
    def put_pause(self, rollout: Rollout, moved: Iterable[Call] = ()) -> asyncio.Future[list[int]]: ...
    def delete_rollout(self, rollout_id: str, run: Run | None = None) -> asyncio.Future[list[int]]: ...
    def put_call(self, call: Call) -> asyncio.Future[list[int]]: ...
    def put_answer(self, call: Call, answered: Answered) -> asyncio.Future[list[int]]: ...
    def put_lease(self, call: Call) -> asyncio.Future[list[int]]: ...
    def put_delegation(self, call: Call) -> asyncio.Future[list[int]]: ...
    def end_call(self, call: Call) -> asyncio.Future[list[int]]: ...
    def mark_told(self, call: Call) -> None: ...
    async def settled(self) -> None: ...
