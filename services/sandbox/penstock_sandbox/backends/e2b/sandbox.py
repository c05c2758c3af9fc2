"""One sandbox of E2B, with a guest agent whose pipe is a command's; E2B applies its end and network policy.

Invariants
- E2B closes the internet before a narrower policy counts as applied; a lease that begins or is renewed moves E2B's own
  deadline before the caller gets its response, and none is renewed beyond what E2B keeps.
- A paused sandbox is stopped by E2B, memory kept, and its link opens no pipe; it is awake only briefly, to signal or
  kill a process and to be copied. A pause or resume whose caller was cancelled is reverted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog

from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.errors import FailedPrecondition, PenstockError, Unavailable
from penstock_chassis.times import even_time
from penstock_sandbox.backends.e2b.cloud import Cloud
from penstock_sandbox.backends.e2b.errors import Denied, Gone
from penstock_sandbox.backends.e2b.pipe import GONE, open_pipe
from penstock_sandbox.backends.e2b.provisioning import WORKDIR, Workload, attach_command
from penstock_sandbox.backends.guest_client.files import lost
from penstock_sandbox.backends.guest_client.messages import Greeting
from penstock_sandbox.backends.guest_client.sandbox import BackendHooks, GuestSandbox, ProcessDefaults
from penstock_sandbox.backends.guest_client.stream import LinkLost
from penstock_sandbox.domain.model import NetworkKind, NetworkPolicy, SandboxSpec, Stats

if TYPE_CHECKING:
    from e2b import AsyncSandbox

_SYSTEM_PATH = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/local/sbin", "/usr/sbin", "/sbin")
MARGIN_S = 60.0
"""How long after its lease E2B ends a sandbox by itself."""
# Each heartbeat of an idle sandbox is a request to E2B.
_HEARTBEAT_S = 20.0

_log = structlog.get_logger(__name__)


def process_defaults(workload: Workload, path: Sequence[str]) -> ProcessDefaults:
    """Returns what the workload's processes start with; ``path`` are directories for PATH, before the system's."""
    env = {
        "PATH": ":".join([*path, *_SYSTEM_PATH]),
        "HOME": workload.home,
        "USER": workload.name,
        "LOGNAME": workload.name,
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "TMPDIR": "/tmp",  # noqa: S108 - the sandbox's
    }
    return ProcessDefaults(workload.home, WORKDIR, workload.name, env)


@dataclass(frozen=True, slots=True)
class Lifetime:
    """E2B started a sandbox at ``began_at`` (by ``even_time``) or later, and runs it for at most ``most_s`` seconds."""

    began_at: float
    most_s: float


class E2BSandbox(GuestSandbox):
    """See the module. ``release`` ends the E2B sandbox; its ``lifetime`` begins anew with each resume."""

    def __init__(
        self,
        sandbox_id: str,
        cloud: Cloud,
        made: AsyncSandbox,
        defaults: ProcessDefaults,
        spec: SandboxSpec,
        lifetime: Lifetime,
        on_lost: Callable[[str], None],
        release: Callable[[E2BSandbox], Awaitable[None]],
    ) -> None:
        super().__init__(
            sandbox_id,
            lambda: open_pipe(self.made, attach_command(sandbox_id)),
            defaults,
            BackendHooks(on_lost, destroy=self._end_at_e2b),
            heartbeat_s=_HEARTBEAT_S,
        )
        self.made = made
        """The SDK's object for it; another one after a resume."""
        self.keep: Callable[[], Awaitable[None]] | None = None
        """Run once by ``destroy``, after the link has closed and before the sandbox is ended."""
        self.terminals = False
        """Whether the template has terminals; known once it is open, as is ``protected``."""
        self.protected = False
        """Whether the workload has another user than the guest agent."""
        self._cloud = cloud
        self._internet = spec.network.kind is NetworkKind.OPEN
        self._lifetime = lifetime
        self._release = release
        self._until = even_time() + (spec.lease_s or 0.0)
        self._switching = asyncio.Lock()
        self._paused = False
        self._undoing = TaskOwner()

    async def open(self, policy: NetworkPolicy | None = None) -> Greeting:
        greeting = await super().open(policy)
        self.terminals, self.protected = greeting.pty, greeting.user_switch
        return greeting

    @property
    def e2b_id(self) -> str:
        """E2B's id of it."""
        return self.made.sandbox_id

    @property
    def settled(self) -> bool:
        """Whether E2B lists it, running or paused: not during a switch between these."""
        return not self._switching.locked()

    async def begin_lease(self, lease_s: float) -> None:
        """Sets E2B's deadline for a lease of ``lease_s`` seconds that begins now.

        A lease of the whole lifetime ends with that, whose start was earlier. Raises FailedPrecondition
        (LEASE_REFUSED), Unavailable (PROVIDER_FAILED), ResourceExhausted (PROVIDER_LIMIT), Gone.
        """
        until = even_time() + lease_s
        async with self._switching:
            await self._set_deadline(until)
            self._until = until

    async def renewed(self, until: float) -> None:
        async with self._switching:
            # Refused here, since E2B would accept it and end the sandbox earlier.
            if until > self._most():
                raise FailedPrecondition(
                    f"E2B keeps a sandbox for at most {self._lifetime.most_s:g} s without a pause",
                    reason="LEASE_REFUSED",
                )
            # A paused sandbox has no deadline; it gets one when it is resumed.
            if not self._paused:
                try:
                    await self._set_deadline(until)
                except Gone:
                    self.lose(GONE)
                    raise lost(LinkLost(GONE)) from None
            self._until = until

    def _most(self) -> float:
        """Returns when E2B ends it in any case; that of a paused one counts from its resume."""
        return (even_time() if self._paused else self._lifetime.began_at) + self._lifetime.most_s

    async def _set_deadline(self, until: float) -> None:
        try:
            await self._cloud.set_timeout(self.e2b_id, self._timeout(until))
        except Denied as denied:
            raise FailedPrecondition(
                f"E2B does not keep a sandbox for so long (status {denied.status})", reason="LEASE_REFUSED"
            ) from None

    def _timeout(self, until: float) -> float:
        """Returns in how many seconds E2B shall end it by itself, if its lease ends at ``until``."""
        return max(min(until + MARGIN_S, self._most()) - even_time(), 0.0)

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
        """Makes a change; once begun at E2B it is not cancelled with its caller, but reverted after it."""
        changing = asyncio.create_task(self._switch(change))
        try:
            await asyncio.shield(changing)
        except asyncio.CancelledError:
            await self._undoing.run(self._take_back(changing, back))
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
                _log.error("a cancelled pause or resume was not undone", sandbox=self.id, error=error.message)

    async def _sleep(self) -> None:
        if self._paused:
            return
        await self._link.suspend()
        try:
            await self._cloud.pause(self.e2b_id)
        except (Gone, Denied, PenstockError) as error:
            try:
                # It may be paused in spite of the error: only the response was lost.
                await self._connect()
            finally:
                self._link.resume()
            if isinstance(error, PenstockError):
                raise Unavailable("E2B did not pause it", reason="PAUSE_FAILED", retry_after_s=1.0) from error
            raise FailedPrecondition(
                "this deployment of E2B cannot pause a sandbox",
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
        """Makes it run at E2B, with its proper deadline."""
        timeout_s = self._timeout(max(self._until, even_time()))
        if self._paused:
            self._lifetime = replace(self._lifetime, began_at=even_time())
        try:
            self.made = await self._cloud.connect(self.e2b_id, timeout_s)
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
        """For operations that cut its streams: the link is closed and it runs at E2B; restored afterwards."""
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
            # It is reported as paused and runs: the next pause or resume corrects that.
            _log.error("a paused sandbox runs", sandbox=self.id, error=error.message)

    async def stats(self) -> Stats:
        """Returns E2B's measurements: of the whole machine, every few seconds; empty where it has none."""
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
        await self._undoing.wait()
        keep, self.keep = self.keep, None
        try:
            if keep is not None:
                await keep()
        finally:
            await self._release(self)
