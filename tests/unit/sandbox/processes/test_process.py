"""A process's exit is decided once and last, whatever the order in which its end is told."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_chassis.errors import Internal
from penstock_sandbox.domain.backend import RawExit, SandboxHandle
from penstock_sandbox.domain.model import Chunk, Command, ExitReason, Gap, ProcessSpec, Stream
from penstock_sandbox.processes.manager import Processes
from penstock_sandbox.processes.process import Cursor, RunningProcess

OUT, ERR = Stream.STDOUT, Stream.STDERR


@pytest.mark.requirement("R39", "R43")
@given(order=st.permutations(["exited", "out", "err", "write-out", "write-err", "condemn"]), lost=st.integers(0, 6))
def test_every_interleaving_ends_in_one_exit_after_all_output(order: list[str], lost: int) -> None:

    async def run() -> None:
        with TemporaryDirectory() as folder:
            process = RunningProcess(ProcessSpec("p", Command(argv=("x",))), b"", Path(folder))
            watching = asyncio.create_task(_watch(process))
            written = {OUT: 0, ERR: 0}
            closed: set[Stream] = set()
            for step, event in enumerate(order):
                await asyncio.sleep(0)
                if step == lost:
                    process.lost()
                    break
                match event:
                    case "exited":
                        process.exited(RawExit(code=None, signal=9))
                    case "out" | "err":
                        stream = OUT if event == "out" else ERR
                        closed.add(stream)
                        process.closed(stream)
                    case "write-out" | "write-err":
                        stream = OUT if event == "write-out" else ERR
                        if stream not in closed:
                            written[stream] += 1
                            process.output(stream, b"x")
                    case "condemn":
                        process.condemn()
            told = await watching
            ended = process.exit
            assert ended is not None
            assert told == written == {OUT: ended.stdout_bytes, ERR: ended.stderr_bytes}
            before = order[:lost]
            if "exited" in before:
                killed = "condemn" in before and before.index("condemn") < before.index("exited")
                assert ended.reason is (ExitReason.KILLED if killed else ExitReason.SIGNALED)
            else:
                assert ended.reason is (ExitReason.KILLED if "condemn" in before else ExitReason.SANDBOX_LOST)
            process.lost()
            assert process.exit is ended

    asyncio.run(run())


async def _watch(process: RunningProcess) -> dict[Stream, int]:
    seen = {OUT: 0, ERR: 0}
    async for event in process.watch({OUT: 0, ERR: 0}):
        if isinstance(event, Chunk):
            assert event.offset == seen[event.stream]
            seen[event.stream] += len(event.data)
    return seen


@pytest.mark.requirement("R1", "R8")
async def test_a_secret_is_in_no_view_of_its_process(tmp_path: Path) -> None:
    command = Command(argv=("x",), secret_env={"KEY": "sk-test '$(leak)"})
    process = RunningProcess(ProcessSpec("p", command), b"", tmp_path)
    assert "leak" not in repr(process.view()) and "leak" not in repr(process.spec)


@pytest.mark.requirement("R26")
async def test_output_discarded_while_a_watcher_is_busy_is_in_the_next_gap(tmp_path: Path) -> None:
    process = RunningProcess(ProcessSpec("p", Command(argv=("x",)), output_limit=2), b"", tmp_path)
    process.output(OUT, b"abcd")
    told = []
    async for event in process.watch({OUT: 0, ERR: 0}):
        told.append(event)
        if len(told) == 2:
            process.output(OUT, b"efgh")
            process.closed(OUT)
            process.closed(ERR)
            process.exited(RawExit(code=0, signal=None))
    assert told == [Chunk(OUT, 0, b"ab"), Gap(OUT, 2, 4), Gap(OUT, 4, 8)]


@pytest.mark.requirement("R26", "R23")
async def test_a_watch_ends_where_the_spool_cannot_be_written(tmp_path: Path) -> None:
    """A watcher gets what is kept, a gap for the rest, and the end."""
    process = RunningProcess(ProcessSpec("p", Command(argv=("x",))), b"", tmp_path / "absent", tail=100)
    process.output(OUT, b"a" * 1000)
    for _ in range(3):
        process.output(OUT, b"b" * 70_000)
    process.closed(OUT)
    process.closed(ERR)
    process.exited(RawExit(code=0, signal=None))
    async with asyncio.timeout(30):
        told = [event async for event in process.watch({OUT: 0, ERR: 0})]
    assert told == [Chunk(OUT, 0, b"a" * 1000), Gap(OUT, 1000, 211_000)]
    assert process.exit is not None and process.exit.stdout_truncated


@pytest.mark.requirement("R26")
async def test_kept_bytes_that_cannot_be_read_are_a_gap(tmp_path: Path) -> None:
    process = RunningProcess(ProcessSpec("p", Command(argv=("x",)), output_limit=80_000), b"", tmp_path)
    process.output(OUT, b"a" * 90_000)
    spooled = process.outputs[OUT]._file
    assert spooled is not None
    os.ftruncate(spooled, 10)
    cursor = Cursor(process, {OUT: 0, ERR: 0})
    pieces = [cursor.next() for _ in range(4)]
    assert pieces == [Chunk(OUT, 0, b"a" * 10), Gap(OUT, 10, 80_000), Gap(OUT, 80_000, 90_000), None]


@pytest.mark.requirement("R22")
async def test_cancelled_waiter_does_not_take_a_start_from_others(tmp_path: Path) -> None:
    """A call on a process that is still being started may be cancelled; the start goes on."""
    process = RunningProcess(ProcessSpec("p", Command(argv=("x",))), b"", tmp_path)
    impatient, patient = (asyncio.create_task(process.kill()) for _ in range(2))
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.wait([impatient])
    process.start_failed("no such program")
    assert (await patient).reason is ExitReason.START_FAILED


@pytest.mark.requirement("R60")
async def test_two_processes_that_kill_all_others_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Both end at once; each exit comes after the kill, which is not told of a process whose own kill is under way."""
    sandbox = _Sandbox()
    processes = Processes(cast("SandboxHandle", sandbox), {}, tmp_path)
    both = [
        await processes.start(ProcessSpec(name, Command(argv=("x",)), kill_all_after=True)) for name in ("one", "two")
    ]
    for process in both:
        process.closed(OUT)
        process.closed(ERR)
        process.exited(RawExit(code=0, signal=None))
    assert [process.exit for process in both] == [None, None]
    async with asyncio.timeout(30):
        await asyncio.gather(*(process.ended.wait() for process in both))
    exits = [process.exit for process in both if process.exit is not None]
    assert [(one.reason, one.all_killed) for one in exits] == [(ExitReason.EXITED, True)] * 2
    assert sandbox.kills == 2


