"""Findings about how an answer ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.services.inner_gate import completion, inner_gate
from tests.support.waiting import eventually

from penstock_codec.chat import FinishReason, Sampling
from penstock_interception.domain.calls import CallState
from penstock_interception.domain.completions import Completion
from penstock_interception.domain.results import Accepted
from penstock_interception.rollouts.trajectory import Grade, capture


def without_stop(text: str) -> Completion:
    """An answer whose engine left its stop token out."""
    whole = completion(text)
    tokens = whole.tokens
    assert tokens is not None and tokens.logprobs is not None
    return replace(whole, tokens=replace(tokens, ids=tokens.ids[:-1], logprobs=tokens.logprobs[:-1]))


@pytest.mark.requirement("R83")
@pytest.mark.parametrize(
    ("sampling", "answer", "grade", "reasons"),
    [
        (Sampling(), completion("four"), Grade.EXACT, set()),
        (Sampling(), without_stop("four"), Grade.EXACT, {"STOP_TOKEN_MISSING"}),
        (Sampling(stop=(".",)), without_stop("four"), Grade.EXACT, set()),
        (
            Sampling(max_tokens=3),
            replace(without_stop("four"), finish_reason=FinishReason.LENGTH),
            Grade.UNUSABLE,
            {"TOKENS_OVER_LIMIT"},
        ),
        (Sampling(max_tokens=2), completion("four"), Grade.USABLE, {"TOKENS_OVER_LIMIT"}),
        (Sampling(max_tokens=5), completion("four"), Grade.EXACT, set()),
    ],
    ids=["complete", "no stop token", "stopped by a text", "cut, and over", "over", "at its limit"],
)
async def test_an_engine_that_does_not_keep_what_a_call_asks_is_a_finding(
    tmp_path: Path, sampling: Sampling, answer: Completion, grade: Grade, reasons: set[str]
) -> None:
    """The tokens are what its engine says; what nobody asked for, or nobody can learn from, is named."""
    async with inner_gate(tmp_path) as gate:
        rollout, session = await gate.open(), gate.join()
        call = await gate.ask(rollout, "how many?", sampling=sampling)
        await eventually(lambda: call.state is CallState.LEASED, "it is sampled")
        verdict = await gate.interceptor.deliver(call.id, "", answer, session=session)
        assert isinstance(verdict, Accepted), verdict
        await call.ended
        await gate.interceptor.rollouts.close(rollout.id, "completed")
        graded = capture(rollout, await gate.interceptor.conversations.of(rollout))
    named = {one.reason for one in graded.findings}
    assert named & {"STOP_TOKEN_MISSING", "TOKENS_OVER_LIMIT"} == reasons, graded.findings
    assert graded.grade is grade, graded.findings
