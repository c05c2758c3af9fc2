"""Runs that several callers wait for, some of whom give up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from tests.unit.sandbox.scripted_domain import pass_turns

from penstock_chassis.errors import Unavailable
from penstock_sandbox.domain.backend import ProcessSink, RawExit, SandboxHandle
from penstock_sandbox.domain.model import Command, ExitReason, ProcessSpec, RunResult, Stream
from penstock_sandbox.processes.manager import Processes

INPUT = bytes(range(256)) * 64
KILLED = 9


class Program:
    """A program that reads a piece of its input when the test lets it."""

    def __init__(self, sink: ProcessSink) -> None:
        self.sink = sink
        self.read = b""
        self.input_ended = False
        self.kills = 0
        self.reads = asyncio.Semaphore(0)

    async def write_stdin(self, data: bytes) -> None:
        await self.reads.acquire()
        self.read += data

    async def close_stdin(self) -> None:
        self.input_ended = True

    async def kill(self) -> None:
        self.kills += 1
        self.end(None, KILLED)

    def end(self, code: int | None, number: int | None = None) -> None:
        for stream in Stream:
            self.sink.closed(stream)
        self.sink.exited(RawExit(code=code, signal=number))


class Machine:
    """A sandbox of such programs."""

    user = "agent"
    workdir = "/"
    default_env: Mapping[str, str] = {}

    def __init__(self) -> None:
        self.programs: list[Program] = []
        self.starts = asyncio.Event()
        """Whether starts are confirmed."""
        self.starts.set()

    async def start(self, argv: object, env: object, cwd: object, sink: ProcessSink, **_: object) -> Program:
        program = Program(sink)
        self.programs.append(program)
        await self.starts.wait()
        return program


class Runs:
    """Calls of Run with one id and one input."""

    def __init__(self, folder: Path) -> None:
        self.machine = Machine()
        self.processes = Processes(cast("SandboxHandle", self.machine), {}, folder)

    async def call(self, *, process_id: str = "r") -> asyncio.Task[RunResult]:
        """A call that waits for the end."""
        running = self.processes.run(Command(argv=("x",)), INPUT, 1 << 20, process_id)
        calling = asyncio.create_task(running)
        await pass_turns()
        return calling

    @property
    def program(self) -> Program:
        (program,) = self.machine.programs
        return program


async def _cancelled(calling: asyncio.Task[RunResult]) -> None:
    calling.cancel()
    await asyncio.wait([calling])
    assert calling.cancelled()


@pytest.mark.requirement("R22", "R67")
async def test_a_joined_run_gets_all_of_its_input_when_its_first_caller_gives_up(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    first, second = await runs.call(), await runs.call()
    runs.program.reads.release()
    await pass_turns()
    await _cancelled(first)
    third = await runs.call()
    await _cancelled(second)
    for _ in range(len(INPUT)):
        runs.program.reads.release()
    await pass_turns()
    assert len(runs.program.read) == len(INPUT)
    assert runs.program.read == INPUT
    assert runs.program.input_ended
    runs.program.end(0)
    async with asyncio.timeout(30):
        assert (await third).exit.reason is ExitReason.EXITED
    assert runs.program.kills == 0


@pytest.mark.requirement("R23", "R40")
@pytest.mark.parametrize("process_id", ["r", ""])
async def test_a_run_that_all_callers_gave_up_is_killed_and_gets_no_more_input(tmp_path: Path, process_id: str) -> None:
    runs = Runs(tmp_path)
    callers = [await runs.call(process_id=process_id)]
    if process_id:
        callers.append(await runs.call(process_id=process_id))
    before = len(asyncio.all_tasks())
    for calling in callers:
        await _cancelled(calling)
    # The callers and what gave the program its input.
    assert len(asyncio.all_tasks()) == before - len(callers) - 1
    assert runs.program.kills == 1
    runs.program.reads.release()
    await pass_turns()
    assert runs.program.read == b""


@pytest.mark.requirement("R23", "R32")
@pytest.mark.parametrize("process_id", ["r", ""])
async def test_a_run_whose_last_caller_goes_while_it_starts_is_killed_once_it_has(
    tmp_path: Path, process_id: str
) -> None:
    """The program may work before its backend says that it was started."""
    runs = Runs(tmp_path)
    runs.machine.starts.clear()
    callers = [await runs.call(process_id=process_id)]
    if process_id:
        callers.append(await runs.call(process_id=process_id))
        await _cancelled(callers.pop())
    callers[0].cancel()
    await pass_turns()
    assert runs.program.kills == 0
    runs.machine.starts.set()
    async with asyncio.timeout(30):
        await asyncio.wait(callers)
    assert callers[0].cancelled() and runs.program.kills == 1


@pytest.mark.requirement("R22", "R23", "R32")
@pytest.mark.parametrize("stays", [True, False])
async def test_a_run_that_a_caller_joins_again_while_it_starts_is_killed_only_if_that_caller_goes_too(
    tmp_path: Path, stays: bool
) -> None:
    """As a client whose call broke, and that calls again by the same id."""
    runs = Runs(tmp_path)
    runs.machine.starts.clear()
    first = await runs.call()
    first.cancel()
    await pass_turns()
    second = await runs.call()
    if not stays:
        # Twice: a second cancellation ends the wait of a caller, not the kill.
        first.cancel()
        second.cancel()
        await pass_turns()
    runs.machine.starts.set()
    async with asyncio.timeout(30):
        await asyncio.wait([first])
    assert first.cancelled()
    await pass_turns()
    if stays:
        assert runs.program.kills == 0
        runs.program.end(0)
    async with asyncio.timeout(30):
        await asyncio.wait([second])
    assert second.cancelled() is not stays
    if stays:
        assert second.result().exit.reason is ExitReason.EXITED
    else:
        assert runs.program.kills > 0


@pytest.mark.requirement("R23")
async def test_a_program_that_ends_without_reading_its_input_leaves_nothing_that_writes(tmp_path: Path) -> None:
    before = len(asyncio.all_tasks())
    runs = Runs(tmp_path)
    callers = [await runs.call(), await runs.call()]
    runs.program.end(0)
    async with asyncio.timeout(30):
        results = await asyncio.gather(*callers)
        later = await (await runs.call())
    assert [result.exit.code for result in (*results, later)] == [0, 0, 0]
    assert len(asyncio.all_tasks()) == before
    assert len(runs.machine.programs) == 1


@pytest.mark.requirement("R40")
@pytest.mark.parametrize("by_id", [True, False])
async def test_killing_everything_is_not_hindered_by_a_start_that_fails_meanwhile(tmp_path: Path, by_id: bool) -> None:
    """Its backend has killed what was not executed in time."""
    given_up = asyncio.Event()

    class Stopping(Machine):
        async def start(self, argv: object, env: object, cwd: object, sink: ProcessSink, **options: object) -> Program:
            if argv == ("stopped",):
                await given_up.wait()
                raise Unavailable("not executed", reason="START_UNANSWERED", retry_after_s=1.0)
            return await super().start(argv, env, cwd, sink, **options)

        async def kill_everything(self) -> bool:
            return True

    processes = Processes(cast("SandboxHandle", Stopping()), {}, tmp_path)
    running = await processes.start(ProcessSpec(id="a", command=Command(argv=("x",))))
    starting = asyncio.create_task(processes.start(ProcessSpec(id="b", command=Command(argv=("stopped",)))))
    await pass_turns()
    killing: Coroutine[Any, Any, object] = processes.kill("a", everything=True) if by_id else processes.kill_all()
    killed = asyncio.create_task(killing)
    await pass_turns()
    assert not killed.done(), "a program may still come of the start"
    given_up.set()
    await asyncio.wait([killed, starting])
    assert killed.exception() is None
    assert running.exit is not None
    assert isinstance(starting.exception(), Unavailable)
