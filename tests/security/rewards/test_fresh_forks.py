"""A fresh fork is graded as the agent left its directory: what was there before it shows through nowhere."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
import pytest_asyncio
from tests.support.copying import Finished, finish, training
from tests.support.docker import dockerd
from tests.support.policy import bash, in_turn
from tests.support.services.stack import Running, running

from penstock.client import (
    Command,
    FailureCause,
    InvalidArgument,
    Phase,
    Resources,
    SandboxChoice,
    SeedFile,
    Task,
    Verifier,
)

BACKENDS = ("local", "docker")

_PREPARED = r"""
for f in pipe sock out keep.wh; do echo prepared > $f; done
echo prepared > .wh.file; mkdir .wh.folder; echo prepared > .wh.folder/kept
mkdir -p again/inner mode shared closed/over; echo prepared > again/file; echo prepared > again/inner/file
echo prepared > closed/over/file
"""
_LEFT = r"""
rm pipe sock out
mkfifo pipe new-pipe; ln -s /etc/hostname out
python3 -c 'import socket; [socket.socket(socket.AF_UNIX).bind(name) for name in ("sock", "new-sock")]'
echo mine > .wh.file
rm -rf closed/over; mkfifo closed/over
rm -rf again; mkdir -p again/inner; chmod 750 again/inner
chmod 700 mode; touch mode/file; chmod 3775 shared
echo one > one; ln one two; ln one three; mkdir twins; echo a > twins/a; ln twins/a twins/b
echo x > set-user; chmod 6755 set-user
echo x > dated; touch -d '2001-02-03 04:05:06.789012345 UTC' dated
mkdir dated.d; touch dated.d/x; touch -d '2002-03-04 05:06:07 UTC' dated.d; touch -d @0 epoch
ln -s dated link; touch -h -d '2003-04-05 06:07:08 UTC' link
"""
_SHOWN = {
    "there": "for f in pipe sock out .wh.file new-* closed/over; do [ -e $f ] || [ -L $f ] && echo $f; done",
    "folder": "cat .wh.folder/kept",
    "again": "find again | LC_ALL=C sort; stat -c %a again/inner",
    "modes": "stat -c %a mode shared set-user",
    "names": "stat -c %h one twins/a; [ twins/a -ef twins/b ] && [ one -ef two ] && cat three twins/b",
    "times": "TZ=UTC stat -c %y dated dated.d link; stat -c %Y epoch",
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def both(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """Four services with both backends."""
    engine = await asyncio.to_thread(dockerd.engine)
    images = {"docker_image": dockerd.BASE, "docker_sidecar_image": dockerd.BASE}
    with dockerd.nothing_left():
        folder = tmp_path_factory.mktemp("stack-forks")
        async with running(folder, {"sandbox": {"docker_host": engine.host, **images}}, agents=False) as started:
            yield started


async def graded(started: Running, backend: str, prepared: str, left: str, verifier: Verifier) -> Finished:
    """One rollout on a prepared state, of an agent that runs a script."""
    label = secrets.token_hex(8)
    task = Task(
        task_id="fork",
        instruction="Run leave.sh.",
        files=[SeedFile("leave.sh", left.encode())],
        setup=[Command(shell=prepared)],
        verifier=verifier,
    )
    async with training(started, label, in_turn(bash("bash leave.sh"), "Done.")):
        handle = await started.ps.rollouts.create(
            task, "shell", sandbox=SandboxChoice(backend=backend), labels={"test": label}
        )
        return await finish(handle)


@pytest.mark.requirement("R72", "R76")
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_fresh_fork_is_graded_as_the_agent_left_it(both: Running, backend: str) -> None:
    """Nothing prepared where a pipe, a socket or a link out stands; modes, times and second names as they were."""
    commands = [Command(shell=text) for text in _SHOWN.values()]
    verifier = Verifier(commands=commands, fresh_fork=True)
    finished = await graded(both, backend, _PREPARED, _LEFT, verifier)
    outcome = finished.result.outcome
    assert outcome.failure is None, finished.agent_said()
    shown = [command.stdout_tail.decode() for command in finished.commands(Phase.VERIFYING)]
    seen = dict(zip(_SHOWN, shown, strict=True))
    assert seen["there"] == ""
    assert seen["folder"] == "prepared\n"
    assert seen["again"] == "again\nagain/inner\n750\n"
    assert seen["modes"] == "700\n3775\n2755\n"
    second = "789012345" if backend == "local" else "000000000"
    dated = [f"2001-02-03 04:05:06.{second} +0000", "2002-03-04 05:06:07.000000000 +0000"]
    assert seen["times"].splitlines() == [*dated, "2003-04-05 06:07:08.000000000 +0000", "0"]
    # Docker's tars show the names of one file only within a new directory.
    assert seen["names"] == ("3\n2\none\na\n" if backend == "local" else "1\n2\n")
    assert outcome.grading is not None and outcome.grading.changes is not None
    names = {"pipe", "sock", "out", "new-pipe", "new-sock", ".wh.file", "closed/over"}
    assert set(outcome.grading.changes.left_out_paths) == {f"/workspace/{name}" for name in names}
    assert outcome.grading.changes.left_out == len(names)


@pytest.mark.requirement("R72", "R76")
@pytest.mark.parametrize("backend", BACKENDS)
async def test_deleted_file_whose_name_is_not_text_is_never_graded_as_intact(both: Running, backend: str) -> None:
    """Docker cannot say which file it was, so there is no grade; a name with a real U+FFFD is like any other."""
    named = r"printf 'caf\351'"
    verifier = Verifier(commands=[Command(shell=f'[ ! -e "$({named})" ] && [ ! -e gone ]')], fresh_fork=True)
    left = f'rm "$({named})" gone\n'
    finished = await graded(both, backend, f'touch "$({named})" gone', left, verifier)
    if backend == "local":
        assert finished.reward == 1.0, finished.agent_said()
    else:
        failure = finished.result.outcome.failure
        assert failure is not None
        assert (failure.cause, failure.reason, failure.retriable) == (FailureCause.AGENT, "GRADING_BLOCKED", False)


@pytest.mark.requirement("R76")
@pytest.mark.parametrize("backend", BACKENDS)
async def test_names_with_a_replacement_character_are_restored_like_others(both: Running, backend: str) -> None:
    """It is a character, which a listing has for other bytes as well."""
    verifier = Verifier(
        commands=[Command(shell="cat tests/*.txt; ls tests | wc -l")], fresh_fork=True, restore=["tests/*.txt"]
    )
    prepared = "mkdir tests; echo prepared > 'tests/\ufffd.txt'"
    left = "echo mine > 'tests/\ufffd.txt'; echo mine > 'tests/\ufffd\ufffd.txt'\n"
    finished = await graded(both, backend, prepared, left, verifier)
    assert finished.result.outcome.failure is None, finished.agent_said()
    assert finished.commands(Phase.VERIFYING)[0].stdout_tail == b"prepared\n1\n"
    left += r'echo mine > "$(printf "tests/\377.txt")"' + "\n"
    failure = (await graded(both, backend, prepared, left, verifier)).result.outcome.failure
    assert failure is not None and failure.reason == "GRADING_BLOCKED"


@pytest.mark.requirement("R27", "R76")
@pytest.mark.parametrize("backend", BACKENDS)
async def test_directory_behind_a_link_is_refused_before_the_agent_starts(both: Running, backend: str) -> None:
    """Its changes would be found elsewhere, and none would be graded."""
    verifier = Verifier(commands=[Command(["true"])], fresh_fork=True, changes_below=["plain", "linked/inner"])
    finished = await graded(both, backend, "mkdir -p real/inner plain; ln -s real linked", "echo x\n", verifier)
    failure = finished.result.outcome.failure
    assert failure is not None
    assert (failure.cause, failure.reason, failure.retriable) == (FailureCause.TASK, "CHANGES_BELOW_INVALID", False)
    assert "changes_below" in failure.message and "/workspace/linked is a link" in failure.message
    assert finished.commands(Phase.VERIFYING) == []
    real = replace(verifier, changes_below=["plain", "real/inner", "not/yet"])
    assert (await graded(both, backend, "mkdir -p real/inner plain", "echo x\n", real)).reward == 1.0


JUDGE = "penstock-test/judge:1"


@pytest.fixture
def judge(both: Running) -> Iterator[None]:
    """An image with a verifier's tools."""
    dockerd.build(
        JUDGE,
        f"FROM {dockerd.BASE}",
        "RUN mkdir /judge && echo secret > /judge/answer",
        "WORKDIR /judge",
    )
    yield
    dockerd.engine().api.remove_image(JUDGE, force=True)


