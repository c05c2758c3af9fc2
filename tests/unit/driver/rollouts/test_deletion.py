"""Deletions of rollouts and groups: what they remove, what they leave, and when they are refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.support.services.inner_driver import CONTEXT, Boxes, InnerDriver, Places, asked, inner_driver
from tests.support.waiting import eventually
from tests.unit.driver.rollouts.test_request_ids import AGENT, create, spec, wait

from penstock.driver.v1 import agent_service_pb2, rollout_pb2
from penstock.driver.v1 import rollout_service_pb2 as pb
from penstock_chassis.errors import FailedPrecondition, NotFound, Unavailable
from penstock_driver.domain.records import RequestKey, new_records
from penstock_driver.status import ExportHealth
from penstock_driver.store.exports import ExportQueue, to_be_exported
from penstock_driver.wire.specs import effective_spec, rollout_spec


@pytest_asyncio.fixture
async def driver(tmp_path: Path) -> AsyncIterator[InnerDriver]:
    async with inner_driver(tmp_path, Boxes(), Places()) as it:
        await it.agents.RegisterAgent(agent_service_pb2.RegisterAgentRequest(spec=AGENT), CONTEXT)
        yield it


async def group_of(driver: InnerDriver, size: int, instruction: str = "work") -> rollout_pb2.Group:
    request = pb.CreateGroupRequest(request_id="g", spec=spec(instruction), size=size, group_id="g")
    return (await asked(driver.rollouts.CreateGroup(request, CONTEXT))).group


async def waited(driver: InnerDriver) -> rollout_pb2.Group:
    return (await asked(driver.rollouts.WaitGroup(pb.WaitGroupRequest(group_id="g"), CONTEXT))).group


async def shown(driver: InnerDriver) -> rollout_pb2.Group:
    return (await asked(driver.rollouts.GetGroup(pb.GetGroupRequest(group_id="g"), CONTEXT))).group


async def delete(driver: InnerDriver, rollout_id: str) -> None:
    await asked(driver.rollouts.DeleteRollout(pb.DeleteRolloutRequest(rollout_id=rollout_id), CONTEXT))


async def delete_group(driver: InnerDriver) -> None:
    await asked(driver.rollouts.DeleteGroup(pb.DeleteGroupRequest(group_id="g"), CONTEXT))


@pytest.mark.requirement("R127")
async def test_a_driver_that_leaves_its_rollouts_deletes_none_of_them(tmp_path: Path) -> None:
    """A trainer cleans up while the driver stops: the next process starts, and goes on with the group."""
    boxes, places = Boxes(), Places()
    async with inner_driver(tmp_path, boxes, places) as driver:
        await driver.agents.RegisterAgent(agent_service_pb2.RegisterAgentRequest(spec=AGENT), CONTEXT)
        await group_of(driver, 2, "sleep")
        await boxes.started.wait()
        await driver.manager.leave(60)
        captured = set(places.captured)
        with pytest.raises(Unavailable) as refused:
            await delete_group(driver)
        assert refused.value.reason == "DRIVER_STOPPING"
        assert places.captured == captured
    async with inner_driver(tmp_path, boxes, places) as driver:
        assert (await waited(driver)).ended
        await delete_group(driver)
        with pytest.raises(NotFound):
            await driver.records.group("g")


@pytest.mark.requirement("R127")
async def test_what_has_not_ended_on_disk_keeps_its_events_and_its_group(driver: InnerDriver) -> None:
    """Whoever asks for the deletion, and when."""
    group = await group_of(driver, 1, "sleep")
    await driver.boxes.started.wait()
    with pytest.raises(FailedPrecondition) as refused:
        await delete_group(driver)
    assert refused.value.reason == "ROLLOUT_RUNNING"
    await driver.records.delete(group.rollout_ids[0])
    await driver.records.delete_group("g")
    assert await driver.journal.query("SELECT 1 FROM events")
    assert (await driver.records.group("g")).group_id == "g"


@pytest.mark.requirement("R146")
async def test_a_rollout_whose_end_is_not_on_disk_is_not_deleted(driver: InnerDriver) -> None:
    """Nothing of it runs any more, and the next start of the driver ends it."""
    accepted = rollout_spec(spec(), driver.agents._registry, "default")
    records = new_records(accepted, effective_spec(accepted), ["r"])
    await driver.records.create(RequestKey("q", "d"), records)
    driver.places.captured.add("r")
    with pytest.raises(Unavailable) as refused:
        await delete(driver, "r")
    assert refused.value.reason == "END_NOT_RECORDED"
    assert driver.places.captured == {"r"}


@pytest.mark.requirement("R70")
async def test_a_group_has_ended_though_an_ended_rollout_of_it_was_deleted(driver: InnerDriver) -> None:
    """It names the deleted one still. Once all are deleted, it has ended too."""
    group = await group_of(driver, 2)
    await waited(driver)
    for rollout_id in group.rollout_ids:
        await delete(driver, rollout_id)
        for now in (await waited(driver), await shown(driver)):
            assert now.ended
            assert list(now.rollout_ids) == list(group.rollout_ids)


@pytest.mark.requirement("R70")
async def test_a_group_of_which_one_runs_has_not_ended_though_another_was_deleted(driver: InnerDriver) -> None:
    driver.boxes.holds = {"fork"}
    group = await group_of(driver, 2)
    await driver.boxes.started.wait()
    first, second = group.rollout_ids
    await asked(driver.rollouts.CancelRollout(pb.CancelRolloutRequest(rollout_id=first), CONTEXT))
    await delete(driver, first)
    assert not (await shown(driver)).ended
    await asked(driver.rollouts.CancelRollout(pb.CancelRolloutRequest(rollout_id=second), CONTEXT))
    assert (await waited(driver)).ended


@pytest.mark.requirement("R124")
async def test_a_deleted_rollout_waits_for_no_export_that_is_off(driver: InnerDriver) -> None:
    """So the next start warns no more, and a rollout that is created with its id is queued anew."""
    queue = ExportQueue(driver.journal)
    await create(driver, "a")
    await wait(driver)
    await driver.journal.write([to_be_exported("r1", ["g0"])])  # as an earlier start did, which exported
    assert [one.reason for one in ExportHealth(None, (await queue.backlog()).count).troubles()] == ["EXPORT_OFF"]
    await delete(driver, "r1")
    assert not list(ExportHealth(None, (await queue.backlog()).count).troubles())


@pytest.mark.requirement("R107")
async def test_an_operator_deletes_at_the_gate_in_the_rollouts_namespace(driver: InnerDriver) -> None:
    """Its id may be another team's there."""
    await create(driver, "a")
    await wait(driver)
    await delete(driver, "r1")
    assert driver.places.deleted_in == {"r1": "default"}


