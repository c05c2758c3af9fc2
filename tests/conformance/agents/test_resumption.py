"""Agents that a user gives further instructions: each goes on in its own session, and every token is exact.

The reference agent runs in each run of the suite, real ones on demand.
"""

from __future__ import annotations

import asyncio
import secrets

import numpy as np
import pytest
from tests.conformance.agents.test_agents import in_tokens
from tests.support.services.stack import Running

from penstock.agents.smoke_test import Reply, text_of
from penstock.client import AgentChoice, Completion, ModelCall, Task, User, UserTurn
from penstock_driver.agents.registry import built_in_specs

TASK, SECOND, THIRD = "Remember the word kiwi.", "Which word was it?", "Thank you. Say goodbye."
AGENTS = [
    pytest.param(
        spec.name, marks=[] if spec.name == "shell" else pytest.mark.on_demand("resumed agents: shell runs always")
    )
    for spec in built_in_specs()
    if spec.resume is not None
]


def answer(call: ModelCall) -> str:
    """A text for each instruction; other calls get a title."""
    said = "\n".join(text_of(message) for message in call.messages)
    known = ((THIRD, "Goodbye."), (SECOND, "It was kiwi."), (TASK, "I remember it."))
    return next((text for asked, text in known if asked in said), "A title")


@pytest.mark.requirement("R133", "R18")
@pytest.mark.parametrize("agent", AGENTS)
async def test_an_agent_goes_on_with_its_session(stack: Running, agent: str) -> None:
    """Each further prompt continues the conversation before it, token for token, in one sample of the agent's alone."""
    label = secrets.token_hex(8)
    registered = await stack.ps.agents.get(agent)
    asked: list[ModelCall] = []
    answers: dict[str, Completion] = {}
    async with stack.ps.intercept(labels={"of": label}, messages=True) as session:

        async def answering() -> None:
            async for call in session.calls():
                asked.append(call)
                answers[call.call_id] = completion = in_tokens(call, Reply(answer(call)))
                await call.deliver(completion)

        handle = await stack.ps.rollouts.create(
            Task(task_id="talk", instruction=TASK),
            AgentChoice(name=agent, skip_permissions=registered.can_skip_permissions),
            labels={"of": label},
            user=User(instructions=[SECOND, THIRD]),
        )
        answers_all = asyncio.create_task(answering())
        try:
            result = await handle.result()
        finally:
            answers_all.cancel()
            await asyncio.wait([answers_all])
            await handle.cancel("OVER")
    assert result.failure is None, result.outcome
    turns = [event.payload async for event in handle.events() if isinstance(event.payload, UserTurn)]
    assert [(turn.agent_message, turn.instruction, turn.end_reason) for turn in turns] == [
        ("I remember it.", SECOND, ""),
        ("It was kiwi.", THIRD, ""),
        ("Goodbye.", "", "SCRIPT_ENDED"),
    ]
    trajectory = await handle.trajectory()
    assert trajectory.grade == "exact", trajectory.findings
    main = [call for call in trajectory.calls if call.call_class == "main"]
    assert len(main) == 3 and not trajectory.user_calls
    assert [call.parent_call_id for call in main] == [None, main[0].call_id, main[1].call_id]
    (sample,) = [sample for sample in trajectory.samples if sample.branch_class == "main"]
    assert [turn.call_id for turn in sample.turns] == [call.call_id for call in main]
    mask = np.zeros(len(sample.input_ids), bool)
    for turn in sample.turns:
        mask[turn.start : turn.end] = True
        np.testing.assert_array_equal(sample.input_ids[turn.start : turn.end], answers[turn.call_id].token_ids)
    np.testing.assert_array_equal(sample.loss_mask, mask)
