"""Terminal episodes in the driver's domain: the rules of their course, the shell's state, and ends from every side."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import subprocess
import tarfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.waiting import eventually, eventually_async
from tests.unit.driver.world import Directories, HttpGate, say

from penstock.driver.v1 import terminal_service_pb2
from penstock_chassis import times
from penstock_chassis.errors import (
    AlreadyExists,
    FailedPrecondition,
    NotFound,
    PenstockError,
    ResourceExhausted,
    Unavailable,
)
from penstock_driver import metrics
from penstock_driver.domain.ports import Command, Exit, ExitReason, Output, SandboxTerms
from penstock_driver.domain.records import RequestKey
from penstock_driver.domain.rollout import Limits, Task, Verifier
from penstock_driver.domain.terminal_episode import (
    MAX_PENDING_BYTES,
    STEP_BYTES,
    Action,
    Answer,
    EpisodeProgress,
    Step,
    TerminalSpec,
)
from penstock_driver.environments import cleanup
from penstock_driver.placement.placement import OnePlace
from penstock_driver.rpc.terminal_service import terminal_to_proto
from penstock_driver.status import Health
from penstock_driver.terminals import records as terminal_records
from penstock_driver.terminals.manager import TerminalManager
from penstock_driver.terminals.shell import Capture, ShellState, in_shell
from penstock_driver.testing import OpenDriver, open_driver

# The course ----------------------------------------------------------------------------------------------------------


class CourseMachine(RuleBasedStateMachine):
    """Steps, answers and ends in any order, against what a reader of the contract would keep in his head."""

    def __init__(self) -> None:
        super().__init__()
        self.course = EpisodeProgress(max_commands=3)
        self.begun: dict[str, str] = {}
        self.answered = False
        self.ends = 0

    @rule(step_id=st.sampled_from("abcdef"), digest=st.sampled_from("xy"), is_answer=st.booleans())
    def step(self, step_id: str, digest: str, is_answer: bool) -> None:
        if step_id in self.begun:
            if self.begun[step_id] == digest:
                assert self.course.knows(step_id, digest)
            else:
                with pytest.raises(AlreadyExists):
                    self.course.knows(step_id, digest)
            return
        assert not self.course.knows(step_id, digest)
        if self.answered or self.ends:
            with pytest.raises(FailedPrecondition):
                self.course.begin(step_id, digest, is_answer=is_answer)
        elif not is_answer and len(self.begun) == 3:
            with pytest.raises(ResourceExhausted):
                self.course.begin(step_id, digest, is_answer=is_answer)
        else:
            number = self.course.begin(step_id, digest, is_answer=is_answer)
            self.begun[step_id] = digest
            self.answered = is_answer
            assert number == len(self.begun)

    @rule()
    def end(self) -> None:
        assert self.course.end() == (self.ends == 0)
        self.ends += 1

    @precondition(lambda self: self.begun)
    @rule(data=st.data())
    def begin_again(self, data: st.DataObject) -> None:
        with pytest.raises(ValueError, match="before"):
            self.course.begin(data.draw(st.sampled_from(sorted(self.begun))), "x", is_answer=False)

    @invariant()
    def it_is_open_until_it_is_answered_or_ends(self) -> None:
        assert self.course.is_open == (not self.answered and not self.ends)
        assert self.course.steps == self.begun


TestCourse = CourseMachine.TestCase
TestCourse.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)
TestCourse.__doc__ = """R78: one end, no step after it; a step id stands for one action for good."""

# The shell -----------------------------------------------------------------------------------------------------------


def run_in(shell: str, directory: Path, commands: list[Command], env: dict[str, str]) -> list[str]:
    """The outputs of commands that are run one after another, each with what the one before it left."""
    state, outputs = ShellState(str(directory)), []
    (directory / "0").touch()
    for number, command in enumerate(commands, 1):
        runs, stdin = in_shell(command, state, number, env)
        argv = list(runs.argv)
        argv[2] = f'exec {shell} -c "$@"'  # in place of the choice of a shell
        given = {"PATH": "/usr/bin:/bin", "HOME": str(directory), "LC_ALL": "C.UTF-8", **runs.env}
        done = subprocess.run(argv, input=stdin or b"", env=given, cwd=directory, capture_output=True, check=False)
        outputs.append((done.stdout + done.stderr).decode("utf-8", "surrogateescape"))
        end = Exit(ExitReason.EXITED, code=done.returncode)
        state = state.after(number, end if done.returncode >= 0 else Exit(ExitReason.SIGNALED, signal=-done.returncode))
    return outputs


VALUES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60)


@pytest.mark.requirement("R42")
@pytest.mark.parametrize("shell", ["bash --noprofile --norc", "dash"])
@given(value=VALUES, brought=VALUES)
@settings(max_examples=25, deadline=None)
def test_any_value_of_the_environment_goes_from_command_to_command(
    tmp_path_factory: pytest.TempPathFactory, shell: str, value: str, brought: str
) -> None:
    """Quotes, newlines and `$(...)` in it included, under bash and under a plain POSIX shell; also in names of
    directories."""
    directory = tmp_path_factory.mktemp("shell")
    name = "".join(character for character in value if character not in "/") or "x"
    name = "d" + name.encode()[:80].decode("utf-8", "ignore")
    outputs = run_in(
        shell,
        directory,
        [
            Command(shell='mkdir -p -- "$NAME"; cd -- "$NAME"; export GIVEN', env={"GIVEN": value, "NAME": name}),
            Command(shell="true", env={"BROUGHT": brought}),
            Command(argv=("printenv", "GIVEN")),
            Command(shell='printf "%s|" "$BROUGHT" "${PWD##*/}"'),
        ],
        {},
    )
    assert outputs == ["", "", value + "\n", f"{brought}|{name}|"]
    shutil.rmtree(directory)


@pytest.mark.parametrize("shell", ["bash --noprofile --norc", "dash"])
def test_each_shell_keeps_its_described_state(tmp_path: Path, shell: str) -> None:
    """Directory, environment, umask, `$?` everywhere; variables and functions under bash; options and traps nowhere."""
    lines = [
        "cd /usr; export E=e; V=v; f() { echo f; }; umask 027; set -u; trap 'echo bye' EXIT; (exit 5)",
        'echo "$? $E ${V-} $(pwd) $(umask) ${nothing-}"; f 2>/dev/null; echo "${undefined}ok"',
        'unset E; V=; cd -- "$OLDPWD"; exec true',
        'echo "${E-unset}"; pwd',
    ]
    outputs = run_in(shell, tmp_path, [Command(shell=line) for line in lines], {"E": "first"})
    is_bash = shell.startswith("bash")
    assert outputs[0] == "bye\n"
    assert outputs[1] == ("5 e v /usr 0027 \nf\nok\n" if is_bash else "5 e  /usr 0027 \nok\n")
    assert outputs[3] == "e\n/usr\n"  # exec left the state as it was


@pytest.mark.requirement("R37")
def test_command_that_does_not_end_by_itself_leaves_the_state_unchanged() -> None:
    """`$?` says how it went all the same."""
    state = ShellState("/tmp/s", 4, 0)
    assert state.after(5, Exit(ExitReason.EXITED, code=3)) == ShellState("/tmp/s", 5, 3)
    assert state.after(5, Exit(ExitReason.TIMED_OUT, signal=9)) == ShellState("/tmp/s", 4, 124)
    assert state.after(5, Exit(ExitReason.SIGNALED, signal=15)) == ShellState("/tmp/s", 4, 143)
    assert state.path == "/tmp/s/4"


@pytest.mark.requirement("R26")
@given(st.integers(0, 50), st.lists(st.tuples(st.binary(max_size=30), st.booleans()), max_size=10))
def test_an_observation_never_has_more_than_its_limit(limit: int, pieces: list[tuple[bytes, bool]]) -> None:
    """Whatever a sandbox service sends."""
    capture = Capture(limit)
    assert capture.head + capture.tail == limit
    for data, is_stderr in pieces:
        capture.take(Output(data, is_stderr))
    result = capture.result(Exit(ExitReason.EXITED, code=0))
    assert result.stdout == b"".join(data for data, is_stderr in pieces if not is_stderr)[:limit]
    assert result.stderr == b"".join(data for data, is_stderr in pieces if is_stderr)[:limit]


# The episodes --------------------------------------------------------------------------------------------------------


class World:
    """The terminals of one driver, with sandboxes that are directories."""

    def __init__(self, opened: OpenDriver, sandboxes: Directories) -> None:
        self.now = times.even_time()
        self.opened = opened
        self.terminals = self.make()
        self.sandboxes = sandboxes
        self.journal = opened.journal

    def make(self) -> TerminalManager:
        """Another driver's, on the same journal."""
        return self.opened.next_terminals(lambda: self.now)

    async def refuse(self, trigger: str, statement: str) -> None:
        """Have the disk refuse a statement, such as `UPDATE OF outcome ON terminals`, until `allow`."""
        await self.journal.execute(
            f"CREATE TRIGGER {trigger} BEFORE {statement} BEGIN SELECT RAISE(ABORT, 'disk full'); END"
        )

    async def allow(self, trigger: str) -> None:
        """End what `refuse` began."""
        await self.journal.execute(f"DROP TRIGGER {trigger}")

    async def open(self, request_id: str = "", **changes: Any) -> str:
        """Open an episode and return its id."""
        task = Task("t", "write out.txt", verifier=Verifier(commands=(Command(shell="test -e out.txt"),)))
        request = terminal_service_pb2.OpenTerminalRequest()
        request.task.setup.add(secret_env={"TOKEN": "x"})  # so that it is not kept for the next driver
        spec = replace(TerminalSpec(task, SandboxTerms(), Limits(), request, "k"), **changes)
        key = RequestKey(request_id or f"q{len(self.sandboxes.calls)}", "d")
        return (await self.terminals.open(key, spec)).terminal_id

    async def step(self, terminal_id: str, step_id: str, action: Action | str) -> terminal_service_pb2.StepResponse:
        """Do a step."""
        given = Command(shell=action) if isinstance(action, str) else action
        request = terminal_service_pb2.StepRequest()
        return await self.terminals.step(terminal_id, Step(step_id, given, repr(given), request))


