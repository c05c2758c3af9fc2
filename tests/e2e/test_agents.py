"""The real agents, in a real sandbox, in the modes without a trainer, against real services."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.support.copying import assert_only_the_endpoint_was_reachable, copy_task, finish
from tests.support.endpoints.endpoint import gate_rollout
from tests.support.installed_agents import ON_DEMAND
from tests.support.services.stack import Running

from penstock.client import AgentChoice, Completion, Inference, Mode, Upstream
from penstock.client.types.chat import TokenIds
from penstock_driver.agents.registry import built_in_specs

SPECS = {spec.name: spec for spec in built_in_specs()}
AGENTS = [name for name, spec in SPECS.items() if name not in ON_DEMAND and not (spec.trial and spec.trial.work)]
"""Those whose model acts by calling tools and that the suite installs; tests/conformance/agents has every agent."""
SPOKEN = {"claude-code": "messages", "codex": "responses", "gemini-cli": "generate_content"}
"""What agents speak, if not chat completions."""
ONE_OF_EACH = [
    name
    if name in SPOKEN or name in ("shell", "pi")
    else pytest.param(
        name,
        marks=pytest.mark.on_demand(
            "agents that speak chat completions, in the modes without a trainer: each runs at the gate in"
            " tests/conformance/agents, and shell and pi run in every mode"
        ),
    )
    for name in AGENTS
]
"""Two that speak chat completions, of which one is a program of others, and those that speak something else. To an
agent all modes are one endpoint: what differs is on its other side."""
CONVERSATION = {"responses": "input", "generate_content": "contents"}
"""Where a body has its conversation, if not in `messages`."""


def ids_of(completion: Completion | None) -> TokenIds:
    """The sampled ids, which are there."""
    assert completion is not None
    assert completion.token_ids is not None
    return completion.token_ids


def choice(agent: str) -> AgentChoice:
    """An agent that runs commands without asking."""
    return AgentChoice(name=agent, skip_permissions=SPECS[agent].can_skip_permissions)


@pytest.mark.requirement("R18", "R82")
@pytest.mark.parametrize("agent", ONE_OF_EACH)
async def test_an_agent_behind_the_transparent_proxy_is_captured_without_a_trainer(stack: Running, agent: str) -> None:
    """The inference service answers at once; every call has the tokens and logprobs of its engine."""
    handle = await stack.ps.rollouts.create(
        copy_task(stack), choice(agent), mode=Mode.TRANSPARENT_PROXY, source=Inference()
    )
    finished = await finish(handle)
    assert finished.reward == 1.0, finished.agent_said()
    assert_only_the_endpoint_was_reachable(finished)
    trajectory = await handle.trajectory()
    main = [call for call in trajectory.calls if call.call_class == "main"]
    assert len(main) == 2
    for call in trajectory.calls:
        assert call.state == "delivered"
        assert call.answerer == "inference"
        assert call.completion is not None
        assert call.completion.engine == "scripted"
        assert call.completion.logprobs is not None
        assert len(call.completion.logprobs) == len(ids_of(call.completion))
    start = np.concatenate((trajectory.prompt_of(main[0].call_id), ids_of(main[0].completion)))
    np.testing.assert_array_equal(trajectory.prompt_of(main[1].call_id)[: len(start)], start)


@pytest.mark.requirement("R11", "R18")
@pytest.mark.parametrize("agent", ONE_OF_EACH)
async def test_black_box_agent_is_answered_by_the_callers_endpoint_alone(stack: Running, agent: str) -> None:
    """The request arrives at the endpoint's own base URL with its own key, and only the outcome is captured.

    The endpoint is a real OpenAI-compatible server: the ingress of a second, transparent rollout.
    """
    async with gate_rollout(stack) as endpoint:
        handle = await stack.ps.rollouts.create(
            copy_task(stack),
            choice(agent),
            mode=Mode.BLACK_BOX,
            source=Upstream(base_url=endpoint.base_url, api_key=endpoint.api_key, model="m"),
        )
        finished = await finish(handle)
        assert finished.reward == 1.0, finished.agent_said()
        assert_only_the_endpoint_was_reachable(finished)
        seen = await endpoint.capture()
    assert [call.call_class for call in seen.calls].count("main") == 2
    said = CONVERSATION.get(SPOKEN.get(agent, ""), "messages")
    assert all(json.loads(call.request_body)[said] for call in seen.calls)
    trajectory = await handle.trajectory()
    assert trajectory.capture_level == "none"
    assert not trajectory.samples
    assert all(call.completion is None for call in trajectory.calls)
    assert len(trajectory.calls) == len(seen.calls)
    assert endpoint.api_key not in str(finished.events)
