"""An agent that really tries to make its own reward, on the backends that run here, in place and with a fresh fork.

Of all that `reward_forger.sh` does one line is honest work, worth 0.25; everything else is to be worth nothing.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.support.copying import Finished, finish, training
from tests.support.docker import dockerd
from tests.support.loads.memory import Peak
from tests.support.policy import bash, in_turn
from tests.support.services.stack import Running, running

from penstock.client import (
    Command,
    CommandFinished,
    Companion,
    Failure,
    FailureCause,
    HealthCheck,
    Limits,
    Phase,
    RewardFrom,
    SandboxChoice,
    SeedFile,
    Task,
    Verifier,
)

FORGER = Path(__file__).with_name("reward_forger.sh")
IN_A_COMPANION = Path(__file__).with_name("companion_forger.py")
BACKENDS = ("local", "docker")
MAX_CHANGES = 4 << 20

_VERIFY = """
for process in /proc/[0-9]*; do { tr '\\0' ' ' < $process/cmdline; } 2> /dev/null; echo; done
env
ls -A "$HOME" | sed 's/^/home /'
cat seen.txt wrote.txt
[ "$(cat work.txt)" = partial ] && echo 0.25 > "$PENSTOCK_REWARD_FILE"
"""
_FILES = {
    "verify.sh": _VERIFY,
    "checks/check.sh": "echo honest",
    "fifo.sh": "echo honest",
    "folder.sh": "echo honest",
    "hard.sh": "echo honest",
    "locked/check.sh": "echo honest",
    "answer_key.py": "KEY = 'honest'",
    "checker.py": "import answer_key; print(answer_key.KEY)",
}
_COMMANDS = {
    "verify": Command(["bash", "verify.sh"]),
    "link on the way": Command(["bash", "checks/check.sh"]),
    "pipe": Command(["bash", "fifo.sh"]),
    "directory": Command(["bash", "folder.sh"]),
    "other name": Command(["bash", "hard.sh"]),
    "locked": Command(["bash", "locked/check.sh"]),
    "compiled": Command(["python3", "checker.py"]),
    "test": Command(["bash", "tests/test_sum.sh"]),
    "listing": Command(shell="find tests | LC_ALL=C sort; cat tests/data/expected.txt"),
    "git": Command(
        shell="git -c user.name=v -c user.email=v@v commit -q --allow-empty -m x && git status --short -uno"
    ),
    "removed": Command(["test", "!", "-e", "remove-me.txt"]),
    "links": Command(shell="for l in out late far .wh*; do [ -L $l ] || [ -e $l ] && echo $l; done; ls -d name*"),
    "left": Command(shell="ls -d __pycache__/answer_key*.pyc .git/hooks/pre-commit mine/check.sh sitecustomize.py"),
}


def task(*, fresh_fork: bool, script: bytes = FORGER.read_bytes()) -> Task:
    """Tests of its own in `tests`, which its verifier puts back, with what of a home is run by others."""
    return Task(
        task_id="forge",
        instruction="Do the work in work.txt.",
        files=[
            SeedFile("forge.sh", script),
            SeedFile("tests/test_sum.sh", b'[ "$(cat work.txt)" = done ]\n'),
            SeedFile("tests/data/expected.txt", b"done\n"),
            SeedFile("remove-me.txt", b"x"),
        ],
        setup=[Command(shell="git init -q .")],
        verifier=Verifier(
            commands=list(_COMMANDS.values()),
            files=[SeedFile(path, content.encode()) for path, content in _FILES.items()],
            reward=RewardFrom.FILE,
            fresh_fork=fresh_fork,
            restore=["tests/**", "~/.local"],
        ),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def both(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """Four services with both backends, little room and few places."""
    engine = await asyncio.to_thread(dockerd.engine)
    settings: dict[str, dict[str, Any]] = {
        "sandbox": {
            "docker_host": engine.host,
            "docker_image": dockerd.BASE,
            "docker_sidecar_image": dockerd.BASE,
            "max_sandboxes": 3,
            "tmp_bytes": 4 << 20,
        },
        "driver": {"max_changes_bytes": MAX_CHANGES},
    }
    with dockerd.nothing_left():
        async with running(tmp_path_factory.mktemp("stack-forged"), settings, agents=False) as started:
            yield started


async def run(started: Running, given: Task, backend: str = "local", companions: Sequence[Companion] = ()) -> Finished:
    """One rollout whose agent runs `forge.sh` and is done."""
    label = secrets.token_hex(8)
    async with training(started, label, in_turn(bash("bash forge.sh"), "Done.")):
        handle = await started.ps.rollouts.create(
            given, "shell", sandbox=SandboxChoice(backend=backend, companions=companions), labels={"test": label}
        )
        return await finish(handle)


@dataclass(frozen=True)
class Forged:
    """How the forger's rollout went; `printed` by the names of the verifier's commands."""

    backend: str
    fresh_fork: bool
    finished: Finished
    commands: dict[str, CommandFinished]

    def printed(self, name: str) -> str:
        """What a command wrote."""
        command = self.commands[name]
        return (command.stdout_tail + command.stderr_tail).decode(errors="replace")


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="session",
    params=[(backend, fresh) for backend in BACKENDS for fresh in (False, True)],
    ids=[f"{backend}-{where}" for backend in BACKENDS for where in ("in-place", "fresh-fork")],
)
async def forged(both: Running, request: pytest.FixtureRequest) -> Forged:
    """One run of the forger."""
    backend, fresh = request.param
    finished = await run(both, task(fresh_fork=fresh), backend)
    commands = finished.commands(Phase.VERIFYING)
    assert len(commands) == len(_COMMANDS), finished.agent_said()
    return Forged(backend, fresh, finished, dict(zip(_COMMANDS, commands, strict=True)))


@pytest.mark.requirement("R72", "R79")
async def test_only_honest_work_is_rewarded(forged: Forged) -> None:
    """Of everything that it did, the 0.25 of one line; and the record says where it was graded."""
    assert forged.finished.reward == 0.25, forged.finished.agent_said()
    grading = forged.finished.result.outcome.grading
    assert grading is not None
    assert grading.fresh_fork is forged.fresh_fork
    assert (grading.changes is not None) is forged.fresh_fork
    assert (grading.total, len(grading.commands)) == (len(_COMMANDS), len(_COMMANDS))
    assert grading.commands[1].stdout_tail == b"honest\n"


@pytest.mark.requirement("R10", "R60", "R72")
async def test_no_process_of_the_agent_lives_while_the_verifier_works(forged: Forged) -> None:
    """Daemons in sessions of their own, cron and at; nor is the agent's endpoint in the environment (R10)."""
    seen = forged.printed("verify")
    assert "forger" not in seen
    assert "/workspace/cron" not in seen
    assert "rollout" not in seen.lower()
    assert "PENSTOCK_REWARD_FILE=/tmp/penstock-" in seen


