"""Snapshots: a spec's files and setup, done once, sealed, and forked any number of times.

Purpose: a group of rollouts of one task shares one prepared state (R57: setup runs once and each command's real exit,
output and duration is told).

Invariants: a snapshot's key is the hash of everything that went into it; concurrent callers for one key share the work;
a setup that failed leaves no snapshot and no sandbox. A snapshot never changes. Together they take at most the cache's
size, as far as those in use let them: the least recently used go first, never one that a sandbox or another snapshot
stands on, that is being forked, or that was used in the last minute, so that who prepared one can fork it. Where
layers outlive their service, those that a service which died knew are known to its successor, and where ``keep`` is
set also those of one that was stopped; whatever the journal does not name goes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import structlog

from penstock_chassis.errors import FailedPrecondition, PenstockError
from penstock_sandbox import files
from penstock_sandbox.backends.base import Backend
from penstock_sandbox.bases import unknown
from penstock_sandbox.clock import even_time
from penstock_sandbox.deletion import Deletion, Pause
from penstock_sandbox.model import SNAPSHOT_LABEL, ExitReason, RunResult, SandboxSpec, Snapshot, SnapshotSpec
from penstock_sandbox.records import SnapshotRecord, SnapshotRecords
from penstock_sandbox.sandboxes import Sandboxes
from penstock_sandbox.shared_work import SharedWork
from penstock_sandbox.snapshot_key import key_of

_OUTPUT_LIMIT = 64 * 1024
_SETUP_LEASE_S = 3600.0
_GRACE_S = 60.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CommandStarted:
    """Setup command ``index`` runs now."""

    index: int


@dataclass(frozen=True, slots=True)
class CommandFinished:
    """Setup command ``index`` ended."""

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

    ``cache_bytes`` bounds them, those in use aside; ``keep`` leaves them at the end where they outlive the service.
    """

    def __init__(
        self,
        sandboxes: Sandboxes,
        records: SnapshotRecords,
        max_lease_s: float,
        cache_bytes: int,
        *,
        keep: bool = False,
        clock: Callable[[], float] = even_time,
        pause: Pause = asyncio.sleep,
    ) -> None:
        self._sandboxes = sandboxes
        self._bases = sandboxes.bases
        self._bases.on_unused = self._trim
        self._records = records
        self._keep = keep
        self._pause = pause
        self._takeovers: list[Deletion] = []
        self._lease_s = min(_SETUP_LEASE_S, max_lease_s)
        self._cache_bytes = cache_bytes
        self._clock = clock
        # The least recently used first.
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._by_key: dict[str, str] = {}
        self._working: dict[str, SharedWork[Progress, Snapshot]] = {}

    async def open(self) -> None:
        """Take over what the journal names; where a backend cannot say yet what it has, that goes on by itself."""
        backends = {info.name: self._sandboxes.backend(info.name) for info in self._sandboxes.backends()}
        for name in sorted(await self._records.backends() - backends.keys()):
            # Their rows stay: the backend may be configured again.
            _log.error("snapshots were left on a backend that is not there any more", backend=name)
        for backend in backends.values():
            if backend.layers_outlive:
                self._takeovers.append(self._take_over(backend, await self._records.of(backend.name)))
        await asyncio.gather(*(takeover.outcome() for takeover in self._takeovers), return_exceptions=True)

    def _take_over(self, backend: Backend, records: list[SnapshotRecord]) -> Deletion:
        async def attempt() -> None:
            try:
                there = await backend.adopt_layers([record.snapshot.id for record in records])
            except FailedPrecondition as error:
                if records:
                    _log.warning("snapshots are not known for now", backend=backend.name, reason=error.message)
                return
            # First what may fail: all of this is tried again then.
            for record in records:
                if record.snapshot.id not in there:
                    await self._records.erase(record.snapshot.id)
            for record in records:
                if record.snapshot.id in there:
                    self._adopt(record)
            self._trim()

        return Deletion(f"what an earlier service left of snapshots on {backend.name}", attempt, pause=self._pause)

    def _adopt(self, record: SnapshotRecord) -> None:
        snapshot = record.snapshot
        below = record.below if record.below in self._known else ""
        if below:
            self._bases.hold(below)
        self._known[snapshot.id] = _Known(snapshot, record.spec, below, self._clock())
        if self._by_key.setdefault(snapshot.key, snapshot.id) != snapshot.id:
            self._forget(snapshot.id)  # it was prepared again before this one was found

    async def prepare(self, spec: SnapshotSpec) -> AsyncIterator[Progress | Snapshot]:
        """Make the snapshot, or join who makes it, or find it made: progress, then the snapshot.

        Raises FailedPrecondition (SETUP_FAILED) after the progress that shows which command failed, and what
        ``Sandboxes.create`` raises.
        """
        key = key_of(spec)
        if (known := self._by_key.get(key)) is not None and await self._is_there(known):
            yield self._used(known).snapshot
            return
        work = self._working.get(key)
        if work is None:

            async def make(tell: Callable[[Progress], None]) -> Snapshot:
                try:
                    return await self._make(key, spec, tell)
                finally:
                    self._working.pop(key, None)

            work = self._working[key] = SharedWork(make)
        async for event in work.events():
            yield event
        yield await work.result()

    async def _is_there(self, snapshot_id: str) -> bool:
        """Whether a snapshot can be forked; one that its backend has lost is forgotten."""
        backend = self._sandboxes.backend(self._known[snapshot_id].snapshot.backend)
        there = await backend.has_layer(snapshot_id)
        if not there and snapshot_id in self._known:
            _log.warning("a snapshot was lost; it is prepared again", snapshot=snapshot_id)
            self._forget(snapshot_id)
        return snapshot_id in self._known

    async def _make(self, key: str, spec: SnapshotSpec, tell: Callable[[Progress], None]) -> Snapshot:
        setup = dataclasses.replace(
            spec.sandbox, lease_s=self._lease_s, labels={SNAPSHOT_LABEL: key[:32]}, to_be_sealed=True
        )
        self._sandboxes.refuse_unforkable(setup)
        sandbox = await self._sandboxes.create("", setup, shared=True)
        try:
            _, handle, processes = self._sandboxes.usable(sandbox.id)
            for file in spec.files:
                await files.write_whole(handle, files.absolute(handle, file.path), file.content, file.mode)
            for index, command in enumerate(spec.setup):
                tell(CommandStarted(index))
                result = await processes.run(command, b"", _OUTPUT_LIMIT)
                tell(CommandFinished(index, result))
                if result.exit.reason is not ExitReason.EXITED or result.exit.code != 0:
                    raise FailedPrecondition(
                        f"setup command {index} failed: {_how(result)}",
                        reason="SETUP_FAILED",
                        metadata={"index": str(index)},
                    )
            below = spec.sandbox.snapshot_id
            if below:
                # From before the sandbox that holds it ends.
                self._bases.hold_below(below)
            try:
                sealed, layer = await self._sandboxes.seal(sandbox.id, f"ss-{secrets.token_hex(16)}")
            except BaseException:
                if below:
                    self._bases.release(below)
                raise
        except BaseException:
            await self._remove(sandbox.id)
            raise
        backend = self._sandboxes.backend(sealed.backend)
        now = self._clock()
        snapshot = Snapshot(layer.id, key, backend.name, now, layer.size, backend.capabilities.fork)
        kept = dataclasses.replace(sealed, lease_s=None, labels={}, to_be_sealed=False)
        if backend.layers_outlive:
            try:
                await self._records.write(SnapshotRecord(snapshot, kept, below))
            except BaseException:
                self._leave(snapshot, below)
                raise
        self._known[snapshot.id] = _Known(snapshot, kept, below, now)
        self._by_key[key] = snapshot.id
        self._trim()
        return snapshot

    async def _remove(self, sandbox_id: str) -> None:
        try:
            await self._sandboxes.delete(sandbox_id)
        except PenstockError as pending:
            # It goes later; what failed before is what the caller must hear.
            _log.warning("a setup's sandbox is not removed yet", sandbox_id=sandbox_id, reason=pending.reason)

    def get(self, snapshot_id: str) -> Snapshot:
        """Raises NotFound (SNAPSHOT_UNKNOWN)."""
        return self._find(snapshot_id).snapshot

    def sandbox_spec(self, snapshot_id: str) -> SandboxSpec:
        """The spec of the sandbox that was sealed, for who forks it. Raises NotFound (SNAPSHOT_UNKNOWN)."""
        self._find(snapshot_id)
        return self._used(snapshot_id).spec

    def all(self) -> list[Snapshot]:
        """All snapshots, newest first."""
        return sorted(
            (known.snapshot for known in self._known.values()), key=lambda one: (one.created_at, one.id), reverse=True
        )

    async def delete(self, snapshot_id: str) -> None:
        """Remove a snapshot; unknown ones are a success. Sandboxes made from it live on; its files go with the last.

        Raises Unavailable (DELETE_PENDING) when its backend could not remove it yet.
        """
        if snapshot_id in self._known:
            # A disk that refuses this leaves it known, so that it can be asked for again.
            await self._records.erase(snapshot_id)
        if snapshot_id in self._known and (deletion := self._forget(snapshot_id)) is not None:
            await deletion.outcome()

    async def aclose(self) -> None:
        """Stop what is being prepared and remove what is not kept, each with the last sandbox that stands on it."""
        for takeover in self._takeovers:
            await takeover.aclose()
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
        if self._by_key.get(known.snapshot.key) == snapshot_id:
            del self._by_key[known.snapshot.key]
        # Before its layer goes: one that nobody remembers is removed, whatever comes between.
        self._records.erase(snapshot_id).add_done_callback(_erased)
        return self._leave(known.snapshot, known.below)

    def _leave(self, snapshot: Snapshot, below: str) -> Deletion | None:
        backend = self._sandboxes.backend(snapshot.backend)
        return self._bases.leave(
            snapshot.id, backend, lambda: self._bases.release(below) if below else None, closed=True
        )

    def _trim(self) -> None:
        """Forget the least recently used that nobody needs, until the rest fits."""
        total = sum(known.snapshot.size for known in self._known.values())
        before = self._clock() - _GRACE_S
        for snapshot_id, known in list(self._known.items()):
            if total <= self._cache_bytes or known.used_at > before:
                return
            # Forgetting one may have led here again.
            if snapshot_id in self._known and not self._bases.held(snapshot_id):
                _log.info("snapshot leaves the cache", snapshot=snapshot_id, bytes=known.snapshot.size)
                total -= known.snapshot.size
                self._forget(snapshot_id)


def _erased(done: asyncio.Future[list[int]]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        # What it stood for goes all the same; the next start finds the row and nothing behind it.
        _log.error("a snapshot's row was not erased", error=repr(error))


def _how(result: RunResult) -> str:
    ended = result.exit
    how = f"exit code {ended.code}" if ended.reason is ExitReason.EXITED else ended.reason.name
    tail = result.stderr[-500:].decode(errors="replace").strip()
    return f"{how}: {tail}" if tail else f"{how} {ended.message}".strip()
