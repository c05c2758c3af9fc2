"""Counts over a rollout's calls as they end."""

from __future__ import annotations

from typing import Final

from penstock_interception.domain.budgets import Spent
from penstock_interception.domain.calls import MOST_FAILURE_KINDS, CallRequest, CallState, Failures, Mode, Totals
from penstock_interception.domain.completions import Failure
from penstock_interception.domain.state import Call, Rollout

_CALL_BYTES: Final = 4 << 10
_TOKEN_BYTES: Final = 32
"""Journal bytes of a call without its body, and of one sampled token. Both are upper estimates."""


def count_ended(call: Call, totals: Totals) -> None:
    """Adds an ended call to its rollout's totals, which count all calls that have come until then."""
    name = call.state.value
    setattr(totals, name, getattr(totals, name) + 1)
    if call.state is CallState.DELIVERED:
        totals.calls_at_answer, totals.expired_since_answer = totals.calls, 0
        for one in totals.failures:
            one.calls_since_answer = 0
    # A source that has answered since the call came was not away: the call waited behind others, or had bad luck.
    since_answer = int(call.index >= totals.calls_at_answer)
    if call.state is CallState.FAILED and call.failure is not None:
        totals.last_failure_reason = call.failure.reason
        totals.last_failure_retriable = call.failure.retriable
        failures = _failures(totals, call.failure)
        failures.calls += 1
        failures.calls_since_answer += since_answer
    if call.state is CallState.EXPIRED:
        totals.expired_since_answer += since_answer
    if call.state is not CallState.CANCELLED:
        may_pass = call.failure is None or call.failure.retriable
        totals.last_unanswered = call.state is not CallState.DELIVERED and may_pass
    prompt, completion = tokens_of(call)
    totals.prompt_tokens += prompt
    totals.completion_tokens += completion
    if call.completion is not None and call.completion.origin is not None:
        totals.replayed.add(Spent(1, prompt, completion, call.request.body_bytes))
    if completion and call.completion is not None and (tokens := call.completion.tokens) is not None and tokens.top:
        totals.top_bytes += tokens.top.token_ids.nbytes + tokens.top.logprobs.nbytes
    if call.state is CallState.DELIVERED and call.completion is not None and call.completion.tokens is not None:
        totals.top_bytes += sum(len(tensor.data) for tensor in call.completion.tokens.tensors)


def _failures(totals: Totals, failure: Failure) -> Failures:
    known = totals.failures
    reasons = (failure.reason,) if len(known) < MOST_FAILURE_KINDS else (failure.reason, "")
    for reason in reasons:
        for one in known:
            if (one.reason, one.retriable) == (reason, failure.retriable):
                return one
    known.append(Failures(reasons[-1], failure.retriable))
    return known[-1]


def tokens_of(call: Call) -> tuple[int, int]:
    """Returns a call's prompt and completion tokens as budgets count them: 0 unless it was delivered."""
    completion = call.completion
    if call.state is not CallState.DELIVERED or completion is None:
        return 0, 0
    if completion.usage is not None:
        return completion.usage.prompt_tokens, completion.count
    return call.prompt.count if call.prompt is not None else 0, completion.count


def new_images(rollout: Rollout, request: CallRequest) -> dict[bytes, int]:
    """Returns the bytes of a request's images, by digest, that no call of the rollout has had."""
    if request.folded is None:
        return {}
    images = request.folded.images.items()
    return {digest: len(data) for digest, (_, data) in images if digest not in rollout.image_bytes}


def journal_bytes(rollout: Rollout, calls: int = 0, request_bytes: int = 0) -> int:
    """Estimates the journal size of a rollout's calls and images.

    With so many more calls, whose bodies and new images have `request_bytes`.
    """
    spent = rollout.totals.spent
    bodies = 0 if rollout.spec.mode is Mode.BLACK_BOX else spent.request_bytes + request_bytes
    sampled = spent.completion_tokens * _TOKEN_BYTES + rollout.totals.top_bytes
    images = sum(rollout.image_bytes.values())
    return bodies + images + (spent.calls + calls) * _CALL_BYTES + sampled
