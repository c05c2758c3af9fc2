"""kill -9 of the services under terminal episodes: taken up again, or ended by type; nothing is done twice or left."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from tests.integration.driver.stack import TOKEN, Stack, running
from tests.support.waiting import eventually_async

from penstock.client import Command, FailedPrecondition, Penstock, Task, TerminalHandle, Verifier, connect

WAIT = "until [ -e go ]; do sleep 0.05; done"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Services whose driver the tests kill and start again."""
    with running(tmp_path_factory.mktemp("stack"), {}) as stack:
        yield stack


@asynccontextmanager
async def client(stack: Stack) -> AsyncIterator[Penstock]:
    addresses = {
        "driver": stack.driver.address,
        "interception": stack.interception.address,
        "sandbox": stack.sandbox.address,
    }
    async with connect(addresses, TOKEN) as client:
        yield client


def task(check: str = "test -e work.txt", **secrets: str) -> Task:
    """Make work.txt."""
    return Task(
        task_id="work",
        instruction="make work.txt",
        verifier=Verifier(commands=[Command(shell=check, secret_env=secrets)]),
    )


async def restart(stack: Stack) -> None:
    """kill -9 of the driver, and its next life."""
    await asyncio.to_thread(stack.driver.kill)
    await asyncio.to_thread(stack.driver.start)


async def in_sandbox(penstock: Penstock, terminal: TerminalHandle, command: str) -> str:
    """What a command gives that runs beside the episode."""
    sandbox = await penstock.sandboxes.attach(terminal.info.sandbox_id)
    return (await sandbox.run(["sh", "-c", command])).stdout.decode()


async def sandboxes(penstock: Penstock) -> list[str]:
    return [sandbox_id async for sandbox_id, _ in penstock.sandboxes.list()]


@pytest.mark.requirement("R34", "R50")
async def test_a_command_outlives_the_driver_and_its_step_gets_its_result(stack: Stack) -> None:
    """Killed in the middle of a step; the command runs once, the shell's state and the reward are as ever."""
    async with client(stack) as penstock:
        terminal = await penstock.terminals.open(task())
        await terminal.run("word=kept; mkdir -p deep; cd deep")
        line = f"echo run >> ../runs; touch ../begun; cd ..; {WAIT}; word=$word-on; wc -l < runs; touch work.txt"
        step = asyncio.ensure_future(terminal.run(line, step_id="long"))
        await in_sandbox(penstock, terminal, "until [ -e begun ]; do sleep 0.05; done")
        await restart(stack)
        await in_sandbox(penstock, terminal, "touch go")
        seen = await step
        assert seen.result is not None
        assert (seen.result.stdout, seen.result.exit.code) == (b"1\n", 0)
        after = await terminal.run('echo "$word"; basename "$PWD"; cat runs')
        assert after.result is not None
        assert after.result.stdout.decode().split() == ["kept-on", "workspace", "run"], after.result
        assert await terminal.run(line, step_id="long") == seen
        end = await terminal.answer()
        assert end.reward is not None
        assert end.reward.value == 1.0
        assert (await terminal.refresh()).step_count == 4
        assert await sandboxes(penstock) == []


@pytest.mark.requirement("R50", "R62")
async def test_an_end_that_came_while_no_driver_lived_is_made_up_for(stack: Stack) -> None:
    """An episode whose time ran out meanwhile ends by that name, and its sandbox goes."""
    async with client(stack) as penstock:
        terminal = await penstock.terminals.open(task(), wall_time=0.5)
        await asyncio.to_thread(stack.driver.kill)
        await asyncio.to_thread(stack.driver.start)
        await terminal.close()
        told = await terminal.refresh()
        assert told.failure is not None
        assert told.failure.reason in ("EPISODE_TIMED_OUT", "CLOSED")  # the second one on a machine that is fast
        assert told.reward is None
        assert await sandboxes(penstock) == []