@pytest.mark.requirement("R75")
async def test_the_verifiers_files_were_absent_and_replace_whatever_was_in_their_place(forged: Forged) -> None:
    """Links, a link on the way, a pipe, a directory, a hard link to a test, a directory without permissions."""
    seen = forged.printed("verify")
    assert "answer_key.py" not in seen
    assert "checker.py" not in seen
    for name in ("link on the way", "pipe", "directory", "other name", "locked", "compiled"):
        assert forged.printed(name) == "honest\n", (name, forged.finished.agent_said())


@pytest.mark.requirement("R76")
async def test_tests_that_were_changed_deleted_or_added_are_as_they_were(forged: Forged) -> None:
    """In a directory that its owner may not list; and the verifier's file under a test's other name left it."""
    assert forged.commands["test"].exit.code == 1
    expected = ["tests", "tests/data", "tests/data/expected.txt", "tests/test_sum.sh", "done"]
    assert forged.printed("listing").splitlines() == expected
    assert forged.finished.result.outcome.grading is not None
    assert forged.finished.result.outcome.grading.restored >= 1


@pytest.mark.requirement("R72", "R75")
async def test_no_program_of_the_agents_runs_on_the_way(forged: Forged) -> None:
    """Python's compiled and start-up modules, git's hooks and monitor, profiles, shims, preloading, mounts.

    What it left is there: it is not run.
    """
    assert len(forged.printed("left").split()) == 4, forged.printed("left")
    for name in _COMMANDS:
        assert "forged" not in forged.printed(name), (name, forged.printed(name))
    assert forged.commands["git"].exit.ok, forged.printed("git")
    assert "/etc/" not in forged.printed("verify").replace("PWD", "")
    assert "/proc/" not in forged.printed("verify")
    assert "mount" not in forged.printed("verify")


