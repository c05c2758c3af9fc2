"""The journal's table of captures that were discarded before their drivers had stored them."""

from __future__ import annotations

from typing import Final

from penstock_chassis.journal import Journal, Statement
from penstock_interception.domain.kept_captures import MOST_RECORDS, Discarded, Why

SCHEMA: Final = """
CREATE TABLE discarded_captures (
    number INTEGER PRIMARY KEY, rollout_id TEXT NOT NULL, namespace TEXT NOT NULL, run_id TEXT, driver_id TEXT NOT NULL,
    closed REAL NOT NULL, at REAL NOT NULL, size_bytes INTEGER NOT NULL, why TEXT NOT NULL
) STRICT;
"""
_ADD: Final = (
    "INSERT INTO discarded_captures (rollout_id, namespace, run_id, driver_id, closed, at, size_bytes, why)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)
_TRIM: Final = "DELETE FROM discarded_captures WHERE number <= (SELECT max(number) FROM discarded_captures) - ?"


class DiscardedStore:
    """Records of the newest `MOST_RECORDS`."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    @staticmethod
    def adding(one: Discarded) -> list[Statement]:
        """Returns the statements for the write that deletes the capture."""
        ids = one.rollout_id, one.namespace, one.run_id, one.driver_id
        return [(_ADD, (*ids, one.closed, one.at, one.size_bytes, one.why.value)), (_TRIM, (MOST_RECORDS,))]

    async def load(self) -> list[Discarded]:
        """Returns the records, oldest first."""
        rows = await self._journal.query("SELECT * FROM discarded_captures ORDER BY number")
        return [
            Discarded(
                row["rollout_id"],
                row["namespace"],
                row["run_id"],
                row["driver_id"],
                row["closed"],
                row["at"],
                row["size_bytes"],
                Why(row["why"]),
            )
            for row in rows
        ]
