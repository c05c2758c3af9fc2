"""Metrics of runs, in the journal: a row for each point, found by its metric and step, and by when it was written.

Invariants: what `put` adds is there as a whole or not at all. The counts of points, by which they are bounded, change
in the commit that changes the points. Revisions only grow, also across restarts, so a reader that asks for what came
after one misses nothing.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from sqlite3 import Row
from typing import Final, NamedTuple

from penstock.values.metrics import MOST_METRICS, MOST_POINTS
from penstock_chassis.errors import ResourceExhausted
from penstock_chassis.journal import Journal, Statement

MIGRATION: Final = """
CREATE TABLE metrics (
    metric INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, namespace TEXT NOT NULL, name TEXT NOT NULL,
    points INTEGER NOT NULL DEFAULT 0, UNIQUE (run_id, namespace, name)
);
CREATE TABLE metric_points (
    metric INTEGER NOT NULL, step INTEGER NOT NULL, value REAL NOT NULL, time INTEGER NOT NULL,
    revision INTEGER NOT NULL, PRIMARY KEY (metric, step)
) WITHOUT ROWID;
CREATE INDEX metric_points_by_revision ON metric_points (metric, revision);
CREATE TABLE metric_totals (namespace TEXT PRIMARY KEY, points INTEGER NOT NULL) WITHOUT ROWID;
"""
"""`time` is in microseconds since the epoch."""
FRAGMENT: Final = 4096
"""Points that are read at once."""
MOST_ASKED: Final = 64
"""Requests to log that wait at once, each with its points in memory."""
_DELETED: Final = 4096
"""Points that one commit deletes: other writes wait for it."""
_NEW: Final = "INSERT INTO metrics (run_id, namespace, name) VALUES (?, ?, ?)"
_COUNT: Final = "UPDATE metrics SET points = points + ? WHERE run_id = ? AND namespace = ? AND name = ?"
_COUNT_ALL: Final = (
    "INSERT INTO metric_totals VALUES (?, ?) ON CONFLICT (namespace) DO UPDATE SET points = points + excluded.points"
)
_PUT: Final = (
    "INSERT INTO metric_points (metric, step, value, time, revision)"
    " SELECT metric, ?, ?, ?, ? FROM metrics WHERE run_id = ? AND namespace = ? AND name = ?"
    " ON CONFLICT (metric, step)"
    " DO UPDATE SET value = excluded.value, time = excluded.time, revision = excluded.revision"
    " WHERE value <> excluded.value OR time <> excluded.time"
)
_REPLACED: Final = (
    "SELECT metrics.name, COUNT(*) AS found FROM json_each(?) AS given"
    " CROSS JOIN metrics ON run_id = ? AND namespace = ? AND name = json_extract(given.value, '$[0]')"
    " CROSS JOIN metric_points AS there"
    " ON there.metric = metrics.metric AND there.step = json_extract(given.value, '$[1]') GROUP BY metrics.name"
)
_THINNED: Final = (
    "SELECT step, value, time FROM ("
    "SELECT step, value, time, MIN(value) FROM metric_points WHERE metric = :metric GROUP BY (step - :first) / :width"
    " UNION "
    "SELECT step, value, time, MAX(value) FROM metric_points WHERE metric = :metric GROUP BY (step - :first) / :width"
    " UNION "
    "SELECT step, value, time, value FROM metric_points WHERE metric = :metric AND step = :last"
    ") ORDER BY step"
)
"""SQLite takes the other columns of a group from the row that has its least, or greatest, value."""


@dataclass(frozen=True, slots=True)
class Logged:
    """A value, and its time in microseconds since the epoch."""

    value: float
    time: int


class At(NamedTuple):
    """What identifies a point of a run."""

    name: str
    step: int


@dataclass(frozen=True, slots=True)
class Fragment:
    """Points of one metric, by step; the rows have `step`, `value` and `time`."""

    namespace: str
    name: str
    rows: Sequence[Row]


class RunMetrics:
    """The metrics that one driver has. Use `open`."""

    def __init__(self, journal: Journal, most_points: int, revision: int) -> None:
        self._journal = journal
        self._most_points = most_points
        self._writing = asyncio.Lock()
        """Held while points are counted and written. What a cancelled writer queued is written before the next."""
        self._asked = 0
        self._given = revision
        self.revision = revision
        """Of the newest points that are on disk for sure."""

    @classmethod
    async def open(cls, journal: Journal, most_points: int) -> RunMetrics:
        """Find the newest revision; `most_points` bounds each namespace."""
        newest = "SELECT MAX(revision) FROM metric_points WHERE metric_points.metric = metrics.metric"
        rows = await journal.query(f"SELECT MAX(({newest})) FROM metrics")  # noqa: S608 - a fixed text
        return cls(journal, most_points, rows[0][0] or 0)

    async def put(self, namespace: str, run_id: str, points: Mapping[At, Logged]) -> None:
        """Add points, or replace those that are there; return once all are on disk.

        ResourceExhausted (METRIC_LIMIT); nothing is added then.
        """
        if self._asked >= MOST_ASKED:
            message = f"{self._asked} requests to log metrics are not answered yet: try again later"
            raise ResourceExhausted(message, reason="METRIC_LIMIT", retry_after_s=1.0)
        self._asked += 1
        try:
            async with self._writing:
                await self._put(namespace, run_id, points)
        finally:
            self._asked -= 1

    async def _put(self, namespace: str, run_id: str, points: Mapping[At, Logged]) -> None:
        # Queries and no reads: they see what a cancelled writer has queued.
        sql = "SELECT name, points FROM metrics WHERE run_id = ? AND namespace = ?"
        known = {row["name"]: row["points"] for row in await self._journal.query(sql, (run_id, namespace))}
        added = Counter(at.name for at in points)
        new = [name for name in added if name not in known]
        rows = await self._journal.query(_REPLACED, (json.dumps(list(points)), run_id, namespace))
        added.subtract({row["name"]: row["found"] for row in rows})
        totals = await self._journal.query("SELECT points FROM metric_totals WHERE namespace = ?", (namespace,))
        self._check_room(len(known) + len(new), sum(known.values()), totals[0][0] if totals else 0, added.total())
        self._given = revision = max(self._given + 1, time.time_ns() // 1000)
        run = (run_id, namespace)
        statements: list[Statement] = [(_NEW, (*run, name)) for name in new]
        statements += [
            (_PUT, (at.step, logged.value, logged.time, revision, *run, at.name)) for at, logged in points.items()
        ]
        statements += [(_COUNT, (count, *run, name)) for name, count in added.items() if count]
        statements.append((_COUNT_ALL, (namespace, added.total())))
        await self._journal.write(statements)
        self.revision = revision

    def _check_room(self, metrics: int, points: int, total: int, more: int) -> None:
        """ResourceExhausted (METRIC_LIMIT)."""
        if metrics > MOST_METRICS:
            message = f"the run would have {metrics} metrics; at most {MOST_METRICS} are allowed"
        elif more and points + more > MOST_POINTS:
            message = f"the run's metrics would have {points + more} points; at most {MOST_POINTS} are allowed"
        elif more and total + more > self._most_points:
            message = (
                f"the metrics of this namespace's runs would have {total + more} points; the driver keeps"
                f" {self._most_points}: delete those of a run that is over"
            )
        else:
            return
        raise ResourceExhausted(message, reason="METRIC_LIMIT")

    async def points(
        self, namespace: str | None, run_id: str, names: Collection[str], after: int, most: int
    ) -> AsyncGenerator[Fragment, None]:
        """Yield the points of a run's metrics, one metric after another.

        Args:
            namespace: None = of the runs with this id in all.
            run_id: of the run.
            names: empty = all.
            after: only what was written after this revision; 0 = all.
            most: where `after` is 0, the points to which a longer metric is thinned; 0 = all.
        """
        wanted = "run_id = ? AND (? IS NULL OR namespace = ?)"
        sql = f"SELECT metric, namespace, name, points FROM metrics WHERE {wanted} ORDER BY name, namespace"  # noqa: S608
        chosen = frozenset(names)
        for metric in await self._journal.read(sql, (run_id, namespace, namespace)):
            if chosen and metric["name"] not in chosen:
                continue
            if after:
                found = self._changed(metric["metric"], after)
            elif most and metric["points"] > most:
                found = self._thinned(metric["metric"], most)
            else:
                found = self._all(metric["metric"])
            async for rows in found:
                yield Fragment(metric["namespace"], metric["name"], rows)

    async def _all(self, metric: int) -> AsyncIterator[Sequence[Row]]:
        sql = "SELECT step, value, time FROM metric_points WHERE metric = ? AND step > ? ORDER BY step LIMIT ?"
        step = -1
        while rows := await self._journal.read(sql, (metric, step, FRAGMENT)):
            yield rows
            step = rows[-1]["step"]

    async def _changed(self, metric: int, after: int) -> AsyncIterator[Sequence[Row]]:
        sql = (
            "SELECT step, value, time, revision FROM metric_points WHERE metric = ? AND (revision, step) > (?, ?)"
            " ORDER BY revision, step LIMIT ?"
        )
        at = (after, 1 << 62)
        while rows := await self._journal.read(sql, (metric, *at, FRAGMENT)):
            yield sorted(rows, key=lambda row: row["step"])
            at = (rows[-1]["revision"], rows[-1]["step"])

    async def _thinned(self, metric: int, most: int) -> AsyncIterator[Sequence[Row]]:
        ends = await self._journal.read(
            "SELECT MIN(step) AS first, MAX(step) AS last FROM metric_points WHERE metric = ?", (metric,)
        )
        first, last = ends[0]["first"], ends[0]["last"]
        if first is None:  # deleted meanwhile
            return
        width = (last - first) // ((most - 1) // 2) + 1
        given = {"metric": metric, "first": first, "width": width, "last": last}
        rows = await self._journal.read(_THINNED, given)
        for at in range(0, len(rows), FRAGMENT):
            yield rows[at : at + FRAGMENT]

    async def delete(self, namespace: str, run_id: str, names: Collection[str], from_step: int) -> int:
        """Delete points of this step and later ones; return how many. `names` empty = of all metrics."""
        sql = "SELECT metric, name FROM metrics WHERE run_id = ? AND namespace = ?"
        chosen, deleted = frozenset(names), 0
        for metric in await self._journal.query(sql, (run_id, namespace)):
            if chosen and metric["name"] not in chosen:
                continue
            while count := await self._delete_some(namespace, metric["metric"], from_step):
                deleted += count
        return deleted

    async def _delete_some(self, namespace: str, metric: int, from_step: int) -> int:
        some = "SELECT step FROM metric_points WHERE metric = ? AND step >= ? ORDER BY step LIMIT ?"
        async with self._writing:
            rows = await self._journal.query(some, (metric, from_step, _DELETED))
            if not rows:
                return 0
            last = rows[-1]["step"]
            await self._journal.write(
                [
                    ("DELETE FROM metric_points WHERE metric = ? AND step BETWEEN ? AND ?", (metric, from_step, last)),
                    ("UPDATE metrics SET points = points - ? WHERE metric = ?", (len(rows), metric)),
                    ("DELETE FROM metrics WHERE metric = ? AND points = 0", (metric,)),
                    (_COUNT_ALL, (namespace, -len(rows))),
                ]
            )
            return len(rows)