@pytest.mark.requirement("R76")
async def test_fresh_fork_has_only_the_agents_files_below_its_directory(forged: Forged) -> None:
    """Deletions too; no link that leads out, no name that would mean something, nothing of its home."""
    assert forged.commands["removed"].exit.ok
    if not forged.fresh_fork:
        return
    assert forged.commands["links"].stdout_tail == b"name\nwith\xffbytes\n"
    assert "home .bashrc" not in forged.printed("verify")
    grading = forged.finished.result.outcome.grading
    assert grading is not None
    assert grading.changes is not None
    left_out = set(grading.changes.left_out_paths)
    names = ("out", "late", "far", "descriptors", ".wh.tests", ".wh..wh..opq")
    assert {f"/workspace/{name}" for name in names} <= left_out
    assert grading.changes.entries > 200
    assert grading.changes.removed >= 1


async def graded(started: Running, given: Task) -> tuple[Failure | None, float | None]:
    """Why it failed, and its reward."""
    finished = await run(started, given)
    return finished.result.outcome.failure, finished.reward


@pytest.mark.requirement("R72", "R74")
async def test_an_agent_that_leaves_no_room_for_the_verifier_fails_by_itself(both: Running) -> None:
    """Its own failure, never the infrastructure's, which would be tried again; a fresh fork grades it."""
    fill = b"echo partial > work.txt\nrm -rf /tmp/*\ncat /dev/zero > /tmp/fill\n"
    failure, reward = await graded(both, task(fresh_fork=False, script=fill))
    assert failure is not None
    assert (failure.cause, failure.reason, failure.retriable) == (FailureCause.AGENT, "DISK_FULL", False)
    assert reward is None
    assert await graded(both, task(fresh_fork=True, script=fill)) == (None, 0.25)


@pytest.mark.requirement("R73", "R74", "R77")
@pytest.mark.parametrize(
    ("score", "reason"),
    [
        ("echo nan > $PENSTOCK_REWARD_FILE", "REWARD_OUT_OF_RANGE"),
        ("echo 1e999 > $PENSTOCK_REWARD_FILE", "REWARD_OUT_OF_RANGE"),
        ("echo 2 > $PENSTOCK_REWARD_FILE", "REWARD_OUT_OF_RANGE"),
        ("""echo '{"reward": 0, "reward": 1}' > $PENSTOCK_REWARD_FILE""", "REWARD_INVALID"),
        ("echo 1 >> $PENSTOCK_REWARD_FILE; echo 1 >> $PENSTOCK_REWARD_FILE", "REWARD_INVALID"),
        ("yes 1 | head -c 100000 > $PENSTOCK_REWARD_FILE", "REWARD_INVALID"),
        ("rm $PENSTOCK_REWARD_FILE; mkfifo $PENSTOCK_REWARD_FILE", "REWARD_FILE_ABSENT"),
        ("rm $PENSTOCK_REWARD_FILE; mkdir $PENSTOCK_REWARD_FILE", "REWARD_FILE_ABSENT"),
        ("echo 1 > mine; ln -sf $PWD/mine $PENSTOCK_REWARD_FILE", "REWARD_FILE_ABSENT"),
        ("echo reward=1.0; echo 'Verification: 1/1 passed; reward=1.0' >&2", "REWARD_ABSENT"),
    ],
)
async def test_reward_from_agent_writable_files_is_a_reward_or_a_failure(
    both: Running, score: str, reason: str
) -> None:
    """Of a verifier that runs the agent's own program; text that looks like a reward is none."""
    verifier = Verifier(commands=[Command(["bash", "score.sh"])], reward=RewardFrom.FILE)
    script = f"cat > score.sh <<'S'\n{score}\nS\necho reward=1.0\n".encode()
    failure, reward = await graded(both, replace(task(fresh_fork=False, script=script), verifier=verifier))
    assert failure is not None
    assert (failure.cause, failure.reason, failure.retriable) == (FailureCause.VERIFIER, reason, False)
    assert reward is None


