"""A writer that waits for room in a process's input, and the input's end meanwhile."""

from __future__ import annotations

import asyncio
import fcntl
import os
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import pytest

from penstock_sandbox.backends.local.channel import Reply
from penstock_sandbox.backends.local.freezing import Freezing
from penstock_sandbox.backends.local.process import LocalProcess
from penstock_sandbox.backends.local.spawner import wire
from penstock_sandbox.domain.model import Stream
from penstock_sandbox.processes.output import Collected

MORE_THAN_FITS = b"x" * (1 << 21)


class NoSandbox:
    """A process's sandbox that is asked nothing."""

    def __init__(self) -> None:
        self.freezing = Freezing(None, lambda: False)

    async def ask_helper(self, request: wire.Message, descriptors: Sequence[int] = ()) -> Reply:
        raise NotImplementedError

    async def kill(self, request: wire.Message) -> None:
        raise NotImplementedError

    def oom_kills(self) -> int:
        return 0

    def forget(self, process: LocalProcess) -> None:
        """Nothing is kept of it."""


@pytest.fixture
def left_open() -> Iterator[list[int]]:
    """The test's own descriptors, which are closed after it."""
    left: list[int] = []
    yield left
    for descriptor in left:
        os.close(descriptor)


async def _blocked_writer(process: LocalProcess) -> asyncio.Task[None]:
    writing = asyncio.create_task(process.write_stdin(MORE_THAN_FITS))
    # Its first turn fills the pipe and ends where it waits for room.
    await asyncio.sleep(0)
    assert not writing.done()
    return writing


async def _end(process: LocalProcess, how: str) -> None:
    if how == "lost":
        process.lose("DOOR_CLOSED")
    elif how == "forgotten":
        await process.aclose()
    else:
        await process.close_stdin()


def _assert_number_is_free_on_the_loop(number: int, pipe: int) -> None:
    """The loop watches whatever gets the number next."""
    again = fcntl.fcntl(pipe, fcntl.F_DUPFD_CLOEXEC, number)
    assert again == number, "it was not closed"
    loop = asyncio.get_running_loop()
    for add, remove in ((loop.add_reader, loop.remove_reader), (loop.add_writer, loop.remove_writer)):
        watch: Callable[..., None] = add
        watch(number, lambda: None)
        assert remove(number)
    os.close(again)


@pytest.mark.requirement("R43", "R23")
@pytest.mark.parametrize("how", ["lost", "forgotten", "closed"])
async def test_a_writer_that_waits_for_room_ends_with_the_input(how: str, left_open: list[int]) -> None:
    read_end, write_end = os.pipe()
    left_open.append(read_end)
    process = LocalProcess(NoSandbox(), 1, 7, Collected(), write_end, {}, None, 0)
    writing = await _blocked_writer(process)
    await _end(process, how)
    async with asyncio.timeout(30):
        with pytest.raises(BrokenPipeError):
            await writing
    _assert_number_is_free_on_the_loop(write_end, read_end)


@pytest.mark.requirement("R43", "R23")
@pytest.mark.parametrize("how", ["lost", "forgotten", "hung-up"])
async def test_a_writer_to_a_terminal_ends_with_the_terminal(how: str, left_open: list[int]) -> None:
    """The number of a closed terminal is soon another sandbox's descriptor, which the loop must be able to watch."""
    left_open += os.pipe()
    primary, secondary = os.openpty()
    tty.setraw(secondary)
    sink = Collected()
    process = LocalProcess(NoSandbox(), 1, 7, sink, primary, {primary: Stream.STDOUT}, primary, 0)
    process.attend(None)
    writing = await _blocked_writer(process)
    if how == "hung-up":
        os.close(secondary)
        async with asyncio.timeout(30):
            await sink.closed_output.wait()
    else:
        left_open.append(secondary)
        await _end(process, how)
    async with asyncio.timeout(30):
        with pytest.raises(BrokenPipeError):
            await writing
    _assert_number_is_free_on_the_loop(primary, left_open[0])


@pytest.mark.requirement("R43")
async def test_a_writer_goes_on_when_there_is_room_again(left_open: list[int]) -> None:
    read_end, write_end = os.pipe()
    left_open.append(read_end)
    os.set_blocking(read_end, False)
    process = LocalProcess(NoSandbox(), 1, 7, Collected(), write_end, {}, None, 0)
    writing = await _blocked_writer(process)
    found = 0
    async with asyncio.timeout(30):
        while not writing.done():
            with suppress(BlockingIOError):
                found += len(os.read(read_end, 1 << 20))
            await asyncio.sleep(0)
    await writing
    await process.close_stdin()
    while chunk := os.read(read_end, 1 << 20):
        found += len(chunk)
    assert found == len(MORE_THAN_FITS)
