"""Sandboxes as callers see them: idempotent creation, states, leases, labels, forks and the end of them.

Purpose: everything that is the same for all backends. A sandbox belongs to its lease: whoever made it may vanish, and
the reaper removes it when the lease ends (R50).

Invariants
- A spec is refused before anything starts when it asks for what the backend or the operator does not allow (R54).
- A sandbox that failed to be made, or whose maker was cancelled, leaves nothing behind; the clean-up's own failure is
  logged and does not hide the cause (R49).
- States only move forward: CREATING -> READY -> LOST or DELETED. Terminal states are announced once.
- Identifiers are random and collision-free (128 bits, R25).
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from penstock_chassis.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PenstockError,
    ResourceExhausted,
    Unavailable,
    Violation,
)
from penstock_chassis.journal import Journal
from penstock_sandbox.backends.base import Backend, MountedToolbox, SandboxHandle
from penstock_sandbox.model import BackendInfo, NetworkPolicy, Resources, Sandbox, SandboxSpec, State
from penstock_sandbox.policy import Limits, Policy
from penstock_sandbox.processes import Processes

_REQUEST_TTL_S = 3600.0
_CREATES_AT_ONCE = 16
_REAP_AT_MOST_EVERY_S = 0.2

_log = structlog.get_logger(__name__)

MIGRATIONS = (
    """
    CREATE TABLE sandbox (
        id TEXT PRIMARY KEY, backend TEXT NOT NULL, labels TEXT NOT NULL, created_at REAL NOT NULL, state TEXT NOT NULL
    ) STRICT;
    """,
)


class Toolboxes(Protocol):
    """Where installed toolboxes are found."""

    def mounted(self, toolbox_id: str) -> MountedToolbox:
        """Raises NotFound (TOOLBOX_UNKNOWN)."""

    def hold(self, toolbox_ids: Sequence[str]) -> None:
        """A sandbox uses them from here on."""

    def release(self, toolbox_ids: Sequence[str]) -> None:
        """A sandbox uses them no more."""


class SnapshotSpecs(Protocol):
    """Where the spec that a snapshot was made from is found."""

    def sandbox_spec(self, snapshot_id: str) -> SandboxSpec:
        """Raises NotFound (SNAPSHOT_UNKNOWN)."""


class LiveSandbox:
    """A sandbox's record: its view, its handle while it lives, and its processes."""

    def __init__(self, view: Sandbox, backend: Backend) -> None:
        self.view = view
        self.backend = backend
        self.handle: SandboxHandle | None = None
        self.processes: Processes | None = None
        self.toolboxes: tuple[str, ...] = ()
        self.changed = asyncio.Event()
        self.removal: asyncio.Task[None] | None = None

    def become(self, **changes: object) -> None:
        """Change the view and tell the watchers."""
        self.view = dataclasses.replace(self.view, **changes)  # type: ignore[arg-type]
        self.changed.set()
        self.changed = asyncio.Event()


