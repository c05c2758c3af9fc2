"""Whether an answer to a call may be accepted (R29, R41). Reads the call, and changes nothing but `stale_since`.

Each answer is judged against its call alone; an invalid answer does not affect others in the same message.
"""

from __future__ import annotations

from penstock_interception.domain.calls import CallState
from penstock_interception.domain.completions import Completion, Failure
from penstock_interception.domain.results import Accepted, Rejection, RejectionReason
from penstock_interception.domain.state import Call, Session


def judge_trainer(call: Call | None, call_id: str, lease_id: str, session: Session | None) -> Call | Rejection:
    """Returns the call, if the owner of this lease or session may answer it. `call` is None if it is unknown."""
    if call is None:
        return Rejection(call_id, RejectionReason.UNKNOWN_CALL, "There is no such call.")
    if call.state.terminal or call.claimed:
        return Rejection(call_id, RejectionReason.CALL_ENDED, f"The call has ended: {call.end_reason or 'answered'}.")
    own = lease_id == call.lease_id or (session is not None and call.holder is session)
    if not call.offered or call.state is CallState.DISPATCHED or (call.state is CallState.LEASED and not own):
        return Rejection(call_id, RejectionReason.NOT_LEASED, "The call is leased to another session.")
    return call


def judge_source(call: Call) -> Call | Rejection:
    """Returns the call, if its model source may answer it: without a lease."""
    if call.claimed or call.state.terminal:
        return Rejection(call.id, RejectionReason.CALL_ENDED, "The call has ended.")
    return call


def repeated(call: Call | None, answer: Completion | Failure) -> Accepted | Rejection | None:
    """Returns the verdict on an answer to a call that already has one; None if it has none."""
    if call is None or not call.claimed or call.committed is None:
        return None
    if call.accepted_digest == answer.digest():
        return Accepted(call.id, call.committed)
    return Rejection(call.id, RejectionReason.ALREADY_DELIVERED, "Another result came first.")


def too_stale(call: Call, completion: Completion, now: float) -> Rejection | None:
    """Returns the rejection of an answer by older weights than the call accepts. `now` in seconds since 1970."""
    least = call.min_policy_version
    if least is None:
        return None
    versions = completion.tokens.versions if completion.tokens is not None else ()
    if not versions:
        wanted = ("completion.span.versions: required, because the rollout bounds the policy version",)
        return Rejection(call.id, RejectionReason.INVALID, "The completion breaks a rule.", wanted)
    oldest = min(span.policy_version for span in versions)
    if oldest >= least:
        return None
    if call.stale_since is None:
        call.stale_since = now
    message = f"Sampled by version {oldest}; this call accepts {least} and newer."
    return Rejection(call.id, RejectionReason.STALE_POLICY, message)
