"""A process's exit is decided once and last, whatever the order in which its end is told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_sandbox.domain.backend import RawExit
from penstock_sandbox.domain.model import Chunk, Command, ExitReason, Gap, ProcessSpec, Stream
from penstock_sandbox.processes.process import RunningProcess

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
