"""The watches of one stream take turns, keep to their windows, and end with their processes."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path

import pytest

from penstock_chassis.errors import InvalidArgument, NotFound, ResourceExhausted
from penstock_sandbox.domain.backend import RawExit
from penstock_sandbox.domain.model import Chunk, Command, Exit, Gap, ProcessSpec, Stream
from penstock_sandbox.processes.process import RunningProcess
from penstock_sandbox.processes.watches import CHUNK_COST, LEAST_WINDOW, Watches

START = {Stream.STDOUT: 0, Stream.STDERR: 0}


def process(spool: Path, limit: int = 1 << 20, tail: int = 0) -> RunningProcess:
    spec = ProcessSpec(id="p", command=Command(argv=("true",)), stdin=False, output_limit=limit)
    return RunningProcess(spec, None, spool, tail)


def end(running: RunningProcess) -> None:
    running.exited(RawExit(0, None))
    for stream in Stream:
        running.closed(stream)


async def test_watches_take_turns_and_each_ends_with_its_exit(tmp_path: Path) -> None:
    watches, first, second = Watches(), process(tmp_path), process(tmp_path)
    watches.begin(1, first, START, LEAST_WINDOW)
    watches.begin(2, second, START, LEAST_WINDOW)
    watches.refuse(3, NotFound("no such process", reason="PROCESS_UNKNOWN"))
    watches.complete()
    for running in (first, second):
        running.output(Stream.STDOUT, b"out")
        running.output(Stream.STDERR, b"err")
        end(running)
    found = [event async for event in watches.events() if event is not None]
    assert [watch_id for watch_id, _ in found] == [1, 2, 3, 1, 2, 1, 2]
    assert [event for watch_id, event in found if watch_id == 1][:2] == [
        Chunk(Stream.STDOUT, 0, b"out"),
        Chunk(Stream.STDERR, 0, b"err"),
    ]
    assert isinstance(found[-1][1], Exit)


@pytest.mark.requirement("R26")
async def test_no_more_is_sent_than_the_window_until_there_is_credit(tmp_path: Path) -> None:
    watches, running = Watches(), process(tmp_path)
    running.output(Stream.STDOUT, bytes(3 * LEAST_WINDOW))
    end(running)
    watches.begin(1, running, START, LEAST_WINDOW)
    events, sent = watches.events(), 0
    first = await anext(events)
    assert first is not None and isinstance(first[1], Chunk)
    assert len(first[1].data) == LEAST_WINDOW - CHUNK_COST
    watches.refuse(2, NotFound("shows that nothing of the first comes before its credit", reason="PROCESS_UNKNOWN"))
    second = await anext(events)
    assert second is not None and second[0] == 2
    sent = len(first[1].data)
    while True:
        watches.credit(1, LEAST_WINDOW)
        event = await anext(events)
        assert event is not None
        if isinstance(event[1], Exit):
            break
        assert isinstance(event[1], Chunk)
        sent += len(event[1].data)
    assert sent == 3 * LEAST_WINDOW


async def test_a_stopped_watch_sends_nothing_more_and_leaves_its_process(tmp_path: Path) -> None:
    watches, running = Watches(), process(tmp_path)
    watches.begin(1, running, START, LEAST_WINDOW)
    running.output(Stream.STDOUT, b"unread")
    watches.stop(1)
    watches.stop(1)
    watches.credit(1, 5)
    watches.complete()
    running.output(Stream.STDOUT, b"more")
    assert [event async for event in watches.events()] == []
    assert running.exit is None and running.outputs[Stream.STDOUT].total == 10


async def test_a_watch_gets_the_tail_after_the_gap_before_the_exit(tmp_path: Path) -> None:
    watches, running = Watches(), process(tmp_path, limit=4, tail=3)
    watches.begin(1, running, START, LEAST_WINDOW)
    watches.complete()
    running.output(Stream.STDOUT, b"headlost" + b"end")
    end(running)
    running.output(Stream.STDOUT, b"after the end")  # of a process that has the pipe still open
    found = [event[1] async for event in watches.events() if event is not None]
    assert found[:2] == [Chunk(Stream.STDOUT, 0, b"head"), Gap(Stream.STDOUT, 4, 11)]
    assert isinstance(found[-1], Exit) and found[-1].stdout_bytes == 11


async def test_an_id_is_used_once_and_ids_grow(tmp_path: Path) -> None:
    watches = Watches()
    watches.check_id(3)
    for used in (3, 2, 0, -1):
        with pytest.raises(InvalidArgument):
            watches.check_id(used)


async def test_a_stream_has_a_bounded_number_of_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are refused count until the caller has read that."""
    monkeypatch.setattr("penstock_sandbox.processes.watches.MOST_WATCHES", 2)
    found = Watches()
    for watch_id in (1, 2):
        found.check_id(watch_id)
        found.refuse(watch_id, NotFound("no such process", reason="PROCESS_UNKNOWN"))
    with pytest.raises(ResourceExhausted, match="at most 2 watches"):
        found.check_id(3)
    async with aclosing(found.events()) as events:
        await anext(events)
        found.check_id(3)


async def test_a_frame_that_cannot_be_read_ends_the_stream(tmp_path: Path) -> None:
    watches, running = Watches(), process(tmp_path)
    running.output(Stream.STDOUT, b"unsent")
    watches.begin(1, running, START, LEAST_WINDOW)
    watches.complete(InvalidArgument("no frame", reason="FIELD_INVALID"))
    with pytest.raises(InvalidArgument):
        await anext(watches.events())
    watches.close()
    assert running.changed._listeners is None
