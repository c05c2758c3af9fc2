"""One sandbox of E2B: an attended sandbox whose pipe is a command's, and whose end and network E2B is told of.

Invariants: the internet is closed at E2B before a narrower policy counts as applied; a renewed lease moves E2B's own
deadline before it is told as renewed.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from penstock_chassis.errors import FailedPrecondition
from penstock_sandbox.backends.attended.files import lost
from penstock_sandbox.backends.attended.messages import Greeting
from penstock_sandbox.backends.attended.sandbox import AttendedSandbox
from penstock_sandbox.backends.attended.stream import LinkLost
from penstock_sandbox.backends.e2b.cloud import Cloud
from penstock_sandbox.backends.e2b.equipment import WORKDIR, Workload, attach_command
from penstock_sandbox.backends.e2b.errors import Denied, Gone
from penstock_sandbox.backends.e2b.pipe import GONE, open_pipe
from penstock_sandbox.model import NetworkKind, NetworkPolicy

if TYPE_CHECKING:
    from e2b import AsyncSandbox

_SYSTEM_PATH = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/local/sbin", "/usr/sbin", "/sbin")
# Each beat of an idle sandbox is a request to E2B.
_HEARTBEAT_S = 20.0


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
        timeout: Callable[[float], float],
        on_lost: Callable[[str], None],
        release: Callable[[E2BSandbox], Awaitable[None]],
    ) -> None:
        super().__init__(
            sandbox_id,
            lambda: open_pipe(made, attach_command(sandbox_id)),
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
        self.keep: Callable[[], Awaitable[None]] | None = None
        """What ``destroy`` does once nobody is attached any more and before the sandbox is ended."""
        self.terminals = False
        """Whether the template has terminals; known once it is open, as is ``protected``."""
        self.protected = False
        """Whether the workload is another user than what serves it."""
        self._cloud = cloud
        self._internet = network is NetworkKind.OPEN
        self._timeout = timeout
        self._release = release

    async def open(self, policy: NetworkPolicy | None = None) -> Greeting:
        greeting = await super().open(policy)
        self.terminals, self.protected = greeting.pty, greeting.user_switch
        return greeting

    @property
    def e2b_id(self) -> str:
        """E2B's name of it."""
        return self.made.sandbox_id

    async def renewed(self, until: float) -> None:
        try:
            await self._cloud.set_timeout(self.e2b_id, self._timeout(until - time.time()))
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

    async def _end_at_e2b(self) -> None:
        try:
            if self.keep is not None:
                await self.keep()
        finally:
            await self._release(self)
