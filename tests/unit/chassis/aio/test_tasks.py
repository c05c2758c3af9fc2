"""Background tasks have an owner: it waits for them, cancels them, and loses no error."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.testing import in_virtual_time


async def fail() -> None:
    await asyncio.sleep(0)
    raise ValueError("broken")


def test_waiting_covers_tasks_that_start_meanwhile() -> None:
    async def run() -> tuple[int, float]:
        owner = TaskOwner()

        async def first() -> None:
            await asyncio.sleep(1.0)
            owner.start(asyncio.sleep(2.0))

        owner.start(first())
        left = await owner.wait()
        return left, asyncio.get_running_loop().time()

    assert in_virtual_time(run()) == (0, 3.0)


def test_waiting_ends_at_its_limit_with_the_number_of_tasks_left() -> None:
    async def run() -> tuple[int, float, int]:
        owner = TaskOwner()
        owner.start(asyncio.sleep(1.0))
        owner.start(asyncio.sleep(100.0))
        left = await owner.wait(5.0)
        now = asyncio.get_running_loop().time()
        await owner.aclose()
        return left, now, len(owner)

    assert in_virtual_time(run()) == (1, 5.0, 0)


async def test_closing_cancels_each_task_once_and_waits_for_its_clean_up() -> None:
    owner, steps = TaskOwner(), list[str]()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            steps.append("cleaned up")

    owner.start(work())
    await asyncio.sleep(0)
    await asyncio.gather(owner.aclose(), owner.aclose())
    assert steps == ["cleaned up"]


async def test_a_task_may_close_its_own_owner() -> None:
    owner = TaskOwner()
    await owner.start(owner.aclose())
    assert len(owner) == 0


async def test_the_error_of_a_background_task_is_logged() -> None:
    owner = TaskOwner()
    with structlog.testing.capture_logs() as logs:
        owner.start(fail(), "the-task")
        await owner.wait()
        await asyncio.sleep(0)
    assert [(line["log_level"], line["task"]) for line in logs] == [("error", "the-task")]


async def test_work_gives_its_result_or_error_to_its_caller_only() -> None:
    owner = TaskOwner()
    with structlog.testing.capture_logs() as logs:
        assert await owner.run(asyncio.sleep(0, "result")) == "result"
        with pytest.raises(ValueError, match="broken"):
            await owner.run(fail())
    assert logs == []


async def test_work_outlives_its_cancelled_caller_and_its_error_is_logged() -> None:
    owner, steps = TaskOwner(), list[str]()

    async def work() -> None:
        await asyncio.sleep(0)
        steps.append("end")
        await fail()

    caller = asyncio.create_task(owner.run(work()))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    with structlog.testing.capture_logs() as logs:
        await owner.wait()
        await asyncio.sleep(0)
    assert (steps, len(logs)) == (["end"], 1)


async def test_an_error_that_is_no_fault_is_not_logged() -> None:
    owner = TaskOwner(unlogged=(ValueError,))
    with structlog.testing.capture_logs() as logs:
        task = owner.start(fail())
        await owner.wait()
        await asyncio.sleep(0)
    assert (isinstance(task.exception(), ValueError), logs) == (True, [])


async def test_a_cancelled_call_ends_only_with_the_work_that_it_finishes() -> None:
    owner, steps, going_on = TaskOwner(), list[str](), asyncio.Event()

    async def work() -> None:
        await going_on.wait()
        steps.append("end")

    caller = asyncio.create_task(owner.finish(work()))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.sleep(0)
    steps.append("cancelled")
    going_on.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert steps == ["cancelled", "end"]
