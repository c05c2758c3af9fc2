"""Paused rollouts: real sandboxes stand still, the real gate keeps their calls, and nothing is sampled twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest
from tests.integration.driver.stack import TOKEN, Stack
from tests.integration.driver.test_rollouts import SOURCE, TASK, bash, called, completion, play
from tests.support.waiting import eventually_async

from penstock.client import (
    FailedPrecondition,
    InvalidArgument,
    ModelCall,
    NotFound,
    Penstock,
    ResourceExhausted,
    RolloutHandle,
    RolloutPaused,
    RolloutResumed,
)
from penstock.client.types.results import Phase
from penstock.interception.v1 import rollout_gate_service_pb2 as gate_pb
from penstock.interception.v1 import rollout_gate_service_pb2_grpc as gate_grpc
from penstock.sandbox.v1 import sandbox_pb2, sandbox_service_pb2, sandbox_service_pb2_grpc
from penstock_chassis.channel import connect as channel
from penstock_codec import Codec

COPY = bash("cat note.txt > out.txt")


async def at_the_gate(stack: Stack, rollout: RolloutHandle) -> gate_pb.GateRollout:
    """A rollout as the gate has it."""
    async with channel(stack.interception.address, TOKEN) as opened:
        gate = gate_grpc.RolloutGateServiceStub(opened)
        return (await gate.GetRollout(gate_pb.GetRolloutRequest(rollout_id=rollout.rollout_id))).rollout


async def sandbox_state(stack: Stack, rollout: RolloutHandle) -> sandbox_pb2.SandboxState.ValueType:
    """The state of a rollout's sandbox."""
    info = await rollout.refresh()
    assert info.home is not None
    async with channel(stack.sandbox.address, TOKEN) as opened:
        sandboxes = sandbox_service_pb2_grpc.SandboxServiceStub(opened)
        request = sandbox_service_pb2.GetSandboxRequest(sandbox_id=info.home.sandbox_id)
        return (await sandboxes.GetSandbox(request)).sandbox.state


@asynccontextmanager
async def first_call(rollout: RolloutHandle) -> AsyncIterator[ModelCall]:
    """The first call of an agent, leased inside the block."""
    async with aclosing(rollout.calls()) as calls:
        yield await anext(calls)


async def ends_well(rollout: RolloutHandle) -> None:
    """One attempt, each call answered once, the reward of an undisturbed rollout."""
    result = await rollout.result()
    assert result.outcome.completed, result.outcome
    assert result.reward is not None and result.reward.value == 1.0
    assert result.rollout.attempts == 1 and result.rollout.pause is None
    trajectory = await rollout.trajectory()
    assert [(call.index, call.state) for call in trajectory.calls] == [(0, "delivered"), (1, "delivered")]
    assert len(trajectory.samples) == 1


@pytest.mark.requirement("R131")
async def test_a_paused_agent_stands_still_and_goes_on_as_undisturbed(
    penstock: Penstock, stack: Stack, codec: Codec
) -> None:
    """A call that was given out is answered meanwhile; the agent reads it afterwards."""
    rollout = await penstock.rollouts.create(TASK, "shell", source=SOURCE)
    async with first_call(rollout) as call:
        frozen = await rollout.pause("weights")
        assert await rollout.pause("weights, still") == frozen, "idempotent"
        await call.deliver(completion(codec, COPY))
    state = sandbox_pb2.SANDBOX_STATE_PAUSED if frozen else sandbox_pb2.SANDBOX_STATE_READY
    assert await sandbox_state(stack, rollout) == state
    assert rollout.info.phase is Phase.RUNNING
    assert rollout.info.pause is not None and rollout.info.pause.reason == "weights, still"
    assert rollout.info.pause.sandbox_frozen == frozen
    held = await at_the_gate(stack, rollout)
    assert held.held and held.totals.delivered <= 1
    await rollout.resume()
    assert not (await at_the_gate(stack, rollout)).held
    assert (await at_the_gate(stack, rollout)).paused_time.ToNanoseconds() > 0
    await play(rollout, codec, "done")
    await ends_well(rollout)
    payloads = [event.payload async for event in rollout.events()]
    (paused,) = [one for one in payloads if isinstance(one, RolloutPaused)]
    (resumed,) = [one for one in payloads if isinstance(one, RolloutResumed)]
    assert (paused.reason, resumed.reason) == ("weights", "RESUMED")
    assert resumed.paused_time is not None and resumed.paused_time > 0


@pytest.mark.requirement("R131")
async def test_a_pause_outlives_kills_of_driver_and_gate(penstock: Penstock, stack: Stack, codec: Codec) -> None:
    """The calls stay held, the sandbox stays frozen, and no call is asked twice."""
    rollout = await penstock.rollouts.create(TASK, "shell", source=SOURCE)
    await called(rollout)
    frozen = await rollout.pause("night", max_duration=3600)
    for process in (stack.interception, stack.driver, stack.interception):
        process.kill()
        process.start()
        info = await rollout.refresh()
        assert info.pause is not None and info.pause.reason == "night"
        assert (await at_the_gate(stack, rollout)).held
    if frozen:
        assert await sandbox_state(stack, rollout) == sandbox_pb2.SANDBOX_STATE_PAUSED
    await rollout.resume()
    await play(rollout, codec, COPY, "done")
    await ends_well(rollout)


