"""A live local sandbox: its door, processes, files, endpoint and what must be released when it ends.

Invariants: everything that enters the sandbox goes through its door; the sandbox ends exactly once, by
``destroy`` or by being lost, and then every process in it is told.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from penstock_chassis.errors import Internal, PenstockError
from penstock_sandbox.backends import diffs
from penstock_sandbox.backends.base import (
    FileReader,
    FileWriter,
    ProcessHandle,
    ProcessSink,
    SandboxHandle,
    StartFailed,
)
from penstock_sandbox.backends.local import layers, rootfs, tree
from penstock_sandbox.backends.local.cgroups import Group
from penstock_sandbox.backends.local.channel import Channel, ChannelClosed, Reply
from penstock_sandbox.backends.local.disk import Allotment
from penstock_sandbox.backends.local.endpoint import Endpoint
from penstock_sandbox.backends.local.freezing import Freezing
from penstock_sandbox.backends.local.opened import Reader, Writer, info
from penstock_sandbox.backends.local.process import LocalProcess
from penstock_sandbox.backends.refusals import Refused, file_error, sandbox_lost
from penstock_sandbox.model import FileInfo, NetworkKind, NetworkPolicy, PtySize, Stats, Stream
from penstock_sandbox.spawner import wire

_MAX_TREE_BYTES = 8 * 1024 * 1024 * 1024
_MAX_TREE_ENTRIES = 500_000
_VERDICT_S = 5.0
_KILL_S, _KILL_SOON_S = 10.0, 2.0


class LocalSandbox(SandboxHandle):
    """One sandbox of the local backend. ``release`` frees what the backend gave it; it is called once, at the end."""

    home = rootfs.HOME
    workdir = rootfs.WORKDIR
    user = rootfs.USER

    def __init__(
        self,
        sandbox_id: str,
        uid: int | None,
        upper: Path,
        group: Group | None,
        default_env: Mapping[str, str],
        on_lost: Callable[[str], None],
        release: Callable[[LocalSandbox], Awaitable[None]],
        disk: Allotment,
    ) -> None:
        self.id = sandbox_id
        self.uid = uid
        self.upper = upper
        self.layer_ids: tuple[str, ...] = ()
        self.first_pid = self.door_pid = 0
        """The host's ids of the sandbox's first process and its door, once they are there."""
        self.default_env = default_env
        self.group = group
        self._on_lost = on_lost
        self._release = release
        self.disk = disk
        self.kept_as: Path | None = None
        self._channel: Channel | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._processes: dict[int, LocalProcess] = {}
        self._early_exits: dict[int, wire.Message] = {}
        self._forgotten: list[int] = []
        self._endpoint: Endpoint | None = None
        self._ended = False
        self._lost_reason = ""
        self._over = asyncio.Event()
        self._verdict: asyncio.TimerHandle | None = None
        self.freezing = Freezing(group, lambda: self._ended)
        self._destroyed: asyncio.Task[None] | None = None

    def join_files(self) -> list[str]:
        """Files of its control groups to which its first process and its door are written before anything else runs."""
        return self.group.members_files if self.group is not None else []

    # Opening -----------------------------------------------------------------------------------------------------

    def connect(self) -> socket.socket:
        """Make the door's socket pair; answers the door's end, which the caller closes once it is handed over."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = Channel(ours, self._event, self._door_closed)
        return theirs

    async def ready(self) -> None:
        """Wait until the door serves. Raises OSError with its reason when it cannot."""
        await self._ready

    def _event(self, message: wire.Message) -> None:
        match message["event"]:
            case "ready":
                self._ready.set_result(None)
            case "failed":
                self._ready.set_exception(OSError(message["errno"], message["what"]))
            case "exit":
                process = self._processes.get(message["pid"])
                if process is not None:
                    process.door_exited(message)
                else:
                    self._early_exits[message["pid"]] = message

    def _door_closed(self) -> None:
        if not self._ready.done():
            self._ready.set_exception(OSError(errno.ECHILD, "the sandbox ended while it was being made"))
        if not self._ended and self._verdict is None:
            # The door ends with the sandbox, by itself, or with the spawner: which of these, the spawner tells, or its
            # end does. A sandbox whose door is gone is lost all the same.
            self._verdict = asyncio.get_running_loop().call_later(_VERDICT_S, lambda: self.lose("DOOR_CLOSED"))

    def lose(self, reason: str) -> None:
        """The sandbox ended by itself."""
        if self._ended:
            return
        self._lost_reason = reason
        self._end()
        if self._ready.done() and self._ready.exception() is None:
            self._on_lost(reason)

    def _end(self) -> None:
        self._ended = True
        if self._verdict is not None:
            self._verdict.cancel()
        if self._channel is not None:
            self._channel.close()
        for process in list(self._processes.values()):
            process.lose(self._lost_reason)
        self._over.set()

    async def lost(self) -> PenstockError:
        """What an operation says that found the door gone: why, too, which is known a moment later."""
        await self._over.wait()
        return sandbox_lost(self._lost_reason, self.id)

    async def door(self, request: wire.Message, descriptors: Sequence[int] = ()) -> Reply:
        """Ask the door. Raises channel.Refused or channel.ChannelClosed."""
        if self._channel is None:
            raise ChannelClosed
        return await self._channel.request(request, descriptors)

    # Processes ---------------------------------------------------------------------------------------------------

    async def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        sink: ProcessSink,
        *,
        stdin: bool,
        pty: PtySize | None,
        to_end: bool = False,
    ) -> ProcessHandle:
        forgotten, self._forgotten = self._forgotten, []
        request = {
            "op": "start",
            "forget": forgotten,
            "argv": list(argv),
            "env": dict(env),
            "cwd": cwd,
            "pty": (pty.rows, pty.columns) if pty is not None else None,
            # Who is given input after the answer does not end before it.
            "to_end": to_end and pty is None and not stdin,
        }
        # Before it starts: one that ends at once for lack of memory is told from one that somebody killed.
        oom_kills = self.oom_kills()
        ours: list[int] = []
        theirs: list[int] = []
        input_end: int | None = None
        terminal: int | None = None
        try:
            if pty is None:
                for _ in range(2):
                    read_end, write_end = os.pipe()
                    ours.append(read_end)
                    theirs.append(write_end)
                if stdin:
                    read_end, input_end = os.pipe()
                    ours.append(input_end)
                    theirs.append(read_end)
            try:
                answer, given = await self.freezing.uncut(partial(self.door, request, theirs))
            except Refused as refusal:
                raise StartFailed(refusal.what) from refusal
            except ChannelClosed as error:
                raise await self.lost() from error
        except BaseException:
            for descriptor in ours:
                os.close(descriptor)
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        if pty is not None:
            terminal = input_end = given[0]
            outputs = {terminal: Stream.STDOUT}
        else:
            outputs = dict(zip(ours[:2], (Stream.STDOUT, Stream.STDERR), strict=True))
        process = LocalProcess(self, answer["pid"], sink, input_end, outputs, terminal, oom_kills)
        self._processes[process.pid] = process
        early: wire.Message | None = answer.get("exit") or self._early_exits.pop(process.pid, None)
        process.attend(early)
        return process

    def forget(self, process: LocalProcess) -> None:
        """Drop an ended process: its id may be used again from here on. The door hears of it with the next start."""
        if self._processes.pop(process.pid, None) is not None:
            self._forgotten.append(process.pid)

    def oom_kills(self) -> int:
        """How often the kernel killed in this sandbox for memory."""
        return self.group.oom_kills() if self.group is not None else 0

    async def kill_everything(self) -> bool:
        try:
            await self.kill({"op": "kill_all"})
        except ChannelClosed:
            pass  # with the sandbox everything in it died
        except Refused as refusal:
            raise Internal(f"not everything was killed: {refusal.what}", reason="KILL_FAILED") from refusal
        return True

    async def kill(self, request: wire.Message) -> None:
        """Have the door kill a tree or everything. Raises channel.Refused or channel.ChannelClosed."""
        frozen = self.group is not None and self.group.can_freeze
        try:
            async with self.freezing.awake():
                await self.door({**request, "within": _KILL_SOON_S if frozen else _KILL_S})
            return
        except Refused as refusal:
            if not frozen or refusal.errno != errno.ETIMEDOUT:
                raise
        # So many are made at once that the door can make none to see to it. What stands still makes none.
        assert self.group is not None
        async with self.freezing.still():
            self.group.kill({self.first_pid, self.door_pid})
        async with self.freezing.awake():
            await self.door({**request, "within": _KILL_S})

    # Files -------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def open_read(self, path: str, *, follow_symlink: bool) -> AsyncIterator[tuple[FileInfo, FileReader]]:
        answer, given = await self._file({"op": "open_read", "path": path, "follow": follow_symlink}, path)
        try:
            yield info(os.path.basename(path), answer), Reader(given[0], path)
        finally:
            os.close(given[0])

    @asynccontextmanager
    async def open_write(self, path: str, mode: int) -> AsyncIterator[FileWriter]:
        answer, given = await self._file({"op": "open_write", "path": path}, path)
        writer = Writer(self.door, self.lost, path, mode, answer, given)
        try:
            yield writer
        finally:
            try:
                if not writer.committed and not self._ended:
                    await self._file({**answer, "op": "discard"}, path, given)
            finally:
                for descriptor in given:
                    os.close(descriptor)

    async def read_tree(self, path: str, max_bytes: int) -> AsyncGenerator[bytes, None]:
        try:
            job = {"job": "read_tree", "path": path, "max_bytes": max_bytes, "max_entries": diffs.MAX_ENTRIES}
            async with aclosing(tree.stream(self.door, job)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except Refused as refusal:
            raise file_error(refusal, path) from refusal
        except ChannelClosed as error:
            raise await self.lost() from error

    async def write_tree(self, path: str, archive: int, *, layer: bool = False) -> tuple[int, int]:
        job = {
            "job": "write_tree",
            "path": path,
            "layer": layer,
            "max_bytes": _MAX_TREE_BYTES,
            "max_entries": _MAX_TREE_ENTRIES,
        }
        answer = await self._tree_job(job, path, [archive])
        return answer["entries"], answer["bytes"]

    async def stat(self, path: str) -> FileInfo:
        answer, _ = await self._file({"op": "stat", "path": path}, path)
        return info(os.path.basename(path.rstrip("/")) or "/", answer)

    async def entries(self, path: str, after: str, limit: int) -> tuple[list[FileInfo], str]:
        answer, _ = await self._file({"op": "list", "path": path, "after": after, "limit": limit}, path)
        return [info(entry["name"], entry) for entry in answer["entries"]], answer["last"]

    async def make_directory(self, path: str, mode: int) -> None:
        await self._file({"op": "mkdir", "path": path, "mode": mode}, path)

    async def remove(self, path: str, *, recursive: bool) -> None:
        await self._tree_job({"job": "remove", "path": path, "recursive": recursive}, path)

    async def _file(self, request: wire.Message, path: str, descriptors: Sequence[int] = ()) -> Reply:
        try:
            return await self.door(request, descriptors)
        except Refused as refusal:
            raise file_error(refusal, path) from refusal
        except ChannelClosed as error:
            raise await self.lost() from error

    async def _tree_job(self, job: wire.Message, path: str, descriptors: Sequence[int] = ()) -> wire.Message:
        try:
            return await tree.run(self.door, job, descriptors)
        except Refused as refusal:
            raise file_error(refusal, path) from refusal
        except ChannelClosed as error:
            raise await self.lost() from error

    # Network, figures, end ---------------------------------------------------------------------------------------

    async def open_endpoint(self, policy: NetworkPolicy) -> None:
        """Open the one endpoint that the policy names. Raises Refused when the port cannot be bound."""
        _, given = await self.door({"op": "listen", "port": policy.local_port})
        self._endpoint = Endpoint(self.id, socket.socket(fileno=given[0]), policy)
        self._endpoint.open()

    async def set_network(self, policy: NetworkPolicy) -> None:
        if policy.kind is NetworkKind.NONE and self._endpoint is not None:
            endpoint, self._endpoint = self._endpoint, None
            await endpoint.aclose()

    async def stats(self) -> Stats:
        figures = self.group.stats() if self.group is not None else Stats()
        held = await self.disk.look(self.first_pid)
        return figures if held is None else replace(figures, disk_bytes=held.bytes, inodes=held.inodes)

    @property
    def at_work(self) -> bool:
        """Whether it was made and has not ended."""
        return not self._ended and self._ready.done() and self._ready.exception() is None

    async def diff(
        self, below: Sequence[str] = (), max_bytes: int = diffs.DEFAULT_BYTES
    ) -> AsyncGenerator[bytes | list[str], None]:
        pieces = diffs.stepwise(self._diff(below, max_bytes), diffs.in_thread)
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece

    def _diff(self, below: Sequence[str], max_bytes: int) -> Generator[bytes | list[str], None, None]:
        for piece in layers.diff(self.upper, below, max_bytes):
            if self._ended:
                # Its files may be going: what is told of them is not all of them.
                raise sandbox_lost(self._lost_reason, self.id)
            yield piece

    # Freezing and the end ----------------------------------------------------------------------------------------

    async def pause(self) -> None:
        await self.freezing.pause()

    async def resume(self) -> None:
        await self.freezing.resume()

    async def destroy(self) -> None:
        if self._destroyed is None or _failed(self._destroyed):
            self._destroyed = asyncio.create_task(self._destroy(), name=f"destroy-{self.id}")
        # Shielded: a caller that gives up does not stop the removal.
        await asyncio.shield(self._destroyed)

    def keep_upper(self, target: Path) -> None:
        """Have ``destroy`` move the sandbox's files to ``target`` instead of removing them."""
        self.kept_as = target

    async def _destroy(self) -> None:
        if not self._ended:
            self._end()
        endpoint, self._endpoint = self._endpoint, None
        try:
            if endpoint is not None:
                await endpoint.aclose()
        finally:
            self.freezing.let_die()
            await self._release(self)


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
