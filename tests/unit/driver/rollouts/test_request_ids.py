"""Request ids of rollouts and groups: what a repeated or a late create gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.support.services.inner_driver import CONTEXT, Boxes, InnerDriver, Places, asked, inner_driver

from penstock.driver.v1 import agent_pb2, agent_service_pb2, rollout_pb2
from penstock.driver.v1 import rollout_service_pb2 as pb
from penstock.interception.v1 import interception_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.errors import AlreadyExists, NotFound, Unavailable

AGENT = agent_pb2.AgentSpec(
    name="kept",
    version="1",
    argv=["/bin/true"],
    instruction=agent_pb2.InstructionDelivery(method=agent_pb2.InstructionDelivery.METHOD_STDIN),
    files=[agent_pb2.ConfigFile(path="endpoint", text="{{base_url}}")],
    dialects=[trajectory_pb2.DIALECT_CHAT_COMPLETIONS],
)


@pytest_asyncio.fixture
async def driver(tmp_path: Path) -> AsyncIterator[InnerDriver]:
    async with inner_driver(tmp_path, Boxes(), Places()) as it:
        await it.agents.RegisterAgent(agent_service_pb2.RegisterAgentRequest(spec=AGENT), CONTEXT)
        yield it


def spec(instruction: str = "work") -> rollout_pb2.RolloutSpec:
    return rollout_pb2.RolloutSpec(
        task=rollout_pb2.Task(task_id="t", instruction=instruction),
        agent=rollout_pb2.AgentChoice(name="kept"),
        mode=interception_pb2.MODE_INTERCEPTION_GATE,
        source=interception_pb2.ModelSource(tokenizer=interception_pb2.ModelSource.Tokenizer(name="tiny")),
    )


async def create(driver: InnerDriver, request_id: str, rollout_id: str = "r1", instruction: str = "work") -> str:
    request = pb.CreateRolloutRequest(request_id=request_id, rollout_id=rollout_id, spec=spec(instruction))
    return (await asked(driver.rollouts.CreateRollout(request, CONTEXT))).rollout.rollout_id


async def wait(driver: InnerDriver, rollout_id: str = "r1") -> rollout_pb2.Rollout:
    request = pb.WaitRolloutRequest(rollout_id=rollout_id)
    return (await asked(driver.rollouts.WaitRollout(request, CONTEXT))).rollout


class Held:
    """A create that is held before its record is written; the disk may refuse it then."""

    def __init__(self, driver: InnerDriver, monkeypatch: pytest.MonkeyPatch, request_id: str) -> None:
        self.goes_on, self.refused = asyncio.Event(), False
        self._reached = asyncio.Event()
        real = driver.records.create

        async def held(key: Any, *rest: Any, **more: Any) -> None:
            if key.request_id == request_id:
                self._reached.set()
                await self.goes_on.wait()
                if self.refused:
                    raise Unavailable("the disk is full", reason="JOURNAL_FAILED")
            await real(key, *rest, **more)

        monkeypatch.setattr(driver.records, "create", held)
        self.call = asyncio.ensure_future(create(driver, request_id))

    async def reached(self) -> None:
        await self._reached.wait()


@pytest_asyncio.fixture
async def hold(driver: InnerDriver, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[str], Held]]:
    """Begins creates that are held; no driver stops before they end."""
    made: list[Held] = []

    def begin(request_id: str) -> Held:
        made.append(Held(driver, monkeypatch, request_id))
        return made[-1]

    yield begin
    for held in made:
        held.goes_on.set()
    await asyncio.gather(*(held.call for held in made), return_exceptions=True)


@pytest.mark.requirement("R25", "R49")
@pytest.mark.parametrize("instruction", ["work", "sleep"], ids=["over", "running"])
async def test_create_that_loses_its_id_leaves_the_other_rollout_alone(
    driver: InnerDriver, hold: Callable[[str], Held], instruction: str
) -> None:
    """Its id was recorded by another create first, whose rollout is over by now, or runs."""
    late = hold("late")
    await late.reached()
    await create(driver, "first", instruction=instruction)
    waiting = asyncio.ensure_future(wait(driver))
    if instruction == "work":
        assert (await waiting).HasField("outcome")
    else:
        await driver.boxes.started.wait()
    late.goes_on.set()
    with pytest.raises(AlreadyExists) as refused:
        await late.call
    assert refused.value.reason == "ROLLOUT_EXISTS"
    assert driver.manager.is_running("r1") == (instruction == "sleep")
    if instruction == "sleep":
        assert not waiting.done()
        cancel = pb.CancelRolloutRequest(rollout_id="r1")
        assert (await asked(driver.rollouts.CancelRollout(cancel, CONTEXT))).rollout.HasField("outcome")
        assert (await waiting).outcome.failure.reason == "CANCELLED"
    assert not driver.boxes.boxes and not driver.places.open_ones


@pytest.mark.requirement("R25", "R49")
async def test_create_that_fails_leaves_another_create_of_its_id_alone(
    driver: InnerDriver, hold: Callable[[str], Held]
) -> None:
    """The first rollout of the id was deleted; the next one is being recorded, and counts as running."""
    late = hold("late")
    await late.reached()
    await create(driver, "first")
    await wait(driver)
    await asked(driver.rollouts.DeleteRollout(pb.DeleteRolloutRequest(rollout_id="r1"), CONTEXT))
    following = hold("following")
    await following.reached()
    late.refused = True
    late.goes_on.set()
    with pytest.raises(Unavailable) as refused:
        await late.call
    assert refused.value.reason == "JOURNAL_FAILED"
    assert driver.manager.is_running("r1")
    following.goes_on.set()
    assert await following.call == "r1"
    assert (await wait(driver)).HasField("outcome")
    assert not driver.manager.is_running("r1") and not driver.boxes.boxes


@pytest.mark.requirement("R25")
async def test_repeated_create_of_a_deleted_rollout_finds_none(driver: InnerDriver) -> None:
    """It neither returns the deleted one nor starts it anew: a late repeat of a request costs nothing."""
    assert await create(driver, "a") == "r1" == await create(driver, "a")
    await wait(driver)
    await asked(driver.rollouts.DeleteRollout(pb.DeleteRolloutRequest(rollout_id="r1"), CONTEXT))
    with pytest.raises(NotFound) as refused:
        await create(driver, "a")
    assert refused.value.reason == "ROLLOUT_UNKNOWN"
    assert not driver.boxes.boxes


@pytest.mark.requirement("R25")
async def test_repeated_create_of_a_deleted_group_finds_none(driver: InnerDriver) -> None:
    """As for a rollout."""
    request = pb.CreateGroupRequest(request_id="a", spec=spec(), size=2, group_id="g")
    for _ in range(2):
        assert (await asked(driver.rollouts.CreateGroup(request, CONTEXT))).group.group_id == "g"
    await asked(driver.rollouts.WaitGroup(pb.WaitGroupRequest(group_id="g"), CONTEXT))
    await asked(driver.rollouts.DeleteGroup(pb.DeleteGroupRequest(group_id="g"), CONTEXT))
    with pytest.raises(NotFound) as refused:
        await asked(driver.rollouts.CreateGroup(request, CONTEXT))
    assert refused.value.reason == "GROUP_UNKNOWN"