@pytest.mark.requirement("R131")
async def test_a_resumption_in_a_killed_driver_is_made_up_for(penstock: Penstock, stack: Stack, codec: Codec) -> None:
    """The pause was over meanwhile: the next driver lets the rollout go on."""
    rollout = await penstock.rollouts.create(TASK, "shell", source=SOURCE)
    await called(rollout)
    await rollout.pause("short", max_duration=1)
    stack.driver.kill()
    stack.driver.start()
    await play(rollout, codec, COPY, "done")
    await ends_well(rollout)
    reasons = [e.payload.reason async for e in rollout.events() if isinstance(e.payload, RolloutResumed)]
    assert reasons == ["PAUSE_EXPIRED"]


@pytest.mark.requirement("R131")
async def test_a_group_is_paused_before_its_agents_start(penstock: Penstock, stack: Stack, codec: Codec) -> None:
    """Each is held in its phase; none calls before the group goes on."""
    group = await penstock.rollouts.create(TASK, "shell", n=3, source=SOURCE)
    await group.pause("first the others")
    assert group.info.paused_count == 3
    rollouts = [await penstock.rollouts.attach(rollout_id) for rollout_id in group.rollout_ids]
    assert all(one.info.pause is not None for one in rollouts)
    await group.resume()
    assert group.info.paused_count == 0

    async def answer(rollout: RolloutHandle) -> None:
        await play(rollout, codec, COPY, "done")
        await ends_well(rollout)

    await asyncio.gather(*map(answer, rollouts))
    with pytest.raises(FailedPrecondition) as refused:
        await group.pause()
    assert refused.value.reason == "ROLLOUT_ENDED"


@pytest.mark.requirement("R131")
async def test_a_storm_of_pauses_ends_with_the_last_word(penstock: Penstock, stack: Stack, codec: Codec) -> None:
    """Pauses and resumptions at once, from several sides; the journal holds two events of each."""
    rollout = await penstock.rollouts.create(TASK, "shell", source=SOURCE)
    await called(rollout)

    async def once(number: int) -> None:
        handle = await penstock.rollouts.attach(rollout.rollout_id)
        if number % 2:
            await handle.resume()
        else:
            await handle.pause(f"storm {number}")

    await asyncio.gather(*map(once, range(40)))
    await rollout.resume()
    assert not (await at_the_gate(stack, rollout)).held
    assert await sandbox_state(stack, rollout) == sandbox_pb2.SANDBOX_STATE_READY
    await play(rollout, codec, COPY, "done")
    await ends_well(rollout)
    payloads = [event.payload async for event in rollout.events()]
    paused = sum(isinstance(one, RolloutPaused) for one in payloads)
    assert 1 <= paused <= 20 and paused == sum(isinstance(one, RolloutResumed) for one in payloads)


@pytest.mark.requirement("R131")
async def test_paused_rollouts_are_cancelled_and_bad_pauses_refused(penstock: Penstock, codec: Codec) -> None:
    """A frozen agent ends with its sandbox; what ended, is unknown, or lasts too long is not paused."""
    rollout = await penstock.rollouts.create(TASK, "shell", source=SOURCE)
    await called(rollout)
    await rollout.pause()
    await rollout.cancel("not needed")
    result = await rollout.result()
    assert result.failure is not None and result.failure.reason == "CANCELLED"
    assert (await rollout.refresh()).pause is None
    await rollout.resume()
    with pytest.raises(FailedPrecondition) as refused:
        await rollout.pause()
    assert refused.value.reason == "ROLLOUT_ENDED"
    await rollout.delete()
    for work in (rollout.pause, rollout.resume):
        with pytest.raises(NotFound):
            await work()
    another = await penstock.rollouts.create(TASK, "shell", source=SOURCE)
    for wrong in (0.5, 100_000.0):
        with pytest.raises(InvalidArgument):
            await another.pause(max_duration=wrong)
    await another.cancel()


@pytest.mark.requirement("R131")
async def test_pauses_together_last_no_longer_than_allowed(penstock: Penstock, stack: Stack, codec: Codec) -> None:
    """A rollout that keeps its slot cannot keep it for ever; a drain ends what is paused."""
    rollout = await penstock.rollouts.create(TASK, "shell", source=SOURCE)
    await called(rollout)
    stack.driver.kill()
    stack.driver.set("max_pause_s", "1")
    stack.driver.start()
    await rollout.pause()

    async def is_over() -> bool:
        return (await rollout.refresh()).pause is None

    await eventually_async(is_over, "the pause ends by itself")
    with pytest.raises(ResourceExhausted) as refused:
        await rollout.pause()
    assert refused.value.reason == "PAUSE_LIMIT"
    stack.driver.kill()
    stack.driver.set("max_pause_s", "86400")
    stack.driver.start()
    await rollout.pause()
    await penstock.operations.drain("driver")
    await eventually_async(is_over, "the drain ends it")
    await penstock.operations.undrain("driver")
    await play(rollout, codec, COPY, "done")
    await ends_well(rollout)
