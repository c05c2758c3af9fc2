"""Snapshots: a spec's files and setup, done once, sealed, and forked any number of times.

Purpose: a group of rollouts of one task shares one prepared state (R57: setup runs once and each command's real exit,
output and duration is told).

Invariants: a snapshot's key is the hash of everything that went into it; concurrent callers for one key share the work;
a setup that failed leaves no snapshot and no sandbox. A snapshot never changes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from penstock_chassis.errors import FailedPrecondition, NotFound
from penstock_sandbox import files
from penstock_sandbox.model import (
    Command,
    ExitReason,
    RunResult,
    SandboxSpec,
    SeedFile,
    Snapshot,
    SnapshotSpec,
)
from penstock_sandbox.progress import SharedWork
from penstock_sandbox.sandboxes import Sandboxes

_OUTPUT_LIMIT = 64 * 1024
_SETUP_LEASE_S = 3600.0


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


class Snapshots:
    """All snapshots of the service."""

    def __init__(self, sandboxes: Sandboxes, max_lease_s: float, clock: Callable[[], float] = time.time) -> None:
        self._sandboxes = sandboxes
        self._lease_s = min(_SETUP_LEASE_S, max_lease_s)
        self._clock = clock
        self._known: dict[str, tuple[Snapshot, SandboxSpec]] = {}
        self._by_key: dict[str, str] = {}
        self._working: dict[str, SharedWork[Progress, Snapshot]] = {}
        self._salt = secrets.token_bytes(16)

    async def prepare(self, spec: SnapshotSpec) -> AsyncIterator[Progress | Snapshot]:
        """Make the snapshot, or join who makes it, or find it made: progress, then the snapshot.

        Raises FailedPrecondition (SETUP_FAILED) after the progress that shows which command failed, and what
        ``Sandboxes.create`` raises.
        """
        key = self.key(spec)
        if (known := self._by_key.get(key)) is not None:
            yield self._known[known][0]
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

    async def _make(self, key: str, spec: SnapshotSpec, tell: Callable[[Progress], None]) -> Snapshot:
        setup = dataclasses.replace(spec.sandbox, lease_s=self._lease_s, labels={"penstock/snapshot": key[:32]})
        self._sandboxes.refuse_unforkable(setup)
        sandbox = await self._sandboxes.create("", setup)
        try:
            live, handle, processes = self._sandboxes.usable(sandbox.id)
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
            live, handle = await self._sandboxes.detach(sandbox.id)
            layer = await live.backend.seal(handle, f"ss-{secrets.token_hex(16)}")
        except BaseException:
            await self._sandboxes.delete(sandbox.id)
            raise
        snapshot = Snapshot(layer.id, key, live.backend.name, self._clock(), layer.size, live.backend.capabilities.fork)
        self._known[snapshot.id] = (snapshot, dataclasses.replace(live.view.spec, lease_s=None, labels={}))
        self._by_key[key] = snapshot.id
        return snapshot

    def get(self, snapshot_id: str) -> Snapshot:
        """Raises NotFound (SNAPSHOT_UNKNOWN)."""
        return self._find(snapshot_id)[0]

    def sandbox_spec(self, snapshot_id: str) -> SandboxSpec:
        """The spec of the sandbox that was sealed. Raises NotFound (SNAPSHOT_UNKNOWN)."""
        return self._find(snapshot_id)[1]

    def all(self) -> list[Snapshot]:
        """All snapshots, newest first."""
        return sorted(
            (known[0] for known in self._known.values()), key=lambda one: (one.created_at, one.id), reverse=True
        )

    async def delete(self, snapshot_id: str) -> None:
        """Remove a snapshot; unknown ones are a success. Sandboxes made from it live on."""
        known = self._known.pop(snapshot_id, None)
        if known is None:
            return
        self._by_key.pop(known[0].key, None)
        await self._sandboxes.backend(known[0].backend).remove_layer(snapshot_id)

    async def aclose(self) -> None:
        """Stop what is being prepared."""
        for work in list(self._working.values()):
            await work.aclose()

    def _find(self, snapshot_id: str) -> tuple[Snapshot, SandboxSpec]:
        known = self._known.get(snapshot_id)
        if known is None:
            raise NotFound("no such snapshot", reason="SNAPSHOT_UNKNOWN", metadata={"snapshot_id": snapshot_id})
        return known

    def key(self, spec: SnapshotSpec) -> str:
        """The content hash of a spec; values of secret environments enter it through a keyed hash."""
        sandbox = spec.sandbox
        content = repr(
            (
                (sandbox.backend, sandbox.image, sandbox.snapshot_id, sandbox.resources, sandbox.network),
                (sorted(sandbox.env.items()), sandbox.toolbox_ids, sandbox.user),
                [_file_key(file) for file in spec.files],
                [self._command_key(command) for command in spec.setup],
            )
        )
        return hashlib.sha256(content.encode(errors="surrogateescape")).hexdigest()

    def _command_key(self, command: Command) -> tuple[object, ...]:
        secret = repr(sorted(command.secret_env.items())).encode(errors="surrogateescape")
        return (
            command.argv,
            command.shell,
            sorted(command.env.items()),
            hmac.digest(self._salt, secret, "sha256").hex() if command.secret_env else "",
            command.cwd,
            command.user,
            command.timeout_s,
        )


def _file_key(file: SeedFile) -> tuple[str, str, int]:
    return file.path, hashlib.sha256(file.content).hexdigest(), file.mode


def _how(result: RunResult) -> str:
    ended = result.exit
    how = f"exit code {ended.code}" if ended.reason is ExitReason.EXITED else ended.reason.name
    tail = result.stderr[-500:].decode(errors="replace").strip()
    return f"{how}: {tail}" if tail else f"{how} {ended.message}".strip()
