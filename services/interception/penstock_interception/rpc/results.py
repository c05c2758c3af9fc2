"""A trainer's results, each judged by itself, and what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock_chassis.errors import InvalidArgument, NotFound
from penstock_interception.completions import Failure
from penstock_interception.metrics import REJECTED
from penstock_interception.ports import Accepted, Rejection, RejectionReason, recorded
from penstock_interception.rpc import convert
from penstock_interception.sessions import Session
from penstock_interception.turns import Turns

_REASONS = {
    RejectionReason.UNKNOWN_CALL: pb.ResultRejected.REASON_UNKNOWN_CALL,
    RejectionReason.ALREADY_DELIVERED: pb.ResultRejected.REASON_ALREADY_DELIVERED,
    RejectionReason.CALL_ENDED: pb.ResultRejected.REASON_CALL_ENDED,
    RejectionReason.NOT_LEASED: pb.ResultRejected.REASON_NOT_LEASED,
    RejectionReason.INVALID: pb.ResultRejected.REASON_INVALID,
    RejectionReason.STALE_POLICY: pb.ResultRejected.REASON_STALE_POLICY,
}


async def judge(turns: Turns, results: Sequence[pb.CallResult]) -> pb.ResultsAcknowledged:
    """Each result by itself; returns when all that were accepted are on disk."""
    return await told([await judge_one(turns, result, None) for result in results])


async def told(verdicts: Sequence[Accepted | Rejection]) -> pb.ResultsAcknowledged:
    """What became of results, once all that were accepted are on disk."""
    acknowledged = pb.ResultsAcknowledged()
    for verdict in verdicts:
        if isinstance(verdict, Rejection):
            acknowledged.rejected.append(
                pb.ResultRejected(
                    call_id=verdict.call_id,
                    reason=_REASONS[verdict.reason],
                    message=verdict.message,
                    violations=verdict.violations,
                )
            )
        else:
            committed = verdict.committed
            if not committed.done():
                await asyncio.wait([committed])
            if recorded(committed):
                acknowledged.accepted_call_ids.append(verdict.call_id)
            else:
                acknowledged.rejected.append(_not_recorded(verdict.call_id))
    return acknowledged


def _not_recorded(call_id: str) -> pb.ResultRejected:
    """The disk refused an answer: the session and its other answers go on."""
    REJECTED.labels("journal_failed").inc()
    return pb.ResultRejected(
        call_id=call_id,
        reason=pb.ResultRejected.REASON_CALL_ENDED,
        message="JOURNAL_FAILED: the service could not record the result, so the call failed; its agent may ask again.",
    )


async def judge_one(turns: Turns, result: pb.CallResult, session: Session | None) -> Accepted | Rejection:
    """One result, of a session or of a lease; what was accepted may not be on disk yet."""
    verdict = await _judged(turns, result, session)
    if isinstance(verdict, Rejection):
        REJECTED.labels(verdict.reason.value).inc()
    return verdict


async def _judged(turns: Turns, result: pb.CallResult, session: Session | None) -> Accepted | Rejection:
    gate = turns.gate
    if not gate.knows(result.call_id):
        with suppress(NotFound):  # what is nobody's is judged below like everything else
            await turns.find_call(result.call_id)
    call_id, lease_id = result.call_id, result.lease_id
    match result.WhichOneof("result"):
        case "completion":
            try:
                completion = convert.completion_from(result.completion)
            except InvalidArgument as error:
                violations = tuple(f"{v.field}: {v.description}" for v in error.violations)
                return Rejection(call_id, RejectionReason.INVALID, error.message, violations)
            return await gate.answers.accept(call_id, lease_id, completion, session=session)
        case "failure":
            failure = Failure(
                result.failure.reason or "TRAINER_FAILED", result.failure.message, result.failure.retriable
            )
            return await gate.answers.accept(call_id, lease_id, failure, session=session)
        case "delegation":
            asked = result.delegation
            override = convert.sampling_from(asked.sampling_override) if asked.HasField("sampling_override") else None
            return gate.answers.delegate(call_id, lease_id, override, session=session)
        case "release":
            return gate.answers.release(call_id, lease_id, session=session)
    return Rejection(call_id, RejectionReason.INVALID, "The result is empty.", ("result: unset",))
