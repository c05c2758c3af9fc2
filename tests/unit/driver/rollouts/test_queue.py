"""Rollouts that wait for a slot: namespaces share what becomes free, and one that waits holds nothing."""

from __future__ import annotations

from asyncio import Event, all_tasks
from collections import Counter
from dataclasses import replace

import pytest
from tests.support.waiting import eventually_async
from tests.unit.driver.conftest import Driver

from penstock_driver.domain.records import GroupPlan, Record
from penstock_driver.domain.rollout import Phase


def held_back(driver: Driver) -> Event:
    """Rollouts that run wait for their first answer until this is set."""
    hold = driver.gate.hold = Event()
    return hold


def running(driver: Driver, namespace: str) -> list[str]:
    """The rollouts of a namespace that have a slot."""
    return [
        rollout_id
        for rollout_id, runner in driver.manager._live.items()
        if runner.is_started and runner.recorder.record.namespace == namespace
    ]


@pytest.mark.requirement("R123")
async def test_a_namespace_that_comes_late_has_the_next_slots(driver: Driver) -> None:
    """However many rollouts of another one wait: until both hold as much."""
    hold = held_back(driver)
    many = await driver.start_group(replace(driver.spec(), namespace="a"), GroupPlan(60))
    few = await driver.start_group(replace(driver.spec(), namespace="b"), GroupPlan(6))
    assert (len(running(driver, "a")), len(running(driver, "b"))) == (8, 0)  # max_running
    for ended in range(1, 5):
        await driver.manager.cancel(running(driver, "a")[0], "")
        assert (len(running(driver, "a")), len(running(driver, "b"))) == (8 - ended, ended)
    await driver.manager.cancel(running(driver, "a")[0], "")
    assert len(running(driver, "a")) == 4, "both hold as much: they take turns"
    assert {running(driver, "b")[0], running(driver, "b")[3]} == {few.rollout_ids[0], few.rollout_ids[3]}
    hold.set()
    await driver.manager.cancel_group(many, "")
    ends = [await driver.outcome(await driver.records.get(rollout_id)) for rollout_id in few.rollout_ids]
    assert all(end.reward.value == 1.0 for end in ends)


@pytest.mark.requirement("R123")
async def test_a_waiting_rollout_has_no_task_and_no_place(driver: Driver) -> None:
    """Its phase is QUEUED, and its end needs none either."""
    held_back(driver)
    await driver.start_group(driver.spec(), GroupPlan(8))
    group = await driver.start_group(driver.spec(), GroupPlan(64))
    names = Counter(task.get_coro().__qualname__ for task in all_tasks())  # type: ignore[union-attr]
    assert names["RolloutRunner._run"] == names["RolloutManager._supervise"] == 8
    await driver.gate.called.wait()
    assert (await driver.manager.get(group.rollout_ids[3])).phase is Phase.QUEUED
    await driver.manager.cancel(group.rollout_ids[3], "not needed")
    record = await driver.manager.get(group.rollout_ids[3])
    assert record.outcome is not None and record.outcome.failure.reason == "CANCELLED"
    assert [event.WhichOneof("event") for event in await driver.events(record.rollout_id)][-1] == "ended"
    assert len(driver.sandboxes.boxes) <= 8
    await driver.manager.cancel_group(group, "")
    assert not driver.manager._waiting


@pytest.mark.requirement("R123")
async def test_one_that_is_cancelled_while_it_waits_takes_no_slot(driver: Driver) -> None:
    """The next in line takes it."""
    hold = held_back(driver)
    first = await driver.start_group(driver.spec(), GroupPlan(8))
    second = await driver.start_group(driver.spec(), GroupPlan(2))
    await driver.manager.cancel(second.rollout_ids[0], "")
    await driver.manager.cancel(first.rollout_ids[0], "")
    assert second.rollout_ids[1] in running(driver, "default")
    hold.set()
    await driver.manager.cancel_group(first, "")
    last: Record = await driver.records.get(second.rollout_ids[1])
    assert (await driver.outcome(last)).reward.value == 1.0
    await eventually_async(driver.owes_nothing, "nothing is held")