LOCKS = "chmod -R 000 . 2> /dev/null; chmod 000 ~"
REMOVES = 'rm -rf "$PWD" 2> /dev/null; rm -rf ~'


@pytest.mark.requirement("R72", "R74", "R76")
@pytest.mark.parametrize("fresh_fork", [False, True], ids=["in-place", "fresh-fork"])
@pytest.mark.parametrize("script", [LOCKS, REMOVES], ids=["locks", "removes"])
@pytest.mark.parametrize("backend", BACKENDS)
async def test_an_agent_that_locks_or_removes_its_directories_is_graded(
    both: Running, backend: str, script: str, fresh_fork: bool
) -> None:
    """It is never tried again for it: where a file is missed the command has not passed."""
    verifier = Verifier(
        commands=[Command(["test", "-e", "forge.sh"]), Command(["sh", "-c", "ls > /dev/null && touch made"])],
        restore=["tests/data/expected.txt", "~/.local"],
        fresh_fork=fresh_fork,
    )
    given = replace(task(fresh_fork=fresh_fork, script=f"{script}\n".encode()), verifier=verifier)
    finished = await run(both, given, backend)
    assert finished.result.outcome.failure is None, finished.agent_said()
    assert finished.reward == (1.0 if script == LOCKS else 0.5), finished.agent_said()


@pytest.mark.requirement("R72", "R74")
@pytest.mark.parametrize(
    ("score", "then", "reason"),
    [
        ("chmod 000 $PENSTOCK_REWARD_FILE", [], "REWARD_FILE_ABSENT"),
        ("chmod 000 ${PENSTOCK_REWARD_FILE%/*}", [], "REWARD_FILE_ABSENT"),
        # The next command has a reward file of its own.
        ("chmod 000 $PENSTOCK_REWARD_FILE", [Command(["true"])], "REWARD_ABSENT"),
        ("chmod 000 ${PENSTOCK_REWARD_FILE%/*}", [Command(["true"])], "REWARD_ABSENT"),
        ('rm -rf "$PWD"', [Command(["true"])], "REWARD_ABSENT"),
    ],
    ids=["file", "directory", "earlier file", "earlier directory", "working directory"],
)
async def test_files_locked_by_the_agents_program_are_no_infrastructure_failure(
    both: Running, score: str, then: list[Command], reason: str
) -> None:
    """Of a verifier that runs it."""
    verifier = Verifier(commands=[Command(["bash", "score.sh"]), *then], reward=RewardFrom.FILE)
    script = f"cat > score.sh <<'S'\n{score}\nS\n".encode()
    failure, reward = await graded(both, replace(task(fresh_fork=False, script=script), verifier=verifier))
    assert failure is not None
    assert (failure.cause, failure.reason, failure.retriable) == (FailureCause.VERIFIER, reason, False)
    assert reward is None


@pytest.mark.requirement("R72", "R74")
async def test_overlong_path_is_the_agents_failure(both: Running) -> None:
    """Of a verifier that looks everywhere."""
    deep = b"d=$(printf 'd%.0s' $(seq 200)); for i in $(seq 30); do mkdir $d && cd $d || exit 1; done; echo deep\n"
    given = task(fresh_fork=False, script=deep)
    verifier = Verifier(commands=[Command(["true"])], restore=["**/conftest.py"])
    failure, reward = await graded(both, replace(given, verifier=verifier))
    assert failure is not None
    assert (failure.cause, failure.reason, failure.retriable) == (FailureCause.AGENT, "GRADING_BLOCKED", False)
    assert reward is None


