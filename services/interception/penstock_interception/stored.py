"""Rollouts and calls as the gate's journal has them, back as the domain has them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from sqlite3 import Row

import structlog

from penstock_chassis.errors import DataLoss
from penstock_interception import records
from penstock_interception.calls import Answerer, Call, CallState, Rollout, RolloutState, Totals, count_ended
from penstock_interception.graph.record import CommitRecord
from penstock_interception.tokens import Grant

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """A rollout with its calls in order of arrival, the graph's records in order of commit, and leases in force.

    A lease is call id, session id, lease id and the SHA-256 of the prompt that it was given for. `recorded` counts the
    graph's records in the journal: `graph` has those before the first that cannot be read.
    """

    rollout: Rollout
    calls: list[Call]
    graph: list[CommitRecord]
    leases: list[tuple[Call, str, str, bytes]]
    recorded: int


def readable(rollout: Rollout, answered: Iterable[Row]) -> list[CommitRecord]:
    """The graph's records before the first that cannot be read."""
    found: list[CommitRecord] = []
    for row in answered:
        try:
            found.append(CommitRecord.from_bytes(row["graph"]))
        except DataLoss as error:
            _log.error("a record is damaged", rollout_id=rollout.id, call_id=row["call_id"], reason=error.reason)
            break
    return found


def load_rollout(row: Row, grants: dict[bytes, Grant]) -> Rollout:
    """A row of `rollouts`, with its tokens; without its calls."""
    return Rollout(
        records.load_opening(row["opening"]),
        row["created"],
        facts=records.load_facts(row["facts"]),
        state=RolloutState(row["state"]),
        closed=row["closed"],
        close_reason=row["close_reason"],
        exhausted_budget=row["exhausted"],
        totals=records.load_totals(row["totals"]),
        grants=grants,
        paused_s=row["paused_s"],
        held_since=row["held_since"],
    )


def load_call(rollout: Rollout, row: Row) -> Call:
    """A row of `calls`, with its body while it is open; without what its graph's record has."""
    state, end_reason, ended_at = CallState(row["state"]), row["end_reason"], row["ended"]
    if rollout.state is RolloutState.CLOSED and not state.terminal:
        # Its end was refused by the disk, or lost with the service: it has none but this.
        state, end_reason, ended_at = CallState.CANCELLED, "ROLLOUT_CLOSED", rollout.closed
    over = state.terminal
    if not over:
        state = CallState.QUEUED  # whoever had it is gone; a lease that may be resumed is restored by the gate
    arrival = records.load_arrival(
        row["arrival"],
        body=b"" if over else row["body"] or b"",
        body_sha256=row["body_sha256"],
        retry_key=row["retry_key"],
    )
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    call = Call(
        id=row["call_id"],
        rollout=rollout,
        index=row["position"],
        arrival=arrival,
        received=row["received"],
        expires=row["expires"],
        sampling=records.load_sampling(row["sampling"]) if row["sampling"] is not None else arrival.sampling,
        ended=ended,
        state=state,
        accepted_digest=row["answer_sha256"],
        injected=bool(row["injected"]),
        end_reason=end_reason,
        delegated=bool(row["delegated"]),
        min_policy_version=row["min_policy_version"],
        answerer=Answerer(row["answerer"]) if row["answerer"] is not None else None,
        ended_at=ended_at,
        leased_at=row["leased"],
        leases=row["leases"],
        http_attempts=row["http_attempts"],
        told=bool(row["told"]),
        journalled=True,
    )
    if row["failure"] is not None:
        call.failure = records.load_failure(row["failure"])
    if over:
        ended.set_result(None)
        if call.accepted_digest is not None:
            call.committed = asyncio.get_running_loop().create_future()
            call.committed.set_result([1])
    return call


def count(calls: list[Call]) -> Totals:
    """What these calls come to."""
    totals = Totals(calls=len(calls))
    for call in calls:
        totals.request_bytes += call.arrival.body_bytes
        if call.state.terminal:
            count_ended(call, totals)
    return totals
