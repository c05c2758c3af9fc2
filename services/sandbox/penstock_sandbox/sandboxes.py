"""Sandboxes as callers see them: made, found, paused, narrowed and deleted, the same on every backend.

Purpose: puts the parts together: requests (idempotency), admission (limits), the table (records and states), leases,
and removal; each has its own module.

Invariants
- A spec is refused before anything starts when it asks for what the backend or the operator does not allow (R54).
- A row in the journal is on disk before its sandbox is begun: no crash leaves anything that nobody knows of (R50).
- A sandbox that failed to be made, or whose maker was cancelled, leaves nothing behind; the clean-up's own failure is
  logged and does not hide the cause (R49).
- Identifiers are random and collision-free (128 bits, R25).
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import structlog

from penstock_chassis.errors import (
    FailedPrecondition,
    InvalidArgument,
    PenstockError,
    Unavailable,
    Violation,
)
from penstock_chassis.journal import Journal
from penstock_sandbox import metrics
from penstock_sandbox.admission import Admission, Owner
from penstock_sandbox.backends.base import Backend, MountedToolbox, SandboxHandle, SealedLayer
from penstock_sandbox.bases import Bases, unknown
from penstock_sandbox.clock import even_time
from penstock_sandbox.deletion import Pause
from penstock_sandbox.leases import Leases
from penstock_sandbox.model import BackendInfo, ForkKind, NetworkPolicy, Resources, Sandbox, SandboxSpec, State
from penstock_sandbox.policy import Limits, Policy
from penstock_sandbox.processes import Processes
from penstock_sandbox.records import Record, Records
from penstock_sandbox.removal import Removals
from penstock_sandbox.requests import Requests, give_up
from penstock_sandbox.table import LiveSandbox, Table
from penstock_sandbox.watermark import Watermark

_log = structlog.get_logger(__name__)


class Toolboxes(Protocol):
    """Where installed toolboxes are found."""

    def mounted(self, toolbox_id: str, *, host_programs: bool) -> MountedToolbox:
        """With the runtimes that sandboxes lack which see this host's programs, or do not. Raises NotFound."""

    def hold(self, toolbox_ids: Sequence[str]) -> None:
        """A sandbox uses them from here on."""

    def release(self, toolbox_ids: Sequence[str]) -> None:
        """A sandbox uses them no more."""


