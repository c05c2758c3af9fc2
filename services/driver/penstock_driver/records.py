"""What the driver remembers of rollouts, groups and the requests that made them: rows of the journal.

Specs and outcomes are kept as bytes in the wire's form; `history` keeps the events and writes how rollouts end.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from sqlite3 import IntegrityError, Row
from typing import Final

from penstock_chassis.errors import AlreadyExists, NotFound
from penstock_chassis.journal import Journal, SqlValue, Statement
from penstock_driver.rollouts import Phase, RolloutOrder

MIGRATION: Final = """
CREATE TABLE driver (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE requests (request_id TEXT PRIMARY KEY, digest TEXT NOT NULL, resource_id TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
    number INTEGER PRIMARY KEY AUTOINCREMENT, group_id TEXT NOT NULL UNIQUE, run_id TEXT, spec BLOB NOT NULL,
    size INTEGER NOT NULL, spares INTEGER NOT NULL, quorum INTEGER NOT NULL, grace REAL,
    create_time REAL NOT NULL, rollout_ids TEXT NOT NULL
);
CREATE TABLE rollouts (
    number INTEGER PRIMARY KEY AUTOINCREMENT, rollout_id TEXT NOT NULL UNIQUE, group_id TEXT, idx INTEGER NOT NULL,
    run_id TEXT, task_id TEXT NOT NULL, agent TEXT NOT NULL, agent_sha256 TEXT NOT NULL, labels TEXT NOT NULL,
    spec BLOB NOT NULL, create_time REAL NOT NULL, end_time REAL, phase INTEGER NOT NULL, phase_times TEXT NOT NULL,
    outcome BLOB, is_result INTEGER NOT NULL DEFAULT 0, fork_kind INTEGER NOT NULL DEFAULT 0,
    last_sequence INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX rollouts_by_group ON rollouts (group_id, idx);
CREATE INDEX rollouts_unended ON rollouts (rollout_id) WHERE end_time IS NULL;
CREATE TABLE events (
    position INTEGER PRIMARY KEY AUTOINCREMENT, rollout_id TEXT NOT NULL, group_id TEXT, sequence INTEGER NOT NULL,
    is_summary INTEGER NOT NULL, payload BLOB NOT NULL, UNIQUE (rollout_id, sequence)
);
CREATE INDEX events_by_group ON events (group_id, position);
"""
MIGRATION_ATTEMPTS: Final = """
ALTER TABLE rollouts ADD COLUMN attempts INTEGER NOT NULL DEFAULT 1;
CREATE TABLE owed (rollout_id TEXT PRIMARY KEY) WITHOUT ROWID;
"""
"""How often a rollout was begun; and the ended ones of which something is still to be released elsewhere."""
PAGE: Final = 256
"""Events that a watcher reads at once."""


@dataclass(frozen=True, slots=True)
class Record:
    """A rollout as remembered. `spec` and `outcome` in the wire's form; times in seconds since the epoch."""

    rollout_id: str
    group_id: str | None
    index: int
    run_id: str | None
    task_id: str
    agent: str
    agent_sha256: str
    labels: Mapping[str, str]
    spec: bytes = field(repr=False)
    create_time: float
    end_time: float | None = None
    phase: Phase = Phase.QUEUED
    phase_times: Mapping[Phase, float] = field(default_factory=dict)
    outcome: bytes | None = None
    is_result: bool = False
    fork_kind: int = 0
    last_sequence: int = 0
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A group as remembered; `grace_s` None waits for stragglers."""

    group_id: str
    run_id: str | None
    spec: bytes = field(repr=False)
    size: int
    spares: int
    quorum: int
    grace_s: float | None
    create_time: float
    rollout_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Filter:
    """Which rollouts: those that match every condition that is set."""

    run_id: str | None = None
    group_id: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    ended: bool | None = None
    task_id: str | None = None
    agent: str | None = None


def new_id(prefix: str) -> str:
    """A fresh identifier of 128 random bits (R25)."""
    return f"{prefix}{secrets.token_hex(16)}"


def new_records(order: RolloutOrder, spec: bytes, ids: Sequence[str], group_id: str | None = None) -> list[Record]:
    """Records of new rollouts of one order; `spec` in the wire's form, without secrets."""
    now = time.time()
    return [
        Record(
            rollout_id=rollout_id,
            group_id=group_id,
            index=index,
            run_id=order.run_id,
            task_id=order.task.task_id,
            agent=order.agent.spec.name,
            agent_sha256=order.agent.sha256,
            labels=dict(order.labels),
            spec=spec,
            create_time=now,
        )
        for index, rollout_id in enumerate(ids)
    ]


class Records:
    """Rollouts, groups and the requests that made them."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def instance_id(self, proposal: str) -> str:
        """The lasting identity of this driver: the proposal of its first start."""
        known = "SELECT value FROM driver WHERE key = 'instance'"
        rows = await self._journal.query(known)  # so that a driver starts on a disk that takes nothing, too
        if not rows:
            await self._journal.execute("INSERT OR IGNORE INTO driver VALUES ('instance', ?)", (proposal,))
            rows = await self._journal.query(known)
        return str(rows[0][0])

    # Creation ---------------------------------------------------------------------------------------------------------

    async def known_request(self, request_id: str, digest: str) -> str | None:
        """What a request made when it came before; AlreadyExists (REQUEST_ID_REUSED) if it asked for something else."""
        rows = await self._journal.query("SELECT digest, resource_id FROM requests WHERE request_id = ?", (request_id,))
        if not rows:
            return None
        if rows[0][0] != digest:
            raise AlreadyExists("this request_id made something else before", reason="REQUEST_ID_REUSED")
        return str(rows[0][1])

    async def create(
        self, request_id: str, digest: str, rollouts: Sequence[Record], group: GroupRecord | None = None
    ) -> None:
        """Remember new rollouts, their group and the request that made them, all or nothing.

        AlreadyExists (ROLLOUT_EXISTS) when the request or one of the identifiers was used before, also by what is
        forgotten and still to be released: that is found by the identifier.
        """
        if await self.owing([record.rollout_id for record in rollouts]):
            message = "what a rollout of this id held is still to be released: choose another id, or try again later"
            raise AlreadyExists(message, reason="ROLLOUT_EXISTS")
        resource_id = group.group_id if group else rollouts[0].rollout_id
        statements: list[Statement] = [("INSERT INTO requests VALUES (?, ?, ?)", (request_id, digest, resource_id))]
        if group:
            values = (group.group_id, group.run_id, group.spec, group.size, group.spares, group.quorum, group.grace_s)
            ids = json.dumps(list(group.rollout_ids))
            statements.append(
                ("INSERT INTO groups VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (*values, group.create_time, ids))
            )
        statements.extend(_insertion(record) for record in rollouts)
        try:
            await self._journal.write(statements)
        except IntegrityError as error:
            message = "the request_id or an identifier was used before: identifiers are used once"
            raise AlreadyExists(message, reason="ROLLOUT_EXISTS") from error

    # Reading ----------------------------------------------------------------------------------------------------------

    async def get(self, rollout_id: str) -> Record:
        """One rollout; NotFound (ROLLOUT_UNKNOWN)."""
        rows = await self._journal.query("SELECT * FROM rollouts WHERE rollout_id = ?", (rollout_id,))
        if not rows:
            raise NotFound(f"there is no rollout {rollout_id}", reason="ROLLOUT_UNKNOWN")
        return _record(rows[0])

    async def list(self, matching: Filter, before: int, limit: int) -> tuple[Sequence[Record], int]:
        """Up to `limit` rollouts with a number below `before` (0 for the newest), newest first, and where to go on."""
        where, values = conditions(matching)
        if before:
            where.append("number < ?")
            values.append(before)
        condition = " AND ".join(where) or "1"
        sql = f"SELECT * FROM rollouts WHERE {condition} ORDER BY number DESC LIMIT ?"  # noqa: S608 - fixed texts
        rows = await self._journal.query(sql, (*values, limit + 1))
        more = int(rows[limit - 1]["number"]) if len(rows) > limit else 0
        return [_record(row) for row in rows[:limit]], more

    async def all(self, matching: Filter) -> AsyncIterator[Record]:
        """Every rollout that matches, newest first."""
        before = 0
        while True:
            records, before = await self.list(matching, before, PAGE)
            for record in records:
                yield record
            if not before:
                return

    async def group(self, group_id: str) -> GroupRecord:
        """One group; NotFound (GROUP_UNKNOWN)."""
        rows = await self._journal.query("SELECT * FROM groups WHERE group_id = ?", (group_id,))
        if not rows:
            raise NotFound("there is no such group", reason="GROUP_UNKNOWN")
        return _group(rows[0])

    async def groups(self, run_id: str | None, before: int, limit: int) -> tuple[Sequence[GroupRecord], int]:
        """Up to `limit` groups with a number below `before` (0 for the newest), newest first, and where to go on."""
        rows = await self._journal.query(
            "SELECT * FROM groups WHERE (? IS NULL OR run_id = ?) AND (? = 0 OR number < ?)"
            " ORDER BY number DESC LIMIT ?",
            (run_id, run_id, before, before, limit + 1),
        )
        more = int(rows[limit - 1]["number"]) if len(rows) > limit else 0
        return [_group(row) for row in rows[:limit]], more

    async def group_ended(self, group_id: str) -> Sequence[Record]:
        """A group's rollouts that have ended, in the order in which they did."""
        sql = "SELECT * FROM rollouts WHERE group_id = ? AND end_time IS NOT NULL ORDER BY end_time, idx"
        return [_record(row) for row in await self._journal.query(sql, (group_id,))]

    async def owed(self) -> Sequence[str]:
        """Ended rollouts of which something is still to be released elsewhere."""
        return [str(row[0]) for row in await self._journal.query("SELECT rollout_id FROM owed")]

    async def owing(self, rollout_ids: Sequence[str]) -> Sequence[str]:
        """Those of the rollouts of which something is still to be released elsewhere."""
        ids = json.dumps(list(rollout_ids))
        sql = "SELECT rollout_id FROM owed WHERE rollout_id IN (SELECT value FROM json_each(?))"
        return [str(row[0]) for row in await self._journal.query(sql, (ids,))]

    async def settled(self, rollout_id: str) -> None:
        """All of an ended rollout is released."""
        await self._journal.execute("DELETE FROM owed WHERE rollout_id = ?", (rollout_id,))

    async def delete(self, rollout_id: str) -> None:
        """Forget an ended rollout and its events."""
        await self._journal.write(
            [
                ("DELETE FROM events WHERE rollout_id = ?", (rollout_id,)),
                ("DELETE FROM rollouts WHERE rollout_id = ? AND end_time IS NOT NULL", (rollout_id,)),
            ]
        )

    async def delete_group(self, group_id: str) -> None:
        """Forget a group whose rollouts are forgotten."""
        await self._journal.execute("DELETE FROM groups WHERE group_id = ?", (group_id,))


def _insertion(record: Record) -> Statement:
    return (
        "INSERT INTO rollouts (rollout_id, group_id, idx, run_id, task_id, agent, agent_sha256, labels, spec,"
        " create_time, phase, phase_times) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, '{}')",
        (
            *(record.rollout_id, record.group_id, record.index, record.run_id, record.task_id, record.agent),
            *(record.agent_sha256, json.dumps(dict(record.labels)), record.spec, record.create_time, int(record.phase)),
        ),
    )


def conditions(matching: Filter) -> tuple[list[str], list[SqlValue]]:
    """A filter as SQL: conditions on the columns of `rollouts`, and the values that they take."""
    where, values = [], []
    for column, value in (
        ("run_id", matching.run_id),
        ("group_id", matching.group_id),
        ("task_id", matching.task_id),
        ("agent", matching.agent),
    ):
        if value is not None:
            where.append(f"{column} = ?")
            values.append(value)
    for label, value in matching.labels.items():
        where.append("EXISTS (SELECT 1 FROM json_each(labels) WHERE key = ? AND value = ?)")
        values += [label, value]
    if matching.ended is not None:
        where.append("end_time IS NOT NULL" if matching.ended else "end_time IS NULL")
    return where, list[SqlValue](values)


def _record(row: Row) -> Record:
    return Record(
        rollout_id=row["rollout_id"],
        group_id=row["group_id"],
        index=row["idx"],
        run_id=row["run_id"],
        task_id=row["task_id"],
        agent=row["agent"],
        agent_sha256=row["agent_sha256"],
        labels=json.loads(row["labels"]),
        spec=row["spec"],
        create_time=row["create_time"],
        end_time=row["end_time"],
        phase=Phase(row["phase"]),
        phase_times={Phase[name]: seconds for name, seconds in json.loads(row["phase_times"]).items()},
        outcome=row["outcome"],
        is_result=bool(row["is_result"]),
        fork_kind=row["fork_kind"],
        last_sequence=row["last_sequence"],
        attempts=row["attempts"],
    )


def _group(row: Row) -> GroupRecord:
    return GroupRecord(
        group_id=row["group_id"],
        run_id=row["run_id"],
        spec=row["spec"],
        size=row["size"],
        spares=row["spares"],
        quorum=row["quorum"],
        grace_s=row["grace"],
        create_time=row["create_time"],
        rollout_ids=tuple(json.loads(row["rollout_ids"])),
    )
