"""Sandbox lifecycle for callers: create, find, pause, narrow and delete, the same on every backend.

Purpose: combines idempotency, admission (limits), the table (records and states), leases and teardown, each in a
module of its own.

Invariants
- A spec that the backend or the operator does not allow is refused before anything starts (R54).
- A journal row is on disk before its sandbox is begun, so that no crash leaves an unknown sandbox (R50).
- A failed or cancelled create leaves nothing behind; an error of the clean-up is logged and does not hide the cause
  (R49).
- Identifiers are random and collision-free (128 bits, R25).
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol, TypeAlias

import structlog

from penstock.values.similar_names import did_you_mean
from penstock_chassis.aio.idempotency import IdempotencyTable, cancel_once
from penstock_chassis.aio.retry import Pause
from penstock_chassis.auth import DEFAULT_NAMESPACE, Quotas
from penstock_chassis.errors import (
    Aborted,
    FailedPrecondition,
    PenstockError,
    Unavailable,
)
from penstock_chassis.homes import Home
from penstock_chassis.journal import Journal
from penstock_chassis.times import even_time
from penstock_chassis.validation import invalid, invalid_field
from penstock_sandbox import metrics
from penstock_sandbox.domain.backend import Backend, MountedToolbox, SealedLayer
from penstock_sandbox.domain.free_space import Watermark
from penstock_sandbox.domain.model import (
    BackendInfo,
    ForkKind,
    NetworkKind,
    NetworkPolicy,
    Resources,
    Sandbox,
    SandboxSpec,
    State,
)
from penstock_sandbox.processes.manager import Processes
from penstock_sandbox.sandboxes.admission import Admission, Owner
from penstock_sandbox.sandboxes.joining import Joins
from penstock_sandbox.sandboxes.layer_refs import LayerRefs, unknown
from penstock_sandbox.sandboxes.leases import Leases
from penstock_sandbox.sandboxes.policy import Limits, Policy, is_narrower, network_problems
from penstock_sandbox.sandboxes.removal import Teardowns
from penstock_sandbox.sandboxes.table import SandboxEntry, Table
from penstock_sandbox.store.records import Record, Records

_log = structlog.get_logger(__name__)


_Whose: TypeAlias = tuple[str, frozenset[tuple[str, str]]]
"""A namespace and labels: those of one rollout's sandboxes are equal."""


class Toolboxes(Protocol):
    """Access to installed toolboxes."""

    def mounted(self, toolbox_id: str, namespace: str, *, host_programs: bool) -> MountedToolbox:
        """Returns a namespace's toolbox; `host_programs`: sandboxes see this host's and need fewer runtimes.

        Raises NotFound.
        """

    def hold(self, toolbox_ids: Sequence[str], namespace: str) -> None:
        """Marks toolboxes as used by a sandbox of a namespace."""

    def release(self, toolbox_ids: Sequence[str], namespace: str) -> None:
        """Ends one such use."""


class Egress(Protocol):
    """The proxy of allow-lists, as sandboxes get it."""

    def given(self, sandbox: Sandbox, policy: NetworkPolicy) -> NetworkPolicy:
        """Returns a policy with what connects a sandbox to the proxy."""

    def environment(self, policy: NetworkPolicy) -> Mapping[str, str]:
        """Returns the variables by which programs use the proxy; empty without an allow-list."""

    def mounted(self) -> Sequence[MountedToolbox]:
        """Returns what a sandbox needs to trust the proxy."""


class NoEgress:
    """The proxy of a service that has none."""

    def given(self, _: Sandbox, policy: NetworkPolicy) -> NetworkPolicy:
        """See Egress."""
        return policy

    def environment(self, _: NetworkPolicy) -> Mapping[str, str]:
        """See Egress."""
        return {}

    def mounted(self) -> Sequence[MountedToolbox]:
        """See Egress."""
        return ()


