"""kill -9 of the gate, and trainers' streams that break, while agents' tools are at work: each runs once (R34)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.faults.interception.test_kill import TOKEN, Victim, captured, opened, victim  # noqa: F401 - a fixture
from tests.support.endpoints.mcp_agent import post, tool_call

from penstock.client import HostTool, HostToolCall, connect
from penstock.trajectory.v1 import trajectory_pb2


class Worker:
    """A tool that says when it was called, and ends when it is let."""

    def __init__(self) -> None:
        self.runs = 0
        self.called = asyncio.Event()
        self.let = asyncio.Event()

    async def work(self, call: HostToolCall[Any]) -> str:
        self.runs += 1
        self.called.set()
        await self.let.wait()
        return f"worked on {call.arguments['word']}"


async def insisting(victim: Victim, token: str) -> str:  # noqa: F811
    """An agent's client that sends its request again until it has the answer."""
    url = f"http://{victim.ingress}/rollout/r1/mcp"
    while True:
        try:
            status, told, _ = await post(url, token, tool_call("work", {"word": "a"}), headers={"mcp-session-id": "s"})
            if status == 200:
                text: str = told["result"]["content"][0]["text"]
                return text
        except (aiohttp.ClientError, ConnectionError):
            pass
        await asyncio.sleep(0.02)  # the back-off of a client whose server is away


@pytest.mark.requirement("R34")
async def test_tool_running_when_the_gate_died_ran_once_and_its_result_arrives(
    victim: Victim,  # noqa: F811
) -> None:
    """R34, decision 7: the trainer's session resumes with its tools, the agent's repeated request joins the call."""
    worker = Worker()
    async with connect({"interception": victim.address}, TOKEN) as ps, ps.intercept(rollout_ids=["r1"]) as session:
        await session.offer_tools([HostTool(name="work", function=worker.work)])
        token = (await opened(victim)).token
        asking = asyncio.create_task(insisting(victim, token))
        await worker.called.wait()
        before = session.session_id
        await victim.kill()
        await victim.start()
        worker.let.set()
        assert await asking == "worked on a"
        assert worker.runs == 1
        assert session.session_id != before
        [recorded] = (await captured(victim)).host_tool_calls
        assert recorded.state == trajectory_pb2.CALL_STATE_DELIVERED
        # The tools are still offered, to this rollout and to those that come.
        worker.called.clear()
        status, told, _ = await post(
            f"http://{victim.ingress}/rollout/r1/mcp", token, tool_call("work", {"word": "b"}, "later")
        )
        assert (status, told["result"]["content"][0]["text"]) == (200, "worked on b")


@pytest.mark.requirement("R34")
@pytest.mark.parametrize("delay_ms", [0, 10, 40])
async def test_killed_at_any_moment_each_of_several_tools_has_one_result(
    victim: Victim,  # noqa: F811
    delay_ms: int,
    tmp_path: Path,
) -> None:
    """Whatever the moment, no accepted result is lost and no call that has one is made again."""
    runs: dict[str, int] = {}

    async def work(call: HostToolCall[Any]) -> dict[str, str]:
        runs[call.tool_call_id] = runs.get(call.tool_call_id, 0) + 1
        return {"word": call.arguments["word"]}

    async with connect({"interception": victim.address}, TOKEN) as ps, ps.intercept(rollout_ids=["r1"]) as session:
        await session.offer_tools([HostTool(name="work", function=work)])
        token = (await opened(victim)).token

        async def agent(number: int) -> str:
            while True:
                url = f"http://{victim.ingress}/rollout/r1/mcp"
                try:
                    status, told, _ = await post(url, token, tool_call("work", {"word": f"w{number}"}, number))
                    if status == 200:
                        word: str = told["result"]["structuredContent"]["word"]
                        return word
                except (aiohttp.ClientError, ConnectionError):
                    await asyncio.sleep(0.02)  # as above

        asking = [asyncio.create_task(agent(number)) for number in range(8)]
        await asyncio.sleep(delay_ms / 1000)
        await victim.kill()
        await victim.start()
        assert await asyncio.gather(*asking) == [f"w{number}" for number in range(8)]
    assert set(runs.values()) == {1}
    recorded = (await captured(victim)).host_tool_calls
    assert {item.state for item in recorded} == {trajectory_pb2.CALL_STATE_DELIVERED}
