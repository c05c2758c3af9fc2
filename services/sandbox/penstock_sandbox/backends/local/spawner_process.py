"""The service's side of its spawner: starts it, requests sandboxes, receives the ends of sandboxes.

Invariants: started from the main thread (the kernel ties the spawner to the thread that made it); it inherits one
descriptor and an empty environment, so it has none of the service's secrets. When it ends, every sandbox is lost.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import penstock_sandbox
from penstock_sandbox.backends.local.channel import Channel
from penstock_sandbox.backends.local.spawner import wire
from penstock_sandbox.backends.local.stage import Stage

_MAIN = "penstock_sandbox.backends.local.spawner.main"
_BOOT = f"import sys; sys.path.insert(0, sys.argv.pop(1)); from {_MAIN} import main; main()"
_END_TIMEOUT_S = 10.0


class SpawnerProcess:
    """A running spawner. ``on_gone`` gets the id of a sandbox that ended by itself, and the reason."""

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel) -> None:
        self._process = process
        self._channel = channel

    @classmethod
    async def start(
        cls,
        bwrap: str,
        stage: Stage,
        on_gone: Callable[[str, str], None],
        on_end: Callable[[], None],
        *,
        allocates: bool,
        first_program: bytes | None = None,
    ) -> SpawnerProcess:
        """Starts and configures a spawner. Raises channel.Refused when the stage cannot be set up.

        ``allocates``: whether sandboxes may allocate disk space without writing to it (fallocate);
        ``first_program``: what bubblewrap's arguments put into sandboxes, from wire.FIRST_PROGRAM.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            package = Path(penstock_sandbox.__file__).parent.parent
            process = subprocess.Popen(  # noqa: ASYNC220 - 2 ms, and it must be this thread's child
                [sys.executable, "-I", "-S", "-c", _BOOT, str(package), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={},
                cwd="/",
            )

        def event(message: wire.Message) -> None:
            on_gone(message["id"], message["reason"])

        channel = Channel(ours, event, on_end)
        spawner = cls(process, channel)
        try:
            await channel.request(
                {
                    "op": "configure",
                    "bwrap": bwrap,
                    "allocates": allocates,
                    "first_program": first_program,
                    "stage": str(stage.root) if stage.root is not None else None,
                    "sources": {name: str(path) for name, path in stage.sources.items()},
                }
            )
        except BaseException:
            await spawner.aclose()
            raise
        return spawner

    @property
    def alive(self) -> bool:
        """Whether it accepts requests."""
        return not self._channel.closed

    async def create(
        self,
        sandbox_id: str,
        arguments: Sequence[str],
        helper: socket.socket,
        *,
        uid: int | None,
        groups: Sequence[str],
        read_only: Sequence[str],
        tmp_inodes: int,
        fixed_clocks: bool,
        writable: Sequence[str] = (),
        first: Sequence[str] = (),
    ) -> tuple[int, int]:
        """Makes a sandbox whose helper serves ``helper``; returns the host's ids of its first process and its helper.

        ``groups`` are the files of its control groups that both join, ``read_only`` the names at the top level of its
        root that become read-only mounts; with ``writable`` all but these directories does. ``first`` is the command of
        its first process (empty: a shell of the host's); ``tmp_inodes`` limits the files of /tmp and of /dev/shm.
        ``fixed_clocks``: its processes' monotonic and boot clocks begin at a fixed time.
        """
        answer, _ = await self._channel.request(
            {
                "op": "create",
                "id": sandbox_id,
                "uid": uid,
                "groups": list(groups),
                "argv": list(arguments),
                "read_only": list(read_only),
                "writable": list(writable),
                "first": list(first),
                "tmp_inodes": tmp_inodes,
                "fixed_clocks": fixed_clocks,
            },
            [helper.fileno()],
        )
        return answer["pid"], answer["helper"]

    async def destroy(self, sandbox_id: str) -> None:
        """Ends a sandbox; returns when none of its processes is left."""
        await self._channel.request({"op": "destroy", "id": sandbox_id})

    async def aclose(self) -> None:
        """Ends the spawner and with it every sandbox."""
        self._channel.close()
        try:
            await asyncio.to_thread(self._process.wait, _END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
