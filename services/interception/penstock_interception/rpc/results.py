"""Validates a trainer's results one by one, and reports the verdicts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock_chassis.errors import InvalidArgument
from penstock_chassis.validation import refuse_provisional
from penstock_interception.domain.completions import Failure
from penstock_interception.domain.results import Accepted, Rejection, RejectionReason
from penstock_interception.domain.state import Session
from penstock_interception.interceptor import Interceptor
from penstock_interception.metrics import REJECTED
from penstock_interception.rollouts.answers import call_unknown
from penstock_interception.store.commits import recorded
from penstock_interception.wire import convert

_REASONS = {
    RejectionReason.UNKNOWN_CALL: pb.ResultRejected.REASON_UNKNOWN_CALL,
    RejectionReason.ALREADY_DELIVERED: pb.ResultRejected.REASON_ALREADY_DELIVERED,
    RejectionReason.CALL_ENDED: pb.ResultRejected.REASON_CALL_ENDED,
    RejectionReason.NOT_LEASED: pb.ResultRejected.REASON_NOT_LEASED,
    RejectionReason.INVALID: pb.ResultRejected.REASON_INVALID,
    RejectionReason.STALE_POLICY: pb.ResultRejected.REASON_STALE_POLICY,
}

JUDGED_ALONE: Final = frozenset({pb.CallResult.DESCRIPTOR.full_name})
"""Messages of which one that cannot be accepted does not refuse the others beside it."""


async def judge(
    interceptor: Interceptor, results: Sequence[pb.CallResult], namespace: str | None, rollout_id: str = ""
) -> pb.ResultsAcknowledged:
    """Validates each result alone; returns once all accepted ones are on disk.

    `namespace`: that of the calls which the caller may answer; None = any. `rollout_id` is the rollout of all of them;
    "" = of several.
    """
    return await acknowledge([await judge_one(interceptor, result, None, namespace, rollout_id) for result in results])


async def acknowledge(verdicts: Sequence[Accepted | Rejection]) -> pb.ResultsAcknowledged:
    """Returns the verdicts as a message, once all accepted results are on disk."""
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
    """The verdict if an answer's write failed; the session and its other answers continue."""
    REJECTED.labels("journal_failed").inc()
    return pb.ResultRejected(
        call_id=call_id,
        reason=pb.ResultRejected.REASON_CALL_ENDED,
        message="JOURNAL_FAILED: the service could not record the result, so the call failed; its agent may retry it.",
    )


async def judge_one(
    interceptor: Interceptor,
    result: pb.CallResult,
    session: Session | None,
    namespace: str | None,
    rollout_id: str = "",
) -> Accepted | Rejection:
    """Validates one result of a session or of a lease; an accepted one may not be on disk yet."""
    if namespace is not None and await interceptor.namespace_of_call(result.call_id) not in (None, namespace):
        verdict: Accepted | Rejection = call_unknown(result.call_id)
    else:
        verdict = _of_another_rollout(interceptor, result, rollout_id) or await _judged(interceptor, result, session)
    if isinstance(verdict, Rejection):
        REJECTED.labels(verdict.reason.value).inc()
    return verdict


def _of_another_rollout(interceptor: Interceptor, result: pb.CallResult, rollout_id: str) -> Rejection | None:
    call = interceptor.registry.find_call(result.call_id)
    if call is None or {result.rollout_id, rollout_id} <= {"", call.rollout.id}:
        return None
    violations = ("rollout_id: is not the call's rollout",)
    return Rejection(result.call_id, RejectionReason.INVALID, "The call is of another rollout.", violations)


async def _judged(interceptor: Interceptor, result: pb.CallResult, session: Session | None) -> Accepted | Rejection:
    call_id, lease_id = result.call_id, result.lease_id
    try:
        refuse_provisional(result)
        completion = convert.completion_from(result.completion) if result.HasField("completion") else None
    except InvalidArgument as error:
        violations = tuple(f"{v.field}: {v.description}" for v in error.violations)
        return Rejection(call_id, RejectionReason.INVALID, error.message, violations)
    if completion is not None:
        return await interceptor.deliver(call_id, lease_id, completion, session=session)
    match result.WhichOneof("result"):
        case "failure":
            failure = Failure(
                result.failure.reason or "TRAINER_FAILED", result.failure.message, result.failure.retriable
            )
            return await interceptor.deliver(call_id, lease_id, failure, session=session)
        case "delegation":
            asked = result.delegation
            override = convert.sampling_from(asked.sampling_override) if asked.HasField("sampling_override") else None
            return await interceptor.delegate(call_id, lease_id, override, session=session)
        case "release":
            return await interceptor.release(call_id, lease_id, session=session)
    return Rejection(call_id, RejectionReason.INVALID, "The result is empty.", ("result: unset",))