@pytest.mark.requirement("R76")
async def test_a_verifier_has_its_own_image_with_the_agents_changes_alone(both: Running, judge: None) -> None:
    """Nothing of the task is in it, nor has the agent seen it; other resources alone keep the task's prepared state."""
    left = "echo mine > mine; ls -d /judge >> mine; rm prepared"
    looks = ["cat /judge/answer; id -un; pwd", "ls -A /workspace; cat /workspace/mine"]
    verifier = Verifier(commands=[Command(shell=look) for look in looks], image=JUDGE)
    finished = await graded(both, "docker", "echo prepared | tee prepared kept", left, verifier)
    assert finished.reward == 1.0, finished.result
    seen = [command.stdout_tail.decode() for command in finished.commands(Phase.VERIFYING)]
    assert seen == ["secret\nagent\n/judge\n", "mine\nmine\n"]
    threads = "import threading, time; [threading.Thread(target=time.sleep, args=(1,)).start() for _ in range(60)]"
    many = Command(["python3", "-c", threads])
    verifier = Verifier(commands=[many, Command(shell="cat mine kept")], resources=Resources(pids=32))
    finished = await graded(both, "docker", "echo prepared | tee prepared kept", left, verifier)
    assert finished.reward == 0.5, finished.result
    assert [command.exit.ok for command in finished.commands(Phase.VERIFYING)] == [False, True]

    later = Verifier(commands=[Command(shell="cat /judge/answer /workspace/mine && [ ! -e kept ]")], image=JUDGE)
    grade = await both.ps.rollouts.regrade(finished.handle.rollout_id, later)
    assert grade.reward is not None and grade.reward.value == 1.0, grade


@pytest.mark.requirement("R76")
async def test_a_verifiers_sandbox_that_cannot_be_made_is_named_before_the_agent_starts(both: Running) -> None:
    """By its image; where it would not be a sandbox of its own, it is refused."""
    verifier = Verifier(commands=[Command(["true"])], image="penstock-test/absent:1")
    finished = await graded(both, "docker", "true", "true", verifier)
    outcome = finished.result.outcome
    assert outcome.failure is not None and "penstock-test/absent" in outcome.failure.message
    assert outcome.agent_exit is None
    with pytest.raises(InvalidArgument) as refused:
        await graded(both, "docker", "true", "true", replace(verifier, fresh_fork=False))
    assert [item.field for item in refused.value.violations] == ["spec.task.verifier.image"]
