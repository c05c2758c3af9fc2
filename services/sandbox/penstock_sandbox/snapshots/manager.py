"""Snapshots: a spec's files and setup, run once, sealed, and forked any number of times.

Purpose: a group of rollouts of one task shares one prepared state (R57: setup runs once and reports each command's real
exit, output and duration).

Invariants: a snapshot's key is the hash of everything that went into it; concurrent callers of one namespace
for one key share the work; a failed setup leaves no snapshot and no sandbox. A snapshot never changes. The cache is
LRU-bounded. Snapshots in use (by a sandbox, a child snapshot or a fork in progress) or used within 60 s are never
evicted, so the size may be exceeded. Where layers outlive their service, snapshots survive its crash, and with ``keep``
also its stop; layers that the journal does not name are removed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import structlog

from penstock_chassis.aio.deletion import Deletion, Deletions
from penstock_chassis.aio.retry import Pause
from penstock_chassis.aio.shared_work import SharedWork
from penstock_chassis.aio.tasks import TaskOwner
from penstock_chassis.auth import DEFAULT_NAMESPACE
from penstock_chassis.errors import FailedPrecondition, PenstockError
from penstock_chassis.times import even_time
from penstock_sandbox import files
from penstock_sandbox.domain.backend import Backend
from penstock_sandbox.domain.errno import sandbox_lost
from penstock_sandbox.domain.model import (
    SNAPSHOT_LABEL,
    Command,
    ExitReason,
    RunResult,
    SandboxSpec,
    SeedFile,
    Snapshot,
    SnapshotSpec,
)
from penstock_sandbox.sandboxes.layer_refs import unknown
from penstock_sandbox.sandboxes.manager import Sandboxes
from penstock_sandbox.store.records import SnapshotRecord, SnapshotRecords

_OUTPUT_LIMIT = 64 * 1024
_SETUP_LEASE_S = 3600.0
_GRACE_S = 60.0
_SALT = secrets.token_bytes(16)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CommandStarted:
    """Setup command ``index`` has started."""

    index: int


@dataclass(frozen=True, slots=True)
class CommandFinished:
    """Setup command ``index`` has ended."""

    index: int
    result: RunResult


Progress = CommandStarted | CommandFinished


@dataclass(slots=True)
class _Known:
    snapshot: Snapshot
    spec: SandboxSpec
    below: str
    used_at: float


class Snapshots:
    """All snapshots of the service.

    ``cache_bytes`` and ``cache_count`` limit those not in use; ``keep`` leaves them at the service's end where they
    outlive it.
    """

    def __init__(
        self,
        sandboxes: Sandboxes,
        records: SnapshotRecords,
        max_lease_s: float,
        cache_bytes: int,
        cache_count: int,
        *,
        keep: bool = False,
        clock: Callable[[], float] = even_time,
        pause: Pause = asyncio.sleep,
    ) -> None:
        self._sandboxes = sandboxes
        self._layer_refs = sandboxes.layer_refs
        self._records = records
        self._keep = keep
        self._takeovers = Deletions(pause=pause)
        self._trimming = TaskOwner()
        self._lease_s = min(_SETUP_LEASE_S, max_lease_s)
        self._cache_bytes = cache_bytes
        self._cache_count = cache_count
        self._clock = clock
        # Least recently used first.
        self._known: OrderedDict[str, _Known] = OrderedDict()
        # By namespace and key.
        self._by_key: dict[tuple[str, str], str] = {}
        self._working: dict[tuple[str, str], SharedWork[Progress, Snapshot]] = {}

    async def open(self) -> None:
        """Adopts what the journal names; continues in the background for a backend that cannot list its layers yet.

        From now on a snapshot that nothing needs any more may be evicted.
        """
        self._trimming.start(self._trim_when_unused(), "trim-snapshots")
        backends = {info.name: self._sandboxes.backend(info.name) for info in self._sandboxes.backends()}
        for name in sorted(await self._records.backends() - backends.keys()):
            # Their rows stay, in case the backend is configured again.
            _log.error("leftover snapshots are on a backend that no longer exists", backend=name)
        takeovers = [
            self._take_over(backend, await self._records.of(backend.name))
            for backend in backends.values()
            if backend.layers_outlive
        ]
        await asyncio.gather(*(takeover.attempted() for takeover in takeovers))

    def _take_over(self, backend: Backend, records: list[SnapshotRecord]) -> Deletion:
        async def attempt() -> None:
            try:
                there = await backend.adopt_layers([record.snapshot.id for record in records])
            except FailedPrecondition as error:
                if records:
                    _log.warning("snapshots could not be listed yet", backend=backend.name, reason=error.message)
                return
            # Calls that may fail come first, because the whole attempt is retried.
            for record in records:
                if record.snapshot.id not in there:
                    await self._records.erase(record.snapshot.id)
            for record in records:
                if record.snapshot.id in there:
                    self._adopt(record)
            self._trim()

        return self._takeovers.start(f"leftover snapshots of an earlier service on {backend.name}", attempt)

    def _adopt(self, record: SnapshotRecord) -> None:
        snapshot = record.snapshot
        below = record.below if record.below in self._known else ""
        if below:
            self._layer_refs.hold(below)
        self._known[snapshot.id] = _Known(snapshot, record.spec, below, self._clock())
        self._layer_refs.put_in(snapshot.namespace, snapshot.id)
        if self._by_key.setdefault((snapshot.namespace, snapshot.key), snapshot.id) != snapshot.id:
            self._forget(snapshot.id)  # prepared again before this one was adopted

    async def prepare(
        self, spec: SnapshotSpec, namespace: str = DEFAULT_NAMESPACE
    ) -> AsyncIterator[Progress | Snapshot]:
        """Makes, joins or finds a namespace's snapshot; yields progress, then the snapshot.

        Raises FailedPrecondition (SETUP_FAILED; SANDBOX_LOST: the command's sandbox was lost) after the progress that
        identifies the command, and what ``Sandboxes.create`` raises.
        """
        key = (namespace, key_of(spec))
        if (known := self._by_key.get(key)) is not None and await self._is_there(known):
            yield self._used(known).snapshot
            return
        work = self._working.get(key)
        if work is None:

            async def make(report: Callable[[Progress], None]) -> Snapshot:
                try:
                    return await self._make(*key, spec, report)
                finally:
                    self._working.pop(key, None)

            work = self._working[key] = SharedWork(make)
        async for event in work.events():
            yield event
        yield await work.result()

    async def _is_there(self, snapshot_id: str) -> bool:
        """Whether a snapshot can be forked; forgets one that its backend has lost."""
        backend = self._sandboxes.backend(self._known[snapshot_id].snapshot.backend)
        there = await backend.has_layer(snapshot_id)
        if not there and snapshot_id in self._known:
            _log.warning("a snapshot was lost; it is prepared again", snapshot=snapshot_id)
            self._forget(snapshot_id)
        return snapshot_id in self._known

    async def _make(self, namespace: str, key: str, spec: SnapshotSpec, report: Callable[[Progress], None]) -> Snapshot:
        setup = dataclasses.replace(
            spec.sandbox, lease_s=self._lease_s, labels={SNAPSHOT_LABEL: key[:32]}, to_be_sealed=True
        )
        self._sandboxes.refuse_unforkable(setup)
        sandbox = await self._sandboxes.create("", setup, namespace, shared=True)
        try:
            _, handle, processes = self._sandboxes.table.usable(sandbox.id)
            for file in spec.files:
                await files.write_whole(handle, files.absolute(handle, file.path), file.content, file.mode)
            for index, command in enumerate(spec.setup):
                report(CommandStarted(index))
                result = await processes.run(command, b"", _OUTPUT_LIMIT)
                report(CommandFinished(index, result))
                if result.exit.reason is ExitReason.SANDBOX_LOST:
                    raise sandbox_lost(result.exit.message, sandbox.id)  # no fault of the command: it may be repeated
                if result.exit.reason is not ExitReason.EXITED or result.exit.code != 0:
                    raise FailedPrecondition(
                        f"setup command {index} failed: {_how(result)}",
                        reason="SETUP_FAILED",
                        metadata={"index": str(index)},
                    )
            below = spec.sandbox.snapshot_id
            if below:
                # Taken before the sandbox that holds it ends.
                self._layer_refs.hold_below(below)
            try:
                sealed, layer = await self._sandboxes.seal(sandbox.id, self._sandboxes.home.new_id("ss"))
            except BaseException:
                if below:
                    self._layer_refs.release(below)
                raise
        except BaseException:
            await self._remove(sandbox.id)
            raise
        backend = self._sandboxes.backend(sealed.backend)
        now = self._clock()
        snapshot = Snapshot(layer.id, key, backend.name, now, layer.size, backend.capabilities.fork, namespace)
        kept = dataclasses.replace(sealed, lease_s=None, labels={}, to_be_sealed=False)
        if backend.layers_outlive:
            try:
                await self._records.write(SnapshotRecord(snapshot, kept, below))
            except BaseException:
                self._leave(snapshot, below)
                raise
        self._known[snapshot.id] = _Known(snapshot, kept, below, now)
        self._layer_refs.put_in(namespace, snapshot.id)
        self._by_key[namespace, key] = snapshot.id
        self._trim()
        return snapshot

    async def _remove(self, sandbox_id: str) -> None:
        try:
            await self._sandboxes.delete(sandbox_id)
        except PenstockError as pending:
            # It is removed later; the caller must get the earlier error.
            _log.warning("a setup's sandbox is not removed yet", sandbox_id=sandbox_id, reason=pending.reason)

    def get(self, snapshot_id: str) -> Snapshot:
        """Returns a snapshot. Raises NotFound (SNAPSHOT_UNKNOWN)."""
        return self._find(snapshot_id).snapshot

    def find(self, snapshot_id: str) -> Snapshot | None:
        """Returns a snapshot, or None."""
        known = self._known.get(snapshot_id)
        return None if known is None else known.snapshot

    def sandbox_spec(self, snapshot_id: str) -> SandboxSpec:
        """Returns the spec of the sealed sandbox, to fork it. Raises NotFound (SNAPSHOT_UNKNOWN)."""
        self._find(snapshot_id)
        return self._used(snapshot_id).spec

    def all(self, namespace: str | None = None) -> list[Snapshot]:
        """Returns the snapshots of a namespace (None: of all), newest first."""
        found = [known.snapshot for known in self._known.values()]
        return sorted(
            (snapshot for snapshot in found if namespace in (None, snapshot.namespace)),
            key=lambda one: (one.created_at, one.id),
            reverse=True,
        )

    async def delete(self, snapshot_id: str, namespace: str | None = None) -> None:
        """Removes a snapshot. Sandboxes made from it live on; its files go with the last.

        Succeeds if a namespace (None: any) has no such snapshot. Raises Unavailable (DELETE_PENDING) if its backend
        could not remove it yet.
        """
        snapshot = self.find(snapshot_id)
        if snapshot is None or namespace not in (None, snapshot.namespace):
            return
        # If the disk refuses, the snapshot stays known and its deletion can be retried.
        await self._records.erase(snapshot_id)
        if snapshot_id in self._known and (deletion := self._forget(snapshot_id)) is not None:
            await deletion.outcome()

    async def aclose(self) -> None:
        """Stops preparations and removes what is not kept, each with the last sandbox based on it."""
        await self._trimming.aclose()
        await self._takeovers.aclose()
        for work in list(self._working.values()):
            await work.aclose()
        for snapshot_id, known in list(self._known.items()):
            if not (self._keep and self._sandboxes.backend(known.snapshot.backend).layers_outlive):
                self._forget(snapshot_id)

    def _find(self, snapshot_id: str) -> _Known:
        known = self._known.get(snapshot_id)
        if known is None:
            raise unknown(snapshot_id)
        return known

    def _used(self, snapshot_id: str) -> _Known:
        self._known.move_to_end(snapshot_id)
        known = self._known[snapshot_id]
        known.used_at = self._clock()
        return known

    def _forget(self, snapshot_id: str) -> Deletion | None:
        known = self._known.pop(snapshot_id)
        key = (known.snapshot.namespace, known.snapshot.key)
        if self._by_key.get(key) == snapshot_id:
            del self._by_key[key]
        # Erased before its layer is removed: a layer without a row is removed, whatever happens in between.
        self._records.erase(snapshot_id).add_done_callback(_erased)
        return self._leave(known.snapshot, known.below)

    def _leave(self, snapshot: Snapshot, below: str) -> Deletion | None:
        backend = self._sandboxes.backend(snapshot.backend)
        return self._layer_refs.leave(
            snapshot.id, backend, lambda: self._layer_refs.release(below) if below else None, closed=True
        )

    async def _trim_when_unused(self) -> None:
        unused = self._layer_refs.unused
        while True:
            number = unused.number
            self._trim()
            await unused.wait(number)

    def _trim(self) -> None:
        """Evicts the least recently used unreferenced snapshots until the rest fits."""
        total = sum(known.snapshot.size for known in self._known.values())
        before = self._clock() - _GRACE_S
        for snapshot_id, known in list(self._known.items()):
            fits = total <= self._cache_bytes and len(self._known) <= self._cache_count
            if fits or known.used_at > before:
                return
            if not self._layer_refs.held(snapshot_id):
                _log.info("snapshot is evicted", snapshot=snapshot_id, bytes=known.snapshot.size)
                total -= known.snapshot.size
                self._forget(snapshot_id)


def _erased(done: asyncio.Future[list[int]]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        # The layer is removed all the same; the next start finds a row without a layer.
        _log.error("a snapshot's row was not deleted", error=repr(error))


def _how(result: RunResult) -> str:
    ended = result.exit
    how = f"exit code {ended.code}" if ended.reason is ExitReason.EXITED else ended.reason.name
    tail = result.stderr[-500:].decode(errors="replace").strip()
    return f"{how}: {tail}" if tail else f"{how} {ended.message}".strip()


def key_of(spec: SnapshotSpec) -> str:
    """Returns the content hash of a spec.

    Equal specs have equal keys while the service runs, and after a restart too unless they hold a secret. A key reveals
    nothing of a secret's value, not even to guessing: it is hashed with a salt that is stored nowhere.
    """
    sandbox = spec.sandbox
    content = repr(
        (
            (sandbox.backend, sandbox.image, sandbox.snapshot_id, sandbox.resources, sandbox.network),
            (sorted(sandbox.env.items()), sandbox.toolbox_ids, sandbox.user),
            [
                (dataclasses.replace(companion, env={}), sorted(companion.env.items()))
                for companion in sandbox.companions
            ],
            [_file_key(file) for file in spec.files],
            [_command_key(command) for command in spec.setup],
        )
    )
    return hashlib.sha256(content.encode(errors="surrogateescape")).hexdigest()


def _command_key(command: Command) -> tuple[object, ...]:
    secret = repr(sorted(command.secret_env.items())).encode(errors="surrogateescape")
    return (
        command.argv,
        command.shell,
        sorted(command.env.items()),
        hmac.digest(_SALT, secret, "sha256").hex() if command.secret_env else "",
        command.cwd,
        command.user,
        command.timeout_s,
    )


def _file_key(file: SeedFile) -> tuple[str, str, int]:
    return file.path, hashlib.sha256(file.content).hexdigest(), file.mode
