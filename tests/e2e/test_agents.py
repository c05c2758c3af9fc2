"""The real agents, in a real sandbox, in all three modes, against real services."""

from __future__ import annotations

import json
import secrets

import numpy as np
import pytest
from tests.support.copying import assert_only_the_endpoint_was_reachable, copy_task, finish, training
from tests.support.endpoint import gate_rollout
from tests.support.policy import CODEC
from tests.support.stack import Running

from penstock.client import AgentChoice, Completion, Inference, Mode, Upstream
from penstock.client.chat import TokenIds

AGENTS = ("shell", "opencode", "pi", "claude-code", "codex", "gemini-cli", "qwen-code")
ASKING = set(AGENTS) - {"shell", "pi"}
"""Agents that ask before they run a command, unless they are told not to."""
SPOKEN = {"claude-code": "messages", "codex": "responses", "gemini-cli": "generate_content"}
"""What agents speak, if not chat completions."""
CONVERSATION = {"responses": "input", "generate_content": "contents"}
"""Where a body has its conversation, if not in `messages`."""


def ids_of(completion: Completion | None) -> TokenIds:
    """The sampled ids, which are there."""
    assert completion is not None
    assert completion.token_ids is not None
    return completion.token_ids


def choice(agent: str) -> AgentChoice:
    """An agent that runs commands without asking."""
    return AgentChoice(name=agent, skip_permissions=agent in ASKING)


@pytest.mark.parametrize("agent", AGENTS)
async def test_an_agent_at_the_gate_does_the_task_and_its_trajectory_is_token_exact(stack: Running, agent: str) -> None:
    """R18, R59, R82, R84, R85, R87: the next prompt starts with what was delivered, and the samples hold it."""
    label = secrets.token_hex(8)
    async with training(stack, label) as trainer:
        handle = await stack.ps.rollouts.create(copy_task(stack), choice(agent), labels={"test": label})
        finished = await finish(handle)
    assert finished.reward == 1.0, finished.agent_said()
    assert finished.result.failure is None
    assert_only_the_endpoint_was_reachable(finished)

    trajectory = await handle.trajectory(bodies=True)
    main = [call for call in trajectory.calls if call.call_class == "main"]
    titles = [call for call in trajectory.calls if call.call_class == "title"]
    assert len(main) == 2
    assert len(titles) == (1 if agent == "opencode" else 0)
    assert len(main) + len(titles) == len(trajectory.calls)
    assert trajectory.grade == "exact", trajectory.findings
    assert trajectory.capture_level == "tokens_and_logprobs"

    first, second = main
    answers = trainer.answers
    for call in trajectory.calls:
        given = answers[call.call_id]
        assert call.completion is not None
        np.testing.assert_array_equal(call.completion.token_ids, given.token_ids)
        np.testing.assert_array_equal(call.completion.logprobs, given.logprobs)
        assert [span.policy_version for span in call.completion.versions] == [3]
    start = np.concatenate((trajectory.prompt_of(first.call_id), ids_of(answers[first.call_id])))
    np.testing.assert_array_equal(trajectory.prompt_of(second.call_id)[: len(start)], start)
    assert "copied" in CODEC.decode(trajectory.prompt_of(second.call_id)[len(start) :])

    [sample] = [sample for sample in trajectory.samples if sample.branch_class == "main"]
    whole = np.concatenate((trajectory.prompt_of(second.call_id), ids_of(answers[second.call_id])))
    np.testing.assert_array_equal(sample.input_ids, whole)
    assert sample.logprobs is not None
    expected = np.zeros(len(whole), bool)
    for span in sample.turns:
        expected[span.start : span.end] = True
        np.testing.assert_array_equal(sample.input_ids[span.start : span.end], answers[span.call_id].token_ids)
        np.testing.assert_array_equal(sample.logprobs[span.start : span.end], answers[span.call_id].logprobs)
    np.testing.assert_array_equal(sample.loss_mask, expected)
    assert [span.call_id for span in sample.turns] == [first.call_id, second.call_id]
    for asked in trainer.calls:
        assert asked.dialect == SPOKEN.get(agent, "chat_completions")
        np.testing.assert_array_equal(asked.prompt_token_ids, trajectory.prompt_of(asked.call_id))


@pytest.mark.parametrize("agent", AGENTS)
async def test_an_agent_behind_the_transparent_proxy_is_captured_without_a_trainer(stack: Running, agent: str) -> None:
    """R18, R82: the inference service answers at once; every call has the tokens and logprobs of its engine."""
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


@pytest.mark.parametrize("agent", AGENTS)
async def test_an_agent_in_a_black_box_is_answered_by_a_callers_endpoint_alone(stack: Running, agent: str) -> None:
    """R11, R18: the request arrives at the endpoint's own base URL with its own key, and only the outcome is captured.

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
