"""The journal of sandboxes: which ones there may be, written before anything of them is made.

Invariants: a row exists from before its sandbox is made until everything of it is gone, so that whatever kills this
service, its next start knows what to look for (R50). Nothing else survives: no handle, no output, no snapshot.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock_chassis.journal import Journal

MIGRATIONS = (
    """
    CREATE TABLE sandbox (
        id TEXT PRIMARY KEY, backend TEXT NOT NULL, labels TEXT NOT NULL, created_at REAL NOT NULL, state TEXT NOT NULL
    ) STRICT;
    """,
    "ALTER TABLE sandbox DROP COLUMN state;",
)


@dataclass(frozen=True, slots=True)
class Record:
    """What is remembered of a sandbox."""

    id: str
    backend: str
    labels: Mapping[str, str]
    created_at: float


class Records:
    """The rows."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def all(self) -> list[Record]:
        """Every row, oldest first."""
        rows = await self._journal.query(
            "SELECT id, backend, labels, created_at FROM sandbox ORDER BY created_at, rowid"
        )
        return [Record(row["id"], row["backend"], _labels(row["labels"]), row["created_at"]) for row in rows]

    async def write(self, record: Record) -> None:
        """Remember a sandbox; returns once it is on disk."""
        await self._journal.execute(
            "INSERT INTO sandbox (id, backend, labels, created_at) VALUES (?, ?, ?, ?)",
            (record.id, record.backend, json.dumps(dict(record.labels)), record.created_at),
        )

    async def erase(self, sandbox_ids: Sequence[str]) -> None:
        """Forget sandboxes of which nothing is left; unknown ones are fine."""
        if sandbox_ids:
            await self._journal.write([("DELETE FROM sandbox WHERE id = ?", (one,)) for one in sandbox_ids])


def _labels(text: str) -> Mapping[str, str]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}  # a row of the first version, which wrote another form
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}