@asynccontextmanager
async def world_on(tmp_path: Path, **chosen: Any) -> AsyncIterator[World]:
    """A world, whose sandboxes are all gone when it ends."""
    sandboxes = Directories(tmp_path / "boxes")
    async with (
        HttpGate(lambda _: say("")) as gate,
        open_driver(tmp_path, sandboxes, gate, max_terminals=3, **chosen) as opened,
    ):
        world = World(opened, sandboxes)
        yield world
        await world.terminals.aclose()
        assert not sandboxes.boxes, "a sandbox was left behind"


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with world_on(tmp_path) as made:
        yield made


@pytest.mark.requirement("R22", "R70", "R78")
async def test_episode_ends_once_and_every_step_is_reported(world: World) -> None:
    """Commands, answers and closings from many tasks; each step has a result or an error."""
    terminal_id = await world.open()

    async def tried(step_id: str, action: Action | str) -> terminal_service_pb2.StepResponse | str:
        try:
            return await world.step(terminal_id, step_id, action)
        except PenstockError as error:
            return error.reason

    work = [tried(f"c{index}", f"echo {index} >> out.txt") for index in range(4)]
    work += [tried(f"a{index}", Answer(str(index))) for index in range(2)]
    work += [tried("late", "echo never")]
    told = await asyncio.gather(*work, world.terminals.close("unknown"))
    results = [item for item in told if isinstance(item, terminal_service_pb2.StepResponse)]
    ends = [item for item in results if item.ended]
    assert [item.reward.value for item in ends] == [1.0]
    assert all(item.result.exit.code == 0 for item in results if not item.ended)
    assert {item for item in told if isinstance(item, str)} == {"EPISODE_ENDED"}
    await asyncio.gather(*(world.terminals.close(terminal_id) for _ in range(3)))
    record = await world.terminals.get(terminal_id)
    assert (record.outcome is not None, record.released, record.step_count) == (True, True, 5)


