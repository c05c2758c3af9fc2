"""Replay where the gate has no tokenizer: the upstream returns the token ids of prompts and answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.services.inner_gate import completion, inner_gate
from tests.support.waiting import eventually
from tests.unit.interception.rollouts.test_replay import findings, recorded, said

from penstock_codec.chat import Message
from penstock_interception.domain.calls import Answerer, CallState, ModelFacts
from penstock_interception.domain.completions import Completion
from penstock_interception.domain.results import Accepted
from penstock_interception.domain.state import Call, Rollout
from penstock_interception.graph.values import IntArray
from penstock_interception.sources.base import Resolved
from penstock_interception.testing import SPEC, OpenGate

PROMPT = np.arange(100, 140, dtype=np.int32)
NEW = np.arange(60, 70, dtype=np.int32)
"""What the upstream's template adds between an answer and the next one."""
TURNS = (["go"], ["go", "one", "more"], ["go", "one", "more", "two", "again"])


async def opened(gate: OpenGate, attempt: int = 1) -> Rollout:
    """A rollout without a tokenizer."""
    spec = replace(SPEC, request_id=f"open-{attempt}", attempt=attempt)
    return await gate.interceptor.rollouts._open(spec, Resolved(ModelFacts(returns_tokens=True), None), None)


def upstreams(text: str, prompt: IntArray) -> Completion:
    """An answer as an upstream gives it that returns ids."""
    return replace(completion(text, version=1), message=Message.assistant(text), prompt_ids=prompt)


async def answered(gate: OpenGate, rollout: Rollout, turn: Sequence[str], answer: Completion) -> Call:
    """A call that no recorded answer answers, and its source's answer."""
    call = await gate.ask(rollout, *turn)
    await eventually(lambda: call.plan is not None, "its prompt was not made")
    outcome = await gate.interceptor._answers.from_source(call, answer, Answerer.INFERENCE)
    assert isinstance(outcome, Accepted), outcome
    await call.ended
    return call


def samples(gate: OpenGate) -> list[tuple[list[int], list[int], list[float], Any]]:
    found = gate.interceptor.conversations["r1"].graph.samples()
    return [(item.input_ids.tolist(), item.loss_mask.tolist(), item.logprobs.tolist(), item.versions) for item in found]


@pytest.mark.requirement("R128", "R130")
@pytest.mark.parametrize("rewrites", [False, True])
async def test_no_token_is_lost_where_the_upstream_makes_the_prompts(tmp_path: Path, rewrites: bool) -> None:
    """Also where its template rewrites the history, so that a prompt shares a part of the line before it only."""
    async with inner_gate(tmp_path) as gate:
        first = await opened(gate)
        prompt = PROMPT
        for number, turn in enumerate(TURNS[:2]):
            answer = upstreams(("one", "two")[number], prompt)
            await answered(gate, first, turn, answer)
            assert answer.tokens is not None
            prompt = np.concatenate([prompt[: 20 if rewrites else None], answer.tokens.ids, NEW])
        before, calls = samples(gate), await recorded(gate, first)
        assert [sum(item[1]) > 0 for item in before] == [True] * (2 if rewrites else 1)

        await gate.interceptor.rollouts.delete(first.id)
        new = await opened(gate, 2)
        await gate.interceptor.replays.load(new, calls, ("r1", 1), exact=False)
        for number, turn in enumerate(TURNS[:2]):
            call = await gate.ask(new, *turn)
            await call.ended
            assert (call.state, said(call)) == (CallState.DELIVERED, ("one", "two")[number])
        assert samples(gate) == before
        assert "REPLAY_DIVERGED" not in await findings(gate, new)

        third = await answered(gate, new, TURNS[2], upstreams("three", prompt))
        assert third.completion is not None and third.completion.origin is None
        assert len(samples(gate)) == (3 if rewrites else 1)


@pytest.mark.requirement("R128", "R130")
async def test_a_recorded_prompt_stays_that_of_its_answer_where_the_line_before_it_is_another(tmp_path: Path) -> None:
    """The first answer is sampled anew, in other tokens of the same text: the second one's prompt is not made of it."""
    async with inner_gate(tmp_path) as gate:
        first = await opened(gate)
        one = upstreams("one", PROMPT)
        await answered(gate, first, TURNS[0], one)
        assert one.tokens is not None
        prompt = np.concatenate([PROMPT, one.tokens.ids, NEW])
        await answered(gate, first, TURNS[1], upstreams("two", prompt))
        calls = await recorded(gate, first)

        await gate.interceptor.rollouts.delete(first.id)
        new = await opened(gate, 2)
        await gate.interceptor.replays.load(new, calls, ("r1", 1), exact=False)
        assert new.recording is not None
        new.recording.use(calls[0].call_id)  # as if it had been too old
        other = np.concatenate([PROMPT, NEW])
        await answered(gate, new, TURNS[0], replace(completion("xyz"), message=one.message, prompt_ids=other))
        call = await gate.ask(new, *TURNS[1])
        await call.ended
        assert said(call) == "two"
        path = gate.interceptor.conversations["r1"].graph.path(call.id)
        assert path[: prompt.size].tolist() == prompt.tolist()
