"""Annotations of ended rollouts: a row of the journal for each, which goes with its rollout's row.

Invariant: a rollout's annotations are in the order of their creation; one that replaces another takes its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.errors import NotFound
from penstock_chassis.journal import Journal
from penstock_driver.domain.records import Record

MIGRATION: Final = """
CREATE TABLE annotations (
    number INTEGER PRIMARY KEY AUTOINCREMENT, rollout_id TEXT NOT NULL, name TEXT NOT NULL, author TEXT NOT NULL,
    call_id TEXT NOT NULL, size INTEGER NOT NULL, digest BLOB NOT NULL, payload BLOB NOT NULL,
    UNIQUE (rollout_id, name, author, call_id)
);
CREATE TRIGGER annotations_deleted AFTER DELETE ON rollouts BEGIN
    DELETE FROM annotations WHERE rollout_id = OLD.rollout_id;
END;
"""
FRAGMENT_BYTES: Final = 4 << 20
"""Bytes of annotations that are read at once, but for a single larger one."""
_PUT: Final = (
    "INSERT INTO annotations (rollout_id, name, author, call_id, size, digest, payload) SELECT ?, ?, ?, ?, ?, ?, ?"
    " WHERE EXISTS (SELECT 1 FROM rollouts WHERE rollout_id = ? AND create_time = ? AND end_time IS NOT NULL)"
    " ON CONFLICT (rollout_id, name, author, call_id)"
    " DO UPDATE SET size = excluded.size, digest = excluded.digest, payload = excluded.payload"
)


class Key(NamedTuple):
    """What identifies an annotation of a rollout; an empty `call_id` = it is about the whole trajectory."""

    name: str
    author: str
    call_id: str

    @classmethod
    def of(cls, annotation: trajectory_pb2.Annotation) -> Key:
        return cls(annotation.name, annotation.author, annotation.call_id)


@dataclass(frozen=True, slots=True)
class Known:
    """An annotation that is there: its bytes, and the digest of its content."""

    size: int
    digest: bytes


def digest_of(annotation: trajectory_pb2.Annotation) -> bytes:
    """SHA-256 of one that has no time yet."""
    return hashlib.sha256(annotation.SerializeToString(deterministic=True)).digest()


class Annotations:
    """All annotations of one driver's rollouts."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def known(self, rollout_id: str) -> Mapping[Key, Known]:
        """The annotations of a rollout."""
        sql = "SELECT name, author, call_id, size, digest FROM annotations WHERE rollout_id = ?"
        rows = await self._journal.read(sql, (rollout_id,))
        return {Key(*row[:3]): Known(row["size"], row["digest"]) for row in rows}

    async def put(self, record: Record, annotations: Mapping[bytes, trajectory_pb2.Annotation]) -> None:
        """Record all of them, by their digests. NotFound (ROLLOUT_UNKNOWN): the ended rollout was deleted meanwhile."""
        statements = []
        for digest, one in annotations.items():
            payload = one.SerializeToString()
            of_row = (record.rollout_id, *Key.of(one), len(payload), digest, payload)
            statements.append((_PUT, (*of_row, record.rollout_id, record.create_time)))
        if 0 in await self._journal.write(statements):
            raise NotFound(f"there is no rollout {record.rollout_id} any more", reason="ROLLOUT_UNKNOWN")

    async def fragments(self, rollout_id: str) -> AsyncIterator[Sequence[trajectory_pb2.Annotation]]:
        """Yield those of a rollout in their order, about FRAGMENT_BYTES at a time."""
        sql = "SELECT number, size FROM annotations WHERE rollout_id = ? ORDER BY number"
        at, rows = 0, await self._journal.read(sql, (rollout_id,), few=True)
        while at < len(rows):
            first, size = rows[at]["number"], 0
            while at < len(rows) and (not size or size + rows[at]["size"] <= FRAGMENT_BYTES):
                size += rows[at]["size"]
                at += 1
            sql = "SELECT payload FROM annotations WHERE rollout_id = ? AND number BETWEEN ? AND ? ORDER BY number"
            found = await self._journal.read(sql, (rollout_id, first, rows[at - 1]["number"]))
            yield [trajectory_pb2.Annotation.FromString(row["payload"]) for row in found]
