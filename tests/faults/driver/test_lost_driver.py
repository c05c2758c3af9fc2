"""A driver that is killed while an agent runs, and is away for longer than its lease at the gate.

Gate and sandbox service are the real ones and stay.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.integration.driver.stack import TOKEN, Stack, running
from tests.integration.driver.test_service import echo_agent
from tests.support.waiting import eventually_async

from penstock.client import Penstock, Phase, RolloutHandle, Task, Tokenizer, connect
from penstock.client.errors import NotFound
from penstock_codec import tiny_tokenizer

_LEASE_S = 2.0
_KEPT_S = 600.0
_ASKS_NOTHING = b"{}"
"""A body that is refused as one, by a gate that accepts the key."""


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent that runs, with its endpoint and its key."""

    rollout: RolloutHandle
    url: str
    key: str

    async def status(self, http: aiohttp.ClientSession) -> int:
        """The status of a request with its key."""
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        async with http.post(f"{self.url}/chat/completions", data=_ASKS_NOTHING, headers=headers) as answer:
            return answer.status


async def _started(stack: Stack, ps: Penstock) -> Agent:
    """Start a rollout; return when its agent runs and its gate has accepted its key."""
    await ps.agents.register(echo_agent(argv=["/bin/sh", "-c", "exec sleep 600"]))
    rollout = await ps.rollouts.create(Task(task_id="wait", instruction="wait"), "echo", source=Tokenizer("tiny"))

    async def runs() -> bool:
        return (await rollout.refresh()).phase is Phase.RUNNING

    await eventually_async(runs, "the agent runs")
    home = rollout.info.home
    assert home is not None
    sandbox = await ps.sandboxes.attach(home.sandbox_id)
    told = json.loads((await sandbox.run(["sh", "-c", 'cat "$HOME/echo.json"'])).stdout)
    path = told["url"].partition("://")[2].partition("/")[2]
    return Agent(rollout, f"http://{stack.interception.endpoints['ingress']}/{path}", told["key"])


@pytest.fixture(params=[_LEASE_S, _KEPT_S], ids=["a short lease", "a long lease"])
async def agent(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[float, Stack, Penstock, Agent]]:
    async with AsyncExitStack() as closing:
        tiny_tokenizer.build(["wait"]).write(tmp_path / "tiny")
        stack = closing.enter_context(running(tmp_path, {"tiny": str(tmp_path / "tiny")}))
        stack.driver.stop()  # it is at the gate from its start on, and not only once it tries again
        stack.interception.stop()
        stack.interception.set("driver_lease_s", str(request.param))
        stack.interception.start()
        stack.driver.start()
        ps = await closing.enter_async_context(connect(stack.addresses, TOKEN))
        yield request.param, stack, ps, await _started(stack, ps)


async def test_a_gate_takes_a_lost_driver_s_rollout_back(agent: tuple[float, Stack, Penstock, Agent]) -> None:
    """At the end of the lease and not before; a driver that returns sooner goes on with it."""
    lease_s, stack, ps, running_agent = agent
    async with aiohttp.ClientSession() as http:
        assert await running_agent.status(http) == 400
        stack.driver.kill()
        if lease_s == _LEASE_S:

            async def refused() -> bool:
                return await running_agent.status(http) == 401

            await eventually_async(refused, "the agent's key is void")
            assert [one async for one in ps.gate.list(open_only=True)] == []
            assert (await ps.gate.get(running_agent.rollout.rollout_id)).close_reason == "DRIVER_LOST"
        else:
            assert await running_agent.status(http) == 400
        stack.driver.start()
        if lease_s == _KEPT_S:
            assert (await running_agent.rollout.refresh()).phase is Phase.RUNNING
            assert await running_agent.status(http) == 400
            await running_agent.rollout.cancel()
        result = await running_agent.rollout.result()
        assert result.outcome.failure is not None
        assert result.outcome.failure.reason == ("GATE_LOST" if lease_s == _LEASE_S else "CANCELLED")
        assert result.outcome.failure.retriable is (lease_s == _LEASE_S)
        closed = await ps.gate.get(running_agent.rollout.rollout_id)
        assert closed.close_reason == ("DRIVER_LOST" if lease_s == _LEASE_S else "ROLLOUT_ENDED")
        assert await running_agent.status(http) == 401
        assert [one async for one in ps.sandboxes.list()] == []


@pytest.mark.requirement("R127")
async def test_a_driver_that_comes_back_without_its_disk_is_named(tmp_path: Path) -> None:
    """HOME_LOST for a wait and for a watch; a later question about the same id is one about an unknown one."""
    async with AsyncExitStack() as closing:
        tiny_tokenizer.build(["wait"]).write(tmp_path / "tiny")
        stack = closing.enter_context(running(tmp_path, {"tiny": str(tmp_path / "tiny")}, {"name": "d0"}))
        ps = await closing.enter_async_context(connect(stack.addresses, TOKEN))
        rollout = (await _started(stack, ps)).rollout

        is_watched = asyncio.Event()

        async def watched() -> None:
            async for _ in rollout.events():
                is_watched.set()

        waiting: list[asyncio.Task[Any]] = [asyncio.create_task(watched())]
        await is_watched.wait()
        await asyncio.to_thread(stack.driver.kill)
        waiting.append(asyncio.create_task(rollout.result()))
        shutil.rmtree(tmp_path / "driver")
        await asyncio.to_thread(stack.driver.start)
        reasons = [error.reason for error in await asyncio.gather(*waiting, return_exceptions=True)]  # type: ignore[union-attr]
        assert reasons == ["HOME_LOST", "HOME_LOST"]
        with pytest.raises(NotFound) as unknown:
            await rollout.refresh()
        assert unknown.value.reason == "ROLLOUT_UNKNOWN"