@dataclass(slots=True)
class _Request:
    spec: SandboxSpec
    made: asyncio.Task[LiveSandbox]
    expires_at: float
    waiters: int = 0


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
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._backends = backends
        self._default = default_backend
        self._toolboxes = toolboxes
        self._journal = journal
        self._spool = spool
        self._limits = limits
        self._policy = Policy(limits)
        self._clock = clock
        self._live: dict[str, LiveSandbox] = {}
        self._requests: dict[str, _Request] = {}
        self._admission = asyncio.Semaphore(_CREATES_AT_ONCE)
        self._lease_moved = asyncio.Event()
        self._draining = False
        self._reaper: asyncio.Task[None] | None = None
        self._removals: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Remember what an earlier instance left as LOST, and start the reaper."""
        for row in await self._journal.query("SELECT id, backend, created_at FROM sandbox ORDER BY created_at"):
            backend = self._backends.get(row["backend"])
            if backend is not None:
                view = Sandbox(
                    row["id"],
                    State.LOST,
                    SandboxSpec(backend=row["backend"]),
                    row["created_at"],
                    self._clock() + self._limits.default_lease_s,
                    lost_reason="SERVICE_RESTARTED",
                )
                self._live[row["id"]] = LiveSandbox(view, backend)
        await self._journal.execute("DELETE FROM sandbox")
        self._reaper = asyncio.create_task(self._reap_forever(), name="lease-reaper")

    async def drain(self) -> None:
        """Make no more sandboxes and delete all: their watchers see the end before the server stops."""
        self._draining = True
        for request in list(self._requests.values()):
            request.made.cancel()
        await asyncio.gather(*(request.made for request in self._requests.values()), return_exceptions=True)
        await asyncio.gather(*(self.delete(sandbox_id) for sandbox_id in list(self._live)), return_exceptions=True)
        await asyncio.gather(*self._removals, return_exceptions=True)

    async def aclose(self) -> None:
        """Delete every sandbox and stop the reaper."""
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.gather(self._reaper, return_exceptions=True)
        await self.drain()

    # Creating ----------------------------------------------------------------------------------------------------

    async def create(self, request_id: str, spec: SandboxSpec) -> Sandbox:
        """Make a sandbox, or answer what the same request made before.

        Raises AlreadyExists (REQUEST_ID_REUSED), FailedPrecondition (CAPABILITY_MISSING, UPSTREAM_NOT_ALLOWED,
        BACKEND_UNAVAILABLE), NotFound (SNAPSHOT_UNKNOWN, TOOLBOX_UNKNOWN), ResourceExhausted (SANDBOX_LIMIT).
        """
        self._forget_old_requests()
        request = self._requests.get(request_id) if request_id else None
        if request is None:
            backend, applied = self._apply(spec)
            made = asyncio.create_task(self._create(backend, applied))
            request = _Request(spec, made, self._clock() + _REQUEST_TTL_S)
            # Without an id nobody can come back for the answer.
            self._requests[request_id or secrets.token_hex(16)] = request
        elif request.spec != spec:
            raise AlreadyExists("the request id belongs to another request", reason="REQUEST_ID_REUSED")
        return (await self._join(request)).view

    async def _join(self, request: _Request) -> LiveSandbox:
        request.waiters += 1
        try:
            return await asyncio.shield(request.made)
        except asyncio.CancelledError:
            if request.waiters == 1 and not request.made.done():
                # The last one who wanted it gave up: whatever is half made goes away before the call ends.
                request.made.cancel()
                await asyncio.wait([request.made])
            raise
        finally:
            request.waiters -= 1
            if request.made.done() and (request.made.cancelled() or request.made.exception() is not None):
                # A failed request may be tried again under its id.
                for key in [key for key, known in self._requests.items() if known is request]:
                    del self._requests[key]

    def _apply(self, spec: SandboxSpec) -> tuple[Backend, SandboxSpec]:
        """The backend and the spec with defaults; raises for what is not allowed. Nothing has started yet."""
        if self._draining:
            raise Unavailable("this service is stopping", reason="DRAINING", retry_after_s=1.0)
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
        if len(self._live) + self._pending() >= self._limits.max_sandboxes:
            raise ResourceExhausted(
                f"{self._limits.max_sandboxes} sandboxes are there, which is this service's limit",
                reason="SANDBOX_LIMIT",
                retry_after_s=1.0,
            )
        return backend, dataclasses.replace(
            spec,
            backend=name,
            lease_s=lease,
            resources=self._policy.with_defaults(backend, spec.resources),
            network=self._policy.with_trust(spec.network),
        )

    def _pending(self) -> int:
        return sum(not request.made.done() for request in self._requests.values())

    async def _create(self, backend: Backend, spec: SandboxSpec) -> LiveSandbox:
        mounted = [self._toolboxes.mounted(toolbox) for toolbox in spec.toolbox_ids]
        if spec.snapshot_id and not await backend.has_layer(spec.snapshot_id):
            raise NotFound("no such snapshot", reason="SNAPSHOT_UNKNOWN", metadata={"snapshot_id": spec.snapshot_id})
        assert spec.lease_s is not None
        sandbox_id = f"sb-{secrets.token_hex(16)}"
        now = self._clock()
        live = LiveSandbox(Sandbox(sandbox_id, State.CREATING, spec, now, now + spec.lease_s), backend)
        # Written before anything is made, so that a crash leaves a trace; awaited beside the making.
        recorded = self._journal.submit(
            [
                (
                    "INSERT INTO sandbox (id, backend, labels, created_at, state) VALUES (?, ?, ?, ?, 'creating')",
                    (sandbox_id, backend.name, repr(dict(spec.labels)), now),
                )
            ]
        )
        self._live[sandbox_id] = live
        live.toolboxes = spec.toolbox_ids
        self._toolboxes.hold(live.toolboxes)
        try:
            async with self._admission:
                live.handle = await backend.create(sandbox_id, spec, mounted, lambda reason: self._lost(live, reason))
            await recorded
            if live.view.state is State.LOST:
                raise Unavailable("the sandbox was lost as it was made", reason="CREATE_FAILED", retry_after_s=0.1)
            live.processes = Processes(live.handle, spec.env, self._spool)
            # The lease runs from here: a queue must not eat it.
            live.become(
                state=State.READY,
                expires_at=self._clock() + spec.lease_s,
                home=live.handle.home,
                workdir=live.handle.workdir,
            )
        except BaseException:
            await self._remove(live)
            raise
        self._lease_moved.set()
        return live

    def _forget_old_requests(self) -> None:
        now = self._clock()
        for key in [key for key, known in self._requests.items() if known.expires_at < now and known.made.done()]:
            del self._requests[key]

    async def fork(
        self, request_id: str, snapshot_id: str, count: int, spec: SandboxSpec, snapshots: SnapshotSpecs
    ) -> AsyncIterator[tuple[int, Sandbox | PenstockError]]:
        """Make ``count`` sandboxes from a snapshot, each answered as it is ready, or with its own failure.

        ``spec`` gives lease, labels, network and additional environment; the rest comes from the snapshot.
        """
        origin = snapshots.sandbox_spec(snapshot_id)
        child = dataclasses.replace(
            origin,
            image="",
            snapshot_id=snapshot_id,
            network=spec.network,
            env={**origin.env, **spec.env},
            lease_s=spec.lease_s,
            labels=spec.labels,
        )
        self._apply(child)  # what all of them would be refused for fails the call itself

        async def make(index: int) -> tuple[int, Sandbox | PenstockError]:
            try:
                return index, await self.create(f"{request_id}/{index}" if request_id else "", child)
            except PenstockError as error:
                return index, error

        tasks = [asyncio.create_task(make(index)) for index in range(count)]
        try:
            for done in asyncio.as_completed(tasks):
                yield await done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # Finding -----------------------------------------------------------------------------------------------------

    def get(self, sandbox_id: str) -> LiveSandbox:
        """A sandbox's record. Raises NotFound (SANDBOX_UNKNOWN)."""
        live = self._live.get(sandbox_id)
        if live is None:
            raise NotFound("no such sandbox", reason="SANDBOX_UNKNOWN", metadata={"sandbox_id": sandbox_id})
        return live

    def usable(self, sandbox_id: str) -> tuple[LiveSandbox, SandboxHandle, Processes]:
        """A sandbox to work in. Raises NotFound, or FailedPrecondition (SANDBOX_LOST) when it is gone."""
        live = self.get(sandbox_id)
        if live.view.state is State.LOST:
            raise FailedPrecondition(
                f"the sandbox is lost: {live.view.lost_reason}",
                reason="SANDBOX_LOST",
                metadata={"sandbox_id": sandbox_id, "lost_reason": live.view.lost_reason},
            )
        if live.handle is None or live.processes is None:
            raise FailedPrecondition("the sandbox is still being made", reason="SANDBOX_NOT_READY")
        return live, live.handle, live.processes

    def processes(self, sandbox_id: str) -> Processes:
        """A sandbox's processes, also of a lost one (their outputs and exits stay readable)."""
        live = self.get(sandbox_id)
        if live.processes is None:
            return self.usable(sandbox_id)[2]
        return live.processes

    def backend(self, name: str) -> Backend:
        """A backend that made something here."""
        return self._backends[name]

    def matching(self, labels: Mapping[str, str]) -> list[Sandbox]:
        """Sandboxes with all of ``labels``, newest first."""
        found = [live.view for live in self._live.values() if labels.items() <= live.view.spec.labels.items()]
        return sorted(found, key=lambda view: (view.created_at, view.id), reverse=True)

    async def watch(self, sandbox_id: str) -> AsyncIterator[Sandbox]:
        """The present state, then each change, to the terminal one."""
        live = self.get(sandbox_id)
        while True:
            changed, view = live.changed, live.view
            yield view
            if view.state.terminal:
                return
            await changed.wait()

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
            )
            for name, backend in sorted(self._backends.items())
        ]

    # Changing and ending -----------------------------------------------------------------------------------------

    def renew(self, sandbox_id: str, lease_s: float) -> float:
        """Set the end of the lease to now + ``lease_s``; answers it."""
        live = self.get(sandbox_id)
        if not 0 < lease_s <= self._limits.max_lease_s:
            raise InvalidArgument(
                f"lease must be positive and at most {self._limits.max_lease_s:g} s",
                reason="INVALID_LEASE",
                violations=[Violation("lease", f"not in (0, {self._limits.max_lease_s:g}] s")],
            )
        live.become(expires_at=self._clock() + lease_s)
        self._lease_moved.set()
        return live.view.expires_at

    async def set_network(self, sandbox_id: str, policy: NetworkPolicy) -> None:
        """Narrow what a sandbox may reach. Raises FailedPrecondition (POLICY_WIDER)."""
        live, handle, _ = self.usable(sandbox_id)
        present = live.view.spec.network
        if policy == present:
            return
        if policy.kind.value >= present.kind.value:
            raise FailedPrecondition("a network policy can only be narrowed", reason="POLICY_WIDER")
        await handle.set_network(policy)
        live.become(spec=dataclasses.replace(live.view.spec, network=policy))

    async def delete(self, sandbox_id: str) -> None:
        """End a sandbox and all in it; returns when it is gone. Unknown ones are a success."""
        for key in [key for key, known in self._requests.items() if _made(known, sandbox_id)]:
            del self._requests[key]
        live = self._live.get(sandbox_id)
        if live is not None:
            await self._remove(live)

    async def delete_labelled(self, labels: Mapping[str, str]) -> list[str]:
        """Delete every sandbox with all of ``labels`` (at least one); answers their ids."""
        if not labels:
            raise InvalidArgument(
                "at least one label is required", reason="INVALID_LABELS", violations=[Violation("labels", "is empty")]
            )
        found = [view.id for view in self.matching(labels)]
        async with asyncio.TaskGroup() as group:
            for sandbox_id in found:
                group.create_task(self.delete(sandbox_id))
        return found

    async def detach(self, sandbox_id: str) -> tuple[LiveSandbox, SandboxHandle]:
        """Take a sandbox out of the table without ending it: sealing ends it in its own way."""
        live, handle, processes = self.usable(sandbox_id)
        processes.condemn()
        live.handle = None
        await self._remove(live)
        return live, handle

    async def _remove(self, live: LiveSandbox) -> None:
        if live.removal is None:
            live.removal = asyncio.create_task(self._really_remove(live), name=f"remove-{live.view.id}")
            self._removals.add(live.removal)
            live.removal.add_done_callback(self._removals.discard)
        await asyncio.shield(live.removal)

    async def _really_remove(self, live: LiveSandbox) -> None:
        if live.processes is not None:
            live.processes.condemn()
        try:
            if live.handle is not None:
                await live.handle.destroy()
            if live.processes is not None:
                await live.processes.aclose()
        except Exception:  # noqa: BLE001
            # The sandbox leaves the table all the same; what remains on disk is removed at the next start.
            _log.exception("removing a sandbox failed", sandbox=live.view.id)
        finally:
            self._toolboxes.release(live.toolboxes)
            live.toolboxes = ()
            self._live.pop(live.view.id, None)
            if live.view.state is not State.LOST:
                live.become(state=State.DELETED)
            await self._journal.execute("DELETE FROM sandbox WHERE id = ?", (live.view.id,))

    def _lost(self, live: LiveSandbox, reason: str) -> None:
        if live.view.state.terminal or live.removal is not None:
            return
        _log.warning("sandbox lost", sandbox=live.view.id, reason=reason)
        live.become(state=State.LOST, lost_reason=reason)
        # What it held is released now; its record, exits and outputs stay until its lease ends.
        if live.handle is not None:
            task = asyncio.create_task(live.handle.destroy())
            self._removals.add(task)
            task.add_done_callback(self._removals.discard)

    # The reaper --------------------------------------------------------------------------------------------------

    async def reap(self) -> list[str]:
        """Delete the sandboxes whose lease has ended; answers their ids."""
        now = self._clock()
        expired = [live.view.id for live in self._live.values() if live.view.expires_at <= now]
        for sandbox_id in expired:
            _log.info("lease ended", sandbox=sandbox_id)
        await asyncio.gather(*(self.delete(sandbox_id) for sandbox_id in expired))
        return expired

    async def _reap_forever(self) -> None:
        while True:
            self._lease_moved.clear()
            ends = [live.view.expires_at for live in self._live.values() if live.view.state is not State.CREATING]
            wait_s = max(_REAP_AT_MOST_EVERY_S, min(ends) - self._clock()) if ends else None
            try:
                async with asyncio.timeout(wait_s):
                    await self._lease_moved.wait()
            except TimeoutError:
                pass
            try:
                await self.reap()
            except Exception:  # noqa: BLE001
                # One failure must not end all reaping.
                _log.exception("reaping failed")


def _made(request: _Request, sandbox_id: str) -> bool:
    made = request.made
    return made.done() and not made.cancelled() and made.exception() is None and made.result().view.id == sandbox_id