@pytest.mark.requirement("R107", "R70")
async def test_a_group_leaves_a_rollout_alone_that_has_the_id_of_one_of_its_deleted_ones(driver: InnerDriver) -> None:
    """It may be another team's: the group neither pauses, cancels nor deletes it, and has ended while it runs."""
    await group_of(driver, 2)
    await waited(driver)
    await delete(driver, "g-0")
    await create(driver, "new", "g-0", "sleep")
    await driver.boxes.started.wait()
    with pytest.raises(FailedPrecondition) as refused:
        await asked(driver.rollouts.PauseGroup(pb.PauseGroupRequest(group_id="g"), CONTEXT))
    assert refused.value.reason == "ROLLOUT_ENDED"
    await asked(driver.rollouts.ResumeGroup(pb.ResumeGroupRequest(group_id="g"), CONTEXT))
    await asked(driver.rollouts.CancelGroup(pb.CancelGroupRequest(group_id="g"), CONTEXT))
    assert driver.manager.is_running("g-0")
    assert (await shown(driver)).ended and (await waited(driver)).ended
    watched = driver.rollouts.WatchGroup(pb.WatchGroupRequest(group_id="g"), CONTEXT)
    assert {answer.event.rollout_id async for answer in watched if answer.HasField("event")} == {"g-1"}
    await delete_group(driver)
    assert driver.manager.is_running("g-0") and driver.places.captured == {"g-0"}


@pytest.mark.requirement("R107")
async def test_a_group_that_is_complete_cancels_its_own_rollouts_alone(driver: InnerDriver) -> None:
    """Not one with the id of a deleted one."""
    driver.boxes.holds = {"fork"}
    request = pb.CreateGroupRequest(request_id="g", spec=spec(), size=1, spares=1, group_id="g")
    await asked(driver.rollouts.CreateGroup(request, CONTEXT))
    await driver.boxes.started.wait()
    await asked(driver.rollouts.CancelRollout(pb.CancelRolloutRequest(rollout_id="g-0"), CONTEXT))
    await delete(driver, "g-0")
    await create(driver, "new", "g-0", "sleep")
    driver.boxes.release()
    assert (await waited(driver)).ended
    await eventually(lambda: not driver.manager.live_groups, "the group is over")
    assert driver.manager.is_running("g-0")
    cancelled = await asked(driver.rollouts.CancelRollout(pb.CancelRolloutRequest(rollout_id="g-0"), CONTEXT))
    assert cancelled.rollout.outcome.failure.reason == "CANCELLED"


@pytest.mark.requirement("R107", "R127")
async def test_a_deletion_leaves_the_spec_of_a_rollout_that_has_the_groups_id(driver: InnerDriver) -> None:
    """The group's own was forgotten before."""
    await group_of(driver, 1)
    await waited(driver)
    await driver.journal.execute("DELETE FROM sealed_specs")
    await create(driver, "new", "g", "sleep")
    await delete(driver, "g-0")
    assert await driver.records.sealed_spec(await driver.records.get("g"))
    await driver.boxes.started.wait()
    await asked(driver.rollouts.CancelRollout(pb.CancelRolloutRequest(rollout_id="g"), CONTEXT))
    await delete(driver, "g")
    assert not await driver.journal.query("SELECT 1 FROM sealed_specs")