@pytest.mark.requirement("R70")
async def test_closing_from_anywhere_unblocks_the_step_that_runs_and_those_that_wait(world: World) -> None:
    """The running one is told the end, the waiting ones that there is none for them."""
    terminal_id = await world.open()
    running = asyncio.ensure_future(world.step(terminal_id, "s1", "sleep 600"))
    waiting = asyncio.ensure_future(world.step(terminal_id, "s2", "echo no"))
    await eventually(lambda: "start" in world.sandboxes.calls, "the command runs")
    await world.terminals.close(terminal_id)
    told = await running
    assert (told.ended, told.failure.reason) == (True, "CLOSED")
    with pytest.raises(FailedPrecondition):
        await waiting
    assert await world.step(terminal_id, "s1", "sleep 600") == told
    assert not world.sandboxes.boxes


@pytest.mark.requirement("R107")
async def test_a_namespace_opens_no_more_terminals_than_its_quota(tmp_path: Path) -> None:
    """Those of other namespaces, and its closed ones, do not count."""
    async with world_on(tmp_path, namespaces={"team-a": {"quota": 1}}) as world:
        opened = await world.open(namespace="team-a")
        with pytest.raises(ResourceExhausted) as full:
            await world.open(namespace="team-a")
        assert full.value.reason == "NAMESPACE_QUOTA"
        await world.open(namespace="team-b")
        await world.terminals.close(opened)
        await world.open(namespace="team-a")
        assert world.terminals._held == {"team-a": 1, "team-b": 1}


