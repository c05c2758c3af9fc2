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


@pytest.mark.requirement("R123")
async def test_the_spec_of_a_waiting_rollout_is_on_disk_alone(driver: Driver) -> None:
    """A reader sees all of the rollout meanwhile, and it runs by that spec."""
    hold = held_back(driver)
    full = await driver.start_group(driver.spec(), GroupPlan(8))
    (record,) = await driver.start_recorded(1)
    assert driver.manager._live[record.rollout_id]._spec is None
    assert (await driver.manager.get(record.rollout_id)).spec == record.spec
    hold.set()
    await driver.manager.cancel_group(full, "")
    assert (await driver.outcome(record)).reward.value == 1.0


@pytest.mark.requirement("R123", "R127")
async def test_rollouts_that_waited_at_a_restart_wait_without_their_specs(driver: Driver) -> None:
    """The next process keeps those of the ones that run."""
    hold = held_back(driver)
    records = await driver.recorded(10)
    assert await driver.manager.recover() == 10
    runners = driver.manager._live.values()
    assert [runner._spec is None for runner in runners] == [not runner.is_started for runner in runners]
    assert sum(runner.is_started for runner in runners) == 8
    hold.set()
    assert [(await driver.outcome(record)).reward.value for record in records] == [1.0] * 10


@pytest.mark.requirement("R123", "R127")
async def test_a_waiting_rollout_ends_if_its_spec_cannot_be_read(driver: Driver) -> None:
    """By a reason of its own, and the next in line goes on."""
    held_back(driver)
    full = await driver.start_group(driver.spec(), GroupPlan(8))
    damaged, whole = await driver.start_recorded(2)
    sql = "UPDATE sealed_specs SET sealed = SUBSTR(sealed, 1, LENGTH(sealed) - 1) WHERE spec_id = ?"
    await driver.journal.execute(sql, (damaged.rollout_id,))
    await driver.manager.cancel(full.rollout_ids[0], "")
    failure = (await driver.outcome(damaged)).failure
    assert (failure.reason, failure.retriable) == ("SPEC_UNREADABLE", True)
    assert driver.manager._live[whole.rollout_id].is_started
    for rollout_id in (whole.rollout_id, *full.rollout_ids):
        await driver.manager.cancel(rollout_id, "")
    for rollout_id in (whole.rollout_id, *full.rollout_ids):  # a driver that stops before leaves them to the next one
        await driver.manager.wait(rollout_id, 60)