@pytest.mark.requirement("R73", "R77", "R79")
async def test_components_with_declared_ranges_come_out_with_the_reward(both: Running) -> None:
    """In the result and in the trajectory, by name."""
    write = """echo '{"reward": 0.5, "components": {"tests": 1, "style": -0.5}}' > $PENSTOCK_REWARD_FILE"""
    verifier = Verifier(
        commands=[Command(shell=write)],
        reward=RewardFrom.FILE,
        component_ranges={"tests": (0, 1), "style": (-1, 0)},
    )
    finished = await run(both, replace(task(fresh_fork=False, script=b"true\n"), verifier=verifier))
    reward = (await finished.handle.trajectory()).reward
    assert reward is not None
    assert (reward.value, dict(reward.components)) == (0.5, {"tests": 1.0, "style": -0.5})


@pytest.mark.requirement("R74", "R76")
async def test_changes_beyond_the_operators_limit_are_the_agents_failure(both: Running) -> None:
    """Not graded, and not retried."""
    fill = b"head -c %d /dev/zero > big\n" % (2 * MAX_CHANGES)
    failure, reward = await graded(both, task(fresh_fork=True, script=fill))
    assert failure is not None
    assert (failure.cause, failure.reason, failure.retriable) == (FailureCause.AGENT, "CHANGES_TOO_LARGE", False)
    assert reward is None


@pytest.mark.requirement("R74", "R89")
@pytest.mark.parametrize("backend", BACKENDS)
async def test_terabytes_of_holes_are_the_agents_failure_and_cost_nothing(both: Running, backend: str) -> None:
    """A file with no block on the disk must not be in the service's memory, nor end the whole stack."""
    peaks = [Peak(both.pid(name)) for name in ("sandbox", "driver")]
    assert len(peaks) == 2
    finished = await run(both, task(fresh_fork=True, script=b"truncate -s 8T /workspace/x\n"), backend)
    failure = finished.result.outcome.failure
    assert failure is not None
    assert (failure.cause, failure.reason, failure.retriable) == (FailureCause.AGENT, "CHANGES_TOO_LARGE", False)
    assert finished.reward is None
    assert max(peak.grown() for peak in peaks) < 64 << 20


@pytest.mark.requirement("R76")
async def test_graded_rollouts_do_not_wait_for_each_others_places(both: Running) -> None:
    """More rollouts than sandboxes, each of which needs one after the other."""
    label = secrets.token_hex(8)
    given = replace(task(fresh_fork=True, script=b"echo partial > work.txt\n"), task_id="many")
    async with training(both, label, in_turn(bash("bash forge.sh"), "Done.")):
        group = await both.ps.rollouts.create(given, "shell", n=6, labels={"test": label}, limits=Limits(prepare=300.0))
        results = await group.results()
    assert [result.reward.value if result.reward else result.outcome for result in results] == [0.25] * 6


@pytest.mark.requirement("R76", "R99")
@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (r"printf 'import sys\nfor l in sys.stdin: print(sum(map(int, l.split())))\n' > sum.py", 1.0),
        (r"printf 'import os\nos._exit(0)\n' > sum.py", 0.0),
    ],
)
async def test_the_guides_task_is_graded_as_the_guide_says(
    both: Running, tmp_path: Path, work: str, expected: float
) -> None:
    """Docs/guides/rewards.md, by who does the work and by who only says so."""
    text = (Path(__file__).parents[3] / "docs/guides/rewards.md").read_text(encoding="utf-8")
    path = tmp_path / "task.yaml"
    path.write_text(text.partition("```yaml task\n")[2].partition("```")[0], encoding="utf-8")
    given = Task.load(path)
    script = SeedFile("forge.sh", f"{work}\n".encode())
    finished = await run(both, replace(given, files=[*given.files, script]))
    assert finished.reward == expected, finished.agent_said()


