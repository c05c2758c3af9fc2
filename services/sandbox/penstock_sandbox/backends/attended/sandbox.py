"""A live sandbox that an attendant serves: everything of a ``SandboxHandle``, over whatever pipe the backend opens.

Purpose: a backend makes a sandbox, starts the attendant in it or beside it, and hands over a way to open pipes to it
and a way to destroy it. The rest is here, the same for all of them.

Invariants: everything that enters the sandbox goes through its link; the sandbox ends exactly once, by ``destroy`` or
by being lost, and then every process in it is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext

from penstock_chassis.errors import FailedPrecondition
from penstock_sandbox.attendant import frames
from penstock_sandbox.backends.attended.endpoint import Endpoint
from penstock_sandbox.backends.attended.files import Files, lost
from penstock_sandbox.backends.attended.link import HEARTBEAT_S, LOST_AFTER_S, Judge, Link, NotExecuted
from penstock_sandbox.backends.attended.messages import Exited, Greeting
from penstock_sandbox.backends.attended.pipe import Opener
from penstock_sandbox.backends.attended.process import AttendedProcess
from penstock_sandbox.backends.attended.stream import LinkLost, Stream
from penstock_sandbox.backends.base import (
    FileReader,
    FileWriter,
    ProcessHandle,
    ProcessSink,
    SandboxHandle,
    StartFailed,
)
from penstock_sandbox.backends.diffs import DEFAULT_BYTES
from penstock_sandbox.backends.refusals import Refused, file_error
from penstock_sandbox.model import FileInfo, NetworkKind, NetworkPolicy, PtySize, Stats

_BY_AN_ATTENDANT = frozenset({"ATTENDANT_ENDED", "ATTENDANT_RESTARTED"})

Diff = Callable[[Sequence[str], int], AsyncGenerator[bytes | list[str], None]]


class AttendedSandbox(SandboxHandle):
    """One sandbox. ``destroy`` is the backend's own way to end it; it is called once, whatever became of the link.

    ``diff``, ``stats`` and ``oom_kills`` (a counter) are what the backend knows from outside, where it does. Without
    ``oom_kills`` the attendant counts, where the sandbox shows its own control group. ``judge`` finds out
    what brought a loss about; without, it is what ran in the sandbox where the attendant there has gone.
    """

    def __init__(
        self,
        sandbox_id: str,
        opener: Opener,
        *,
        home: str,
        workdir: str,
        user: str,
        default_env: Mapping[str, str],
        on_lost: Callable[[str], None],
        destroy: Callable[[], Awaitable[None]],
        diff: Diff | None = None,
        stats: Callable[[], Awaitable[Stats]] | None = None,
        oom_kills: Callable[[], int] | None = None,
        judge: Judge | None = None,
        lost_after_s: float = LOST_AFTER_S,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.id = sandbox_id
        self.home = home
        self.workdir = workdir
        self.user = user
        self.default_env = default_env
        self._on_lost = on_lost
        self._destroy_backing = destroy
        self._diff = diff
        self._stats = stats
        self._oom_kills = oom_kills
        self._link = Link(
            opener,
            self._event,
            self._opened,
            self._lost,
            judge=judge or by_what_serves_it,
            lost_after_s=lost_after_s,
            heartbeat_s=heartbeat_s,
        )
        self._files = Files(self._link)
        self._processes: dict[int, AttendedProcess] = {}
        self._endpoint: Endpoint | None = None
        self._ready = False
        self._ended = False
        self._destroyed: asyncio.Task[None] | None = None
        self._cutting: set[asyncio.Task[None]] = set()

    async def open(self, policy: NetworkPolicy | None = None) -> Greeting:
        """Attach, and open the endpoint of a ONE_ENDPOINT policy; answers what the attendant says of its sandbox.

        Raises LinkLost when the attendant cannot be reached in time, Refused when the port cannot be bound. Either
        way the sandbox is still the caller's to destroy.
        """
        greeting = await self._link.open()
        if policy is not None and policy.kind is NetworkKind.ONE_ENDPOINT:
            self._endpoint = Endpoint(self.id, policy)
            await self._link.request("listen", port=policy.local_port)
        self._ready = True
        return greeting

    def lose(self, reason: str) -> None:
        """The backend knows that the sandbox ended by itself: every waiter is told at once."""
        self._link.lose(reason)

    # From the link -----------------------------------------------------------------------------------------------

    def _event(self, message: frames.Message) -> None:
        try:
            ended = self._link.checked(Exited, message)
        except LinkLost:
            return
        process = self._processes.get(ended.process)
        if process is not None:
            process.exited(ended)

    def _opened(self, stream: Stream) -> None:
        if self._endpoint is not None:
            self._endpoint.accept(stream)
        else:
            stream.reset()

    def _lost(self, reason: str) -> None:
        if self._ended:
            return
        self._end(reason)
        if self._ready:
            self._on_lost(reason)

    def _end(self, reason: str = "") -> None:
        self._ended = True
        for process in list(self._processes.values()):
            process.lose(reason)
        if self._endpoint is not None:
            # Its connections belong to the link, which is gone.
            endpoint, self._endpoint = self._endpoint, None
            task = asyncio.create_task(endpoint.aclose())
            self._cutting.add(task)
            task.add_done_callback(self._cutting.discard)

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
        process = AttendedProcess(
            self._link, sink, self._forget, self._oom_kills, self.woken, stdin=stdin, pty=pty is not None
        )
        self._processes[process.number] = process
        try:
            await self._link.request(
                "start",
                argv=list(argv),
                env=dict(env),
                cwd=cwd,
                pty=(pty.rows, pty.columns) if pty is not None else None,
                **process.streams(),
            )
        except BaseException as error:
            process.drop()
            self._forget(process.number)
            if isinstance(error, NotExecuted):
                raise StartFailed(error.what) from error
            if isinstance(error, Refused):
                raise file_error(error, argv[0]) from error
            if isinstance(error, LinkLost):
                raise lost(error) from error
            raise
        return process

    def woken(self) -> AbstractAsyncContextManager[bool]:
        """Have the attendant answer, where a pause silences it; answers whether one did, and does again afterwards."""
        return nullcontext(False)

    def _forget(self, number: int) -> None:
        self._processes.pop(number, None)

    # Files -------------------------------------------------------------------------------------------------------

    def open_read(self, path: str, *, follow_symlink: bool) -> AbstractAsyncContextManager[tuple[FileInfo, FileReader]]:
        return self._files.open_read(path, follow_symlink=follow_symlink)

    def open_write(self, path: str, mode: int) -> AbstractAsyncContextManager[FileWriter]:
        return self._files.open_write(path, mode)

    def read_tree(self, path: str, max_bytes: int) -> AsyncGenerator[bytes, None]:
        return self._files.read_tree(path, max_bytes)

    async def write_tree(self, path: str, archive: int, *, layer: bool = False) -> tuple[int, int]:
        return await self._files.write_tree(path, archive, layer=layer)

    async def stat(self, path: str) -> FileInfo:
        return await self._files.stat(path)

    async def entries(self, path: str, after: str, limit: int) -> tuple[list[FileInfo], str]:
        return await self._files.entries(path, after, limit)

    async def make_directory(self, path: str, mode: int) -> None:
        await self._files.make_directory(path, mode)

    async def remove(self, path: str, *, recursive: bool) -> None:
        await self._files.remove(path, recursive=recursive)

    # Network, figures, end ---------------------------------------------------------------------------------------

    async def set_network(self, policy: NetworkPolicy) -> None:
        try:
            if policy.kind is NetworkKind.NONE and self._endpoint is not None:
                endpoint, self._endpoint = self._endpoint, None
                await endpoint.aclose()
                await self._link.request("unlisten")
            elif policy.kind is NetworkKind.ONE_ENDPOINT and self._endpoint is None:
                self._endpoint = Endpoint(self.id, policy)
                await self._link.request("listen", port=policy.local_port)
        except LinkLost as error:
            raise lost(error) from error
        except Refused as refusal:
            self._endpoint = None
            raise file_error(refusal, f"port {policy.local_port}") from refusal

    async def stats(self) -> Stats:
        return await self._stats() if self._stats is not None else Stats()

    async def diff(
        self, below: Sequence[str] = (), max_bytes: int = DEFAULT_BYTES
    ) -> AsyncGenerator[bytes | list[str], None]:
        if self._diff is None:
            raise FailedPrecondition("this backend tells no differences", reason="CAPABILITY_MISSING")
        async with aclosing(self._diff(below, max_bytes)) as pieces:
            async for piece in pieces:
                if self._destroyed is not None or self._link.lost is not None:
                    # Its files may be going: what is told of them is not all of them.
                    raise FailedPrecondition("the sandbox is gone", reason="SANDBOX_LOST")
                yield piece

    async def destroy(self) -> None:
        ending = self._destroyed
        if ending is None or (ending.done() and (ending.cancelled() or ending.exception() is not None)):
            # One that failed is done again: whoever asks for it goes on asking until it succeeds.
            ending = self._destroyed = asyncio.create_task(self._destroy(), name=f"destroy-{self.id}")
        # Shielded: a caller that gives up does not stop the removal.
        await asyncio.shield(ending)

    async def _destroy(self) -> None:
        if not self._ended:
            self._end()
        try:
            await self._link.aclose()
            await asyncio.gather(*self._cutting, return_exceptions=True)
        finally:
            await self._destroy_backing()


async def by_what_serves_it(reason: str) -> str:
    """Where a provider still has a sandbox whose attendant has gone, only what runs beside that can have ended it."""
    return "ATTENDANT_KILLED" if reason in _BY_AN_ATTENDANT else reason