@pytest.mark.requirement("R26")
async def test_open_terminals_are_limited_and_a_closed_one_makes_room(world: World) -> None:
    """Refused with a delay, by name; the same for a driver that stops."""
    opened = [await world.open() for _ in range(3)]
    with pytest.raises(ResourceExhausted) as full:
        await world.open()
    assert (full.value.reason, full.value.retry_after_s) == ("TERMINAL_LIMIT", 5.0)
    await world.terminals.close(opened[0])
    await world.open()
    await world.terminals.aclose()
    with pytest.raises(Unavailable):
        await world.open()


@pytest.mark.requirement("R49")
async def test_an_opening_that_fails_leaves_nothing_and_may_be_tried_again(world: World) -> None:
    """Whatever fails after there is a sandbox; the cause is what is told."""
    for method in ("prepare_snapshot", "fork", "write_files"):
        world.sandboxes.fail[method] = [FailedPrecondition("no", reason="BROKEN")]
        with pytest.raises(FailedPrecondition, match="no"):
            await world.open()
        assert not world.sandboxes.boxes, method
    terminal_id = await world.open()
    assert (await world.step(terminal_id, "s", "echo fine")).result.stdout == b"fine\n"


async def test_a_snapshot_that_was_dropped_is_prepared_again(world: World) -> None:
    """The sandbox service may forget prepared states."""
    await world.open()
    world.sandboxes.snapshots.clear()
    await world.open()
    assert world.sandboxes.calls.count("prepare_snapshot") == 2


@pytest.mark.requirement("R51")
async def test_a_service_that_is_away_for_a_moment_costs_no_step(world: World) -> None:
    """Starts are repeated, which is harmless by their process id."""
    terminal_id = await world.open()
    world.sandboxes.fail["start"] = [Unavailable("away", reason="X", retry_after_s=0.0)] * 3
    assert (await world.step(terminal_id, "s", "echo fine")).result.stdout == b"fine\n"


@pytest.mark.requirement("R43", "R74")
async def test_refusal_by_the_sandbox_service_ends_the_episode_with_its_reason(world: World) -> None:
    """A sandbox that is gone is the infrastructure's failure, which may be tried again; no reward."""
    terminal_id = await world.open()
    world.sandboxes.fail["start"] = [NotFound("gone", reason="SANDBOX_UNKNOWN")]
    told = await world.step(terminal_id, "s", "echo x")
    assert (told.ended, told.failure.reason, told.failure.retriable) == (True, "SANDBOX_LOST", True)
    assert not told.HasField("reward")


@pytest.mark.requirement("R93")
@pytest.mark.parametrize("inside", [True, False])
async def test_an_episode_whose_policy_ended_its_sandbox_failed_by_itself(world: World, inside: bool) -> None:
    """Never as the infrastructure's, which is tried again."""
    terminal_id = await world.open()
    world.sandboxes.from_within = inside
    world.sandboxes.fail["start"] = [FailedPrecondition("gone", reason="SANDBOX_LOST")]
    told = await world.step(terminal_id, "s", "prlimit --cpu=0 --pid 1")
    assert (told.failure.reason, told.failure.retriable) == (
        ("SANDBOX_ENDED_INSIDE", False) if inside else ("SANDBOX_LOST", True)
    )


