"""Terminal episodes in the driver's domain: the rules of their course, the shell's state, and ends from every side."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import subprocess
import tarfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.waiting import eventually
from tests.unit.driver.world import Directories, HttpGate, say

from penstock.driver.v1 import terminal_service_pb2
from penstock_chassis.errors import (
    AlreadyExists,
    FailedPrecondition,
    NotFound,
    PenstockError,
    ResourceExhausted,
    Unavailable,
)
from penstock_chassis.journal import Journal
from penstock_driver import metrics, releases
from penstock_driver.app import MIGRATIONS
from penstock_driver.fleet import Fleet
from penstock_driver.history import History
from penstock_driver.oversight import Oversight
from penstock_driver.ports import Command, Exit, ExitReason, Output, SandboxTerms
from penstock_driver.preflight import Preflight
from penstock_driver.records import Records
from penstock_driver.rollouts import Limits, Task, Verifier
from penstock_driver.rpc.shown import encode_event, encode_outcome
from penstock_driver.rpc.terminal_forms import TerminalForms, terminal_to_proto
from penstock_driver.terminals import records as terminal_records
from penstock_driver.terminals.episodes import Action, Answer, EpisodeCourse, TerminalOrder
from penstock_driver.terminals.fleet import Terminals
from penstock_driver.terminals.records import TerminalRecords
from penstock_driver.terminals.shell import Capture, ShellState, in_shell

# The course ----------------------------------------------------------------------------------------------------------


class CourseMachine(RuleBasedStateMachine):
    """Steps, answers and ends in any order, against what a reader of the contract would keep in his head."""

    def __init__(self) -> None:
        super().__init__()
        self.course = EpisodeCourse(max_commands=3)
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


@pytest.mark.parametrize("shell", ["bash --noprofile --norc", "dash"])
@given(value=VALUES, brought=VALUES)
@settings(max_examples=25, deadline=None)
def test_any_value_of_the_environment_goes_from_command_to_command(
    tmp_path_factory: pytest.TempPathFactory, shell: str, value: str, brought: str
) -> None:
    """R42: quotes, newlines and `$(...)` in it included, under bash and under a plain POSIX shell; also in names of
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
def test_what_each_shell_keeps_is_what_its_description_says(tmp_path: Path, shell: str) -> None:
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


def test_the_state_after_a_command_is_the_one_before_it_unless_it_ended_by_itself() -> None:
    """R37: `$?` says how it went all the same."""
    state = ShellState("/tmp/s", 4, 0)
    assert state.after(5, Exit(ExitReason.EXITED, code=3)) == ShellState("/tmp/s", 5, 3)
    assert state.after(5, Exit(ExitReason.TIMED_OUT, signal=9)) == ShellState("/tmp/s", 4, 124)
    assert state.after(5, Exit(ExitReason.SIGNALED, signal=15)) == ShellState("/tmp/s", 4, 143)
    assert state.path == "/tmp/s/4"


@given(st.integers(0, 50), st.lists(st.tuples(st.binary(max_size=30), st.booleans()), max_size=10))
def test_an_observation_never_has_more_than_its_limit(limit: int, pieces: list[tuple[bytes, bool]]) -> None:
    """R26: whatever a sandbox service sends."""
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

    def __init__(self, make: Callable[[], Terminals], sandboxes: Directories, journal: Journal) -> None:
        self.make = make
        self.terminals = make()
        self.sandboxes = sandboxes
        self.journal = journal

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
        order = replace(TerminalOrder(task, SandboxTerms(), Limits()), **changes)
        shown = terminal_service_pb2.Terminal().SerializeToString()
        number = len(self.sandboxes.calls)
        record = await self.terminals.open(
            order, request_id=request_id or f"q{number}", digest="d", key="k", shown=shown, kept=None
        )
        return record.terminal_id

    async def step(self, terminal_id: str, step_id: str, action: Action | str) -> terminal_service_pb2.StepResponse:
        """Do a step."""
        given = Command(shell=action) if isinstance(action, str) else action
        data = await self.terminals.step(terminal_id, step_id, given, digest=repr(given), kept=b"")
        return terminal_service_pb2.StepResponse.FromString(data)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with HttpGate(lambda _: say("")) as gate, await Journal.open(tmp_path / "driver.db", MIGRATIONS) as journal:
        sandboxes = Directories(tmp_path / "boxes")

        def make() -> Terminals:
            return Terminals(
                Records(journal),
                TerminalRecords(journal),
                sandboxes,
                Preflight(sandboxes, gate),
                TerminalForms(),
                instance_id="d1",
                max_open=3,
            )

        world = World(make, sandboxes, journal)
        yield world
        await world.terminals.aclose()
        assert not sandboxes.boxes, "a sandbox was left behind"


