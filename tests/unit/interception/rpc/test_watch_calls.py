"""Watches of calls: whoever watches many rollouts loses none of them to one call."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from tests.support.services.inner_gate import completion, tokenizer

from penstock.interception.v1 import rollout_gate_service_pb2 as pb
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis import auth
from penstock_chassis.auth.callers import Caller, serve_for
from penstock_interception.domain.completions import Completion
from penstock_interception.rpc.gate_service import RolloutGateServicer
from penstock_interception.rpc.trajectory import NOT_WRITTEN
from penstock_interception.testing import open_gate


@pytest.mark.requirement("R26")
async def test_a_call_that_no_message_can_hold_costs_only_itself(tmp_path: Path) -> None:
    """Its change has its ids and state, and says that the rest is missing; those of other rollouts follow it."""
    serve_for(Caller(auth.Role.OPERATOR, None))
    async with open_gate(tmp_path, tokenizer()) as gate:
        servicer = RolloutGateServicer(gate.interceptor, [], lambda: "", asyncio.Event())
        start = gate.interceptor.events.last
        odd = await gate.ask(await gate.open(), "hi")
        odd.sampling = replace(odd.sampling, top_k=2**31)
        gate.interceptor.gate.cancel(odd, "AGENT_GONE")
        sound = await gate.ask(await gate.open(request_id="q2", rollout_id="r2"), "hi")
        gate.interceptor.gate.cancel(sound, "AGENT_GONE")
        request = pb.WatchCallsRequest(after_sequence=start, ended_only=True, all_namespaces=True)
        events = cast("Any", servicer.WatchCalls(request, cast("Any", None)))
        seen = [await anext(events) for _ in range(3)]
        await events.aclose()
    assert [event.WhichOneof("event") for event in seen] == ["started", "changed", "changed"]
    first, second = (event.changed.call for event in seen[1:])
    assert first == trajectory_pb2.Call(
        call_id=odd.id,
        rollout_id="r1",
        state=trajectory_pb2.CALL_STATE_CANCELLED,
        end_reason="AGENT_GONE",
        normalisations=[NOT_WRITTEN],
    )
    assert (second.call_id, second.rollout_id) == (sound.id, "r2")
    assert second.model_requested == "m"


@pytest.mark.requirement("R71")
async def test_a_change_has_the_sum_of_the_logprobs_that_it_leaves_out(tmp_path: Path) -> None:
    """Whoever watches knows how sure the policy was, without the tokens; of tokens without logprobs it has none."""
    serve_for(Caller(auth.Role.OPERATOR, None))
    answers = (completion("yes", times=3), _without_logprobs(completion("no")))
    async with open_gate(tmp_path, tokenizer()) as gate:
        servicer = RolloutGateServicer(gate.interceptor, [], lambda: "", asyncio.Event())
        start = gate.interceptor.events.last
        rollout = await gate.open()
        gate.join()
        for text, answer in zip(("hi", "ho"), answers, strict=True):
            call = await gate.ask(rollout, text)
            await gate.interceptor.deliver(call.id, call.lease_id, answer)
            await call.ended
        request = pb.WatchCallsRequest(after_sequence=start, ended_only=True, all_namespaces=True)
        events = cast("Any", servicer.WatchCalls(request, cast("Any", None)))
        spans = [(await anext(events)).changed.call.completion.span for _ in range(3)][1:]
        await events.aclose()
    with_them, without = spans
    assert not with_them.logprobs and with_them.count == answers[0].count
    assert with_them.logprob_sum == -0.5 * with_them.count
    assert without.count and not without.HasField("logprob_sum")


def _without_logprobs(answer: Completion) -> Completion:
    assert answer.tokens is not None
    return replace(answer, tokens=replace(answer.tokens, logprobs=None, logprobs_mode=None))
