"""A machine whose disk many agents fill together: the services go on, and so does whoever takes little."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.copying import REPLY, copy_task, finish, training
from tests.support.policy import bash, prompt_text
from tests.support.services.stack import Running, stack_in

from penstock.client import (
    Failure,
    FailureCause,
    ModelCall,
    Party,
    Resources,
    RolloutHandle,
    SandboxChoice,
    Task,
    connect,
)

MIB = 1 << 20
SIZE, FREE, LIMIT = 1200 * MIB, 600 * MIB, 500 * MIB
HOGS = 4


@contextmanager
def small_disk() -> Iterator[Path]:
    """A file system of its own, without anything in reserve for root."""
    with tempfile.TemporaryDirectory(prefix="penstock-small-") as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "penstock-test", folder], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def least_free(folder: Path, ended: asyncio.Event) -> asyncio.Task[int]:
    """The least that was seen to be free there until an event."""

    async def watch() -> int:
        least = SIZE
        while not ended.is_set():
            there = os.statvfs(folder)
            least = min(least, there.f_bavail * there.f_frsize)
            await asyncio.sleep(0.01)
        return least

    return asyncio.create_task(watch())


async def hogged(stack: Running, label: str, mark: str) -> RolloutHandle:
    """A rollout whose agent fills its disk, once the trainer answers."""
    return await stack.ps.rollouts.create(
        Task(task_id="hog", instruction=f"{mark}: fill the disk."),
        "shell",
        labels={"test": label},
        max_attempts=1,
        sandbox=SandboxChoice(resources=Resources(disk_bytes=LIMIT)),
    )


async def failure_of(handle: RolloutHandle) -> Failure:
    finished = await finish(handle)
    assert finished.result.outcome.failure is not None, finished.agent_said()
    return finished.result.outcome.failure


@pytest.mark.requirement("R95")
@pytest.mark.usefixtures("root")
async def test_agents_that_fill_the_disk_break_no_journal_and_no_neighbour() -> None:
    """Each keeps within its own limit, together they are more than the disk; the journals are on the same one."""
    label = secrets.token_hex(8)
    within, beyond = LIMIT // MIB - 100, LIMIT // MIB + 300
    # Slow from before a limit on: all together leave the service seconds to measure and act in.
    fill = "head -c {}M /dev/zero > fill; for _ in $(seq {}); do head -c 5M /dev/zero >> fill; sleep 0.3; done"
    fill += "; sleep 3000"
    wait_for_all, full, ended = asyncio.Barrier(HOGS + 1), asyncio.Event(), asyncio.Event()

    # All have their sandbox when the first one writes: none is refused for want of room.
    async def before(call: ModelCall) -> None:
        if "MODEST" in prompt_text(call):
            await wait_for_all.wait()
        elif "GREEDY" not in prompt_text(call):
            if not full.is_set():
                await wait_for_all.wait()
            await full.wait()

    def reply(prompt: str) -> str:
        if "GREEDY" in prompt or "MODEST" in prompt:
            at_once, in_all = (LIMIT // MIB - 50, beyond) if "GREEDY" in prompt else (120, within)
            return bash(fill.format(at_once, (in_all - at_once) // 5))
        return REPLY(prompt)

    with small_disk() as disk:
        settings = {"sandbox": {"min_free_bytes": FREE, "min_free_inodes": 100}}
        # Without the toolboxes of other tests, which would take most of it.
        services = stack_in(disk, settings)
        async with (
            services,
            connect(services.endpoints) as client,
            training(stack := Running(services, client, services.state_dir), label, reply) as trainer,
        ):
            trainer.before = before
            least = least_free(disk, ended)
            neighbour = await stack.ps.rollouts.create(copy_task(stack), "shell", labels={"test": label})
            modest = [await hogged(stack, label, "MODEST") for _ in range(HOGS)]
            failing = [asyncio.create_task(failure_of(handle)) for handle in modest]
            await asyncio.wait(failing, return_when=asyncio.FIRST_COMPLETED)
            full.set()
            for handle in modest:
                await handle.cancel("the disk was full")
            graded = await finish(neighbour)
            failures = await asyncio.gather(*failing)
            greedy = await failure_of(await hogged(stack, label, "GREEDY"))
            ended.set()
            left = await least
            logs = stack.logs
            assert graded.reward == 1.0, (left, failures, greedy, graded.agent_said(), logs)
            [trajectory_call, *_] = (await neighbour.trajectory()).calls
    assert left > 0, "a journal may have found no room"
    assert trajectory_call.state == "delivered"
    stopped = [one for one in failures if one.cause is not FailureCause.CANCELLED]
    assert stopped
    for one in stopped:
        assert (one.cause, one.caused_by, one.reason) == (FailureCause.INFRASTRUCTURE, Party.SANDBOX, "SANDBOX_LOST")
        assert "DISK_LOW" in one.message
    assert (greedy.cause, greedy.caused_by, greedy.reason) == (FailureCause.AGENT, Party.AGENT, "SANDBOX_ENDED_INSIDE")
    assert "DISK_EXHAUSTED" in greedy.message and not greedy.retriable
    for trace in ("disk is full", "No space left", "Traceback"):
        assert trace not in logs, logs[-20_000:]
