"""What a bubblewrap that is killed too early leaves behind is ended by whoever comes next."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from penstock_sandbox.backends.local import bubblewrap
from penstock_sandbox.backends.local.channel import ChannelClosed
from penstock_sandbox.backends.local.spawner_process import SpawnerProcess
from penstock_sandbox.backends.local.stage import Stage
from penstock_sandbox.domain.errno import Refused

# Like bubblewrap before its first word to its child: killing it leaves the child, which tells its own id.
_EARLY = """#!/bin/bash
/bin/sleep 3600 </dev/null >/dev/null 2>&1 &
echo $! > TELL
wait
"""


async def _started(spawner: SpawnerProcess, tell: Path) -> tuple[asyncio.Task[tuple[int, int]], int]:
    """A create that hangs halfway, and the process that its bubblewrap would leave; both work as the caller's user."""
    os.mkfifo(tell)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        creating = spawner.create(
            "s1", [], theirs, uid=None, groups=[], read_only=[], tmp_inodes=64, fixed_clocks=False
        )
        create = asyncio.create_task(creating)
        child = int(await asyncio.to_thread(tell.read_text))
    return create, child


@pytest.fixture
def binary(tmp_path: Path) -> tuple[Path, Path]:
    """Stands in for bubblewrap, and where it tells of its child."""
    path, tell = tmp_path / "bwrap", tmp_path / "tell"
    path.write_text(_EARLY.replace("TELL", f"'{tell}'"))
    path.chmod(0o755)
    return path, tell


async def _gone(child: int) -> None:
    """Until the process is dead; a descriptor of a process becomes readable then."""
    try:
        process = os.pidfd_open(child)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(process, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(process)
        os.close(process)


async def _destroy(spawner: SpawnerProcess) -> None:
    await spawner.destroy("s1")


async def _close(spawner: SpawnerProcess) -> None:
    await spawner.aclose()


@pytest.mark.requirement("R43", "R51")
@pytest.mark.parametrize("end", [_destroy, _close])
async def test_a_sandbox_that_is_ended_halfway_leaves_no_process(
    binary: tuple[Path, Path], end: Callable[[SpawnerProcess], Coroutine[None, None, None]]
) -> None:
    """The child of a bubblewrap that was killed before it spoke is nobody's, and would wait for ever."""
    path, tell = binary
    spawner = await SpawnerProcess.start(str(path), Stage(None), lambda _, __: None, lambda: None, allocates=True)
    create, child = await _started(spawner, tell)
    try:
        await end(spawner)
        await _gone(child)
    finally:
        await spawner.aclose()
    with pytest.raises((Refused, ChannelClosed)):  # whichever comes first
        await create


@pytest.mark.requirement("R51")
def test_unfinished_work_of_a_killed_service_is_ended_by_the_next(tmp_path: Path) -> None:
    """Known by the directory of its sandbox among its arguments, and nothing else is touched."""
    script = tmp_path / "run"
    script.write_text("exec -a bwrap /bin/bash -c 'read -r _; :' \"$1\"")
    left, other = (
        subprocess.Popen(["/bin/bash", script, f"/state/sandboxes/{name}/upper"], stdin=subprocess.PIPE)
        for name in ("s1", "s2")
    )
    try:
        while not Path(f"/proc/{left.pid}/cmdline").read_bytes().startswith(b"bwrap\0"):
            pass
        bubblewrap.kill_left(["s1"])
        assert left.wait() == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (left, other):
            process.kill()
            process.communicate()
