"""The queue of ended rollouts that are to be exported, in the journal.

Invariants: a rollout is queued in the commit that ends it, and leaves the queue once it is stored and its gates know
it, so a kill -9 loses none. A file's number is on disk with its rollouts before its first byte is sent, so what a
killed driver sent is sent again under the same name.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from sqlite3 import Row
from typing import Final

from penstock.driver.v1 import rollout_pb2
from penstock_chassis.journal import Journal, Statement

MIGRATION: Final = """
ALTER TABLE rollouts ADD COLUMN export BLOB;
CREATE TABLE exports (
    position INTEGER PRIMARY KEY AUTOINCREMENT, rollout_id TEXT NOT NULL UNIQUE, namespace TEXT NOT NULL, run_id TEXT,
    gate TEXT NOT NULL, gates TEXT NOT NULL, end_time REAL NOT NULL, file INTEGER, error TEXT,
    stored INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX exports_unstored ON exports (namespace, run_id, position) WHERE stored = 0;
CREATE TABLE export_files (number INTEGER PRIMARY KEY AUTOINCREMENT);
"""
"""`file` is the number of the file that has the rollout, or will have it; `error` why it cannot be exported."""
_AMONG: Final = "SELECT value FROM json_each(?)"


@dataclass(frozen=True, slots=True)
class Queued:
    """An ended rollout in the queue. `gate` had its last attempt, `gates` any; empty = not known, or none."""

    rollout_id: str
    namespace: str
    run_id: str | None
    gate: str
    gates: tuple[str, ...]
    file: int | None


@dataclass(frozen=True, slots=True)
class Backlog:
    """What is not stored: how many rollouts wait, since when (seconds since the epoch; None = nothing), and up to 100
    that cannot be exported."""

    count: int
    since: float | None
    broken: tuple[str, ...]


def to_be_exported(rollout_id: str, gates: Sequence[str]) -> Statement:
    """The statement that queues a rollout whose end is written before it."""
    return (
        "INSERT OR IGNORE INTO exports (rollout_id, namespace, run_id, gate, gates, end_time)"
        " SELECT rollout_id, namespace, run_id, ?, ?, end_time FROM rollouts WHERE rollout_id = ?",
        (gates[-1] if gates else "", json.dumps(list(gates)), rollout_id),
    )


class ExportQueue:
    """The queue's rows."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def last(self) -> int:
        """The position of the newest rollout; 0 without one."""
        return int((await self._journal.query("SELECT coalesce(max(position), 0) FROM exports"))[0][0])

    async def next(self, limit: int, until: int, but_gates: Collection[str]) -> Sequence[Queued]:
        """The oldest rollouts that may share a file: of one namespace and run, at most `limit`; none at `but_gates`.

        Or all rollouts of a file that has its number, whatever their gates: it is stored whole. None is after the
        position `until`.
        """
        free = "stored = 0 AND error IS NULL AND position <= ? AND gate NOT IN (SELECT value FROM json_each(?))"
        gates = json.dumps(list(but_gates))
        oldest = f"SELECT * FROM exports WHERE {free} ORDER BY position LIMIT 1"  # noqa: S608 - fixed texts
        first = await self._journal.query(oldest, (until, gates))
        if not first:
            return ()
        head = first[0]
        if head["file"] is not None:
            rows = await self._journal.query(
                "SELECT * FROM exports WHERE stored = 0 AND error IS NULL AND file = ? ORDER BY position",
                (head["file"],),
            )
        else:
            rows = await self._journal.query(
                f"SELECT * FROM exports WHERE {free} AND file IS NULL AND namespace = ? AND run_id IS ?"  # noqa: S608
                " ORDER BY position LIMIT ?",
                (until, gates, head["namespace"], head["run_id"], limit),
            )
        return [_queued(row) for row in rows]

    async def number(self, rollout_ids: Sequence[str], left_out: Sequence[str], known: int | None) -> int:
        """Record that these rollouts are in one file, and return its number: `known`, or the next one.

        `left_out` are no longer in that file.
        """
        if known is None:
            known = int((await self._journal.query("INSERT INTO export_files DEFAULT VALUES RETURNING number"))[0][0])
        await self._journal.write(
            [
                (f"UPDATE exports SET file = ? WHERE rollout_id IN ({_AMONG})", (known, json.dumps(list(rollout_ids)))),  # noqa: S608
                (f"UPDATE exports SET file = NULL WHERE rollout_id IN ({_AMONG})", (json.dumps(list(left_out)),)),  # noqa: S608
            ]
        )
        return known

    async def stored(self, rollout_ids: Sequence[str], export: rollout_pb2.Export) -> None:
        """Record that these rollouts are stored."""
        ids = json.dumps(list(rollout_ids))
        await self._journal.write(
            [
                (f"UPDATE rollouts SET export = ? WHERE rollout_id IN ({_AMONG})", (export.SerializeToString(), ids)),  # noqa: S608
                (f"UPDATE exports SET stored = 1 WHERE rollout_id IN ({_AMONG})", (ids,)),  # noqa: S608
            ]
        )

    async def fail(self, rollout_id: str, error: str) -> None:
        """Record that a rollout cannot be exported, whenever it is tried."""
        await self._journal.execute(
            "UPDATE exports SET error = ?, file = NULL WHERE rollout_id = ?", (error, rollout_id)
        )

    async def try_all_again(self) -> None:
        """Forget the errors of rollouts: another version of the driver may be able to export them."""
        await self._journal.execute("UPDATE exports SET error = NULL WHERE error IS NOT NULL")

    async def unreported(self, after: int, limit: int) -> Sequence[tuple[int, Queued]]:
        """Stored rollouts whose gates do not all know it yet, after a position, with their positions."""
        rows = await self._journal.query(
            "SELECT * FROM exports WHERE stored = 1 AND position > ? ORDER BY position LIMIT ?", (after, limit)
        )
        return [(int(row["position"]), _queued(row)) for row in rows]

    async def done(self, rollout_ids: Sequence[str]) -> None:
        """Take rollouts out of the queue: their gates know, or they were deleted."""
        await self._journal.execute(
            f"DELETE FROM exports WHERE rollout_id IN ({_AMONG})",  # noqa: S608
            (json.dumps(list(rollout_ids)),),
        )

    async def unstored(self, rollout_ids: Sequence[str]) -> Sequence[str]:
        """The ids of the given rollouts that are not stored yet."""
        sql = f"SELECT rollout_id FROM exports WHERE stored = 0 AND rollout_id IN ({_AMONG})"  # noqa: S608
        return [str(row[0]) for row in await self._journal.query(sql, (json.dumps(list(rollout_ids)),))]

    async def backlog(self) -> Backlog:
        """What is not stored."""
        (row,) = await self._journal.query(
            "SELECT COUNT(*), MIN(end_time) FROM exports WHERE stored = 0 AND error IS NULL"
        )
        broken = await self._journal.query(
            "SELECT rollout_id FROM exports WHERE error IS NOT NULL ORDER BY position LIMIT 100"
        )
        return Backlog(int(row[0]), row[1], tuple(str(one[0]) for one in broken))

    async def written_before(self, url: str) -> bool:
        """Whether this driver could write to the URL before."""
        return bool(await self._journal.query("SELECT 1 FROM driver WHERE key = 'export_url' AND value = ?", (url,)))

    async def writable(self, url: str) -> None:
        """Record that this driver can write to the URL."""
        await self._journal.execute("INSERT OR REPLACE INTO driver VALUES ('export_url', ?)", (url,))


def _queued(row: Row) -> Queued:
    return Queued(
        row["rollout_id"], row["namespace"], row["run_id"], row["gate"], tuple(json.loads(row["gates"])), row["file"]
    )
