"""The driver's records of rollouts, groups and the requests that created them: rows of the journal.

Specs and outcomes are stored as serialized messages; `event_log` stores the events and the ends of rollouts.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Sequence
from sqlite3 import IntegrityError, Row
from typing import Final

import structlog

from penstock.driver.v1 import rollout_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.errors import AlreadyExists, NotFound
from penstock_chassis.journal import Journal, SqlValue, Statement
from penstock_driver.domain.pauses import Pause
from penstock_driver.domain.records import Filter, GroupPlan, GroupRecord, Record, RequestKey
from penstock_driver.domain.rollout import Phase
from penstock_driver.domain.unended import AttemptPlace, Stage, Unended, spec_id

_log = structlog.get_logger("penstock.driver")
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
"""Adds the number of attempts, and the ended rollouts with a pending cleanup in other services."""
MIGRATION_NAMESPACES: Final = """
ALTER TABLE rollouts ADD COLUMN namespace TEXT NOT NULL DEFAULT 'default';
ALTER TABLE groups ADD COLUMN namespace TEXT NOT NULL DEFAULT 'default';
CREATE INDEX rollouts_by_namespace ON rollouts (namespace, number);
ALTER TABLE requests RENAME TO former_requests;
CREATE TABLE requests (
    namespace TEXT NOT NULL, request_id TEXT NOT NULL, digest TEXT NOT NULL, resource_id TEXT NOT NULL,
    PRIMARY KEY (namespace, request_id)
) WITHOUT ROWID;
INSERT INTO requests SELECT 'default', request_id, digest, resource_id FROM former_requests;
DROP TABLE former_requests;
"""
MIGRATION_HOME: Final = "ALTER TABLE rollouts ADD COLUMN home BLOB;"
"""Adds which services have the rollout."""
MIGRATION_ADOPTION: Final = """
ALTER TABLE rollouts ADD COLUMN place TEXT;
ALTER TABLE rollouts ADD COLUMN stage TEXT NOT NULL DEFAULT '';
ALTER TABLE rollouts ADD COLUMN so_far BLOB;
ALTER TABLE rollouts ADD COLUMN owed INTEGER NOT NULL DEFAULT 0;
CREATE TABLE sealed_specs (spec_id TEXT PRIMARY KEY, sealed BLOB NOT NULL) WITHOUT ROWID;
"""
"""Adds what the next driver needs to go on with a rollout that has not ended (`domain.unended`)."""
MIGRATION_PAUSES: Final = """
ALTER TABLE rollouts ADD COLUMN pause TEXT;
ALTER TABLE rollouts ADD COLUMN paused_s REAL NOT NULL DEFAULT 0;
ALTER TABLE rollouts ADD COLUMN pauses INTEGER NOT NULL DEFAULT 0;
"""
"""Adds how a rollout is paused, and for how long and how often it has been."""
MIGRATION_BRANCHES: Final = """
ALTER TABLE rollouts ADD COLUMN branch BLOB;
ALTER TABLE groups ADD COLUMN branch BLOB;
ALTER TABLE sealed_specs ADD COLUMN ended REAL;
CREATE INDEX sealed_specs_by_end ON sealed_specs (ended) WHERE ended IS NOT NULL;
"""
"""Adds what rollouts are branches of, and when the last rollout of a sealed spec ended: it is kept for branches."""
MIGRATION_KEPT_SPECS: Final = """
ALTER TABLE sealed_specs ADD COLUMN namespace TEXT NOT NULL DEFAULT 'default';
UPDATE sealed_specs SET namespace = COALESCE(
    (SELECT namespace FROM groups WHERE group_id = spec_id),
    (SELECT namespace FROM rollouts WHERE rollout_id = spec_id),
    'default'
);
DROP INDEX sealed_specs_by_end;
CREATE INDEX sealed_specs_by_end ON sealed_specs (namespace, ended, spec_id) WHERE ended IS NOT NULL;
CREATE TABLE kept_specs (namespace TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO kept_specs
    SELECT namespace, SUM(LENGTH(sealed)) FROM sealed_specs WHERE ended IS NOT NULL GROUP BY namespace;
CREATE TRIGGER spec_kept AFTER UPDATE OF ended ON sealed_specs WHEN OLD.ended IS NULL AND NEW.ended IS NOT NULL BEGIN
    INSERT INTO kept_specs VALUES (NEW.namespace, LENGTH(NEW.sealed))
    ON CONFLICT (namespace) DO UPDATE SET bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER spec_forgotten AFTER DELETE ON sealed_specs WHEN OLD.ended IS NOT NULL BEGIN
    UPDATE kept_specs SET bytes = bytes - LENGTH(OLD.sealed) WHERE namespace = OLD.namespace;
    DELETE FROM kept_specs WHERE namespace = OLD.namespace AND bytes = 0;
END;
"""
"""Adds whose sealed specs of ended rollouts are kept, and how many bytes of them each namespace has. They are counted
by triggers, in the transaction that changes a spec, whatever changes it."""
PAGE: Final = 256
"""Events that a watcher reads at once."""


class Records:
    """Rollouts, groups and the requests that created them."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def instance_id(self, proposal: str) -> str:
        """The lasting identity of this driver: the proposal of its first start."""
        known = "SELECT value FROM driver WHERE key = 'instance'"
        rows = await self._journal.query(known)  # lets a driver start on a full disk
        if not rows:
            await self._journal.execute("INSERT OR IGNORE INTO driver VALUES ('instance', ?)", (proposal,))
            rows = await self._journal.query(known)
        return str(rows[0][0])

    # Creation ---------------------------------------------------------------------------------------------------------

    async def known_request(self, key: RequestKey) -> str | None:
        """The resource that this request created; AlreadyExists (REQUEST_ID_REUSED) if it asked for something else."""
        sql = "SELECT digest, resource_id FROM requests WHERE namespace = ? AND request_id = ?"
        rows = await self._journal.query(sql, (key.namespace, key.request_id))
        if not rows:
            return None
        if rows[0][0] != key.digest:
            raise AlreadyExists("this request_id was used for another request", reason="REQUEST_ID_REUSED")
        return str(rows[0][1])

    async def unless_known(self, key: RequestKey, recording: Awaitable[object]) -> str | None:
        """Record a new request by `recording`; return None, or what an equal request created that was recorded first.

        Raises what `recording` raises.
        """
        try:
            await recording
        except AlreadyExists:
            known = await self.known_request(key)
            if known is None:
                raise
            return known
        return None

    async def create(
        self, key: RequestKey, rollouts: Sequence[Record], group: GroupRecord | None = None, *, sealed: bytes = b""
    ) -> None:
        """Record new rollouts, their group and the request that created them, atomically.

        `sealed` is their spec for the next driver; without it, that one ends them.

        AlreadyExists (ROLLOUT_EXISTS) when the request or one of the ids was used before. This includes deleted
        rollouts with a pending cleanup, which finds its resources by the id.
        """
        if await self.with_pending_cleanup([record.rollout_id for record in rollouts]):
            message = "the clean-up of a rollout with this id is pending: choose another id, or try again later"
            raise AlreadyExists(message, reason="ROLLOUT_EXISTS")
        resource_id = group.group_id if group else rollouts[0].rollout_id
        statements: list[Statement] = [
            ("INSERT INTO requests VALUES (?, ?, ?, ?)", (key.namespace, key.request_id, key.digest, resource_id))
        ]
        if group:
            plan = group.plan
            values = (
                *(group.group_id, group.run_id, group.spec.SerializeToString()),
                *(plan.size, plan.spares, plan.quorum, plan.grace_s),
                *(group.create_time, json.dumps(list(group.rollout_ids)), group.namespace),
                group.branched_from.SerializeToString() if group.branched_from else None,
            )
            statements.append(("INSERT INTO groups VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values))
        statements.extend(_insertion(record) for record in rollouts)
        if sealed:
            statements.append(
                (
                    "INSERT INTO sealed_specs (spec_id, sealed, namespace) VALUES (?, ?, ?)",
                    (spec_id(rollouts[0]), sealed, rollouts[0].namespace),
                )
            )
        try:
            await self._journal.write(statements)
        except IntegrityError as error:
            message = "the request_id or an identifier was used before: choose new ones"
            raise AlreadyExists(message, reason="ROLLOUT_EXISTS") from error

    # Reading ----------------------------------------------------------------------------------------------------------

    async def get(self, rollout_id: str) -> Record:
        """One rollout; NotFound (ROLLOUT_UNKNOWN)."""
        rows = await self._journal.read("SELECT * FROM rollouts WHERE rollout_id = ?", (rollout_id,), few=True)
        if not rows:
            raise NotFound(f"there is no rollout {rollout_id}", reason="ROLLOUT_UNKNOWN")
        return _record(rows[0])

    async def namespace_of(self, rollout_id: str) -> str | None:
        """The namespace of a rollout; None if there is no such rollout."""
        rows = await self._journal.read("SELECT namespace FROM rollouts WHERE rollout_id = ?", (rollout_id,), few=True)
        return str(rows[0][0]) if rows else None

    async def namespace_of_group(self, group_id: str) -> str | None:
        """The namespace of a group; None if there is no such group."""
        rows = await self._journal.read("SELECT namespace FROM groups WHERE group_id = ?", (group_id,), few=True)
        return str(rows[0][0]) if rows else None

    async def list(self, matching: Filter, before: int, limit: int) -> tuple[Sequence[Record], int]:
        """Up to `limit` rollouts numbered below `before` (0 for the newest), newest first, and the next `before`."""
        where, values = conditions(matching)
        few = len(where) <= (matching.namespace is not None) and limit <= PAGE  # other filters may scan every rollout
        if before:
            where.append("number < ?")
            values.append(before)
        condition = " AND ".join(where) or "1"
        sql = f"SELECT * FROM rollouts WHERE {condition} ORDER BY number DESC LIMIT ?"  # noqa: S608 - fixed texts
        rows = await self._journal.read(sql, (*values, limit + 1), few=few)
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

    async def unended(self) -> Sequence[Unended]:
        """Every rollout that has not ended, with what the next driver needs but its sealed spec, which may be long and
        which a group shares: the furthest first, then the oldest.
        """
        rows = await self._journal.query("SELECT * FROM rollouts WHERE end_time IS NULL ORDER BY phase DESC, number")
        return [_unended(row) for row in rows]

    async def unended_branches(self) -> Sequence[tuple[str, str, str]]:
        """Id, group and namespace of every branch that has not ended."""
        sql = (
            "SELECT rollout_id, group_id, namespace FROM rollouts"
            " WHERE end_time IS NULL AND branch IS NOT NULL AND group_id IS NOT NULL"
        )
        return [(str(row[0]), str(row[1]), str(row[2])) for row in await self._journal.query(sql)]

    async def sealed_spec(self, record: Record) -> bytes | None:
        """The sealed spec of a rollout, also after its end; None if it is no longer kept."""
        sql = "SELECT sealed FROM sealed_specs WHERE spec_id = ?"
        rows = await self._journal.query(sql, (spec_id(record),))
        return bytes(rows[0][0]) if rows else None

    async def group(self, group_id: str) -> GroupRecord:
        """One group; NotFound (GROUP_UNKNOWN)."""
        rows = await self._journal.read("SELECT * FROM groups WHERE group_id = ?", (group_id,), few=True)
        if not rows:
            raise NotFound(f"there is no group {group_id}", reason="GROUP_UNKNOWN")
        return _group(rows[0])

    async def groups(
        self, run_id: str | None, before: int, limit: int, namespace: str | None = None
    ) -> tuple[Sequence[GroupRecord], int]:
        """Up to `limit` groups numbered below `before` (0 for the newest), newest first, and the next `before`.

        `namespace` None = those of all namespaces.
        """
        rows = await self._journal.read(
            "SELECT * FROM groups WHERE (? IS NULL OR run_id = ?) AND (? IS NULL OR namespace = ?)"
            " AND (? = 0 OR number < ?) ORDER BY number DESC LIMIT ?",
            (run_id, run_id, namespace, namespace, before, before, limit + 1),
        )
        more = int(rows[limit - 1]["number"]) if len(rows) > limit else 0
        return [_group(row) for row in rows[:limit]], more

    async def group_ended(self, group_id: str) -> Sequence[Record]:
        """The ended rollouts of a group, in the order in which they ended."""
        sql = "SELECT * FROM rollouts WHERE group_id = ? AND end_time IS NOT NULL ORDER BY end_time, idx"
        return [_record(row) for row in await self._journal.read(sql, (group_id,))]

    async def members(self, group: GroupRecord) -> Sequence[str]:
        """The ids of a group's `rollout_ids` that are its rollouts still, in order.

        The id of one that was deleted may be another rollout's by now, also another team's.
        """
        sql = "SELECT rollout_id FROM rollouts WHERE group_id = ? AND namespace = ? ORDER BY idx"
        return [str(row[0]) for row in await self._journal.read(sql, (group.group_id, group.namespace))]

    async def without_end(self, rollout_ids: Sequence[str]) -> Sequence[str]:
        """The ids of the given rollouts whose end is not on disk."""
        ids = json.dumps(list(rollout_ids))
        sql = (
            "SELECT rollout_id FROM rollouts WHERE end_time IS NULL AND rollout_id IN (SELECT value FROM json_each(?))"
        )
        return [str(row[0]) for row in await self._journal.read(sql, (ids,))]

    async def pending_cleanups(self) -> Sequence[str]:
        """Ended rollouts with a pending cleanup in other services."""
        return [str(row[0]) for row in await self._journal.query("SELECT rollout_id FROM owed")]

    async def with_pending_cleanup(self, rollout_ids: Sequence[str]) -> Sequence[str]:
        """The ids of the given rollouts that have a pending cleanup in other services."""
        ids = json.dumps(list(rollout_ids))
        sql = "SELECT rollout_id FROM owed WHERE rollout_id IN (SELECT value FROM json_each(?))"
        return [str(row[0]) for row in await self._journal.query(sql, (ids,))]

    async def cleaned_up(self, rollout_id: str) -> None:
        """Record that an ended rollout is fully released."""
        await self._journal.execute("DELETE FROM owed WHERE rollout_id = ?", (rollout_id,))

    async def set_grades(self, rollout_id: str, grades: Sequence[rollout_pb2.Grade]) -> None:
        """Record all further grades of an ended rollout; NotFound (ROLLOUT_UNKNOWN) if it was deleted meanwhile."""
        stored = rollout_pb2.Rollout(grades=grades).SerializeToString()
        sql = "UPDATE rollouts SET grades = ? WHERE rollout_id = ? AND end_time IS NOT NULL"
        if not await self._journal.execute(sql, (stored, rollout_id)):
            raise NotFound(f"there is no rollout {rollout_id} any more", reason="ROLLOUT_UNKNOWN")

    async def delete(self, rollout_id: str) -> None:
        """Delete an ended rollout, its events and its place in the queue of exports, and its spec, unless another
        rollout of its group has it too.

        One that has not ended keeps all of it.
        """
        await self._journal.write(
            [
                (
                    # A group and a rollout may have one id: the spec may be the other one's.
                    "DELETE FROM sealed_specs WHERE (spec_id, namespace) ="
                    " (SELECT COALESCE(group_id, rollout_id), namespace FROM rollouts"
                    " WHERE rollout_id = ? AND end_time IS NOT NULL) AND NOT EXISTS"
                    " (SELECT 1 FROM rollouts WHERE rollout_id != ? AND rollouts.namespace = sealed_specs.namespace"
                    " AND (group_id = spec_id OR rollout_id = spec_id AND group_id IS NULL))",
                    (rollout_id, rollout_id),
                ),
                (
                    "DELETE FROM events WHERE rollout_id = ? AND NOT EXISTS"
                    " (SELECT 1 FROM rollouts WHERE rollout_id = ? AND end_time IS NULL)",
                    (rollout_id, rollout_id),
                ),
                ("DELETE FROM rollouts WHERE rollout_id = ? AND end_time IS NOT NULL", (rollout_id,)),
                ("DELETE FROM exports WHERE rollout_id = ?", (rollout_id,)),  # also while this driver exports nothing
            ]
        )

    async def delete_group(self, group_id: str) -> None:
        """Delete a group, unless a rollout of it has not ended: the next driver goes on with that one in its group."""
        sql = (
            "DELETE FROM groups WHERE group_id = ? AND NOT EXISTS"
            " (SELECT 1 FROM rollouts WHERE group_id = ? AND end_time IS NULL)"
        )
        await self._journal.execute(sql, (group_id, group_id))


def _insertion(record: Record) -> Statement:
    return (
        "INSERT INTO rollouts (rollout_id, group_id, idx, run_id, task_id, agent, agent_sha256, labels, spec,"
        " create_time, phase, namespace, home, branch, phase_times)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, '{}')",
        (
            *(record.rollout_id, record.group_id, record.index, record.run_id, record.task_id, record.agent),
            *(record.agent_sha256, json.dumps(dict(record.labels)), record.spec.SerializeToString()),
            *(record.create_time, int(record.phase), record.namespace),
            record.home.SerializeToString() if record.home else None,
            record.branched_from.SerializeToString() if record.branched_from else None,
        ),
    )


def conditions(matching: Filter) -> tuple[list[str], list[SqlValue]]:
    """A filter as SQL: conditions on the columns of `rollouts`, and their values."""
    where, values = [], []
    for column, value in (
        ("run_id", matching.run_id),
        ("group_id", matching.group_id),
        ("task_id", matching.task_id),
        ("agent", matching.agent),
        ("namespace", matching.namespace),
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


def parsed_outcome(data: bytes | None) -> rollout_pb2.Outcome | None:
    """A stored outcome; None while the rollout has not ended."""
    return None if data is None else rollout_pb2.Outcome.FromString(data)


def parsed_home(data: bytes | None) -> rollout_pb2.Home | None:
    """The services that have a rollout; None for one of an earlier version."""
    return None if data is None else rollout_pb2.Home.FromString(data)


def _parsed_branch(data: bytes | None) -> trajectory_pb2.BranchPoint | None:
    return None if data is None else trajectory_pb2.BranchPoint.FromString(data)


def parsed_export(data: bytes | None) -> rollout_pb2.Export | None:
    """Where a rollout was stored; None while it was not."""
    return None if data is None else rollout_pb2.Export.FromString(data)


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
        spec=rollout_pb2.RolloutSpec.FromString(row["spec"]),
        create_time=row["create_time"],
        end_time=row["end_time"],
        phase=Phase(row["phase"]),
        phase_times={Phase[name]: seconds for name, seconds in json.loads(row["phase_times"]).items()},
        outcome=parsed_outcome(row["outcome"]),
        is_result=bool(row["is_result"]),
        fork_kind=row["fork_kind"],
        last_sequence=row["last_sequence"],
        attempts=row["attempts"],
        namespace=row["namespace"],
        home=parsed_home(row["home"]),
        export=parsed_export(row["export"]),
        pause=None if row["pause"] is None else Pause.from_json(row["pause"]),
        paused_s=row["paused_s"],
        pauses=row["pauses"],
        branched_from=_parsed_branch(row["branch"]),
        grades=() if row["grades"] is None else tuple(rollout_pb2.Rollout.FromString(row["grades"]).grades),
    )


def _group(row: Row) -> GroupRecord:
    return GroupRecord(
        group_id=row["group_id"],
        run_id=row["run_id"],
        spec=rollout_pb2.RolloutSpec.FromString(row["spec"]),
        plan=GroupPlan(row["size"], row["spares"], row["quorum"], row["grace"]),
        create_time=row["create_time"],
        rollout_ids=tuple(json.loads(row["rollout_ids"])),
        namespace=row["namespace"],
        branched_from=_parsed_branch(row["branch"]),
    )


def _unended(row: Row) -> Unended:
    """What is known of a rollout."""
    try:
        return Unended(
            _record(row),
            place=None if row["place"] is None else AttemptPlace.from_json(row["place"]),
            stage=Stage(row["stage"]),
            so_far=parsed_outcome(row["so_far"]),
            owed=bool(row["owed"]),
        )
    except ValueError as error:
        _log.error("a rollout cannot be taken up", rollout_id=row["rollout_id"], error=repr(error))
        return Unended(_record(row), owed=bool(row["owed"]), is_readable=False)
