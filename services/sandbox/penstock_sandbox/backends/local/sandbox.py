"""A live local sandbox: its helper, processes, files, endpoint and what must be released at its end.

Invariants: all access to the sandbox goes through its helper; the sandbox ends exactly once, by ``destroy`` or by being
lost, and then every process in it gets that event.
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

from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.errors import FailedPrecondition, Internal, PenstockError
from penstock_sandbox.backends.host import layers
from penstock_sandbox.backends.host.cgroups import Group
from penstock_sandbox.backends.local import tree_jobs
from penstock_sandbox.backends.local.channel import Channel, ChannelClosed, Reply
from penstock_sandbox.backends.local.disk.limits import Allotment
from penstock_sandbox.backends.local.endpoint import Endpoint
from penstock_sandbox.backends.local.freezing import Freezing
from penstock_sandbox.backends.local.images.bases import Base
from penstock_sandbox.backends.local.opened_files import Reader, Writer, info
from penstock_sandbox.backends.local.process import LocalProcess
from penstock_sandbox.backends.local.spawner import wire
from penstock_sandbox.backends.local.spawner_process import SpawnerProcess
from penstock_sandbox.domain import diffs, paths
from penstock_sandbox.domain.backend import (
    MAX_ARCHIVE_BYTES,
    MAX_ARCHIVE_ENTRIES,
    FileReader,
    FileWriter,
    ProcessHandle,
    ProcessSink,
    SandboxHandle,
    StartFailed,
)
from penstock_sandbox.domain.errno import Refused, file_error, sandbox_lost
from penstock_sandbox.domain.model import FileInfo, NetworkKind, NetworkPolicy, PtySize, Stats, Stream

_VERDICT_S = 5.0
_KILL_S, _KILL_SOON_S = 10.0, 2.0


class LocalSandbox(SandboxHandle):
    """One sandbox of the local backend. ``release`` frees its allocations; it is called again if it failed."""

    home = paths.HOME
    workdir = paths.WORKDIR
    user = paths.USER

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
        base: Base | None = None,
    ) -> None:
        self.id = sandbox_id
        self.uid = uid
        self.upper = upper
        self.layer_ids: tuple[str, ...] = ()
        self.added: tuple[Path, ...] = ()
        """What its toolboxes add to its root, each a layer."""
        self.base = base
        if base is not None:
            self.home, self.workdir, self.user = base.account.home, base.workdir, base.account.name
        self.first_pid = self.helper_pid = 0
        """The host's ids of the sandbox's first process and its helper, once they exist."""
        self.default_env = default_env
        self.group = group
        self._on_lost = on_lost
        self._release = release
        self.disk = disk
        self.kept_as: Path | None = None
        self._channel: Channel | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # By number: the kernel gives the id of a process that has ended again, while its watchers still have it.
        self._processes: dict[int, LocalProcess] = {}
        self._early_exits: dict[int, wire.Message] = {}
        self._forgotten: list[int] = []
        self._endpoints: dict[NetworkPolicy, Endpoint] = {}
        self._shares_network = False
        self._ended = False
        self._lost_reason = ""
        self._over = asyncio.Event()
        self._verdict: asyncio.TimerHandle | None = None
        self.freezing = Freezing(group, lambda: self._ended)
        self.unfinished: set[str] = set()
        """Names of files that are being uploaded, each in the directory of its target."""
        self._uploads = TaskOwner(unlogged=(PenstockError,))
        self.being_copied = asyncio.Lock()
        """Held while its files are copied; they are not removed meanwhile."""
        self._destroyed: asyncio.Task[None] | None = None

    # Opening -----------------------------------------------------------------------------------------------------

    async def open(
        self,
        spawner: SpawnerProcess,
        arguments: Sequence[str],
        network: NetworkPolicy,
        *,
        read_only: Sequence[str],
        first: Sequence[str],
        tmp_inodes: int,
        fixed_clocks: bool,
    ) -> None:
        """Makes the sandbox by bubblewrap with ``arguments``; returns once its helper serves and its endpoint is open.

        ``read_only``, ``first``, ``tmp_inodes`` and ``fixed_clocks`` are as in ``SpawnerProcess.create``. After an
        error, ``destroy`` removes what there is. Raises Refused, channel.ChannelClosed (the spawner ended), OSError.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = Channel(ours, self._event, self._helper_closed)
        # The helper has its own copy of its end, so that this side sees the channel close with it.
        with theirs:
            self.first_pid, self.helper_pid = await spawner.create(
                self.id,
                arguments,
                theirs,
                uid=self.uid,
                groups=self.group.members_files if self.group is not None else [],
                read_only=read_only,
                writable=self.base.writable if self.base is not None else (),
                first=first,
                tmp_inodes=tmp_inodes,
                fixed_clocks=fixed_clocks,
            )
        await self._ready
        self._shares_network = network.kind is NetworkKind.OPEN
        for endpoint in network.endpoints:
            await self._open_endpoint(endpoint)

    async def _open_endpoint(self, policy: NetworkPolicy) -> None:
        _, given = await self.ask_helper({"op": "listen", "port": policy.local_port})
        self._endpoints[policy] = endpoint = Endpoint(self.id, socket.socket(fileno=given[0]), policy)
        endpoint.open()

    def _event(self, message: wire.Message) -> None:
        match message["event"]:
            case "ready":
                self._ready.set_result(None)
            case "failed":
                self._ready.set_exception(OSError(message["errno"], message["what"]))
            case "exit":
                process = self._processes.get(message["process"])
                if process is not None:
                    process.helper_exited(message)
                else:
                    self._early_exits[message["process"]] = message

    def _helper_closed(self) -> None:
        if not self._ready.done():
            self._ready.set_exception(OSError(errno.ECHILD, "the sandbox ended during its creation"))
        if self._channel is not None and self._channel.failed:
            self.lose("DOOR_UNREADABLE")
        if not self._ended and self._verdict is None:
            # The helper ends with the sandbox, by itself, or with the spawner; the spawner's event, or its end, shows
            # which. A sandbox without its helper is lost in any case.
            self._verdict = asyncio.get_running_loop().call_later(_VERDICT_S, lambda: self.lose("DOOR_CLOSED"))

    def lose(self, reason: str) -> None:
        """Handles that the sandbox ended by itself."""
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
        """Returns the error of an operation that lost its helper, with the reason, which is known a moment later."""
        await self._over.wait()
        return sandbox_lost(self._lost_reason, self.id)

    async def ask_helper(self, request: wire.Message, descriptors: Sequence[int] = ()) -> Reply:
        """Sends the sandbox helper a request. Raises channel.Refused or channel.ChannelClosed."""
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
            # A process that gets input only after the reply cannot end before the reply.
            "to_end": to_end and pty is None and not stdin,
        }
        # Read before the start, to distinguish an early OOM kill from a kill by another process.
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
                answer, given = await self.freezing.uncut(partial(self.ask_helper, request, theirs))
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
        process = LocalProcess(self, answer["seq"], answer["pid"], sink, input_end, outputs, terminal, oom_kills)
        self._processes[process.number] = process
        early: wire.Message | None = answer.get("exit") or self._early_exits.pop(process.number, None)
        process.attend(early)
        if self._ended and early is None:
            # The end came after the reply: it reached only the processes that were known by then.
            process.lose(self._lost_reason)
        return process

    def forget(self, process: LocalProcess) -> None:
        """Drops an ended process. The helper is informed with the next start."""
        if self._processes.pop(process.number, None) is not None:
            self._forgotten.append(process.number)

    def oom_kills(self) -> int:
        """Returns how often the kernel killed in this sandbox for memory."""
        return self.group.oom_kills() if self.group is not None else 0

    async def kill_everything(self) -> bool:
        try:
            await self.kill({"op": "kill_all"})
        except ChannelClosed:
            pass  # everything died with the sandbox
        except Refused as refusal:
            raise Internal(f"some processes were not killed: {refusal.what}", reason="KILL_FAILED") from refusal
        return True

    async def kill(self, request: wire.Message) -> None:
        """Makes the helper kill a tree or everything. Raises channel.Refused or channel.ChannelClosed."""
        frozen = self.group is not None and self.group.can_freeze
        try:
            async with self.freezing.awake():
                await self.ask_helper({**request, "within": _KILL_SOON_S if frozen else _KILL_S})
            return
        except Refused as refusal:
            if not frozen or refusal.errno != errno.ETIMEDOUT:
                raise
        # A fork bomb: the helper itself cannot fork. Frozen processes do not fork.
        assert self.group is not None
        async with self.freezing.still():
            self.group.kill({self.first_pid, self.helper_pid})
        async with self.freezing.awake():
            await self.ask_helper({**request, "within": _KILL_S})

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
        opening = self._uploads.start(self._open_write(path), f"open a file in {self.id}")
        try:
            answer, given = await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The helper may make the file all the same, and only its answer names it.
            self._uploads.start(self._discard_opened(opening, path), f"discard a file in {self.id}")
            raise
        writer = Writer(self.ask_helper, self.lost, path, mode, answer, given)
        try:
            yield writer
        finally:
            await self._uploads.run(self._close_write(answer, given, path, discards=not writer.committed))

    async def _open_write(self, path: str) -> Reply:
        # Uncut: a copier of the frozen sandbox's files must know the name of each that is unfinished.
        reply = await self._file({"op": "open_write", "path": path}, path, uncut=True)
        self.unfinished.add(reply[0]["partial"])
        return reply

    async def _discard_opened(self, opening: asyncio.Task[Reply], path: str) -> None:
        answer, given = await opening
        await self._close_write(answer, given, path, discards=True)

    async def _close_write(self, answer: wire.Message, given: Sequence[int], path: str, *, discards: bool) -> None:
        try:
            if discards:
                await self.ask_helper({**answer, "op": "discard"}, given)
        except Refused as refusal:
            # It may be gone, also because a commit whose caller was cancelled has succeeded.
            if refusal.errno != errno.ENOENT:
                raise file_error(refusal, path) from refusal
        except ChannelClosed:
            pass  # it is removed with the sandbox
        finally:
            self.unfinished.discard(answer["partial"])
            for descriptor in given:
                os.close(descriptor)

    async def read_tree(self, path: str, max_bytes: int) -> AsyncGenerator[bytes, None]:
        try:
            job = {"job": "read_tree", "path": path, "max_bytes": max_bytes, "max_entries": diffs.MAX_ENTRIES}
            async with aclosing(tree_jobs.stream(self.ask_helper, job)) as chunks:
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
            "max_bytes": MAX_ARCHIVE_BYTES,
            "max_entries": MAX_ARCHIVE_ENTRIES,
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

    async def _file(self, request: wire.Message, path: str, *, uncut: bool = False) -> Reply:
        """Asks the helper about a file; ``uncut``: and no freeze may interrupt that."""
        try:
            if uncut:
                return await self.freezing.uncut(partial(self.ask_helper, request))
            return await self.ask_helper(request)
        except Refused as refusal:
            raise file_error(refusal, path) from refusal
        except ChannelClosed as error:
            raise await self.lost() from error

    async def _tree_job(self, job: wire.Message, path: str, descriptors: Sequence[int] = ()) -> wire.Message:
        try:
            return await tree_jobs.run(self.ask_helper, job, descriptors)
        except Refused as refusal:
            raise file_error(refusal, path) from refusal
        except ChannelClosed as error:
            raise await self.lost() from error

    # Network, statistics, end ------------------------------------------------------------------------------------

    async def set_network(self, policy: NetworkPolicy) -> None:
        if self._shares_network:
            raise FailedPrecondition(
                "a sandbox of the local backend that shares this host's network keeps it: create another one",
                reason="CAPABILITY_MISSING",
                metadata={"backend": "local", "capabilities": "narrowing of OPEN"},
            )
        wanted = policy.endpoints
        for present in [one for one in self._endpoints if one not in wanted]:
            await self._endpoints.pop(present).aclose()
        for endpoint in wanted:
            if endpoint not in self._endpoints:
                await self._open_endpoint(endpoint)

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
                # Its files may be partly removed: the diff is not complete.
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
        # Shielded: a caller's cancellation does not stop the removal.
        await asyncio.shield(self._destroyed)

    def keep_upper(self, target: Path) -> None:
        """Makes ``destroy`` move the sandbox's files to ``target`` instead of removing them."""
        self.kept_as = target

    async def _destroy(self) -> None:
        if not self._ended:
            self._end()
        try:
            while self._endpoints:
                await self._endpoints.popitem()[1].aclose()
        finally:
            self.freezing.let_die()
            await self._uploads.wait()
            await self._release(self)


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
