"""A driver of today on the journal of the last released one, with rollouts that ran."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from protos.breaking import BASELINE
from tests.integration.driver.stack import TOKEN, running
from tests.integration.driver.test_service import echo_agent
from tests.support import wheels
from tests.support.waiting import eventually_async

from penstock.client import Phase, Task, Tokenizer, connect
from penstock_codec import tiny_tokenizer

pytestmark = pytest.mark.timeout(600)  # a guard: wheels are built


@pytest.mark.requirement("R111", "R127")
async def test_todays_driver_opens_a_journal_of_the_last_release(tmp_path: Path) -> None:
    """What ended is there to read; what ran ends as DRIVER_RESTARTED and is released; new rollouts run."""
    commit = BASELINE.read_text(encoding="utf-8").strip()
    before = wheels.install(await asyncio.to_thread(wheels.of_commit, commit), tmp_path / "baseline")
    tiny_tokenizer.build(["wait"]).write(tmp_path / "tiny")
    with running(tmp_path, {"tiny": str(tmp_path / "tiny")}) as stack:
        stack.driver.stop()
        stack.driver.python, today = str(before), stack.driver.python
        for file in (stack.directory / "driver").glob("driver.db*"):
            file.unlink()  # the old version makes its own
        stack.driver.start()
        async with connect(stack.addresses, TOKEN) as ps:
            await ps.agents.register(echo_agent())
            await ps.agents.register(echo_agent(name="sleeps", argv=["/bin/sh", "-c", "exec sleep 600"]))
            task = Task(task_id="wait", instruction="wait")
            ended = await ps.rollouts.create(task, "echo", source=Tokenizer("tiny"))
            assert (await ended.result()).failure is None
            events = [event.sequence async for event in ended.events()]
            ran = await ps.rollouts.create(task, "sleeps", source=Tokenizer("tiny"))

            async def runs() -> bool:
                return (await ran.refresh()).phase is Phase.RUNNING

            await eventually_async(runs, "the agent runs")
            stack.driver.kill()
            stack.driver.python = today
            stack.driver.start()
            failure = (await ran.result()).failure
            assert failure is not None
            assert (failure.reason, failure.retriable) == ("DRIVER_RESTARTED", True)
            assert [one async for one in ps.sandboxes.list()] == []
            assert (await ended.result()).failure is None
            assert [event.sequence async for event in ended.events()] == events
            after = await ps.rollouts.create(task, "echo", source=Tokenizer("tiny"))
            assert (await after.result()).failure is None