@pytest.mark.requirement("R60")
async def test_everything_that_was_started_is_killed_before_the_verifier_starts(world: World) -> None:
    """Each command's process, ended ones too, since they may have left something behind."""
    terminal_id = await world.open()
    for index in range(3):
        await world.step(terminal_id, f"s{index}", "true")
    before = len(world.sandboxes.calls)
    await world.step(terminal_id, "a", Answer("done"))
    calls = world.sandboxes.calls[before:]
    assert calls[:3] == ["kill"] * 3
    assert calls.index("run") > 2


@pytest.mark.requirement("R90")
@pytest.mark.parametrize("user", ["", "root"])
async def test_a_policy_that_changed_the_system_is_not_graded_on_it(
    world: World, monkeypatch: pytest.MonkeyPatch, user: str
) -> None:
    """As in a rollout that is graded in place; who lets it be root has chosen so."""

    async def diff(sandbox_id: str, below: Sequence[str], sink: BinaryIO, max_bytes: int) -> Sequence[str]:
        assert "/usr/bin" in below
        tarfile.open(fileobj=sink, mode="w").close()
        return ["/usr/bin/test"]

    monkeypatch.setattr(world.sandboxes, "diff", diff)
    terminal_id = await world.open(sandbox=SandboxTerms(user=user))
    given = await world.step(terminal_id, "a", Answer("done"))
    assert given.HasField("reward") is (user == "root")
    assert given.failure.reason == ("" if user else "GRADING_BLOCKED")


@pytest.mark.requirement("R23")
async def test_results_of_old_episodes_are_forgotten_and_their_ends_kept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal does not grow with every output there ever was; a repeated step is still never run again."""
    first = await world.open()
    told = await world.step(first, "s", "echo x")
    await world.terminals.close(first)
    assert await world.step(first, "s", "echo x") == told
    monkeypatch.setattr(terminal_records, "KEPT_S", -1.0)
    await world.terminals.close(await world.open())
    with pytest.raises(FailedPrecondition) as refused:
        await world.step(first, "s", "echo x")
    assert refused.value.reason == "EPISODE_ENDED"
    record = await world.terminals.get(first)
    assert (record.step_count, record.outcome is not None) == (1, True)


@pytest.mark.requirement("R23", "R70")
@pytest.mark.parametrize("by", ["close", "answer"])
async def test_unwritable_episode_end_blocks_nobody_and_keeps_no_sandbox(world: World, by: str) -> None:
    """What waits is told, the driver can be stopped, and the end is written when the disk takes it."""
    terminal_id = await world.open()
    await world.refuse("full", "UPDATE OF outcome ON terminals")
    running = asyncio.ensure_future(world.step(terminal_id, "s", "sleep 600" if by == "close" else "true"))
    if by == "close":
        await eventually(lambda: "start" in world.sandboxes.calls, "the command runs")
        ending = asyncio.ensure_future(world.terminals.close(terminal_id))
    else:
        await running
        ending = asyncio.ensure_future(world.step(terminal_id, "a", Answer("")))  # type: ignore[arg-type]
    await eventually(lambda: not world.sandboxes.boxes, "the sandbox is gone")
    await world.allow("full")
    await ending
    if by == "close":
        assert (await running).failure.reason == "CLOSED"
    record = await world.terminals.get(terminal_id)
    assert (record.outcome is not None, record.released) == (True, True)


@pytest.mark.requirement("R50")
async def test_driver_stops_despite_an_unwritable_end_that_the_next_settles(world: World) -> None:
    """Nothing is told to have ended that is not on disk as ended; the next driver finds that its sandbox is gone."""
    terminal_id = await world.open()
    running = asyncio.ensure_future(world.step(terminal_id, "s", "sleep 600"))
    await eventually(lambda: "start" in world.sandboxes.calls, "the command runs")
    await world.refuse("full", "UPDATE OF outcome ON terminals")
    await world.terminals.aclose()
    with pytest.raises(sqlite3.Error):
        await running
    assert not world.sandboxes.boxes
    await world.allow("full")
    world.terminals = world.make()
    await world.terminals.recover()

    async def has_ended() -> bool:
        return (await world.terminals.get(terminal_id)).outcome is not None

    await eventually_async(has_ended, "the next driver ends it")


@pytest.mark.requirement("R78")
@pytest.mark.parametrize("action", ["echo x", Answer("x")])
async def test_unwritable_step_ends_its_episode_as_the_drivers_fault(world: World, action: Action | str) -> None:
    """Not one that looks answered and is never graded, nor one whose steps are not on disk."""
    terminal_id = await world.open()
    await world.refuse("full", "INSERT ON terminal_steps")
    with pytest.raises(sqlite3.Error):
        await world.step(terminal_id, "s", action)
    await world.terminals.close(terminal_id)  # waits for the end that is under way
    told = terminal_to_proto(await world.terminals.get(terminal_id), "d")
    assert (told.ended, told.failure.reason, told.sandbox_id) == (True, "INTERNAL", "")


@pytest.mark.requirement("R49")
async def test_opening_cut_off_by_a_restart_is_repeated_by_its_request(world: World) -> None:
    """The row of the first one waits for its sandbox to go, and stands in nobody's way."""
    reached = world.sandboxes.holds["fork"] = asyncio.Event()
    opening = asyncio.ensure_future(world.open("q"))
    await reached.wait()
    del world.sandboxes.holds["fork"]
    world.sandboxes.fail["delete_labelled"] = [Unavailable("away", reason="X")] * 2
    before = world.terminals  # as if killed: what it would do next is done by nobody
    world.terminals = world.make()
    assert await world.terminals.recover() == 0
    terminal_id = await world.open("q")
    assert (await world.terminals.get(terminal_id)).outcome is None
    await before.aclose()
    with pytest.raises(Unavailable):
        await opening
    assert await world.open("q") == terminal_id