@pytest.mark.requirement("R60", "R49")
async def test_an_exit_says_when_the_others_could_not_be_killed(tmp_path: Path) -> None:
    sandbox = _Sandbox(error=Internal("a process stays", reason="KILL_FAILED"))
    processes = Processes(cast("SandboxHandle", sandbox), {}, tmp_path)
    process = await processes.start(ProcessSpec("p", Command(argv=("x",)), kill_all_after=True))
    for stream in (OUT, ERR):
        process.closed(stream)
    process.exited(RawExit(code=0, signal=None))
    async with asyncio.timeout(30):
        await process.ended.wait()
    assert process.exit is not None
    assert (process.exit.reason, process.exit.all_killed) == (ExitReason.EXITED, False)


@pytest.mark.requirement("R60", "R91")
async def test_a_tree_is_killed_once_where_all_trees_are_killed_again_and_again(tmp_path: Path) -> None:
    """What is dead makes no process; a tree that ended since, and may have left some, is killed too."""
    sandbox = _Guest()
    processes = Processes(cast("SandboxHandle", sandbox), {}, tmp_path)
    for name in ("one", "two", "three"):
        process = await processes.start(ProcessSpec(name, Command(argv=("x",)), kill_all_after=name != "two"))
        for stream in (OUT, ERR):
            process.closed(stream)
        process.exited(RawExit(code=0, signal=None))
        async with asyncio.timeout(30):
            await process.ended.wait()
    assert [tree.kills for tree in sandbox.trees] == [1, 1, 1]


class _Tree:
    """Counts how often it was killed."""

    def __init__(self) -> None:
        self.kills = 0

    async def kill(self) -> None:
        self.kills += 1


class _Guest:
    """A sandbox where each tree is killed by itself."""

    user = "agent"
    workdir = "/"
    default_env: Mapping[str, str] = {}

    def __init__(self) -> None:
        self.trees: list[_Tree] = []

    async def start(self, *_: object, **__: object) -> _Tree:
        self.trees.append(_Tree())
        return self.trees[-1]

    async def kill_everything(self) -> bool:
        return False


class _Sandbox:
    """A sandbox whose processes are told their events by the test; counts how often all in it was killed."""

    user = "agent"
    workdir = "/"
    default_env: Mapping[str, str] = {}

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.kills = 0

    async def start(self, *_: object, **__: object) -> object:
        return object()

    async def kill_everything(self) -> bool:
        self.kills += 1
        await asyncio.sleep(0)
        if self.error:
            raise self.error
        return True
