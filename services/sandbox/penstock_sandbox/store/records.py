"""The journal of sandboxes and of snapshots.

Invariants: a sandbox's row is written before the sandbox is made and erased after all of it is gone, so that the next
start after a crash knows what to clean up (R50). A snapshot's row is written once its layer is complete and erased
before the layer is removed: a layer without a row is an orphan. Rows hold no values of a secret environment. Nothing
else survives a restart: no handle, no output.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version

import structlog
from pydantic import TypeAdapter, ValidationError

from penstock_chassis.auth import DEFAULT_NAMESPACE
from penstock_chassis.journal import Journal, refusal
from penstock_sandbox.domain.model import SandboxSpec, Snapshot

MIGRATIONS = (
    """
    CREATE TABLE sandbox (
        id TEXT PRIMARY KEY, backend TEXT NOT NULL, labels TEXT NOT NULL, created_at REAL NOT NULL, state TEXT NOT NULL
    ) STRICT;
    """,
    "ALTER TABLE sandbox DROP COLUMN state;",
    """
    CREATE TABLE snapshot (
        id TEXT PRIMARY KEY, backend TEXT NOT NULL, made_by TEXT NOT NULL, content BLOB NOT NULL
    ) STRICT;
    """,
    "ALTER TABLE sandbox ADD COLUMN namespace TEXT NOT NULL DEFAULT 'default';",
)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Record:
    """The journal row of a sandbox."""

    id: str
    backend: str
    labels: Mapping[str, str]
    created_at: float
    namespace: str = DEFAULT_NAMESPACE


class Records:
    """The journal's sandbox rows."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def all(self) -> list[Record]:
        """Returns every row, oldest first."""
        rows = await self._journal.query(
            "SELECT id, backend, labels, created_at, namespace FROM sandbox ORDER BY created_at, rowid"
        )
        return [
            Record(row["id"], row["backend"], _labels(row["labels"]), row["created_at"], row["namespace"])
            for row in rows
        ]

    async def write(self, record: Record) -> None:
        """Writes a sandbox's row; returns once it is on disk. Raises Unavailable (JOURNAL_FAILED) if the disk fails."""
        with _refused():
            await self._journal.execute(
                "INSERT INTO sandbox (id, backend, labels, created_at, namespace) VALUES (?, ?, ?, ?, ?)",
                (record.id, record.backend, json.dumps(dict(record.labels)), record.created_at, record.namespace),
            )

    async def erase(self, sandbox_ids: Sequence[str]) -> None:
        """Erases the rows of sandboxes that are entirely gone; unknown ids are ignored."""
        if sandbox_ids:
            await self._journal.write([("DELETE FROM sandbox WHERE id = ?", (one,)) for one in sandbox_ids])


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """A snapshot, the spec of the sandbox that was sealed, and the snapshot below it (empty: none)."""

    snapshot: Snapshot
    spec: SandboxSpec
    below: str


_CONTENT = TypeAdapter(SnapshotRecord)


class SnapshotRecords:
    """The rows of snapshots on backends whose layers outlive the service."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def of(self, backend: str) -> list[SnapshotRecord]:
        """Returns a backend's rows, oldest first. Rows of another version of this service are orphans: erased."""
        rows = await self._journal.query(
            "SELECT id, made_by, content FROM snapshot WHERE backend = ? ORDER BY rowid", (backend,)
        )
        found = []
        for row in rows:
            try:
                if row["made_by"] != _made_by():
                    raise ValueError("was made by another version")
                found.append(_CONTENT.validate_json(row["content"]))
            except (ValidationError, ValueError) as error:
                _log.info("a snapshot is not reused", snapshot=row["id"], why=type(error).__name__)
                await self.erase(row["id"])
        return found

    async def backends(self) -> set[str]:
        return {row["backend"] for row in await self._journal.query("SELECT DISTINCT backend FROM snapshot")}

    async def write(self, record: SnapshotRecord) -> None:
        """Writes a snapshot's row; returns once it is on disk. Unavailable (JOURNAL_FAILED) if the disk fails."""
        one = record.snapshot
        with _refused():
            await self._journal.execute(
                "INSERT INTO snapshot (id, backend, made_by, content) VALUES (?, ?, ?, ?)",
                (one.id, one.backend, _made_by(), _CONTENT.dump_json(record)),
            )

    def erase(self, snapshot_id: str) -> asyncio.Future[list[int]]:
        """Erases a snapshot's row, in order with other writes; await the result to have it on disk."""
        return self._journal.submit([("DELETE FROM snapshot WHERE id = ?", (snapshot_id,))])


@contextmanager
def _refused() -> Iterator[None]:
    """Turns a disk error into this service's error, reported per sandbox and counted like the others."""
    try:
        yield
    except sqlite3.Error as error:
        raise refusal(error) or error from error


def _made_by() -> str:
    return version("penstock-sandbox")


def _labels(text: str) -> Mapping[str, str]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}  # a row of the first version, which wrote another form
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}
