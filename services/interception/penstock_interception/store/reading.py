"""Rebuilds rollouts and calls from the gate's journal."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from sqlite3 import Row

import structlog

from penstock_chassis.errors import DataLoss
from penstock_interception.domain.agent_keys import AgentKey
from penstock_interception.domain.calls import Answerer, CallState, RolloutState, Totals
from penstock_interception.domain.recordings import Recording
from penstock_interception.domain.state import HOLD, Call, Rollout
from penstock_interception.domain.totals import count_ended
from penstock_interception.graph.record import GraphRecord
from penstock_interception.store import serde

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StoredLease:
    """A call's lease when the service stopped: whose it was, and the SHA-256 of the leased prompt.

    `lease_s`: its length in seconds, if it is a unary request's; None: it lasts as long as its session. `lease_request`
    identifies that request; "": a repeat of it is not recognised.
    """

    session_id: str
    lease_id: str
    prompt_sha256: bytes
    lease_s: float | None
    lease_request: str = ""


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """A rollout with its calls in order of arrival, the graph's records in commit order, and its leases by call id.

    `recorded` counts the graph's records in the journal; `graph` holds those before the first unreadable one.
    """

    rollout: Rollout
    calls: list[Call]
    graph: list[GraphRecord]
    leases: dict[str, StoredLease]
    recorded: int


def readable(rollout: Rollout, answered: Iterable[Row]) -> list[GraphRecord]:
    """Returns the graph's records before the first unreadable one."""
    found: list[GraphRecord] = []
    for row in answered:
        try:
            found.append(GraphRecord.from_bytes(row["graph"]))
        except DataLoss as error:
            _log.error("a record is damaged", rollout_id=rollout.id, call_id=row["call_id"], reason=error.reason)
            break
    return found


def load_rollout(row: Row, keys: dict[bytes, AgentKey]) -> Rollout:
    """Builds a rollout from its row and its agent keys, without its calls."""
    return Rollout(
        serde.load_spec(row["opening"]),
        row["created"],
        facts=serde.load_facts(row["facts"]),
        state=RolloutState(row["state"]),
        closed=row["closed"],
        close_reason=row["close_reason"],
        exhausted_budget=row["exhausted"],
        totals=serde.load_totals(row["totals"]),
        keys=keys,
        paused_s=row["paused_s"],
        paused_by={HOLD} if row["held"] else set(),
        paused_since=row["held_since"],
        stored=bool(row["stored"]),
    )


def load_call(rollout: Rollout, row: Row, body: bytes) -> Call:
    """Builds a call from its row: with its `body` if it is open, without what the graph's record holds."""
    state, end_reason, ended_at = CallState(row["state"]), row["end_reason"], row["ended"]
    if rollout.state is RolloutState.CLOSED and not state.terminal:
        # Its end was never written: the write failed, or the service stopped.
        state, end_reason, ended_at = CallState.CANCELLED, "ROLLOUT_CLOSED", rollout.closed
    over = state.terminal
    if not over:
        state = CallState.QUEUED  # its holder is gone; the gate restores leases that may be resumed
    request = serde.load_request(
        row["arrival"],
        body=b"" if over else body,
        body_sha256=row["body_sha256"],
        retry_key=row["retry_key"],
    )
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    call = Call(
        id=row["call_id"],
        rollout=rollout,
        index=row["position"],
        request=request,
        received=row["received"],
        expires=row["expires"],
        sampling=serde.load_sampling(row["sampling"]) if row["sampling"] is not None else request.sampling,
        ended=ended,
        state=state,
        accepted_digest=row["answer_sha256"],
        injected=bool(row["injected"]),
        end_reason=end_reason,
        delegated=bool(row["delegated"]),
        model=row["model"],
        min_policy_version=row["min_policy_version"],
        answerer=Answerer(row["answerer"]) if row["answerer"] is not None else None,
        ended_at=ended_at,
        leased_at=row["leased"],
        leases=row["leases"],
        lease_id=row["lease_id"],
        http_attempts=row["http_attempts"],
        answer_sent=bool(row["told"]),
        submitted=True,
    )
    if (model := call.of_model) is not None:
        call.policy_id = model.policy_id
    if row["failure"] is not None:
        call.failure = serde.load_failure(row["failure"])
    if over:
        ended.set_result(None)
        if call.accepted_digest is not None:
            call.committed = asyncio.get_running_loop().create_future()
            call.committed.set_result([1])
    return call


def count(calls: list[Call]) -> Totals:
    """Counts a rollout's calls, which are in the order in which they came, as they were counted when they ended."""
    totals = Totals(request_bytes=sum(call.request.body_bytes for call in calls))
    for call in sorted((call for call in calls if call.state.terminal), key=_ended):
        while totals.calls < len(calls) and calls[totals.calls].received <= _ended(call):
            totals.calls += 1
        count_ended(call, totals)
    totals.calls = len(calls)
    return totals


def use_recorded(recording: Recording | None, calls: Iterable[Call]) -> None:
    """Marks the recorded calls that have answered some of these."""
    for call in calls:
        if recording is not None and call.completion is not None and call.completion.origin is not None:
            recording.use(call.completion.origin.via)


def _ended(call: Call) -> float:
    return call.received if call.ended_at is None else call.ended_at
