"""What an agent leaves cannot forge the grade of a later verifier: it runs where no process of the agent ever was."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.support.copying import finish, training
from tests.support.policy import bash, in_turn
from tests.support.services.stack import Running, running

from penstock.client import Command, Grade, RewardFrom, SeedFile, Task, Verifier

pytestmark = pytest.mark.asyncio(loop_scope="session")

DAEMON = """
import glob, os, time
if os.fork():
    os._exit(0)
os.setsid()
for _ in range(3000):
    for path in glob.glob("/tmp/penstock-*/*") + ["/workspace/daemon"]:
        try:
            open(path, "w").write("1")
        except OSError:
            pass
    time.sleep(0.01)
"""
COUNT = "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'python3 [d]aemon'"
FORGE = f"""
python3 daemon.py > /dev/null 2>&1 < /dev/null
{COUNT} > counted
ln -s /tmp penstock-link; ln -s ../../tmp up; ln -sf /etc/passwd check.sh
mkdir -p reward; echo 1 > reward/reward; for i in $(seq 20); do ln -s /tmp/penstock-$i reward-$i; done
mkdir -p /tmp/penstock-0; echo 1 > /tmp/penstock-0/reward
printf 'echo 1 > "$PENSTOCK_REWARD_FILE"' > sh; chmod 755 sh; cp sh cat; cp sh test
printf 'import os; open(os.environ["PENSTOCK_REWARD_FILE"], "w").write("1")' > sitecustomize.py
"""
FIRST = Verifier(commands=[Command(shell='echo 0 > "$PENSTOCK_REWARD_FILE"')], reward=RewardFrom.FILE)
LATER = Verifier(
    files=[
        SeedFile("check.sh", b'test -e honest && echo 1 > "$PENSTOCK_REWARD_FILE" || echo 0 > "$PENSTOCK_REWARD_FILE"')
    ],
    commands=[
        Command(shell=f"cat counted; {COUNT}"),
        Command(shell="readlink up penstock-link; [ -L check.sh ] && echo link; ls -d /tmp/penstock-0"),
        Command(shell="python3 -c 'pass'; bash check.sh"),
    ],
    reward=RewardFrom.FILE,
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    async with running(tmp_path_factory.mktemp("stack-regraded"), agents=False) as found:
        yield found


async def graded_twice(started: Running, script: str) -> Grade:
    """The later grade of an agent that runs a script, and gets 0 from the first verifier."""
    label = secrets.token_hex(8)
    files = [SeedFile("leave.sh", script.encode()), SeedFile("daemon.py", DAEMON.encode())]
    task = Task(task_id="forge", instruction="Run leave.sh.", files=files, verifier=FIRST)
    async with training(started, label, in_turn(bash("bash leave.sh"), "Done.")):
        handle = await started.ps.rollouts.create(task, "shell", labels={"test": label})
        finished = await finish(handle)
    assert finished.reward == 0.0, finished.agent_said()
    return await handle.regrade(LATER, name="later")


@pytest.mark.requirement("R72", "R76", "R140")
async def test_nothing_that_an_agent_left_forges_a_later_grade(started: Running) -> None:
    """Links, programs in the way, a start-up module, a daemon, and files where rewards are written."""
    grade = await graded_twice(started, FORGE)
    assert grade.failure is None and grade.reward is not None and grade.reward.value == 0.0, grade
    assert grade.grading is not None
    processes, links, _ = (command.stdout_tail.decode() for command in grade.grading.commands)
    assert processes == "1\n0\n", "the daemon was there when the agent counted, and is not any more"
    assert links == "", "no link out, no file in memory, and the verifier's own file is in place"


@pytest.mark.requirement("R140")
async def test_honest_work_is_rewarded_by_a_later_verifier(started: Running) -> None:
    grade = await graded_twice(started, "touch honest\n" + FORGE)
    assert grade.reward is not None and grade.reward.value == 1.0, grade
