"""What only Claude Code does: its commands' environment, tools that it loads late, how a used-up budget ends it."""

from __future__ import annotations

import secrets

import pytest
from tests.support.copying import copy_task, finish, training
from tests.support.policy import calling, in_turn
from tests.support.services.stack import Running

from penstock.client import AgentChoice, Budgets, Command, Phase, RewardFrom, Task, Verifier

CLAUDE = AgentChoice(name="claude-code", skip_permissions=True)


@pytest.mark.requirement("R1", "R10")
async def test_claude_codes_commands_inherit_neither_endpoint_nor_key(stack: Running) -> None:
    """The address and the key of the model are in its files, not in what its shell hands on."""
    label = secrets.token_hex(8)
    look = Verifier(commands=[Command(["cat", "env.txt"])], reward=RewardFrom.PASSED_SHARE)
    reply = in_turn(calling("Bash", command="env > env.txt", description="Looks"), "done")
    async with training(stack, label, reply) as trainer:
        task = Task(task_id="env", instruction="Look.", verifier=look)
        handle = await stack.ps.rollouts.create(task, CLAUDE, labels={"test": label})
        finished = await finish(handle)
    assert finished.reward == 1.0, finished.agent_said()
    environment = finished.commands(Phase.VERIFYING)[0].stdout_tail.decode()
    assert "CLAUDECODE=1" in environment, environment
    assert "ANTHROPIC_BASE_URL" not in environment and "ANTHROPIC_API_KEY" not in environment
    assert handle.rollout_id not in environment
    assert {call.dialect for call in (await handle.trajectory()).calls} == {"messages"}
    assert len(trainer.calls) == 2


@pytest.mark.requirement("R82")
async def test_a_tool_that_it_loads_late_leaves_the_tokens_exact(stack: Running) -> None:
    """Its tool search answers with references; the head of the prompt stays as it was."""
    label = secrets.token_hex(8)
    reply = in_turn(calling("ToolSearch", query="select:CronList"), calling("CronList"), "The list is empty.")
    async with training(stack, label, reply):
        handle = await stack.ps.rollouts.create(
            Task(task_id="late", instruction="Look."), CLAUDE, labels={"test": label}
        )
        finished = await finish(handle)
    assert finished.result.failure is None, finished.agent_said()
    trajectory = await handle.trajectory()
    assert trajectory.grade == "exact", trajectory.findings
    assert len({call.branch_id for call in trajectory.calls}) == 1
    assert len(trajectory.calls) == 3


@pytest.mark.requirement("R88")
async def test_a_used_up_budget_ends_it_at_once(stack: Running) -> None:
    """Told in a way that it does not repeat for minutes; the rollout says why."""
    label = secrets.token_hex(8)
    async with training(stack, label) as trainer:
        handle = await stack.ps.rollouts.create(
            copy_task(stack), CLAUDE, labels={"test": label}, budgets=Budgets(max_calls=1)
        )
        finished = await finish(handle)
    assert finished.result.failure is not None
    assert finished.result.failure.reason == "BUDGET_EXHAUSTED", finished.agent_said()
    assert len(trainer.calls) == 1
