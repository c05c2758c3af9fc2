"""A live sandbox with a guest agent: a whole ``SandboxHandle``, over pipes that the backend opens.

Purpose: a backend makes a sandbox, starts the guest agent in it or beside it, and provides an opener of pipes to the
agent and a way to destroy the sandbox. The rest is here, shared by all of them.

Invariants: all access to the sandbox goes through its link; the sandbox ends exactly once, by ``destroy`` or by being
lost, and then every process in it gets that event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass

import structlog

from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.errors import FailedPrecondition, Unavailable
from penstock_sandbox.backends.guest_client.endpoint import Endpoint
from penstock_sandbox.backends.guest_client.files import Files, lost
from penstock_sandbox.backends.guest_client.link import HEARTBEAT_S, LOST_AFTER_S, Judge, Link, NotExecuted
from penstock_sandbox.backends.guest_client.messages import Exited, Greeting
from penstock_sandbox.backends.guest_client.pipe import Opener
from penstock_sandbox.backends.guest_client.process import ORDER_ANSWER_S, AttendedProcess
from penstock_sandbox.backends.guest_client.stream import LinkLost, Stream
from penstock_sandbox.domain.backend import (
    FileReader,
    FileWriter,
    ProcessHandle,
    ProcessSink,
    SandboxHandle,
    StartFailed,
)
from penstock_sandbox.domain.diffs import DEFAULT_BYTES
from penstock_sandbox.domain.errno import Refused, file_error
from penstock_sandbox.domain.model import FileInfo, NetworkPolicy, PtySize, Stats
from penstock_sandbox.guest import frames

_log = structlog.get_logger(__name__)

START_ANSWER_S = 30.0
"""Maximum wait for a program to be executed. An agent can stop it before that, so that the answer never comes."""

_BY_A_GUEST = frozenset({"ATTENDANT_ENDED", "ATTENDANT_RESTARTED"})

Diff = Callable[[Sequence[str], int], AsyncGenerator[bytes | list[str], None]]


@dataclass(frozen=True, slots=True)
class ProcessDefaults:
    """What a sandbox's processes start with, unless their command says otherwise. Paths are the sandbox's."""

    home: str
    workdir: str
    user: str
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class BackendHooks:
    """What the backend does for a sandbox, and observes from outside.

    ``on_lost`` gets the reason when a sandbox that was open has ended by itself. ``destroy`` is the backend's own way
    to end it, whatever became of the link; it is called again if it failed. ``diff``, ``stats`` and ``oom_kills`` (a
    counter) are None where the backend cannot observe. Without ``oom_kills`` the guest agent counts, if the sandbox
    shows its own control group. ``judge`` finds the cause of a loss; without it, a guest agent that has gone counts as
    ended by the sandbox's own workload.
    """

    on_lost: Callable[[str], None]
    destroy: Callable[[], Awaitable[None]]
    diff: Diff | None = None
    stats: Callable[[], Awaitable[Stats]] | None = None
    oom_kills: Callable[[], int] | None = None
    judge: Judge | None = None
    keeps_network: bool = False
    """Whether nothing can narrow its network any more."""


class GuestSandbox(SandboxHandle):
    """One sandbox."""

    def __init__(
        self,
        sandbox_id: str,
        opener: Opener,
        defaults: ProcessDefaults,
        hooks: BackendHooks,
        *,
        lost_after_s: float = LOST_AFTER_S,
        heartbeat_s: float = HEARTBEAT_S,
        start_answer_s: float = START_ANSWER_S,
        order_answer_s: float = ORDER_ANSWER_S,
    ) -> None:
        self._start_answer_s = start_answer_s
        self._order_answer_s = order_answer_s
        self.id = sandbox_id
        self.home = defaults.home
        self.workdir = defaults.workdir
        self.user = defaults.user
        self.default_env = defaults.env
        self._hooks = hooks
        self._link = Link(
            opener,
            self._event,
            self._opened,
            self._lost,
            judge=hooks.judge or by_what_serves_it,
            lost_after_s=lost_after_s,
            heartbeat_s=heartbeat_s,
        )
        self._files = Files(self._link)
        self._processes: dict[int, AttendedProcess] = {}
        self._endpoints: dict[NetworkPolicy, Endpoint] = {}
        self._ready = False
        self._ended = False
        self._destroyed: asyncio.Task[None] | None = None
        self._cutting = TaskOwner()

    async def open(self, policy: NetworkPolicy | None = None) -> Greeting:
        """Attaches, and opens a policy's endpoints; returns the guest agent's greeting.

        Raises LinkLost if the guest agent cannot be reached in time, Refused if the port cannot be bound. In both
        cases the caller must still destroy the sandbox.
        """
        greeting = await self._link.open()
        for endpoint in () if policy is None else policy.endpoints:
            await self._listen(endpoint)
        self._ready = True
        return greeting

    def lose(self, reason: str) -> None:
        """Handles the sandbox's end by itself, as known to the backend: every waiter fails at once."""
        self._link.lose(reason)

    # Events of the link ------------------------------------------------------------------------------------------

    def _event(self, message: frames.Message) -> None:
        try:
            ended = self._link.checked(Exited, message)
        except LinkLost:
            return
        process = self._processes.get(ended.process)
        if process is not None:
            process.exited(ended)

    def _opened(self, stream: Stream, port: int) -> None:
        for policy, endpoint in self._endpoints.items():
            if policy.local_port == port:
                endpoint.accept(stream)
                return
        stream.reset()

    def _lost(self, reason: str) -> None:
        if self._ended:
            return
        self._end(reason)
        if self._ready:
            self._hooks.on_lost(reason)

    def _end(self, reason: str = "") -> None:
        self._ended = True
        for process in list(self._processes.values()):
            process.lose(reason)
        for endpoint in self._endpoints.values():
            # Its connections belong to the link, which is gone.
            self._cutting.start(endpoint.aclose())
        self._endpoints.clear()

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
            self._link,
            sink,
            self._forget,
            self._hooks.oom_kills,
            self.woken,
            stdin=stdin,
            pty=pty is not None,
            order_answer_s=self._order_answer_s,
        )
        self._processes[process.number] = process
        try:
            await self._link.request(
                "start",
                within_s=self._start_answer_s,
                argv=list(argv),
                env=dict(env),
                cwd=cwd,
                pty=(pty.rows, pty.columns) if pty is not None else None,
                **process.streams(),
            )
        except TimeoutError as error:
            await process.give_up()
            if self._link.lost is not None:
                raise lost(self._link.lost) from error
            raise Unavailable(
                "the program was not executed in time, and was killed", reason="START_UNANSWERED", retry_after_s=1.0
            ) from error
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
        """Keeps the guest agent awake where a pause freezes it; yields whether it was and will be again afterwards."""
        return nullcontext(False)

    async def kill_everything(self) -> bool:
        """Kills the trees of all processes that were started, also of those that the service has forgotten.

        As with one process's kill, what cannot be killed ends the sandbox: its processes are then reported as lost.
        """
        try:
            async with self.woken():
                await self._link.request("kill_all")
        except LinkLost:
            pass  # everything ended with the sandbox
        except Refused as refusal:
            _log.warning("not every process tree was killed, so the sandbox ends", reason=refusal.what)
            self._link.lose("TREE_SURVIVED")
        return True

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

    # Network, statistics, end ------------------------------------------------------------------------------------

    async def set_network(self, policy: NetworkPolicy) -> None:
        if self._hooks.keeps_network:
            raise FailedPrecondition(
                "a sandbox with an open network keeps it on this backend: create another one",
                reason="CAPABILITY_MISSING",
                metadata={"capabilities": "narrowing of OPEN"},
            )
        wanted = policy.endpoints
        try:
            for present in [one for one in self._endpoints if one not in wanted]:
                await self._endpoints.pop(present).aclose()
                await self._link.request("unlisten", port=present.local_port)
            for endpoint in wanted:
                if endpoint in self._endpoints:
                    continue
                try:
                    await self._listen(endpoint)
                except Refused as refusal:
                    raise file_error(refusal, f"port {endpoint.local_port}") from refusal
        except LinkLost as error:
            raise lost(error) from error

    async def _listen(self, policy: NetworkPolicy) -> None:
        """Raises LinkLost, Refused."""
        self._endpoints[policy] = Endpoint(self.id, policy)
        try:
            await self._link.request("listen", port=policy.local_port)
        except Refused:
            del self._endpoints[policy]
            raise

    async def stats(self) -> Stats:
        return await self._hooks.stats() if self._hooks.stats is not None else Stats()

    async def diff(
        self, below: Sequence[str] = (), max_bytes: int = DEFAULT_BYTES
    ) -> AsyncGenerator[bytes | list[str], None]:
        if self._hooks.diff is None:
            raise FailedPrecondition("this backend cannot list changes", reason="CAPABILITY_MISSING")
        async with aclosing(self._hooks.diff(below, max_bytes)) as pieces:
            async for piece in pieces:
                if self._destroyed is not None or self._link.lost is not None:
                    # Its files may be partly removed: the diff is not complete.
                    raise FailedPrecondition("the sandbox is gone", reason="SANDBOX_LOST")
                yield piece

    async def destroy(self) -> None:
        ending = self._destroyed
        if ending is None or (ending.done() and (ending.cancelled() or ending.exception() is not None)):
            # A failed destroy is repeated: callers retry until it succeeds.
            ending = self._destroyed = asyncio.create_task(self._destroy(), name=f"destroy-{self.id}")
        # Shielded: a caller's cancellation does not stop the removal.
        await asyncio.shield(ending)

    async def _destroy(self) -> None:
        if not self._ended:
            self._end()
        try:
            await self._link.aclose()
            await self._cutting.wait()
        finally:
            await self._hooks.destroy()


async def by_what_serves_it(reason: str) -> str:
    """If the provider still has a sandbox whose guest agent has gone, only the workload beside it can have ended it."""
    return "ATTENDANT_KILLED" if reason in _BY_A_GUEST else reason
