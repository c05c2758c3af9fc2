"""kill -9 of each service, and of the spawner, in the middle of rollouts: typed ends, nothing left, life goes on."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from tests.support.copying import copy_task, finish, training
from tests.support.policy import Trainer
from tests.support.services.restarting import RestartableStack, Traces, spawner_of
from tests.support.services.stack import Running
from tests.support.waiting import eventually, eventually_async

from penstock.client import Inference, Mode, ModelCall, RolloutHandle, RolloutResult
from penstock.driver.v1 import agent_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

Fragile = tuple[Running, RestartableStack]


@dataclass
class Held:
    """Rollouts whose agents wait at the gate for their second answer: each in the middle of its work."""

    trainer: Trainer
    handles: Sequence[RolloutHandle]
    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def results(self) -> list[RolloutResult]:
        """How each of them ended."""
        return list(await asyncio.gather(*(handle.result() for handle in self.handles)))


@asynccontextmanager
async def held(running: Running, count: int, agent: str = "shell") -> AsyncIterator[Held]:
    """Starts rollouts and waits until all of them are held."""
    label = secrets.token_hex(8)
    waiting: set[str] = set()
    async with training(running, label) as trainer:
        now = Held(trainer, ())

        async def hold(call: ModelCall) -> None:
            if call.index == 1:
                waiting.add(call.rollout_id)
                await now.go.wait()

        trainer.before = hold
        now.handles = [
            await running.ps.rollouts.create(copy_task(running), agent, labels={"test": label}) for _ in range(count)
        ]
        await eventually(lambda: len(waiting) == count, "every agent waits for its second answer")
        yield now


async def assert_work_goes_on(running: Running) -> None:
    """A rollout from beginning to end."""
    label = secrets.token_hex(8)
    async with training(running, label):
        handle = await running.ps.rollouts.create(copy_task(running), "shell", labels={"test": label})
        finished = await finish(handle)
    assert finished.reward == 1.0, finished.agent_said()


async def sandboxes_of(running: Running) -> list[str]:
    """Ids of the sandboxes that the service still counts as alive."""
    return [sandbox_id async for sandbox_id, state in running.ps.sandboxes.list() if state != "lost"]


@pytest.mark.requirement("R43", "R50")
async def test_killed_sandbox_service_fails_its_rollouts_typed_and_leaves_nothing(
    fragile: Fragile,
) -> None:
    """Infrastructure, retriable; no process, mount, control group or directory stays."""
    running, stack = fragile
    traces = Traces(stack)
    async with held(running, 3) as now:
        assert traces.note(stack.pid("sandbox")) >= 3
        await stack.kill("sandbox")
        await stack.start_again("sandbox")
        results = await now.results()
    for result in results:
        assert result.reward is None
        assert result.failure is not None
        assert result.failure.cause == "infrastructure", result.failure
        assert result.failure.retriable, result.failure
    await eventually(lambda: not traces.left(), "nothing is left")
    assert traces.left() == []
    assert await sandboxes_of(running) == []
    await assert_work_goes_on(running)


@pytest.mark.requirement("R43", "R50")
async def test_after_a_kill_of_the_spawner_the_service_makes_new_sandboxes(fragile: Fragile) -> None:
    """The sandboxes of a dead spawner are lost, which their rollouts tell; the service needs no restart."""
    running, stack = fragile
    traces = Traces(stack)
    async with held(running, 3) as now:
        assert traces.note(stack.pid("sandbox")) >= 3
        os.kill(spawner_of(stack.pid("sandbox")), signal.SIGKILL)
        results = await now.results()
    for result in results:
        assert result.failure is not None
        assert (result.failure.cause, result.failure.reason) == ("infrastructure", "SANDBOX_LOST"), result.failure
        assert result.failure.retriable
    await eventually(lambda: not traces.left(), "nothing is left")
    assert traces.left() == []
    assert await sandboxes_of(running) == []
    await assert_work_goes_on(running)


@pytest.mark.requirement("R50", "R62", "R127")
async def test_killed_driver_loses_no_rollout_and_leaves_no_sandbox(fragile: Fragile) -> None:
    """The next driver goes on where the last one was: no call is asked twice, and the trainer notices nothing."""
    running, stack = fragile
    traces = Traces(stack)
    async with held(running, 3) as now:
        assert traces.note(stack.pid("sandbox")) >= 3
        await stack.kill("driver")
        await stack.start_again("driver")
        now.go.set()
        results = await now.results()
        asked = Counter((call.rollout_id, call.index) for call in now.trainer.calls)
    assert set(asked.values()) == {1}
    for result in results:
        assert result.failure is None
        assert result.reward is not None
        assert (result.reward.value, result.rollout.attempts) == (1.0, 1)

    async def gone() -> bool:
        return not traces.left() and not await sandboxes_of(running)

    await eventually_async(gone, "no sandbox of the dead driver is left")
    await assert_work_goes_on(running)


@pytest.mark.requirement("R34")
async def test_agents_retry_after_a_gate_kill_joins_its_call(
    fragile: Fragile,
) -> None:
    """Open rollouts come back with their calls; each question is asked and answered once, and the work is done."""
    running, stack = fragile
    patient = await shell_that_retries(running, 9)
    async with held(running, 3, agent=patient) as now:
        await stack.restart("interception")
        now.go.set()
        results = await now.results()
    for result in results:
        assert result.failure is None, (result.outcome, result.outcome.agent_stderr)
        assert result.reward is not None
        assert result.reward.value == 1.0
    for handle in now.handles:
        trajectory = await handle.trajectory()
        assert [call.state for call in trajectory.calls] == ["delivered", "delivered"]
        assert trajectory.grade == "exact", trajectory.findings
        asked = [call.call_id for call in now.trainer.calls if call.rollout_id == handle.rollout_id]
        assert asked == [call.call_id for call in trajectory.calls], "each call came to the trainer once"
        for call in trajectory.calls:
            assert call.completion is not None
            assert call.completion.token_ids is not None
            given = now.trainer.answers[call.call_id].token_ids
            assert given is not None
            assert call.completion.token_ids.tolist() == given.tolist()
    await assert_work_goes_on(running)


@pytest.mark.requirement("R34")
async def test_acknowledged_answer_survives_an_immediate_kill_of_the_gate(fragile: Fragile) -> None:
    """The agent may not have read it yet; its retry gets the same answer and the trainer is not asked again."""
    running, stack = fragile
    patient = await shell_that_retries(running, 9)
    label = secrets.token_hex(8)
    async with training(running, label) as trainer:
        handle = await running.ps.rollouts.create(copy_task(running), patient, labels={"test": label})
        await asyncio.wait_for(trainer.after.wait(), 60)
        await stack.restart("interception")
        result = await handle.result()
    assert result.failure is None, (result.outcome, result.outcome.agent_stderr)
    trajectory = await handle.trajectory()
    assert [call.call_id for call in trainer.calls] == [call.call_id for call in trajectory.calls]
    assert len(trajectory.calls) == 2
    await assert_work_goes_on(running)


@pytest.mark.requirement("R27", "R59")
async def test_killed_engine_ends_its_rollouts_typed_and_the_next_work(fragile: Fragile) -> None:
    """Calls that nobody can answer are the model's failure, retriable, and never a reward."""
    running, stack = fragile
    handle = await running.ps.rollouts.create(copy_task(running), await shell_that_retries(running, 1))
    asked = 0
    async for call in handle.calls():
        if not asked:
            await stack.kill("inference")
        asked += 1
        await call.delegate()
    result = await handle.result()
    assert asked
    assert result.reward is None
    assert result.failure is not None
    assert (result.failure.cause, result.failure.retriable) == ("model", True), result.outcome
    await stack.start_again("inference")
    handle = await running.ps.rollouts.create(
        copy_task(running), "shell", mode=Mode.TRANSPARENT_PROXY, source=Inference()
    )
    finished = await finish(handle)
    assert finished.reward == 1.0, finished.agent_said()


async def shell_that_retries(running: Running, times: int) -> str:
    """The reference agent, which asks again so often: 9 is as long as a service needs to start on a busy machine."""
    spec = agent_pb2.AgentSpec()
    spec.CopyFrom((await running.ps.agents.get("shell")).spec)
    spec.name = f"shell-that-retries-{times}"
    spec.files[0].json["max_retries"] = times
    await running.ps.agents.register(spec)
    return spec.name
