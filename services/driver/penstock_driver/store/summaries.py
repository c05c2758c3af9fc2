"""Summary rows of rollouts, for watchers of many: read without their specs, with a notice of every change.

Invariants: a row shows what is on disk. A watcher holds the set of ids changed since its last read, however often each
changed, so a slow one costs a set of ids and no queue.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from sqlite3 import Row
from typing import Final

from penstock.driver.v1 import rollout_pb2
from penstock_chassis.journal import Journal, Statement
from penstock_driver.domain.ports import CallSpent
from penstock_driver.domain.records import Filter
from penstock_driver.domain.rollout import Phase
from penstock_driver.store.records import conditions, parsed_export, parsed_home, parsed_outcome

MIGRATION: Final = """
ALTER TABLE rollouts ADD COLUMN calls INTEGER NOT NULL DEFAULT 0;
ALTER TABLE rollouts ADD COLUMN prompt_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE rollouts ADD COLUMN completion_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE rollouts ADD COLUMN oldest_version INTEGER;
ALTER TABLE rollouts ADD COLUMN newest_version INTEGER;
"""
"""Sums over a rollout's model calls, as far as the gate reported them."""
MIGRATION_LOGPROBS: Final = """
ALTER TABLE rollouts ADD COLUMN logprob_sum REAL NOT NULL DEFAULT 0;
ALTER TABLE rollouts ADD COLUMN logprob_count INTEGER NOT NULL DEFAULT 0;
"""
"""The sum of the logprobs of the sampled tokens that have one, in nats, and the number of these tokens."""

_COLUMNS: Final = (
    "number, rollout_id, group_id, idx, run_id, task_id, agent, labels, create_time, end_time, phase, attempts,"
    " outcome, home, export, calls, prompt_tokens, completion_tokens, oldest_version, newest_version, namespace,"
    " logprob_sum, logprob_count, pause IS NOT NULL AS paused"
)


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """A rollout without its spec; times in seconds since the epoch."""

    number: int
    rollout_id: str
    group_id: str | None
    index: int
    run_id: str | None
    task_id: str
    agent: str
    labels: Mapping[str, str]
    create_time: float
    end_time: float | None
    phase: Phase
    attempts: int
    outcome: rollout_pb2.Outcome | None = field(repr=False)
    home: rollout_pb2.Home | None
    export: rollout_pb2.Export | None
    calls: int
    prompt_tokens: int
    completion_tokens: int
    oldest_version: int | None
    newest_version: int | None
    namespace: str
    paused: bool
    logprob_sum: float
    logprob_count: int

    def matches(self, matching: Filter) -> bool:
        """Whether every condition that is set holds."""
        return (
            matching.run_id in (None, self.run_id)
            and matching.group_id in (None, self.group_id)
            and matching.task_id in (None, self.task_id)
            and matching.agent in (None, self.agent)
            and matching.namespace in (None, self.namespace)
            and matching.labels.items() <= self.labels.items()
            and matching.ended in (None, self.end_time is not None)
        )


class Summaries:
    """Reads summary rows, many per query."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def newest(self, matching: Filter, before: int, limit: int) -> Sequence[RolloutRow]:
        """Up to `limit` rows with a number below `before` (0 for the newest), newest first."""
        where, values = conditions(matching)
        if before:
            where.append("number < ?")
            values.append(before)
        condition = " AND ".join(where) or "1"
        sql = f"SELECT {_COLUMNS} FROM rollouts WHERE {condition} ORDER BY number DESC LIMIT ?"  # noqa: S608 - fixed texts
        return [_row(row) for row in await self._journal.read(sql, (*values, limit))]

    async def of(self, rollout_ids: Iterable[str]) -> Sequence[RolloutRow]:
        """The rows of the given rollouts that exist, oldest first."""
        sql = (
            f"SELECT {_COLUMNS} FROM rollouts WHERE rollout_id IN (SELECT value FROM json_each(?))"  # noqa: S608
            " ORDER BY number"
        )
        return [_row(row) for row in await self._journal.read(sql, (json.dumps(list(rollout_ids)),))]


class Changes:
    """The rollouts that changed since the last `take`. Deletions of other namespaces than `namespace` are left out, but
    writes are not.
    """

    def __init__(self, namespace: str | None = None) -> None:
        self.namespace = namespace
        self._ids: dict[str, bool] = {}
        """Each with whether it was deleted."""
        self._some = asyncio.Event()

    def add(self, rollout_ids: Iterable[str], *, deleted: bool = False) -> None:
        for rollout_id in rollout_ids:
            # A write from before the deletion may be reported after it.
            self._ids[rollout_id] = deleted or self._ids.get(rollout_id, False)
        if self._ids:
            self._some.set()

    async def wait(self, seconds: float) -> bool:
        """Wait for a change; False after `seconds` without any."""
        try:
            async with asyncio.timeout(seconds):
                await self._some.wait()
        except TimeoutError:
            return False
        return True

    def take(self, most: int) -> Mapping[str, bool]:
        """Remove and return up to `most` ids, oldest first, each with whether it was deleted."""
        taken = dict(islice(self._ids.items(), most))
        for rollout_id in taken:
            del self._ids[rollout_id]
        if not self._ids:
            self._some.clear()
        return taken


def counted(rollout_id: str, spent: CallSpent) -> Statement:
    """The statement that adds an ended call to a rollout's sums."""
    # SQLite's MIN and MAX of two values are NULL when one of them is.
    return (
        "UPDATE rollouts SET calls = calls + 1, prompt_tokens = prompt_tokens + ?,"
        " completion_tokens = completion_tokens + ?,"
        " oldest_version = COALESCE(MIN(oldest_version, ?), oldest_version, ?),"
        " newest_version = COALESCE(MAX(newest_version, ?), newest_version, ?),"
        " logprob_sum = logprob_sum + ?, logprob_count = logprob_count + ? WHERE rollout_id = ?",
        (
            *(spent.prompt_tokens, spent.completion_tokens),
            *(spent.oldest_version, spent.oldest_version, spent.newest_version, spent.newest_version),
            *(spent.logprob_sum, spent.logprob_count),
            rollout_id,
        ),
    )


def _row(row: Row) -> RolloutRow:
    return RolloutRow(
        number=row["number"],
        rollout_id=row["rollout_id"],
        group_id=row["group_id"],
        index=row["idx"],
        run_id=row["run_id"],
        task_id=row["task_id"],
        agent=row["agent"],
        labels=json.loads(row["labels"]),
        create_time=row["create_time"],
        end_time=row["end_time"],
        phase=Phase(row["phase"]),
        attempts=row["attempts"],
        outcome=parsed_outcome(row["outcome"]),
        home=parsed_home(row["home"]),
        export=parsed_export(row["export"]),
        calls=row["calls"],
        prompt_tokens=row["prompt_tokens"],
        completion_tokens=row["completion_tokens"],
        oldest_version=row["oldest_version"],
        newest_version=row["newest_version"],
        namespace=row["namespace"],
        paused=bool(row["paused"]),
        logprob_sum=row["logprob_sum"],
        logprob_count=row["logprob_count"],
    )
