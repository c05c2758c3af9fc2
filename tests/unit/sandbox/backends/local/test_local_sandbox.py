"""A local sandbox whose helper is the test: process ids that are given again, uploads that are cancelled, its loss."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
from tests.unit.sandbox.scripted_domain import pass_turns
from tests.unit.sandbox.scripted_helper import ScriptedHelper

from penstock_chassis.errors import FailedPrecondition
from penstock_sandbox.backends.local.disk.limits import Allotment
from penstock_sandbox.backends.local.disk.usage import DiskUse
from penstock_sandbox.backends.local.sandbox import LocalSandbox
from penstock_sandbox.backends.local.spawner import wire
from penstock_sandbox.backends.local.spawner_process import SpawnerProcess
from penstock_sandbox.domain.backend import ProcessHandle
from penstock_sandbox.domain.model import NetworkKind, NetworkPolicy
from penstock_sandbox.processes.output import Collected

PID = 7


class Watched:
    """A sandbox with such a helper; every process in it has one id."""

    def __init__(self, folder: Path) -> None:
        async def release(_: LocalSandbox) -> None:
            return None

        self.helper = ScriptedHelper()
        disk = Allotment(folder, cast("DiskUse", None))
        self.sandbox = LocalSandbox("s", None, folder, None, {}, lambda _: None, release, disk)

    async def asks_to_start(self) -> tuple[asyncio.Task[ProcessHandle], Collected, wire.Message]:
        sink = Collected()
        work = self.sandbox.start(["x"], {}, "/", sink, stdin=False, pty=None)
        starting = asyncio.create_task(work)
        return starting, sink, await self.helper.asked()

    async def starts(self) -> tuple[ProcessHandle, Collected, wire.Message]:
        starting, sink, request = await self.asks_to_start()
        self.helper.send({"seq": request["seq"], "pid": PID})
        return await starting, sink, request

    async def answers(self, work: Any) -> wire.Message:
        """The request that a piece of work sends; it is answered."""
        working = asyncio.ensure_future(work)
        request = await self.helper.asked()
        self.helper.send({"seq": request["seq"]})
        await working
        return request


@pytest_asyncio.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    made = Watched(tmp_path)
    network = NetworkPolicy(NetworkKind.NONE)
    spawner = cast("SpawnerProcess", made.helper)
    await made.sandbox.open(spawner, (), network, read_only=(), first=(), tmp_inodes=0, fixed_clocks=False)
    yield made
    await made.sandbox.destroy()
    assert made.helper.end is not None
    made.helper.end.close()


def _code(sink: Collected) -> int | None:
    ended = sink.ended.result() if sink.ended.done() else None
    return ended.code if ended is not None else None


@pytest.mark.requirement("R39")
async def test_a_process_with_an_ended_ones_id_gets_its_own_exit(watched: Watched) -> None:
    """The ended one is kept for its watchers, and forgotten while the new one runs."""
    old, old_sink, old_start = await watched.starts()
    watched.helper.exits(old_start, 3)
    await pass_turns()
    assert _code(old_sink) == 3
    new, new_sink, new_start = await watched.starts()
    await old.aclose()
    watched.helper.exits(new_start, 4)
    await pass_turns()
    assert _code(new_sink) == 4
    await new.aclose()


@pytest.mark.requirement("R39")
async def test_an_exit_that_comes_right_after_the_start_is_the_new_processs(watched: Watched) -> None:
    old, old_sink, old_start = await watched.starts()
    watched.helper.exits(old_start, 3)
    await pass_turns()
    starting, new_sink, new_start = await watched.asks_to_start()
    watched.helper.send({"seq": new_start["seq"], "pid": PID})
    watched.helper.exits(new_start, 4)
    channel = watched.sandbox._channel
    assert channel is not None
    # Both are read before the caller is resumed.
    channel._readable()
    channel._readable()
    new = await starting
    assert (_code(old_sink), _code(new_sink)) == (3, 4)
    await old.aclose()
    await new.aclose()
    assert not watched.sandbox._early_exits and not watched.sandbox._processes


@pytest.mark.requirement("R40", "R39")
async def test_signals_and_kills_name_the_process_and_not_only_its_id(watched: Watched) -> None:
    old, _, old_start = await watched.starts()
    watched.helper.exits(old_start, 0)
    await pass_turns()
    new, _, new_start = await watched.starts()
    for process, start in ((old, old_start), (new, new_start)):
        assert (await watched.answers(process.signal(15)))["process"] == start["seq"]
    assert (await watched.answers(old.kill()))["process"] == old_start["seq"]
    await old.aclose()
    await new.aclose()


@pytest.mark.requirement("R23")
async def test_each_forgotten_process_is_named_once_to_the_helper(watched: Watched) -> None:
    """Also one that is forgotten while the start of the next one, with its id, is under way."""
    old, _, old_start = await watched.starts()
    watched.helper.exits(old_start, 0)
    await pass_turns()
    starting, _, new_start = await watched.asks_to_start()
    await old.aclose()
    watched.helper.send({"seq": new_start["seq"], "pid": PID})
    new = await starting
    last, _, last_start = await watched.starts()
    assert (new_start["forget"], last_start["forget"]) == ([], [old_start["seq"]])
    await new.aclose()
    await new.aclose()
    await last.aclose()
    _, _, final = await watched.starts()
    assert final["forget"] == [new_start["seq"], last_start["seq"]]


@pytest.mark.requirement("R49")
async def test_a_sandbox_whose_messages_cannot_be_read_is_lost_and_not_blamed(watched: Watched) -> None:
    looking = asyncio.create_task(watched.sandbox.stat("/x"))
    await watched.helper.asked()
    assert watched.helper.end is not None
    watched.helper.end.send(bytes(100 * 1024))
    with pytest.raises(FailedPrecondition) as caught:
        await looking
    assert caught.value.reason == "SANDBOX_LOST"
    assert caught.value.metadata == {"sandbox_id": "s", "lost_reason": "DOOR_UNREADABLE"}


async def _upload(sandbox: LocalSandbox) -> None:
    async with sandbox.open_write("/home/file", 0o644) as writer:
        await writer.write(b"content")
        await writer.commit()


@pytest.mark.requirement("R23", "R44")
async def test_an_upload_that_is_cancelled_while_it_is_opened_leaves_no_file(watched: Watched) -> None:
    """The helper makes the file all the same, and names it when nobody waits any more."""
    uploading = asyncio.create_task(_upload(watched.sandbox))
    request = await watched.helper.asked()
    uploading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await uploading
    read_end, write_end = os.pipe()
    answer = {"seq": request["seq"], "partial": ".file.00.partial", "name": "file"}
    watched.helper.send(answer, [write_end, write_end])
    os.close(write_end)
    discard = await watched.helper.asked()
    assert (request["op"], discard["op"], discard["partial"]) == ("open_write", "discard", ".file.00.partial")
    assert watched.sandbox.unfinished == {".file.00.partial"}
    watched.helper.send({"seq": discard["seq"]})
    await pass_turns()
    assert watched.sandbox.unfinished == set()
    # All copies of its descriptors are closed.
    os.set_blocking(read_end, False)
    assert os.read(read_end, 9) == b""
    os.close(read_end)


@pytest.mark.requirement("R23", "R44")
async def test_an_upload_that_is_cancelled_after_its_commit_was_sent_only_ends(watched: Watched) -> None:
    """There is nothing left to discard, which is no error of the cancelled call."""
    uploading = asyncio.create_task(_upload(watched.sandbox))
    request = await watched.helper.asked()
    read_end, write_end = os.pipe()
    answer = {"seq": request["seq"], "partial": ".file.00.partial", "name": "file"}
    watched.helper.send(answer, [write_end, write_end])
    os.close(write_end)
    commit = await watched.helper.asked()
    assert (commit["op"], os.read(read_end, 9)) == ("commit", b"content")
    uploading.cancel()
    discard = await watched.helper.asked()
    watched.helper.send({"seq": commit["seq"]})
    watched.helper.send({"seq": discard["seq"], "errno": errno.ENOENT, "what": "No such file or directory"})
    with pytest.raises(asyncio.CancelledError):
        await uploading
    assert watched.sandbox.unfinished == set()
    os.close(read_end)


@pytest.mark.requirement("R39", "R43")
@pytest.mark.parametrize("how", ["lost", "destroyed"])
async def test_a_process_that_starts_as_its_sandbox_ends_is_lost_with_it(watched: Watched, how: str) -> None:
    """Its reply was read, and its caller not resumed yet: the end reached the processes that were known by then."""
    starting, sink, start = await watched.asks_to_start()
    channel = watched.sandbox._channel
    assert channel is not None
    destroying = asyncio.create_task(watched.sandbox.destroy()) if how == "destroyed" else None
    if destroying is not None:
        await asyncio.sleep(0)  # its next turn, before the start's, ends the sandbox
    watched.helper.send({"seq": start["seq"], "pid": PID})
    channel._readable()
    if destroying is None:
        watched.sandbox.lose("DOOR_CLOSED")
    process = await starting
    assert sink.ended.done() and sink.ended.result() is None
    if destroying is not None:
        await destroying
    async with asyncio.timeout(30):
        await process.kill()
    await process.aclose()
    assert not watched.sandbox._processes


@pytest.mark.requirement("R39", "R43")
async def test_a_process_that_ended_before_its_sandbox_keeps_its_exit(watched: Watched) -> None:
    """Also if the sandbox ended before the caller of its start was resumed."""
    starting, sink, start = await watched.asks_to_start()
    watched.helper.send({"seq": start["seq"], "pid": PID})
    watched.helper.exits(start, 4)
    channel = watched.sandbox._channel
    assert channel is not None
    channel._readable()
    channel._readable()
    watched.sandbox.lose("DOOR_CLOSED")
    process = await starting
    assert _code(sink) == 4
    await process.aclose()
