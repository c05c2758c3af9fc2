"""Rollouts whose sandbox is ended by what runs in it: the agent's failure, graded by nobody and never tried again."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from pathlib import Path

import pytest
from tests.security.test_sandbox_isolation import processes_of, status
from tests.support.copying import Finished, finish, training
from tests.support.policy import bash, in_turn
from tests.support.services.stack import Running
from tests.support.waiting import eventually_async

from penstock.client import AttemptFailed, Command, FailureCause, Party, Phase, RewardFrom, SeedFile, Task, Verifier

PAID = 'echo 1 > "$PENSTOCK_REWARD_FILE"'
# Each way by which a process without rights could end the first process of its sandbox, which all the others end with.
ENDS = """
import os, resource, signal
for limit in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_STACK):
    try:
        resource.prlimit(1, limit, (0, 0))
    except OSError:
        pass
for sent in signal.valid_signals():
    try:
        os.kill(1, sent)
    except OSError:
        pass
os.kill(-1, signal.SIGKILL)
"""


def asleep(seconds: str) -> bool:
    """Whether `sleep seconds` runs on this machine."""
    return any(one.get("arguments") == f"sleep {seconds}" for one in map(status, Path("/proc").glob("[0-9]*")))


def assert_the_agents(finished: Finished) -> None:
    """A failure that is worth nothing to the agent, and is not tried again."""
    failure = finished.result.outcome.failure
    assert failure is not None, finished.agent_said()
    assert (failure.cause, failure.caused_by) == (FailureCause.AGENT, Party.AGENT), finished.agent_said()
    assert not failure.retriable
    assert not finished.reward
    assert not [event for event in finished.events if isinstance(event.payload, AttemptFailed)]


@pytest.mark.requirement("R93")
@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.VERIFYING])
async def test_a_sandbox_whose_first_process_ends_is_its_agents_failure(stack: Running, phase: Phase) -> None:
    """While the agent works, and while a verifier runs what it made; two attempts would be allowed."""
    label = secrets.token_hex(8)
    # No other run on this machine sleeps as long.
    seconds = str(10**6 + secrets.randbelow(10**9))
    while_it_works = phase is Phase.RUNNING
    verifier = Verifier(
        commands=[Command(["true"]) if while_it_works else Command(["sleep", seconds]), Command(shell=PAID)],
        reward=RewardFrom.FILE,
    )
    task = Task(task_id="ended", instruction="Wait.", verifier=verifier)
    async with training(stack, label, in_turn(bash(f"sleep {seconds}") if while_it_works else "Done.", "Done.")):
        handle = await stack.ps.rollouts.create(task, "shell", labels={"test": label}, max_attempts=2)

        async def sleeps() -> bool:
            return await asyncio.to_thread(asleep, seconds)

        await eventually_async(sleeps, "the command sleeps")
        _, first = await asyncio.to_thread(processes_of, seconds)
        os.kill(int(first["Pid"]), signal.SIGKILL)
        finished = await finish(handle)
    assert_the_agents(finished)
    failure = finished.result.outcome.failure
    assert failure is not None
    assert finished.reward is None
    assert (failure.reason, failure.phase) == ("SANDBOX_ENDED_INSIDE", phase), finished.agent_said()


@pytest.mark.requirement("R90", "R93")
async def test_agent_that_kills_every_process_gets_no_other_attempt(stack: Running) -> None:
    """Whether or not its sandbox outlives that, what it left is at most its own failure."""
    label = secrets.token_hex(8)
    task = Task(
        task_id="ends",
        instruction="End it.",
        files=[SeedFile("ends.py", ENDS.encode())],
        verifier=Verifier(commands=[Command(shell=f"[ ! -e done.txt ] || {PAID}")], reward=RewardFrom.FILE),
    )
    async with training(stack, label, in_turn(bash("python3 ends.py"), "Done.")):
        handle = await stack.ps.rollouts.create(task, "shell", labels={"test": label}, max_attempts=2)
        finished = await finish(handle)
    assert_the_agents(finished)