@pytest.mark.requirement("R49", "R25")
async def test_an_opening_cancelled_while_recorded_is_found_by_the_same_request(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was recorded and never opened: its request was answered with an episode that no step could reach."""
    recorded, go_on, create = asyncio.Event(), asyncio.Event(), world.terminals._records.create

    async def slowly(*given: Any) -> None:
        await create(*given)
        recorded.set()
        await go_on.wait()

    monkeypatch.setattr(world.terminals._records, "create", slowly)
    leaving = asyncio.ensure_future(world.open("q"))
    await recorded.wait()
    leaving.cancel()
    await asyncio.wait([leaving])
    assert leaving.cancelled()
    go_on.set()
    await eventually(lambda: world.terminals.open_count == 1, "it is open")
    assert (await world.step(await world.open("q"), "s", "echo fine")).result.stdout == b"fine\n"
    assert world.terminals.open_count == 1


@pytest.mark.requirement("R49")
async def test_an_opening_recorded_while_the_driver_stops_leaves_no_sandbox(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, go_on, create = asyncio.Event(), asyncio.Event(), world.terminals._records.create

    async def slowly(*given: Any) -> None:
        await create(*given)
        recorded.set()
        await go_on.wait()

    monkeypatch.setattr(world.terminals._records, "create", slowly)
    opening = asyncio.ensure_future(world.open("q"))
    await recorded.wait()
    stopping = asyncio.ensure_future(world.terminals.aclose())
    await asyncio.sleep(0)
    go_on.set()
    await stopping
    with pytest.raises(Unavailable):
        await opening
    assert not world.sandboxes.boxes and not world.terminals.open_count


@pytest.fixture
def health(world: World) -> Health:
    """What is reported of the world's terminals, and of no rollout."""
    return Health(world.opened.parts.manager, world.terminals, OnePlace(cast(Any, None)))


@pytest.mark.requirement("R50", "R70")
async def test_a_sandbox_that_cannot_be_deleted_is_owed_until_it_can(
    world: World, health: Health, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an episode that has ended and of one that could not be opened; both say so meanwhile, to operators
    too."""
    for name in ("FIRST_PAUSE_S", "MOST_PAUSE_S"):
        monkeypatch.setattr(cleanup, name, 3600.0)  # nobody waits for the release
    ended = await world.open()
    away = world.sandboxes.fail["delete_labelled"] = [Unavailable("away", reason="X")] * 4
    with pytest.raises(Unavailable) as pending:
        await world.terminals.close(ended)
    assert (pending.value.reason, pending.value.retry_after_s) == ("TERMINAL_UNRELEASED", 1.0)
    told = terminal_to_proto(await world.terminals.get(ended), "d")
    assert (told.ended, bool(told.sandbox_id)) == (True, True)
    world.sandboxes.fail["write_files"] = [FailedPrecondition("no", reason="BROKEN")]
    with pytest.raises(FailedPrecondition, match="no"):
        await world.open()
    assert len(world.sandboxes.boxes) == 2
    (trouble,) = health.troubles(0.0)
    assert (trouble.reason, len(trouble.subjects), ended in trouble.subjects) == ("RELEASES_OWED", 2, True)
    with health.reported():
        assert metrics.OWED.values() == {(): 2.0}
    away.clear()
    await world.terminals.aclose()  # each is tried once more
    assert not list(health.troubles(0.0))
    assert not world.sandboxes.boxes
    await world.terminals.close(ended)
    assert not terminal_to_proto(await world.terminals.get(ended), "d").sandbox_id


@pytest.mark.requirement("R49", "R70")
async def test_stopping_does_not_interrupt_the_cleanup_of_a_failed_opening(tmp_path: Path) -> None:
    """The cancellation of the opening arrives while its sandbox is being released."""
    boxes = Directories(tmp_path / "boxes")
    async with HttpGate(lambda _: say("")) as gate, open_driver(tmp_path, boxes, gate, max_terminals=3) as opened:
        world = World(opened, boxes)
        write, delete = boxes.write_files, boxes.delete_labelled
        releasing, go_on = asyncio.Event(), asyncio.Event()

        async def refuse(sandbox_id: str, files: Any) -> None:
            if boxes.boxes[sandbox_id].labels:
                raise FailedPrecondition("no", reason="X")
            await write(sandbox_id, files)

        async def slow(labels: Any, *, beside: str = "") -> Any:
            releasing.set()
            await go_on.wait()
            return await delete(labels)

        boxes.write_files, boxes.delete_labelled = refuse, slow  # type: ignore[method-assign]
        opening = asyncio.ensure_future(world.open("q"))
        await releasing.wait()
        stopping = asyncio.ensure_future(world.terminals.aclose())
        go_on.set()
        await stopping
        await asyncio.wait([opening])
        assert not boxes.boxes
        assert not await world.journal.query("SELECT terminal_id FROM terminals WHERE released = 0")


def begin_step(world: World, terminal_id: str, step_id: str, size: int) -> asyncio.Future[Any]:
    """Ask for a step whose request has this many bytes and some more."""
    request = terminal_service_pb2.StepRequest(step_id=step_id)
    request.command.shell = f"true #{'x' * size}"
    given = Step(step_id, Command(shell="true"), f"{size}", request)
    return asyncio.ensure_future(world.terminals.step(terminal_id, given))


@pytest.mark.requirement("R38", "R43", "R78")
async def test_step_larger_than_the_pending_bytes_runs_alone(world: World) -> None:
    """Others are refused until it has ended; a repeat joins it."""
    terminal_id = await world.open()
    reached = world.sandboxes.holds["start"] = asyncio.Event()
    alone = begin_step(world, terminal_id, "large", MAX_PENDING_BYTES)
    await reached.wait()
    with pytest.raises(ResourceExhausted) as refused:
        await begin_step(world, terminal_id, "small", 1)
    assert refused.value.reason == "STEPS_PENDING" and refused.value.retry_after_s
    joined = begin_step(world, terminal_id, "large", MAX_PENDING_BYTES)
    await world.terminals.close(terminal_id)
    assert (await alone).ended and (await joined).ended
    del world.sandboxes.holds["start"]
    terminal_id = await world.open()
    for step_id, size in (("large", MAX_PENDING_BYTES), ("small", 1)):
        assert (await begin_step(world, terminal_id, step_id, size)).result.exit.reason


@pytest.mark.requirement("R38", "R43", "R78")
async def test_waiting_steps_are_bounded_in_number_too(world: World) -> None:
    """Each costs something beside its bytes."""
    terminal_id = await world.open()
    reached = world.sandboxes.holds["start"] = asyncio.Event()
    most = MAX_PENDING_BYTES // STEP_BYTES
    steps = [begin_step(world, terminal_id, f"s{number}", 1) for number in range(most)]
    await reached.wait()
    await world.terminals.close(terminal_id)
    ends = await asyncio.gather(*steps, return_exceptions=True)
    assert isinstance(ends[0], terminal_service_pb2.StepResponse) and ends[0].ended
    reasons = [getattr(error, "reason", "") for error in ends[1:]]
    assert reasons == sorted(reasons) and {*reasons} == {"EPISODE_ENDED", "STEPS_PENDING"}
