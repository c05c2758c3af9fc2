"""A driver that is stopped while rollouts run: who goes on with them, and who ends them if nobody does."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.integration.driver.stack import TOKEN, Stack, running
from tests.integration.driver.test_service import echo_agent
from tests.support.waiting import eventually_async

from penstock.client import Command, Penstock, Phase, RolloutHandle, Task, Tokenizer, Verifier, connect
from penstock_codec import tiny_tokenizer

_GO = "until [ -e go ]; do sleep 0.05; done"


@asynccontextmanager
async def started(folder: Path, **driver: str) -> AsyncIterator[tuple[Stack, Penstock]]:
    """The real services; `driver` are settings of the driver alone. An agent `waits` that ends once a file is there."""
    tiny_tokenizer.build(["wait"]).write(folder / "tiny")
    with running(folder, {"tiny": str(folder / "tiny")}) as stack:
        if driver:
            stack.driver.stop()
            for setting, value in driver.items():
                stack.driver.set(setting, value)
            stack.driver.start()
        async with connect(stack.addresses, TOKEN) as ps:
            await ps.agents.register(echo_agent(name="waits", argv=["/bin/sh", "-c", _GO]))
            yield stack, ps


async def created(ps: Penstock, agent: str = "waits", task: Task | None = None) -> RolloutHandle:
    task = task or Task(task_id="wait", instruction="wait")
    return await ps.rollouts.create(task, agent, source=Tokenizer("tiny"))


async def reached(rollout: RolloutHandle, phase: Phase) -> None:
    async def is_there() -> bool:
        return (await rollout.refresh()).phase is phase

    await eventually_async(is_there, f"the rollout is {phase}")


async def touch(ps: Penstock, rollout: RolloutHandle, name: str = "go") -> None:
    """Make a file in the working directory of a rollout's agent."""
    home = (await rollout.refresh()).home
    assert home is not None
    sandbox = await ps.sandboxes.attach(home.sandbox_id)
    assert (await sandbox.run(["touch", name])).exit.code == 0


async def is_made(ps: Penstock, rollout: RolloutHandle, name: str) -> bool:
    """Whether such a file is in the working directory of a rollout's agent."""
    home = (await rollout.refresh()).home
    assert home is not None
    return (await (await ps.sandboxes.attach(home.sandbox_id)).run(["test", "-e", name])).exit.code == 0


async def sandboxes(ps: Penstock) -> list[str]:
    return [sandbox_id async for sandbox_id, _ in ps.sandboxes.list()]


@pytest.mark.requirement("R127")
async def test_callers_wait_on_while_a_stopped_driver_is_replaced(tmp_path: Path) -> None:
    """One rollout runs and another one waits for its place; both end in their first attempt, in the same sandbox."""
    async with started(tmp_path, max_running="1") as (stack, ps):
        first = await created(ps)
        await reached(first, Phase.RUNNING)
        second = await created(ps)
        results = [asyncio.ensure_future(one.result()) for one in (first, second)]
        kept = await sandboxes(ps)
        assert await asyncio.to_thread(stack.driver.stop) == 0
        assert await sandboxes(ps) == kept
        await asyncio.to_thread(stack.driver.start)
        await touch(ps, first)
        await reached(second, Phase.RUNNING)
        await touch(ps, second)
        for result in await asyncio.gather(*results):
            assert result.failure is None
            assert result.rollout.attempts == 1
        assert await sandboxes(ps) == []


@pytest.mark.requirement("R127", "R70")
async def test_what_nobody_goes_on_with_ends_by_its_leases(tmp_path: Path) -> None:
    """The driver stops for good: the gate closes the rollout, and the sandbox service deletes the sandbox."""
    async with started(tmp_path, leave_s="1") as (stack, ps):
        stack.interception.stop()
        stack.interception.set("driver_lease_s", "1")
        stack.interception.start()
        rollout = await created(ps)
        await reached(rollout, Phase.RUNNING)
        assert await asyncio.to_thread(stack.driver.stop) == 0

        async def is_nothing_left() -> bool:
            return not await sandboxes(ps) and not [one async for one in ps.gate.list(open_only=True)]

        await eventually_async(is_nothing_left, "nothing is left")
        assert (await ps.gate.get(rollout.rollout_id)).close_reason == "DRIVER_LOST"
        # One that comes too late says what happened, and begins again only where another attempt is allowed.
        await asyncio.to_thread(stack.driver.start)
        failure = (await rollout.result()).failure
        assert failure is not None
        assert (failure.reason, failure.retriable) in {("SANDBOX_LOST", True), ("GATE_LOST", True)}


@pytest.mark.requirement("R70")
@pytest.mark.parametrize("how", ["a signal of a person", "a setting", "a drain before"])
async def test_a_driver_without_a_successor_ends_its_rollouts(tmp_path: Path, how: str) -> None:
    settings = {"drain_s": "0", **({"on_stop": "drain"} if how == "a setting" else {})}
    async with started(tmp_path, **settings) as (stack, ps):
        rollout = await created(ps)
        await reached(rollout, Phase.RUNNING)
        if how == "a drain before":
            await ps.operations.drain("driver")
        number = signal.SIGINT if how == "a signal of a person" else signal.SIGTERM
        assert await asyncio.to_thread(stack.driver.stop, number) == 0
        assert await sandboxes(ps) == []
        await asyncio.to_thread(stack.driver.start)
        failure = (await rollout.result()).failure
        assert failure is not None
        assert (failure.reason, failure.retriable) == ("DRIVER_STOPPED", True)


@pytest.mark.requirement("R127")
async def test_a_stop_waits_for_a_verifier_in_the_agent_s_sandbox(tmp_path: Path) -> None:
    """Nobody could go on with it: the driver ends when it has the reward, and the next one has nothing to do."""
    verifier = Verifier(commands=[Command(shell=f"touch begun; {_GO}; exit 0")], fresh_fork=False)
    task = Task(task_id="wait", instruction="wait", verifier=verifier)
    async with started(tmp_path, drain_s="600") as (stack, ps):
        await ps.agents.register(echo_agent(name="ends", argv=["/bin/true"]))
        rollout = await created(ps, "ends", task)
        await reached(rollout, Phase.VERIFYING)
        await eventually_async(lambda: is_made(ps, rollout, "begun"), "the verifier runs")
        stack.driver.signal(signal.SIGTERM)

        async def is_draining() -> bool:
            return "SERVICE_DRAINING" in {one.reason for one in (await ps.operations.status("driver")).troubles}

        await eventually_async(is_draining, "the driver stops")
        await touch(ps, rollout)
        assert await asyncio.to_thread(stack.driver.stop, signal.SIGCONT) == 0
        await asyncio.to_thread(stack.driver.start)
        result = await rollout.result()
        assert result.failure is None
        assert result.reward is not None
        assert (result.reward.value, result.rollout.attempts) == (1.0, 1)