class Sandboxes:
    """All sandboxes of the service."""

    def __init__(
        self,
        backends: Mapping[str, Backend],
        default_backend: str,
        toolboxes: Toolboxes,
        journal: Journal,
        spool: Path,
        limits: Limits,
        clock: Callable[[], float] = even_time,
        pause: Pause = asyncio.sleep,
    ) -> None:
        self._backends = backends
        self._default = default_backend
        self._toolboxes = toolboxes
        self._spool = spool
        self._limits = limits
        self._policy = Policy(limits)
        self._clock = clock
        self._records = Records(journal)
        self._requests = Requests(clock)
        self._admission = Admission(
            limits.max_sandboxes, limits.max_sandboxes_per_owner, limits.max_queued, limits.queue_timeout_s
        )
        self._watermark = Watermark(spool, limits.min_free_bytes, limits.min_free_inodes)
        self.bases = Bases(pause)
        self.table = Table()
        self._removals = Removals(self.table, self._records, pause)
        self._leases = Leases(
            self.table, limits.max_lease_s, limits.max_lifetime_s, clock, lambda live: self._removals.begin(live)
        )

    async def open(self) -> None:
        """Have the backends remove what an earlier instance left, which is LOST, and start the reaper."""
        await self._removals.open(self._backends, self._clock() + self._limits.default_lease_s)
        self._leases.open()
        default = self._backends[self._default]
        if default.available and (missing := self._policy.not_held(default)):
            _log.warning("sandboxes are held to no default limit", backend=default.name, resources=missing)

    async def drain(self) -> None:
        """Make no more sandboxes and delete all: their watchers see the end before the server stops."""
        await self._requests.drain()
        await asyncio.gather(*(self._removals.remove(live) for live in self.table), return_exceptions=True)

    async def aclose(self) -> None:
        """Delete every sandbox and stop the reaper."""
        await self._leases.aclose()
        await self.drain()
        await self._removals.aclose()
        await self.bases.aclose()

    # Creating ----------------------------------------------------------------------------------------------------

    async def create(
        self, request_id: str, spec: SandboxSpec, *, wait_s: float | None = None, shared: bool = False
    ) -> Sandbox:
        """Make a sandbox, or answer what the same request made before.

        ``wait_s`` bounds the wait for a place beside the operator's own limit. A ``shared`` one is the service's and
        counts for no owner.

        Raises AlreadyExists (REQUEST_ID_REUSED), FailedPrecondition (CAPABILITY_MISSING, UPSTREAM_NOT_ALLOWED,
        BACKEND_UNAVAILABLE), NotFound (SNAPSHOT_UNKNOWN, TOOLBOX_UNKNOWN), ResourceExhausted (SANDBOX_LIMIT,
        OWNER_LIMIT, DISK_LOW), Aborted (DELETED_MEANWHILE).
        """
        owner = None if shared else spec.labels.get(self._limits.owner_label, "")
        live = await self._requests.join(request_id, spec, lambda: self._make(*self.applied(spec), owner, wait_s))
        return live.view

    def applied(self, spec: SandboxSpec) -> tuple[Backend, SandboxSpec]:
        """The backend and the spec with defaults; raises for what is not allowed. Nothing has started yet."""
        self._requests.check_open()
        name = spec.backend or self._default
        backend = self._backends.get(name)
        if backend is None:
            raise FailedPrecondition(
                f"no such backend; there are: {', '.join(sorted(self._backends))}",
                reason="BACKEND_UNAVAILABLE",
                metadata={"backend": name},
            )
        lease = spec.lease_s if spec.lease_s is not None else self._limits.default_lease_s
        self._policy.check_values(spec, lease)
        backend.refuse_unsupported(spec)
        self._policy.check_network(spec.network)
        return backend, dataclasses.replace(
            spec,
            backend=name,
            lease_s=lease,
            resources=self._policy.with_defaults(backend, spec.resources),
            network=self._policy.with_trust(spec.network),
        )

    def refuse_unforkable(self, spec: SandboxSpec) -> None:
        """Raise for a spec that no snapshot can be made of: what `create` raises, and CAPABILITY_MISSING (fork)."""
        backend, _ = self.applied(spec)
        if backend.capabilities.fork is ForkKind.NONE:
            raise FailedPrecondition(
                f"the {backend.name} backend cannot do this here: fork",
                reason="CAPABILITY_MISSING",
                metadata={"backend": backend.name, "capabilities": "fork"},
            )

    async def _make(self, backend: Backend, spec: SandboxSpec, owner: Owner, wait_s: float | None) -> LiveSandbox:
        assert spec.lease_s is not None
        # Given back here if it comes to no sandbox, otherwise with the sandbox.
        with ExitStack() as holds:
            mounted = [
                self._toolboxes.mounted(toolbox, host_programs=backend.host_programs) for toolbox in spec.toolbox_ids
            ]
            self._toolboxes.hold(spec.toolbox_ids)
            holds.callback(self._toolboxes.release, spec.toolbox_ids)
            if spec.snapshot_id:
                self.bases.hold(spec.snapshot_id)
                holds.callback(self.bases.release, spec.snapshot_id)
                if not await backend.has_layer(spec.snapshot_id):
                    raise unknown(spec.snapshot_id)
            holds.callback(await self._admission.place(owner, wait_s))
            async with self._admission.making(backend.name, backend.creates_at_once, owner):
                self._watermark.check()
                with _counted(backend.name, fork=bool(spec.snapshot_id)):
                    return await self._make_in_place(backend, spec, mounted, holds)

    async def _make_in_place(
        self, backend: Backend, spec: SandboxSpec, mounted: Sequence[MountedToolbox], holds: ExitStack
    ) -> LiveSandbox:
        assert spec.lease_s is not None
        now = self._clock()
        view = Sandbox(f"sb-{secrets.token_hex(16)}", State.CREATING, spec, now, now + spec.lease_s)
        live = LiveSandbox(view, backend, holds.pop_all())
        live.making = asyncio.current_task()
        self.table.add(live)
        try:
            # Awaited before anything is made: beside it, a crash could come first.
            await self._records.write(Record(view.id, backend.name, spec.labels, now))
            live.handle = await backend.create(view.id, spec, mounted, lambda reason: self._removals.lost(live, reason))
            if live.view.state is State.LOST:
                raise Unavailable("the sandbox was lost as it was made", reason="CREATE_FAILED", retry_after_s=0.1)
            live.processes = Processes(live.handle, spec.env, self._spool)
            live.become(
                state=State.READY,
                expires_at=self._leases.begin(live, spec.lease_s),
                home=live.handle.home,
                workdir=live.handle.workdir,
            )
        except BaseException:
            try:
                await self._removals.remove(live)
            except PenstockError as pending:
                _log.warning("what was half made is not removed yet", sandbox_id=view.id, reason=pending.reason)
            raise
        _log.info("sandbox ready", sandbox_id=view.id, backend=backend.name)
        return live

    # Finding -----------------------------------------------------------------------------------------------------

    def get(self, sandbox_id: str) -> LiveSandbox:
        """A sandbox's record. Raises NotFound (SANDBOX_UNKNOWN)."""
        return self.table.get(sandbox_id)

    def usable(self, sandbox_id: str) -> tuple[LiveSandbox, SandboxHandle, Processes]:
        """A sandbox to work in. Raises NotFound, FailedPrecondition (SANDBOX_LOST, SANDBOX_PAUSED, ..._NOT_READY)."""
        return self.table.usable(sandbox_id)

    def processes(self, sandbox_id: str) -> Processes:
        """A sandbox's processes, also of a paused or lost one (their outputs and exits stay readable)."""
        return self.table.processes(sandbox_id)

    def backend(self, name: str) -> Backend:
        """A backend that made something here."""
        return self._backends[name]

    def matching(self, labels: Mapping[str, str]) -> list[Sandbox]:
        """Sandboxes with all of ``labels``, newest first."""
        return self.table.matching(labels)

    def watch(self, sandbox_id: str) -> AsyncIterator[Sandbox]:
        """The present state, then each change, to the terminal one."""
        return self.table.watch(sandbox_id)

    def backends(self) -> list[BackendInfo]:
        """What the backends can do here."""
        return [
            BackendInfo(
                name=name,
                available=backend.available,
                unavailable_reason=backend.unavailable_reason,
                capabilities=backend.capabilities,
                is_default=name == self._default,
                max_sandboxes=self._limits.max_sandboxes,
                default_lease_s=self._limits.default_lease_s,
                max_lease_s=self._limits.max_lease_s,
                default_resources=self._policy.with_defaults(backend, Resources()),
                max_lifetime_s=self._limits.max_lifetime_s,
                max_sandboxes_per_owner=self._limits.max_sandboxes_per_owner,
                max_resources=self._limits.max_resources,
            )
            for name, backend in sorted(self._backends.items())
        ]

    # Changing ----------------------------------------------------------------------------------------------------

    async def renew(self, sandbox_id: str, lease_s: float) -> float:
        """Set the end of the lease; answers the end that was granted. See Leases.renew."""
        return await self._leases.renew(sandbox_id, lease_s)

    async def set_network(self, sandbox_id: str, policy: NetworkPolicy) -> None:
        """Narrow what a sandbox may reach. Raises FailedPrecondition (POLICY_WIDER, CAPABILITY_MISSING)."""
        live, handle, _ = self.usable(sandbox_id)
        present = live.view.spec.network
        if policy == present:
            return
        if policy.kind.value >= present.kind.value:
            raise FailedPrecondition("a network policy can only be narrowed", reason="POLICY_WIDER")
        if not live.backend.allows(policy.kind):
            raise FailedPrecondition(
                f"the {live.backend.name} backend cannot do this here: network {policy.kind.name}",
                reason="CAPABILITY_MISSING",
                metadata={"backend": live.backend.name, "capabilities": f"network {policy.kind.name}"},
            )
        await handle.set_network(policy)
        live.become(spec=dataclasses.replace(live.view.spec, network=policy))

    async def pause(self, sandbox_id: str) -> None:
        """Freeze every process of a sandbox; one that is paused is a success.

        Raises NotFound, FailedPrecondition (CAPABILITY_MISSING, SANDBOX_LOST), Unavailable (PAUSE_FAILED).
        """
        live, handle, _ = self.table.there(sandbox_id)
        if not live.backend.capabilities.pause:
            raise FailedPrecondition(
                f"the {live.backend.name} backend cannot pause here",
                reason="CAPABILITY_MISSING",
                metadata={"backend": live.backend.name, "capabilities": "pause"},
            )
        await self._switch(live, handle.pause, State.PAUSED)

    async def resume(self, sandbox_id: str) -> None:
        """Thaw a paused sandbox; one that is not paused is a success. Raises as ``pause`` does."""
        live, handle, _ = self.table.there(sandbox_id)
        await self._switch(live, handle.resume, State.READY)

    async def _switch(self, live: LiveSandbox, change: Callable[[], Awaitable[None]], to: State) -> None:
        async with live.changing:
            live.check_lives()
            if live.view.state is to:
                return
            await change()
            live.check_lives()
            live.become(state=to)

    async def seal(self, sandbox_id: str, layer_id: str) -> tuple[SandboxSpec, SealedLayer]:
        """End a sandbox and keep its files as a layer; answers its spec too."""
        live, handle, processes = self.usable(sandbox_id)
        processes.condemn()
        async with live.changing:
            layer = await live.backend.seal(handle, layer_id)
        await self._removals.remove(live)
        return live.view.spec, layer

    # Ending ------------------------------------------------------------------------------------------------------

    async def delete(self, sandbox_id: str) -> None:
        """End a sandbox and all in it; returns when it is gone. Unknown ones are a success.

        Raises Unavailable (DELETE_PENDING) when its backend could not delete it yet.
        """
        self._requests.forget(sandbox_id)
        live = self.table.find(sandbox_id)
        if live is None:
            return
        if live.making is not None and not live.making.done() and live.view.state is State.CREATING:
            give_up(live.making)
            await asyncio.wait([live.making])
        await self._removals.remove(live)

    async def delete_labelled(self, labels: Mapping[str, str]) -> list[str]:
        """Delete every sandbox with all of ``labels`` (at least one); answers their ids. Raises as ``delete`` does."""
        if not labels:
            raise InvalidArgument(
                "at least one label is required", reason="INVALID_LABELS", violations=[Violation("labels", "is empty")]
            )
        found = [view.id for view in self.matching(labels)]
        outcomes = await asyncio.gather(*(self.delete(sandbox_id) for sandbox_id in found), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return found


@contextmanager
def _counted(backend: str, *, fork: bool) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    except PenstockError as error:
        metrics.CREATION_FAILURES.labels(backend, error.reason).inc()
        raise
    metrics.CREATION_SECONDS.labels(backend).observe(time.monotonic() - began)
    if fork:
        metrics.FORKS.labels(backend).inc()
