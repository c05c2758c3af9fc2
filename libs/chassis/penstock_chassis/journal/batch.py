"""One transaction of a journal: its writes and queries, and the result of each."""

import asyncio
import sqlite3
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from penstock_chassis.journal.reads import SqlParams

Statement: TypeAlias = tuple[str, SqlParams]

_REFUSED: Final = (sqlite3.Error, ValueError, TypeError, OverflowError)
"""Errors of a statement: besides its own errors, sqlite3 raises the others for values that it cannot bind."""


class Job(NamedTuple):
    """A queued write or query and the future for its result; `size` as in `Journal.submit`, in bytes."""

    statements: Sequence[Statement]
    rows: bool
    """True: the result is the one statement's rows. False: the result is the changed row counts."""
    size: int | None
    done: asyncio.Future[Any]


class Result(NamedTuple):
    """The result of a job: rows or changed row counts, or the error."""

    job: Job
    value: object
    error: BaseException | None


def commit(connection: sqlite3.Connection, batch: list[Job]) -> list[Result]:
    """Runs a batch in one transaction. If the transaction as a whole fails, every job in it fails."""
    results = _commit_plainly(connection, batch)
    return _commit_guarded(connection, batch) if results is None else results


def _commit_plainly(connection: sqlite3.Connection, batch: list[Job]) -> list[Result] | None:
    """Runs a batch without a savepoint per writer, which costs as much as a write; nearly no batch has a failure.

    Returns None when something failed: then the whole batch is rolled back.
    """
    results: list[Result] = []
    execute = connection.execute
    try:
        execute("BEGIN IMMEDIATE")
        for job in batch:
            value: object
            if job.rows:
                (statement,) = job.statements
                value = execute(*statement).fetchall()
            else:
                value = [execute(sql, parameters).rowcount for sql, parameters in job.statements]
            results.append(Result(job, value, None))
        execute("COMMIT")
    except _REFUSED:
        if connection.in_transaction:
            execute("ROLLBACK")
        return None
    return results


def _commit_guarded(connection: sqlite3.Connection, batch: list[Job]) -> list[Result]:
    """Runs a batch in which one writer may fail without the others."""
    results: list[Result] = []
    try:
        connection.execute("BEGIN IMMEDIATE")
        for job in batch:
            results.append(_perform(connection, job))
            if not connection.in_transaction:
                # Disk full, I/O error, OR ROLLBACK: SQLite undid the whole transaction, earlier writers included.
                raise results[-1].error or sqlite3.OperationalError("the transaction ended early")
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        return [Result(job, None, error) for job in batch]
    return results


def _perform(connection: sqlite3.Connection, job: Job) -> Result:
    # A single statement that fails undoes itself; only several together need a savepoint.
    nested = len(job.statements) > 1
    try:
        if nested:
            connection.execute("SAVEPOINT writer")
        value: object
        if job.rows:
            (statement,) = job.statements
            value = connection.execute(*statement).fetchall()
        else:
            value = [connection.execute(*statement).rowcount for statement in job.statements]
        if nested:
            connection.execute("RELEASE writer")
    except _REFUSED as error:
        if nested and connection.in_transaction:
            connection.execute("ROLLBACK TO writer")
            connection.execute("RELEASE writer")
        return Result(job, None, error)
    return Result(job, value, None)