async def test_whatever_comes_at_once_an_episode_ends_once_and_every_step_is_told(world: World) -> None:
    """R22, R70, R78: commands, answers and closings from many tasks; each step has a result or an error."""
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


async def test_closing_from_anywhere_unblocks_the_step_that_runs_and_those_that_wait(world: World) -> None:
    """R70: the running one is told the end, the waiting ones that there is none for them."""
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


async def test_no_more_terminals_than_may_be_are_open_and_a_closed_one_makes_room(world: World) -> None:
    """R26: refused with a delay, by name; the same for a driver that stops."""
    opened = [await world.open() for _ in range(3)]
    with pytest.raises(ResourceExhausted) as full:
        await world.open()
    assert (full.value.reason, full.value.retry_after_s) == ("TERMINAL_LIMIT", 5.0)
    await world.terminals.close(opened[0])
    await world.open()
    await world.terminals.aclose()
    with pytest.raises(Unavailable):
        await world.open()


async def test_an_opening_that_fails_leaves_nothing_and_may_be_tried_again(world: World) -> None:
    """R49: whatever fails after there is a sandbox; the cause is what is told."""
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


async def test_a_service_that_is_away_for_a_moment_costs_no_step(world: World) -> None:
    """R51: starts are repeated, which is harmless by their process id."""
    terminal_id = await world.open()
    world.sandboxes.fail["start"] = [Unavailable("away", reason="X", retry_after_s=0.0)] * 3
    assert (await world.step(terminal_id, "s", "echo fine")).result.stdout == b"fine\n"


async def test_what_the_sandbox_service_refuses_ends_the_episode_with_its_reason(world: World) -> None:
    """R43, R74: a sandbox that is gone is the infrastructure's failure, which may be tried again; no reward."""
    terminal_id = await world.open()
    world.sandboxes.fail["start"] = [NotFound("gone", reason="SANDBOX_UNKNOWN")]
    told = await world.step(terminal_id, "s", "echo x")
    assert (told.ended, told.failure.reason, told.failure.retriable) == (True, "SANDBOX_LOST", True)
    assert not told.HasField("reward")


@pytest.mark.parametrize("inside", [True, False])
async def test_an_episode_whose_policy_ended_its_sandbox_failed_by_itself(world: World, inside: bool) -> None:
    """R93: never as the infrastructure's, which is tried again."""
    terminal_id = await world.open()
    world.sandboxes.from_within = inside
    world.sandboxes.fail["start"] = [FailedPrecondition("gone", reason="SANDBOX_LOST")]
    told = await world.step(terminal_id, "s", "prlimit --cpu=0 --pid 1")
    assert (told.failure.reason, told.failure.retriable) == (
        ("SANDBOX_ENDED_INSIDE", False) if inside else ("SANDBOX_LOST", True)
    )


async def test_everything_that_was_started_is_killed_before_the_verifier_starts(world: World) -> None:
    """R60: each command's process, ended ones too, since they may have left something behind."""
    terminal_id = await world.open()
    for index in range(3):
        await world.step(terminal_id, f"s{index}", "true")
    before = len(world.sandboxes.calls)
    await world.step(terminal_id, "a", Answer("done"))
    calls = world.sandboxes.calls[before:]
    assert calls[:3] == ["kill"] * 3
    assert calls.index("run") > 2


@pytest.mark.parametrize("user", ["", "root"])
async def test_a_policy_that_changed_the_system_is_not_graded_on_it(
    world: World, monkeypatch: pytest.MonkeyPatch, user: str
) -> None:
    """R90: as in a rollout that is graded in place; who lets it be root has chosen so."""

    async def diff(sandbox_id: str, below: Sequence[str], sink: BinaryIO, max_bytes: int) -> Sequence[str]:
        assert "/usr/bin" in below
        tarfile.open(fileobj=sink, mode="w").close()
        return ["/usr/bin/test"]

    monkeypatch.setattr(world.sandboxes, "diff", diff)
    terminal_id = await world.open(sandbox=SandboxTerms(user=user))
    given = await world.step(terminal_id, "a", Answer("done"))
    assert given.HasField("reward") is (user == "root")
    assert given.failure.reason == ("" if user else "GRADING_BLOCKED")


