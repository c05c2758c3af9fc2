"""Runs with budgets, as plain data and in the gate's journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from pydantic import TypeAdapter

from penstock_chassis.journal import Journal, Statement
from penstock_interception.domain.budgets import RunBudgets, Spent

Submit: TypeAlias = Callable[[Sequence[Statement]], asyncio.Future[list[int]]]
"""Queues a write in order, and logs its failure even if no caller waits for it."""

SCHEMA: Final = """
CREATE TABLE runs (
    run_id TEXT PRIMARY KEY, budgets BLOB NOT NULL, created REAL NOT NULL, exhausted TEXT NOT NULL, gone BLOB NOT NULL
) STRICT;
"""
NAMESPACES: Final = "UPDATE runs SET run_id = 'default/' || run_id;"
"""A run's key begins with its namespace (RolloutSpec.run_key)."""
_BUDGETS: Final = TypeAdapter(RunBudgets)
_SPENT: Final = TypeAdapter(Spent)


@dataclass(slots=True, eq=False)
class Run:
    """A run: `gone` is the usage of its deleted rollouts, `exhausted` its exhausted budget or "".

    `id` is its key among the runs of all namespaces (RolloutSpec.run_key).
    """

    id: str
    budgets: RunBudgets
    created: float
    exhausted: str = ""
    gone: Spent = field(default_factory=Spent)

    @property
    def name(self) -> str:
        """The run's id in its namespace."""
        return self.id.partition("/")[2]


class RunStore:
    """The journal's table of runs."""

    def __init__(self, journal: Journal, submit: Submit) -> None:
        self._journal = journal
        self._submit = submit

    @staticmethod
    def opening(run: Run) -> Statement:
        """Returns the statement for the write that opens one of its rollouts; the first one inserts the run."""
        values = (run.id, _BUDGETS.dump_json(run.budgets), run.created, run.exhausted, _SPENT.dump_json(run.gone))
        return "INSERT INTO runs VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING", values

    @staticmethod
    def changed(run: Run) -> Statement:
        """Returns the statement for the write that deletes one of its rollouts."""
        sql = "UPDATE runs SET exhausted = ?, gone = ? WHERE run_id = ?"
        return sql, (run.exhausted, _SPENT.dump_json(run.gone), run.id)

    def update(self, run: Run) -> asyncio.Future[list[int]]:
        """Writes the run's current state."""
        return self._submit([self.changed(run)])

    def delete(self, run_id: str) -> asyncio.Future[list[int]]:
        return self._submit([("DELETE FROM runs WHERE run_id = ?", (run_id,))])

    async def load(self) -> list[Run]:
        """Returns all runs, oldest first."""
        rows = await self._journal.query("SELECT * FROM runs ORDER BY created")
        return [
            Run(
                row["run_id"],
                _BUDGETS.validate_json(row["budgets"]),
                row["created"],
                row["exhausted"],
                _SPENT.validate_json(row["gone"]),
            )
            for row in rows
        ]
