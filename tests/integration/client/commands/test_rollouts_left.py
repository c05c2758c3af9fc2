"""Commands without a model of their own, where a `penstock up` that was killed has left rollouts."""

from __future__ import annotations

from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from tests.integration.client.test_cli import penstock, start
from tests.support.endpoints.loopback import serving
from tests.support.services.processes import children_of, until_ended

from penstock.client import Command, Mode, Rollout, Task, Upstream, connect
from penstock.client.transport.endpoints import of_state_dir

pytestmark = pytest.mark.asyncio(loop_scope="session")


@asynccontextmanager
async def up(state: Path) -> AsyncIterator[Process]:
    """A `penstock up` that runs within the block, unless it is killed there."""
    process = await start("up", "--free-ports", "--state-dir", str(state), "--json")
    try:
        assert process.stdout is not None and await process.stdout.readline()
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            await process.communicate()


async def kill(process: Process) -> None:
    """Kills it, and returns once its services have ended."""

    async def end() -> None:
        process.kill()
        await process.communicate()

    await until_ended(children_of(process.pid), end)


async def rollout(state: Path) -> Rollout:
    """The rollout of the services that run."""
    endpoints = of_state_dir(state)
    assert endpoints is not None
    async with connect(endpoints) as ps:
        return await (await ps.rollouts.attach("left")).refresh()


@pytest.mark.requirement("R127")
async def test_a_command_that_only_reads_ends_no_rollout_that_was_left(tmp_path: Path) -> None:
    """It says how many there are; the next `penstock up` goes on with them, and once they have ended it reads."""
    state = tmp_path / "state"
    async with up(state) as running, serving(web.Application()) as url:
        endpoints = of_state_dir(state)
        assert endpoints is not None
        async with connect(endpoints) as ps:
            task = Task(task_id="slow", instruction="x", setup=[Command(["sleep", "600"])])
            source = Upstream(base_url=f"{url}/v1", model="m")
            await ps.rollouts.create(task, "shell", rollout_id="left", mode=Mode.BLACK_BOX, source=source)
        await kill(running)

    exporting = ("export", str(tmp_path / "rows.jsonl"), "--table", "rollouts", "--state-dir", str(state))
    code, out, err = await penstock(*exporting)
    assert code == 4 and "1 rollout has not ended" in err and "penstock up" in err, (out, err)
    code, out, err = await penstock("agents", "list", "--state-dir", str(state))
    assert code == 4 and "1 rollout has not ended" in err, (out, err)

    async with up(state):
        assert (await rollout(state)).outcome is None
    code, out, err = await penstock(*exporting)
    assert code in (0, 1) and "services for this command only" in err, (out, err)