async def test_results_of_episodes_that_ended_long_ago_are_forgotten_and_how_they_ended_is_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R23: the journal does not grow with every output there ever was; a repeated step is still never run again."""
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


@pytest.mark.parametrize("by", ["close", "answer"])
async def test_a_disk_that_does_not_take_an_episodes_end_holds_nobody_up_and_keeps_no_sandbox(
    world: World, by: str
) -> None:
    """R23, R70: what waits is told, the driver can be stopped, and the end is written when the disk takes it."""
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


async def test_a_driver_stops_though_the_disk_takes_no_end_and_the_next_one_settles_it(world: World) -> None:
    """R50: nothing is told to have ended that is not on disk as ended."""
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
    record = await world.terminals.get(terminal_id)
    assert record.outcome is not None


@pytest.mark.parametrize("action", ["echo x", Answer("x")])
async def test_a_step_that_the_disk_does_not_take_ends_its_episode_as_the_drivers_fault(
    world: World, action: Action | str
) -> None:
    """R78: not one that looks answered and is never graded, nor one whose steps are not on disk."""
    terminal_id = await world.open()
    await world.refuse("full", "INSERT ON terminal_steps")
    with pytest.raises(sqlite3.Error):
        await world.step(terminal_id, "s", action)
    await world.terminals.close(terminal_id)  # waits for the end that is under way
    told = terminal_to_proto(await world.terminals.get(terminal_id))
    assert (told.ended, told.failure.reason, told.sandbox_id) == (True, "INTERNAL", "")


async def test_an_opening_that_a_restart_cut_off_is_done_anew_by_the_same_request(world: World) -> None:
    """R49: the row of the first one waits for its sandbox to go, and stands in nobody's way."""
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


@pytest.fixture
async def oversight(world: World) -> AsyncIterator[Oversight]:
    """What is told of the world's terminals, and of no rollout."""
    history, records = History(world.journal, encode_event), Records(world.journal)
    fleet = Fleet(
        records,
        history,
        world.sandboxes,
        HttpGate(lambda _: say("")),
        instance_id="d1",
        encode_outcome=encode_outcome,
        max_running=1,
        max_queued=1,
        agent_port=1,
    )
    yield Oversight(fleet, world.terminals)
    await history.aclose()


async def test_a_sandbox_that_cannot_be_deleted_is_owed_until_it_can(
    world: World, oversight: Oversight, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R50, R70: of an episode that has ended and of one that could not be opened; both say so meanwhile, to operators
    too."""
    monkeypatch.setattr(releases, "FIRST_PAUSE_S", 3600.0)  # nobody waits for the release
    ended = await world.open()
    away = world.sandboxes.fail["delete_labelled"] = [Unavailable("away", reason="X")] * 4
    with pytest.raises(Unavailable) as pending:
        await world.terminals.close(ended)
    assert (pending.value.reason, pending.value.retry_after_s) == ("TERMINAL_UNRELEASED", 1.0)
    told = terminal_to_proto(await world.terminals.get(ended))
    assert (told.ended, bool(told.sandbox_id)) == (True, True)
    world.sandboxes.fail["write_files"] = [FailedPrecondition("no", reason="BROKEN")]
    with pytest.raises(FailedPrecondition, match="no"):
        await world.open()
    assert len(world.sandboxes.boxes) == 2
    (trouble,) = oversight.troubles(0.0)
    assert (trouble.reason, len(trouble.subjects), ended in trouble.subjects) == ("RELEASES_OWED", 2, True)
    with oversight.told():
        assert metrics.OWED.values() == {(): 2.0}
    away.clear()
    await world.terminals.aclose()  # each is tried once more
    assert not list(oversight.troubles(0.0))
    assert not world.sandboxes.boxes
    await world.terminals.close(ended)
    assert not terminal_to_proto(await world.terminals.get(ended)).sandbox_id
