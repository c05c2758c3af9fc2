"""A trainer's own tools in the hands of real agents, in real sandboxes, through the gate."""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

import pytest
from pydantic import BaseModel
from tests.support.copying import assert_only_the_endpoint_was_reachable, copy_task, finish, training
from tests.support.policy import TITLE_SYSTEM_PROMPT, in_shell
from tests.support.services.stack import Running

from penstock.client import AgentChoice, FailedPrecondition, HostTool, HostToolCall, Mode, ToolFailed, sync

AGENTS = ("opencode", "codex")
"""The one names the tool after its server, the other has it in a namespace; tests/conformance/agents has them all."""
CODE = re.compile(r"the code is (\w+)")
NAME = re.compile(r"(\w*open_drawer)\b")


class Question(BaseModel):
    """What the tool wants to know."""

    drawer: int


class Cabinet:
    """A tool whose answers exist in this process only."""

    def __init__(self) -> None:
        self.codes = {7: f"code{secrets.token_hex(4)}"}
        self.calls: list[HostToolCall[Any]] = []

    async def open(self, call: HostToolCall[Question]) -> str:
        self.calls.append(call)
        if call.arguments.drawer not in self.codes:
            raise ToolFailed("There is no such drawer, try 7.")
        return f"the code is {self.codes[call.arguments.drawer]}"

    @property
    def tool(self) -> HostTool:
        """As it is offered."""
        return HostTool(
            name="open_drawer", function=self.open, description="Tells a drawer's code.", parameters=Question
        )


def curious(prompt: str) -> str:
    """Opens a drawer that is not there and then the right one, by the agent's own name of the tool; does the work."""
    if TITLE_SYSTEM_PROMPT in prompt:
        return "A title"
    if (found := CODE.search(prompt)) is not None:
        if "copied" in prompt.rpartition("the code is")[2]:
            return "Done."
        return in_shell(f"bash work.sh; echo {found[1]} > code.txt", description="Does the work")(prompt)
    named = NAME.search(prompt)
    if named is None:
        return "There is no such tool."
    arguments = {"drawer": 7 if "try 7" in prompt else 3}
    return f"<tool_call>\n{json.dumps({'name': named[1], 'arguments': arguments})}\n</tool_call>"


@pytest.mark.requirement("R14", "R15", "R69")
@pytest.mark.parametrize("agent", AGENTS)
async def test_an_agent_uses_a_tool_of_the_trainers_host(stack: Running, agent: str) -> None:
    """It finds the tool by its own configuration, through the sandbox's one endpoint, and does as
    it was told; the calls are in the trajectory."""
    label, cabinet = secrets.token_hex(8), Cabinet()
    async with training(stack, label, curious) as trainer:
        await trainer.session.offer_tools([cabinet.tool])
        handle = await stack.ps.rollouts.create(
            copy_task(stack),
            AgentChoice(name=agent, skip_permissions=True),
            labels={"test": label},
        )
        finished = await finish(handle)
    assert finished.reward == 1.0, finished.agent_said()
    assert_only_the_endpoint_was_reachable(finished)
    assert [call.arguments.drawer for call in cabinet.calls] == [3, 7]
    assert {call.rollout_id for call in cabinet.calls} == {handle.rollout_id}
    trajectory = await handle.trajectory(bodies=True)
    assert trajectory.grade == "exact", trajectory.findings
    wrong, right = trajectory.host_tool_calls
    assert (wrong.state, wrong.is_error, right.state, right.is_error) == ("delivered", True, "delivered", False)
    assert json.loads(right.arguments_json) == {"drawer": 7}
    assert json.loads(right.result_json) == {"text": f"the code is {cabinet.codes[7]}"}
    samples_only = await handle.trajectory(samples_only=True)
    assert samples_only.host_tool_calls == ()


@pytest.mark.requirement("R63", "R69")
@pytest.mark.parametrize("agent", ["pi", "shell"])
async def test_an_agent_without_mcp_is_refused_tools_by_name(stack: Running, agent: str) -> None:
    """Before anything starts, and only where there are tools."""
    label = secrets.token_hex(8)
    async with stack.ps.intercept(labels={"test": label}) as session:
        await session.offer_tools([Cabinet().tool])
        before = {item.rollout_id async for item in stack.ps.rollouts.list()}
        for create in (stack.ps.rollouts.create, stack.ps.groups.create):
            more: dict[str, Any] = {"n": 2} if create == stack.ps.groups.create else {}
            with pytest.raises(FailedPrecondition, match=f"agent {agent} cannot use the host tools") as refused:
                await create(copy_task(stack), agent, labels={"test": label}, **more)
            assert refused.value.reason == "AGENT_WITHOUT_MCP"
        assert {item.rollout_id async for item in stack.ps.rollouts.list()} == before
        await session.offer_tools([])
        handle = await stack.ps.rollouts.create(
            copy_task(stack), agent, labels={"test": label}, mode=Mode.TRANSPARENT_PROXY
        )
        assert (await finish(handle)).reward == 1.0


@pytest.mark.requirement("R15")
def test_the_client_without_await_offers_plain_functions(stack: Running) -> None:
    """The same names, and tools that block run in threads."""
    with sync.connect(stack.stack.endpoints) as ps, ps.intercept(labels={"test": "nobody"}) as session:
        session.offer_tools([HostTool(name="plain", function=lambda call: call.name)])
        session.offer_tools([])