@pytest.mark.requirement("R50", "R78")
async def test_an_answered_episode_ends_by_type_when_its_verifier_was_cut_off(stack: Stack) -> None:
    """Never graded twice; the answer's step tells the failure, which is nobody's fault and retriable."""
    async with client(stack) as penstock:
        terminal = await penstock.terminals.open(task(check=f"touch begun; {WAIT}"))
        answer = asyncio.ensure_future(terminal.answer("it", step_id="last"))
        await in_sandbox(penstock, terminal, "until [ -e begun ]; do sleep 0.05; done")
        await restart(stack)
        end = await answer
        assert end.ended
        assert end.reward is None
        assert end.failure is not None
        assert (end.failure.cause, end.failure.reason, end.failure.retriable, end.failure.phase) == (
            "infrastructure", "GRADING_INTERRUPTED", True, "verifying",
        )  # fmt: skip
        assert await terminal.answer("it", step_id="last") == end
        with pytest.raises(FailedPrecondition):
            await terminal.run("true")
        await gone(penstock)


async def gone(penstock: Penstock) -> None:
    """Waits until no sandbox is left: a driver that starts removes them in the background."""

    async def none() -> bool:
        return not await sandboxes(penstock)

    await eventually_async(none, "no sandbox is left")


@pytest.mark.requirement("R8", "R127")
async def test_an_episode_with_a_secret_goes_on_and_the_journal_never_shows_it(stack: Stack) -> None:
    """Its verifier has the secret after the restart; on disk it is sealed, while the episode is open and after."""
    secret = "sk-test '$(leak)"
    async with client(stack) as penstock:
        terminal = await penstock.terminals.open(task(check='test "$KEY"', KEY=secret))
        await terminal.run("touch work.txt")
        assert not _files_with(stack, secret)
        await restart(stack)
        end = await terminal.answer()
        assert end.reward is not None
        assert end.reward.value == 1.0
        await gone(penstock)
    assert not _files_with(stack, secret)


def _files_with(stack: Stack, secret: str) -> list[Path]:
    """The files of the driver's state in which a secret is to be read."""
    found = []
    for folder, _, files in os.walk(stack.directory / "driver"):
        for file in files:
            with suppress(FileNotFoundError):  # the driver removes files meanwhile
                found += [Path(folder, file)] * (secret.encode() in Path(folder, file).read_bytes())
    return found


@pytest.mark.requirement("R127")
async def test_an_episode_goes_on_after_its_driver_was_stopped(stack: Stack) -> None:
    """With the command that ran, whose caller waits on, and with an answer that is graded."""
    async with client(stack) as penstock:
        terminal = await penstock.terminals.open(task())
        step = asyncio.ensure_future(terminal.run("touch begun; until [ -e go ]; do sleep 0.05; done; touch work.txt"))
        await in_sandbox(penstock, terminal, "until [ -e begun ]; do sleep 0.05; done")
        assert await asyncio.to_thread(stack.driver.stop) == 0
        assert len(await sandboxes(penstock)) == 1
        await asyncio.to_thread(stack.driver.start)
        await in_sandbox(penstock, terminal, "touch go")
        assert not (await step).ended
        end = await terminal.answer()
        assert end.reward is not None
        assert end.reward.value == 1.0
        await gone(penstock)


@pytest.mark.requirement("R70")
async def test_a_driver_that_ends_for_good_ends_its_episodes_by_type(stack: Stack) -> None:
    """Nothing is left running for nobody."""
    async with client(stack) as penstock:
        terminal = await penstock.terminals.open(task())
        await asyncio.to_thread(stack.driver.stop, signal.SIGINT)
        assert await sandboxes(penstock) == []
        await asyncio.to_thread(stack.driver.start)
        told = await terminal.refresh()
        assert told.failure is not None
        assert (told.failure.reason, told.failure.retriable) == ("DRIVER_STOPPED", True)


@pytest.mark.requirement("R43")
async def test_a_sandbox_that_is_lost_ends_its_episode_by_type(stack: Stack) -> None:
    """The sandbox service is killed under a command; the failure is the infrastructure's, and no reward."""
    async with client(stack) as penstock:
        terminal = await penstock.terminals.open(task())
        step = asyncio.ensure_future(terminal.run(f"touch begun; {WAIT}"))
        await in_sandbox(penstock, terminal, "until [ -e begun ]; do sleep 0.05; done")
        await asyncio.to_thread(stack.sandbox.kill)
        await asyncio.to_thread(stack.sandbox.start)
        end = await step
        assert end.ended
        assert end.failure is not None
        assert (end.failure.cause, end.failure.retriable, end.reward) == ("infrastructure", True, None), end.failure