@pytest.mark.requirement("R90")
async def test_in_place_no_verifier_starts_on_a_system_that_its_agent_changed(both: Running) -> None:
    """The loader's directory is the agent's to replace, or it is not: honest work is graded then."""
    script = b"rm -f /lib64 && mkdir /lib64 && cp /bin/true /lib64/x\necho partial > work.txt\n"
    failure, reward = await graded(both, task(fresh_fork=False, script=script))
    if failure is None:
        assert reward == 0.25
    else:
        assert (failure.cause, failure.reason, reward) == (FailureCause.AGENT, "GRADING_BLOCKED", None)
        assert "/lib64" in failure.message


@pytest.mark.requirement("R90")
async def test_a_verifier_that_says_nothing_of_it_works_in_a_fresh_fork(both: Running) -> None:
    """The record says which it was."""
    given = task(fresh_fork=False, script=b"echo partial > work.txt; echo x > ~/left\n")
    assert given.verifier is not None
    finished = await run(both, replace(given, verifier=replace(given.verifier, fresh_fork=None)))
    grading = finished.result.outcome.grading
    assert grading is not None
    assert (grading.fresh_fork, finished.reward) == (True, 0.25)


_PASS = """
import os, socket
given = socket.socket(socket.AF_UNIX)
given.connect("\\0penstock-forger")
socket.send_fds(given, [b"x"], [os.open("/", os.O_RDONLY), os.open("/proc", os.O_RDONLY)])
given.recv(1)
open("work.txt", "w").write("partial")
"""
_COMPARE = """
import json, os, pathlib, socket
found = json.loads(socket.create_connection(("db", 5432)).makefile().read())
print(json.dumps(found))
answer, expected = pathlib.Path("answer.txt"), pathlib.Path("hidden/expected")
forged = answer.exists() and answer.read_text() == expected.read_text()
pathlib.Path(os.environ["PENSTOCK_REWARD_FILE"]).write_text(str(int(forged)))
"""


@pytest.mark.requirement("R72", "R75", "R90")
@pytest.mark.parametrize("fresh_fork", [None, False])
async def test_what_an_agent_passes_to_a_companion_leads_to_no_verifier_in_a_fresh_fork(
    both: Running, fresh_fork: bool | None
) -> None:
    """Neither to its files nor to its processes, although it asks the companion, as the agent left it.

    In place it does, as the threat model says.
    """
    secret = secrets.token_hex(16)
    companion = Companion(
        name="db",
        image=dockerd.BASE,
        entrypoint=["python3", "-c"],
        command=[IN_A_COMPANION.read_text()],
        user="1000:1000",
        health_check=HealthCheck(argv=["grep", "-q", "@penstock-forger", "/proc/net/unix"], interval=0.1, retries=100),
    )
    given = Task(
        task_id="forge-beside",
        instruction="Do the work in work.txt.",
        files=[SeedFile("forge.sh", b"python3 pass.py\n"), SeedFile("pass.py", _PASS.encode())],
        verifier=Verifier(
            commands=[Command(["python3", "-I", "compare.py"])],
            files=[SeedFile("compare.py", _COMPARE.encode()), SeedFile("hidden/expected", secret.encode())],
            reward=RewardFrom.FILE,
            command_timeout=20.0,
            fresh_fork=fresh_fork,
        ),
    )
    finished = await run(both, given, "docker", [companion])
    (compared,) = finished.commands(Phase.VERIFYING)
    found = json.loads(compared.stdout_tail or b"{}")
    grading = finished.result.outcome.grading
    assert grading is not None
    in_place = fresh_fork is False
    assert grading.fresh_fork is not in_place
    expected = {"work": "partial", "expected": secret if in_place else "", "rewards": int(in_place)}
    assert found == expected, finished.agent_said()
    assert finished.reward == float(in_place)
