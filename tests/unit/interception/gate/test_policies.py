"""Trainers of several policies in one run: none answers for another, nor makes another's answers too old."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.services.inner_gate import completion, inner_gate
from tests.support.waiting import eventually

from penstock_interception.domain.calls import CallRule, CallState, PolicyBounds, RolloutModel
from penstock_interception.domain.results import Accepted, Rejection, RejectionReason
from penstock_interception.domain.state import Selector

SOLVER = Selector(run_id="run", policy_ids=frozenset({"solver"}))
CRITIC = Selector(run_id="run", policy_ids=frozenset({"critic"}))
MODELS = (RolloutModel("", "solver", rule=CallRule(until_index=1)), RolloutModel("", "critic"))


@pytest.mark.requirement("R133")
async def test_an_announcement_without_a_policy_is_of_what_its_session_trains(tmp_path: Path) -> None:
    """Version 100 of the solver makes neither the critic's version 3 old nor the 5 of a rollout with one model."""
    bounds = PolicyBounds(max_staleness=1)
    async with inner_gate(tmp_path) as gate:
        opened = [
            await gate.open(
                request_id=name, rollout_id=name, run_id="run", models=(RolloutModel("", name, bounds=bounds),)
            )
            for name in ("solver", "critic")
        ]
        alone = await gate.open(request_id="alone", rollout_id="alone", run_id="run", policy=bounds)
        solver = gate.join(selector=SOLVER, policy_version=100)
        gate.interceptor.sessions.announce(solver, 100)
        critic = gate.join(selector=CRITIC, policy_version=3)
        call = await gate.ask(opened[1], "hello")
        await eventually(lambda: call.holder is critic, "the critic's trainer has it")
        assert isinstance(
            await gate.interceptor.deliver(call.id, "", completion("x", version=3), session=critic), Accepted
        )
        one = gate.join(selector=Selector(run_id="run"), policy_version=5)
        call = await gate.ask(alone, "hello")
        await eventually(lambda: call.holder is one, "its trainer has it")
        assert isinstance(
            await gate.interceptor.deliver(call.id, "", completion("x", version=5), session=one), Accepted
        )


@pytest.mark.requirement("R133")
async def test_a_session_answers_calls_of_its_policies_alone(tmp_path: Path) -> None:
    """Neither a waiting call whose id it knows, nor what it takes over of another session."""
    async with inner_gate(tmp_path) as gate:
        rollout = await gate.open(run_id="run", models=MODELS)
        critic = gate.join(selector=CRITIC)
        call = await gate.ask(rollout, "hello")
        await eventually(lambda: call.state is CallState.QUEUED, "nobody takes it")
        refused = await gate.interceptor.deliver(call.id, "", completion("x", version=3), session=critic)
        assert isinstance(refused, Rejection) and refused.reason is RejectionReason.NOT_LEASED
        solver = gate.join(selector=SOLVER)
        await eventually(lambda: call.holder is solver, "its trainer has it")
        gate.join(selector=CRITIC, resume=solver.id)
        assert call.state is CallState.QUEUED and call.holder is None
        last = gate.join(selector=SOLVER)
        await eventually(lambda: call.holder is last, "it waited for a trainer of its policy")
        assert isinstance(
            await gate.interceptor.deliver(call.id, "", completion("x", version=3), session=last), Accepted
        )