class Sandboxes:
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
        home: Home = Home("sandbox", "sandbox"),  # noqa: B008 - frozen
        egress: Egress | None = None,
    ) -> None:
        self.home = home
        self._egress: Egress = egress or NoEgress()
        self._backends = backends
        self._default = default_backend
        self._toolboxes = toolboxes
        self._spool = spool
        self._limits = limits
        self._policy = Policy(limits)
        self._clock = clock
        self._records = Records(journal)
        self._requests: IdempotencyTable[SandboxEntry] = IdempotencyTable(clock, cancelled=_deleted_meanwhile)
        self._quotas = Quotas(limits.quotas, "sandboxes")
        self._staying: set[_Whose] | None = None
        """While the service drains: the owners that had a sandbox here when that began."""
        self._held: Counter[str] = Counter()
        """Sandboxes by namespace, with those that are being made."""
        self._admission = Admission(
            limits.max_sandboxes, limits.max_sandboxes_per_owner, limits.max_queued, limits.queue_timeout_s
        )
        self._watermark = Watermark(spool, limits.min_free_bytes, limits.min_free_inodes)
        self.layer_refs = LayerRefs(pause)
        self.table = Table()
        self._joins = Joins(self.table, limits.owner_label)
        # A repeated request never gets a sandbox that is being removed: it creates another one.
        self._teardowns = Teardowns(
            self.table, self._records, pause, lambda live: self._requests.forget(live.request_id, live)
        )
        self.leases = Leases(self.table, self._teardowns, limits.max_lease_s, limits.max_lifetime_s, clock)

    async def open(self) -> None:
        """Makes the backends remove an earlier instance's sandboxes, which are LOST, and starts the reaper."""
        await self._teardowns.open(self._backends, self._clock() + self._limits.default_lease_s)
        self.leases.open()
        default = self._backends[self._default]
        if default.available and (missing := self._policy.not_held(default)):
            _log.warning("sandboxes have no default limits", backend=default.name, resources=missing)

    def take(self, takes: bool) -> None:
        """Takes new work, or refuses it: all but sandboxes of an owner that has some here already.

        A rollout needs a second sandbox to grade in, so its labels are those of work that runs here.
        """
        self._staying = None if takes else {_whose(live.view.namespace, live.view.spec) for live in self.table}

    def _check_takes(self, namespace: str, spec: SandboxSpec) -> None:
        """Raises Unavailable (DRAINING)."""
        if self._staying is not None and not (spec.labels and _whose(namespace, spec) in self._staying):
            raise Unavailable("this service drains: it takes no new work", reason="DRAINING", retry_after_s=1.0)

    async def drain(self) -> None:
        """Stops creation and deletes all sandboxes, so that watchers see the end before the server stops."""
        await self._requests.drain()
        await asyncio.gather(*(self._teardowns.remove(live) for live in self.table), return_exceptions=True)

    async def aclose(self) -> None:
        """Deletes every sandbox and stops the reaper."""
        await self.leases.aclose()
        await self.drain()
        await self._teardowns.aclose()
        await self.layer_refs.aclose()

    @property
    def room(self) -> int:
        """How many more sandboxes are admitted now, of all owners; 0 while the disk is low."""
        return self._admission.free if self._watermark.allows() else 0

    @property
    def waiting(self) -> int:
        """How many creates wait for a free place."""
        return self._admission.queued

    # Creating ----------------------------------------------------------------------------------------------------

    async def create(
        self,
        request_id: str,
        spec: SandboxSpec,
        namespace: str = DEFAULT_NAMESPACE,
        *,
        wait_s: float | None = None,
        shared: bool = False,
    ) -> Sandbox:
        """Creates a sandbox, or returns the one that the same request created before, unless its removal has begun.

        ``wait_s`` limits the wait for a slot, in addition to the operator's limit. A ``shared`` sandbox belongs to the
        service and counts towards no owner. Every sandbox counts towards its namespace's quota. The snapshot and the
        toolboxes in the spec must be of the same namespace, and so must the sandbox that it joins. Request ids of all
        namespaces share one table: the caller puts the namespace into them.

        Raises InvalidArgument (FIELD_INVALID), AlreadyExists (REQUEST_ID_REUSED), FailedPrecondition
        (CAPABILITY_MISSING, UPSTREAM_NOT_ALLOWED, HOST_NOT_ALLOWED, BACKEND_UNAVAILABLE, LEASE_REFUSED), NotFound
        (SNAPSHOT_UNKNOWN, TOOLBOX_UNKNOWN), ResourceExhausted (NAMESPACE_QUOTA, SANDBOX_LIMIT, OWNER_LIMIT, DISK_LOW),
        Aborted (DELETED_MEANWHILE), Unavailable (DRAINING, CREATE_FAILED, JOURNAL_FAILED), Internal (CREATE_FAILED),
        and as ``Joins.take`` does.
        """
        owner = None if shared else f"{namespace}/{spec.labels.get(self._limits.owner_label, '')}"

        async def create() -> SandboxEntry:
            # Only for the first request: a repeated one gets its sandbox, whatever is refused by now.
            self._check_takes(namespace, spec)
            backend, complete = self._applied(spec)
            return await self._create(request_id, namespace, backend, complete, owner, wait_s)

        live = await self._requests.join(request_id, spec, create)
        return live.view

    def check(self, spec: SandboxSpec) -> Backend:
        """Raises what every ``create`` with this spec would, and returns its backend. Starts nothing."""
        self._requests.check_open()
        backend, _ = self._applied(spec)
        return backend

    def _applied(self, spec: SandboxSpec) -> tuple[Backend, SandboxSpec]:
        """Returns the backend and the spec with defaults; raises for what is not allowed."""
        name = spec.backend or self._default
        backend = self._backends.get(name)
        if backend is None:
            raise FailedPrecondition(
                f"there is no such backend{did_you_mean(name, self._backends) or ';'} known backends:"
                f" {', '.join(sorted(self._backends))}",
                reason="BACKEND_UNAVAILABLE",
                metadata={"backend": name},
            )
        lease = spec.lease_s if spec.lease_s is not None else self._limits.default_lease_s
        self._policy.check_values(spec, lease)
        backend.refuse_unsupported(spec)
        for companion in spec.companions:
            backend.refuse_unsupported(SandboxSpec(resources=companion.resources))
        self._policy.check_network(spec.network)
        complete = dataclasses.replace(
            spec,
            backend=name,
            lease_s=lease,
            resources=self._policy.with_defaults(backend, spec.resources),
            network=self._policy.completed(spec.network),
            companions=tuple(
                dataclasses.replace(one, resources=self._policy.with_defaults(backend, one.resources))
                for one in spec.companions
            ),
        )
        self._policy.check_together(complete)
        return backend, complete

    def refuse_unforkable(self, spec: SandboxSpec) -> None:
        """Raises for a spec that cannot become a snapshot: as ``check`` does, and CAPABILITY_MISSING (fork)."""
        backend = self.check(spec)
        if backend.capabilities.fork is ForkKind.NONE:
            raise FailedPrecondition(
                f"the {backend.name} backend does not support: fork",
                reason="CAPABILITY_MISSING",
                metadata={"backend": backend.name, "capabilities": "fork"},
            )

    async def _create(
        self,
        request_id: str,
        namespace: str,
        backend: Backend,
        spec: SandboxSpec,
        owner: Owner,
        wait_s: float | None,
    ) -> SandboxEntry:
        assert spec.lease_s is not None
        # Released here if no sandbox results, otherwise with the sandbox.
        with ExitStack() as holds:
            if spec.joins:
                holds.callback(self._joins.take(spec, namespace, backend))
            else:
                self._quotas.check(namespace, self._held[namespace])
                self._held[namespace] += 1
                holds.callback(self._held.subtract, (namespace,))
            mounted = [
                self._toolboxes.mounted(toolbox, namespace, host_programs=backend.shows_host_programs(spec))
                for toolbox in spec.toolbox_ids
            ]
            if not backend.capabilities.debian_packages and any(box.root_layer for box in mounted):
                raise FailedPrecondition(
                    f"the {backend.name} backend does not support: debian_packages",
                    reason="CAPABILITY_MISSING",
                    metadata={"backend": backend.name, "capabilities": "debian_packages"},
                )
            self._toolboxes.hold(spec.toolbox_ids, namespace)
            holds.callback(self._toolboxes.release, spec.toolbox_ids, namespace)
            if spec.snapshot_id:
                self.layer_refs.check(namespace, spec.snapshot_id)
                self.layer_refs.hold(spec.snapshot_id)
                holds.callback(self.layer_refs.release, spec.snapshot_id)
                if not await backend.has_layer(spec.snapshot_id):
                    raise unknown(spec.snapshot_id)
            if spec.joins:
                await self._quiet(spec.joins)
            else:
                holds.callback(await self._admission.slot(owner, wait_s))
            # An image takes space, too, and below half of the minimum others' sandboxes are ended.
            self._watermark.check()
            await backend.fetch(spec)
            async with self._admission.turn(backend.name, backend.creates_at_once, owner):
                self._watermark.check()
                with _counted(backend.name, fork=bool(spec.snapshot_id)):
                    return await self._create_in_slot(request_id, namespace, backend, spec, mounted, holds)

    async def _create_in_slot(
        self,
        request_id: str,
        namespace: str,
        backend: Backend,
        spec: SandboxSpec,
        mounted: Sequence[MountedToolbox],
        holds: ExitStack,
    ) -> SandboxEntry:
        assert spec.lease_s is not None
        now = self._clock()
        sandbox_id = self.home.new_id("sb")
        view = Sandbox(sandbox_id, State.CREATING, spec, now, now + spec.lease_s, namespace=namespace)
        live = SandboxEntry(view, backend, holds.pop_all(), request_id=request_id)
        live.creation = asyncio.current_task()
        self.table.add(live)
        try:
            # Awaited first: a crash in parallel could leave a sandbox without a row.
            await self._records.write(Record(view.id, backend.name, spec.labels, now, namespace))
            given = dataclasses.replace(spec, network=self._egress.given(view, spec.network))
            if spec.network.kind is NetworkKind.ALLOWLIST:
                mounted = [*mounted, *self._egress.mounted()]
            live.handle = await backend.create(
                view.id, given, mounted, lambda reason: self._teardowns.lost(live, reason)
            )
            if live.view.state is State.LOST:
                raise Unavailable("the sandbox was lost during its creation", reason="CREATE_FAILED", retry_after_s=0.1)
            defaults, search = _of_toolboxes(mounted)
            live.processes = Processes(live.handle, {**defaults, **spec.env}, self._spool, search)
            live.processes.set_network_env(self._egress.environment(spec.network))
            live.become(
                state=State.READY,
                expires_at=self.leases.begin(live, spec.lease_s),
                home=live.handle.home,
                workdir=live.handle.workdir,
            )
        except BaseException:
            try:
                await self._teardowns.remove(live)
            except PenstockError as pending:
                _log.warning("a half-made sandbox is not removed yet", sandbox_id=view.id, reason=pending.reason)
            raise
        _log.info("sandbox ready", sandbox_id=view.id, backend=backend.name)
        return live

    async def _quiet(self, sandbox_id: str) -> None:
        """Ends the programs and the network access of a sandbox that another one joins."""
        _, _, processes = self.table.usable(sandbox_id)
        await processes.kill_all()
        await self.set_network(sandbox_id, NetworkPolicy())

    # Backends ----------------------------------------------------------------------------------------------------

    def backend(self, name: str) -> Backend:
        return self._backends[name]

    def backends(self) -> list[BackendInfo]:
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
                egress_hosts=self._limits.egress_hosts if backend.allows(NetworkKind.ALLOWLIST) else (),
            )
            for name, backend in sorted(self._backends.items())
        ]

    # Changing ----------------------------------------------------------------------------------------------------

    async def set_network(self, sandbox_id: str, policy: NetworkPolicy) -> None:
        """Narrows a sandbox's network access.

        Raises InvalidArgument (FIELD_INVALID), FailedPrecondition (POLICY_WIDER, CAPABILITY_MISSING,
        UPSTREAM_NOT_ALLOWED, HOST_NOT_ALLOWED).
        """
        live, _, _ = self.table.usable(sandbox_id)
        async with live.changing:
            live, handle, processes = self.table.usable(sandbox_id)
            present = live.view.spec.network
            if problems := network_problems(policy):
                raise invalid(problems)
            policy = self._policy.completed(policy)
            if policy == present:
                return
            if not is_narrower(policy, present):
                raise FailedPrecondition("a network policy can only be narrowed", reason="POLICY_WIDER")
            if not live.backend.allows(policy.kind):
                raise FailedPrecondition(
                    f"the {live.backend.name} backend does not support: network {policy.kind.name}",
                    reason="CAPABILITY_MISSING",
                    metadata={"backend": live.backend.name, "capabilities": f"network {policy.kind.name}"},
                )
            self._policy.check_network(policy)
            await handle.set_network(self._egress.given(live.view, policy))
            processes.set_network_env(self._egress.environment(policy))
            live.become(spec=dataclasses.replace(live.view.spec, network=policy))

    async def pause(self, sandbox_id: str, *, hold_timeouts: bool = False) -> bool:
        """Freezes every process of a sandbox; succeeds if it is already paused.

        ``hold_timeouts``: the timeouts of its commands stand still too. Returns False if the backend can do only that.

        Raises NotFound, FailedPrecondition (CAPABILITY_MISSING, SANDBOX_LOST), Unavailable (PAUSE_FAILED).
        """
        live, handle, processes = self.table.there(sandbox_id)
        freezes = live.backend.capabilities.pause
        if not freezes and not hold_timeouts:
            raise FailedPrecondition(
                f"the {live.backend.name} backend does not support pausing",
                reason="CAPABILITY_MISSING",
                metadata={"backend": live.backend.name, "capabilities": "pause"},
            )
        if freezes:
            await self._switch(live, handle.pause, State.PAUSED)
        if hold_timeouts:
            processes.hold_timeouts()
        return freezes

    async def resume(self, sandbox_id: str) -> None:
        """Thaws a paused sandbox; succeeds if it is not paused. Raises as ``pause`` does."""
        live, handle, processes = self.table.there(sandbox_id)
        await self._switch(live, handle.resume, State.READY)
        processes.release_timeouts()

    async def _switch(self, live: SandboxEntry, change: Callable[[], Awaitable[None]], to: State) -> None:
        async with live.changing:
            live.check_lives()
            if live.view.state is to:
                return
            await change()
            live.check_lives()
            live.become(state=to)

    async def seal(self, sandbox_id: str, layer_id: str) -> tuple[SandboxSpec, SealedLayer]:
        """Ends a sandbox and keeps its files as a layer; also returns its spec."""
        live, handle, processes = self.table.usable(sandbox_id)
        processes.condemn()
        async with live.changing:
            layer = await live.backend.seal(handle, layer_id)
        try:
            await self._teardowns.remove(live)
        except BaseException:
            self.layer_refs.leave(layer_id, live.backend, lambda: None, closed=True)  # the caller never gets it
            raise
        return live.view.spec, layer

    # Ending ------------------------------------------------------------------------------------------------------

    async def delete(self, sandbox_id: str, namespace: str | None = None) -> None:
        """Deletes a sandbox and everything in it; returns when it is gone.

        Succeeds if a namespace (None: any) has no such sandbox. Raises Unavailable (DELETE_PENDING) if its backend
        could not delete it yet.
        """
        live = self.table.find(sandbox_id, namespace)
        if live is None:
            return
        if live.creation is not None and not live.creation.done() and live.view.state is State.CREATING:
            cancel_once(live.creation)
            await asyncio.wait([live.creation])
        await self._teardowns.remove(live)

    async def delete_labelled(self, labels: Mapping[str, str], namespace: str | None = None) -> list[str]:
        """Deletes every sandbox of a namespace (None: of all) with all of ``labels`` (at least one).

        Returns their ids. Raises as ``delete`` does.
        """
        if not labels:
            raise invalid_field("labels", "must name at least one")
        found = [view.id for view in self.table.matching(labels, namespace)]
        outcomes = await asyncio.gather(*(self.delete(sandbox_id) for sandbox_id in found), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return found


def _whose(namespace: str, spec: SandboxSpec) -> _Whose:
    return namespace, frozenset(spec.labels.items())


def _of_toolboxes(mounted: Sequence[MountedToolbox]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns variables that a sandbox with these toolboxes has, and directories that are appended to variables."""
    python = [folder for toolbox in mounted for folder in toolbox.python_path]
    node = [folder for toolbox in mounted for folder in toolbox.node_path]
    search = {"PYTHONPATH": ":".join(python), "NODE_PATH": ":".join(node)}
    # As in a virtual environment: packages in the home, which an agent may write, are not mixed with them.
    return {"PYTHONNOUSERSITE": "1"} if python else {}, {name: value for name, value in search.items() if value}


def _deleted_meanwhile() -> PenstockError:
    return Aborted("the sandbox was deleted during its creation", reason="DELETED_MEANWHILE")


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
