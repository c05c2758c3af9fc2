"""One sandbox of E2B: an attended sandbox whose pipe is a command's, and whose end and network E2B is told of.

Invariants
- The internet is closed at E2B before a narrower policy counts as applied; a renewed lease moves E2B's own deadline
  before it is told as renewed.
- A paused sandbox is one that E2B has stopped, memory kept, and its link opens no pipe; only to signal or kill a
  process and to be copied is it awake for a moment. A pause or resume that nobody waits for any more is taken back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import structlog

from penstock_chassis.errors import FailedPrecondition, PenstockError, Unavailable
from penstock_sandbox.backends.attended.files import lost
from penstock_sandbox.backends.attended.messages import Greeting
from penstock_sandbox.backends.attended.sandbox import AttendedSandbox
from penstock_sandbox.backends.attended.stream import LinkLost
from penstock_sandbox.backends.e2b.cloud import Cloud
from penstock_sandbox.backends.e2b.equipment import WORKDIR, Workload, attach_command
from penstock_sandbox.backends.e2b.errors import Denied, Gone
from penstock_sandbox.backends.e2b.pipe import GONE, open_pipe
from penstock_sandbox.clock import even_time
from penstock_sandbox.model import NetworkKind, NetworkPolicy, Stats

if TYPE_CHECKING:
    from e2b import AsyncSandbox

_SYSTEM_PATH = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/local/sbin", "/usr/sbin", "/sbin")
# Each beat of an idle sandbox is a request to E2B.
_HEARTBEAT_S = 20.0

_log = structlog.get_logger(__name__)


class E2BSandbox(AttendedSandbox):
    """See the module. ``release`` ends the E2B sandbox; ``timeout`` says what E2B's deadline is for a lease."""

    def __init__(
        self,
        sandbox_id: str,
        cloud: Cloud,
        made: AsyncSandbox,
        workload: Workload,
        network: NetworkKind,
        path: Sequence[str],
        lease_s: float,
        timeout: Callable[[float], float],
        on_lost: Callable[[str], None],
        release: Callable[[E2BSandbox], Awaitable[None]],
    ) -> None:
        super().__init__(
            sandbox_id,
            lambda: open_pipe(self.made, attach_command(sandbox_id)),
            home=workload.home,
            workdir=WORKDIR,
            user=workload.name,
            default_env={
                "PATH": ":".join([*path, *_SYSTEM_PATH]),
                "HOME": workload.home,
                "USER": workload.name,
                "LOGNAME": workload.name,
                "SHELL": "/bin/bash",
                "LANG": "C.UTF-8",
                "TERM": "dumb",
                "TMPDIR": "/tmp",  # noqa: S108 - the sandbox's
            },
            on_lost=on_lost,
            destroy=self._end_at_e2b,
            heartbeat_s=_HEARTBEAT_S,
        )
        self.made = made
        """What speaks to it; another one after a resume."""
        self.keep: Callable[[], Awaitable[None]] | None = None
        """What ``destroy`` does, once, when nobody is attached any more and before the sandbox is ended."""
        self.terminals = False
        """Whether the template has terminals; known once it is open, as is ``protected``."""
        self.protected = False
        """Whether the workload is another user than what serves it."""
        self._cloud = cloud
        self._internet = network is NetworkKind.OPEN
        self._timeout = timeout
        self._release = release
        self._until = even_time() + lease_s
        self._switching = asyncio.Lock()
        self._paused = False
        self._undoing: set[asyncio.Task[None]] = set()

    async def open(self, policy: NetworkPolicy | None = None) -> Greeting:
        greeting = await super().open(policy)
        self.terminals, self.protected = greeting.pty, greeting.user_switch
        return greeting

    @property
    def e2b_id(self) -> str:
        """E2B's name of it."""
        return self.made.sandbox_id

    @property
    def settled(self) -> bool:
        """Whether E2B lists it, running or paused: not while it is on the way from one to the other."""
        return not self._switching.locked()

    async def renewed(self, until: float) -> None:
        async with self._switching:
            # What is paused has no deadline; it gets one when it is resumed.
            if not self._paused:
                await self._set_deadline(until)
            self._until = until

    async def _set_deadline(self, until: float) -> None:
        try:
            await self._cloud.set_timeout(self.e2b_id, self._timeout(until - even_time()))
        except Gone:
            self.lose(GONE)
            raise lost(LinkLost(GONE)) from None
        except Denied as denied:
            raise FailedPrecondition(
                f"E2B does not keep a sandbox so long (status {denied.status})", reason="LEASE_REFUSED"
            ) from None

    async def set_network(self, policy: NetworkPolicy) -> None:
        if self._internet:
            try:
                await self._cloud.close_network(self.e2b_id)
            except Gone:
                self.lose(GONE)
                raise lost(LinkLost(GONE)) from None
            except Denied as denied:
                raise FailedPrecondition(
                    f"E2B does not close this sandbox's network (status {denied.status})", reason="CAPABILITY_MISSING"
                ) from None
            self._internet = False
        await super().set_network(policy)

    # Pausing -----------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        await self._completely(self._sleep, self._wake)

    async def resume(self) -> None:
        await self._completely(self._wake, self._sleep)

    async def _completely(self, change: Callable[[], Awaitable[None]], back: Callable[[], Awaitable[None]]) -> None:
        """Make a change; one that was begun at E2B is not cancelled with its caller, but taken back after it."""
        changing = asyncio.create_task(self._switch(change))
        try:
            await asyncio.shield(changing)
        except asyncio.CancelledError:
            undoing = asyncio.create_task(self._take_back(changing, back))
            self._undoing.add(undoing)
            undoing.add_done_callback(self._undoing.discard)
            await asyncio.shield(undoing)
            raise

    async def _switch(self, change: Callable[[], Awaitable[None]]) -> None:
        async with self._switching:
            await change()

    async def _take_back(self, changing: asyncio.Task[None], back: Callable[[], Awaitable[None]]) -> None:
        await asyncio.wait({changing})
        if changing.exception() is None:
            try:
                await self._switch(back)
            except PenstockError as error:
                _log.error("a cancelled pause or resume was not taken back", sandbox=self.id, error=error.message)

    async def _sleep(self) -> None:
        if self._paused:
            return
        await self._link.suspend()
        try:
            await self._cloud.pause(self.e2b_id)
        except (Gone, Denied, PenstockError) as error:
            try:
                # It may be paused all the same: only the answer was lost.
                await self._connect()
            finally:
                self._link.resume()
            if isinstance(error, PenstockError):
                raise Unavailable("E2B did not pause it", reason="PAUSE_FAILED", retry_after_s=1.0) from error
            raise FailedPrecondition(
                "this deployment of E2B pauses no sandbox",
                reason="CAPABILITY_MISSING",
                metadata={"backend": "e2b", "capabilities": "pause"},
            ) from None
        self._paused = True

    async def _wake(self) -> None:
        if self._paused:
            await self._connect()
            self._paused = False
            self._link.resume()

    async def _connect(self) -> None:
        """Have it run at E2B, with the deadline that it should have."""
        try:
            self.made = await self._cloud.connect(self.e2b_id, self._timeout(max(self._until - even_time(), 0.0)))
        except Gone:
            self.lose(GONE)
            raise lost(LinkLost(GONE)) from None
        except (Denied, PenstockError) as error:
            raise Unavailable("E2B did not resume it", reason="PAUSE_FAILED", retry_after_s=1.0) from error

    @asynccontextmanager
    async def woken(self) -> AsyncIterator[bool]:
        if not self._paused and self.settled:
            yield False
            return
        async with self._switching:
            was_paused = self._paused
            if was_paused:
                await self._wake()
            try:
                yield was_paused
            finally:
                if was_paused:
                    await self._sleep_again()

    @asynccontextmanager
    async def detached(self) -> AsyncIterator[None]:
        """For what cuts its streams: nobody is attached inside, and it runs at E2B; as before afterwards."""
        async with self._switching:
            if self._paused:
                await self._connect()
            else:
                await self._link.suspend()
            try:
                yield
            finally:
                if self._paused:
                    self._paused = False
                    await self._sleep_again()
                else:
                    self._link.resume()

    async def _sleep_again(self) -> None:
        try:
            await self._sleep()
        except PenstockError as error:
            # It is told as paused and runs: the next attempt to pause or resume it sets that right.
            _log.error("a sandbox that was paused runs", sandbox=self.id, error=error.message)

    async def stats(self) -> Stats:
        """As E2B measures: the whole machine, every few seconds; nothing where it does not."""
        try:
            measured = await self._cloud.metrics(self.e2b_id)
        except (Gone, Denied):
            return Stats()
        if not measured:
            return Stats()
        return Stats(
            memory_bytes=measured[-1].mem_used,
            memory_peak_bytes=max(one.mem_used for one in measured),
            disk_bytes=measured[-1].disk_used,
        )

    async def _end_at_e2b(self) -> None:
        await asyncio.gather(*self._undoing, return_exceptions=True)
        keep, self.keep = self.keep, None
        try:
            if keep is not None:
                await keep()
        finally:
            await self._release(self)
