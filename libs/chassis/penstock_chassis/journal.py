"""A service's durable state: one SQLite file in WAL mode, written by one thread with group commit.

Many tasks of the event loop submit writes; one dedicated thread takes all that wait, runs them in the order of their
submission inside one transaction and commits once. What one turn of the loop submits is handed to the thread together:
to wake a thread costs more than a write. A writer's `await` returns after the commit, so what was
acknowledged survives a kill -9 of the service (and with `sync="full"` a loss of power).

Invariants:

- Order of submission is order of execution, reads included: a read sees every write submitted before it, and returns
  only once those writes are committed.
- The statements of one `write` happen all or not at all. A statement that fails fails its own writer only.
- Cancelling a task that waits does not take its write back.
- One process owns the file: a second one that opens it is refused.
"""

import asyncio
import functools
import queue
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias

from penstock_chassis.errors import FailedPrecondition, Unavailable
from penstock_chassis.metrics import SHORT_S, histogram

SqlValue: TypeAlias = int | float | str | bytes | None
SqlParams: TypeAlias = Sequence[SqlValue] | Mapping[str, SqlValue]
Statement: TypeAlias = tuple[str, SqlParams]

_COMMIT_SECONDS: Final = histogram(
    "penstock_journal_commit_seconds", "Transactions of the journal, begin to commit", buckets=SHORT_S
)

_MAX_BATCH = 1024
"""From so many writers on a transaction takes no more in: bounds how long the first waits for the last."""

_LATER_S: Final = 0.02
"""How long a write that may wait does, unless another one goes first."""

_STATEMENT_CACHE = 256
_LOCK_WAIT_S = 2.0
"""How long opening waits for the file's lock: a service that was just killed may hold it for a moment more."""

_REFUSED: Final = (sqlite3.Error, ValueError, TypeError, OverflowError)
"""What a statement fails with: besides its own errors, sqlite3 raises the others for values that it cannot bind."""

_FORBIDDEN = frozenset(
    {"BEGIN", "COMMIT", "END", "ROLLBACK", "SAVEPOINT", "RELEASE", "ATTACH", "DETACH", "VACUUM", "PRAGMA"}
)


class _Job(NamedTuple):
    statements: Sequence[Statement]
    rows: bool
    """True: the one statement's rows are the result. False: the changed row counts are."""
    done: asyncio.Future[Any]


class _Result(NamedTuple):
    job: _Job
    value: object
    error: BaseException | None


class Journal:
    """Owns the file and its thread. Open with `Journal.open`, close with `aclose` (or use as a context manager).

    All methods belong to the event loop that opened it.
    """

    def __init__(self, path: Path, migrations: Sequence[str], sync: Literal["normal", "full"]) -> None:
        """Use `open`: it also starts the thread."""
        self._path = path
        self._migrations = tuple(migrations)
        self._sync = sync
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[list[_Job] | None] = queue.SimpleQueue()
        # Submitted, and not yet handed to the thread.
        self._waiting: list[_Job] = []
        self._due = False
        self._later: asyncio.TimerHandle | None = None
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._closing = False
        # A daemon: an interpreter that exits without aclose() must not hang. Nothing that was acknowledged is lost.
        self._thread = threading.Thread(target=self._run, name=f"journal-{path.stem}", daemon=True)

    @classmethod
    async def open(
        cls, path: Path | str, migrations: Sequence[str], *, sync: Literal["normal", "full"] = "normal"
    ) -> Self:
        """Opens the file at `path`, creates it (mode 0600) and its directory when absent, and migrates it.

        Args:
            path: the database file.
            migrations: SQL scripts in order; script i brings the schema from version i to i + 1. A released script
                never changes, a new one is appended.
            sync: "normal" survives the death of the process; "full" also survives a loss of power, at one fsync per
                group commit.

        Raises:
            FailedPrecondition: `JOURNAL_IN_USE` when another process owns the file, `JOURNAL_TOO_NEW` when a newer
                version wrote it, `JOURNAL_UNREADABLE` when it is no database or cannot be opened.
            sqlite3.Error: a migration is wrong; the file stays at the version before it.
        """
        journal = cls(Path(path), migrations, sync)
        journal._thread.start()
        try:
            await asyncio.shield(journal._opened)
        except asyncio.CancelledError:
            await journal.aclose()
            raise
        return journal

    async def execute(self, sql: str, params: SqlParams = ()) -> int:
        """Runs one writing statement durably; returns the number of rows that it changed (-1 where SQLite knows none).

        Raises:
            sqlite3.Error: the statement failed (an IntegrityError for a broken constraint); nothing of it happened.
            Unavailable: `JOURNAL_CLOSED`.
        """
        counts: list[int] = await self.submit([(sql, params)])
        return counts[0]

    async def write(self, statements: Sequence[Statement]) -> list[int]:
        """Runs the statements durably, all or none; returns each one's changed row count. Raises as `execute` does."""
        return await self.submit(statements)

    def submit(self, statements: Sequence[Statement], *, soon: bool = True) -> asyncio.Future[list[int]]:
        """Puts a write in order at once and returns what to await for its commit.

        For code that must fix the order of several writes without waiting in between. Cancelling the future does not
        take the write back. One that nobody waits for needs not be `soon`: it goes with the next that is, or after 20
        ms.
        """
        return self._enqueue(statements, rows=False, soon=soon)

    def hurry(self) -> None:
        """Lets what was submitted wait no more."""
        if self._waiting:
            self._hand_over()

    async def query(self, sql: str, params: SqlParams = ()) -> list[sqlite3.Row]:
        """Runs one statement and returns its rows; `INSERT ... RETURNING` and its like are allowed and durable.

        Raises as `execute` does.
        """
        rows: list[sqlite3.Row] = await self._enqueue([(sql, params)], rows=True)
        return rows

    async def aclose(self) -> None:
        """Commits what was submitted, closes the file and ends the thread. Idempotent and safe from several tasks."""
        if not self._closing:
            self._closing = True
            self.hurry()
            self._jobs.put(None)
        await asyncio.shield(self._ended)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _enqueue(self, statements: Sequence[Statement], *, rows: bool, soon: bool = True) -> asyncio.Future[Any]:
        for sql, _ in statements:
            _check(sql)
        if self._closing:
            raise Unavailable("The service is stopping and records nothing more.", reason="JOURNAL_CLOSED")
        done: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.append(_Job(statements, rows, done))
        if soon:
            if not self._due:
                self._due = True
                self._loop.call_soon(self._hand_over)
        elif self._later is None:
            self._later = self._loop.call_later(_LATER_S, self._time_is_up)
        return done

    def _hand_over(self) -> None:
        self._due = False
        if self._waiting:
            jobs, self._waiting = self._waiting, []
            self._jobs.put(jobs)

    def _time_is_up(self) -> None:
        self._later = None
        self._hand_over()

    # The thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            connection = _open(self._path, self._migrations, self._sync)
        except BaseException as error:  # noqa: BLE001 - handed to the task that opens
            self._call(_settle_open, self._opened, error)
            self._call(_settle_open, self._ended, None)
            return
        self._call(_settle_open, self._opened, None)
        try:
            self._serve(connection)
        finally:
            connection.close()
            self._call(_settle_open, self._ended, None)

    def _serve(self, connection: sqlite3.Connection) -> None:
        more = True
        while more:
            jobs = self._jobs.get()
            batch: list[_Job] = []
            while jobs is not None:
                batch += jobs
                if len(batch) >= _MAX_BATCH:
                    break
                try:
                    jobs = self._jobs.get_nowait()
                except queue.Empty:
                    break
            more = jobs is not None
            if batch:
                began = time.perf_counter()
                results = _commit(connection, batch)
                _COMMIT_SECONDS.observe(time.perf_counter() - began)
                self._call(_settle, results)

    def _call(self, function: Any, *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The loop is closed: nobody waits any more. The thread goes on, so that what was submitted is recorded.
            if not self._loop.is_closed():
                raise


def _commit(connection: sqlite3.Connection, batch: list[_Job]) -> list[_Result]:
    """Runs a batch in one transaction. If the transaction as a whole fails, so does everyone in it."""
    results = _commit_plainly(connection, batch)
    return _commit_guarded(connection, batch) if results is None else results


def _commit_plainly(connection: sqlite3.Connection, batch: list[_Job]) -> list[_Result] | None:
    """A batch in which nothing fails, as nearly none does: without a savepoint for each writer, which costs as much as
    a write. None when something failed: then nothing of the batch has happened.
    """
    results: list[_Result] = []
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
            results.append(_Result(job, value, None))
        execute("COMMIT")
    except _REFUSED:
        if connection.in_transaction:
            execute("ROLLBACK")
        return None
    return results


def _commit_guarded(connection: sqlite3.Connection, batch: list[_Job]) -> list[_Result]:
    """A batch in which a writer may fail without the others."""
    results: list[_Result] = []
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
        return [_Result(job, None, error) for job in batch]
    return results


def _perform(connection: sqlite3.Connection, job: _Job) -> _Result:
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
        return _Result(job, None, error)
    return _Result(job, value, None)


def _settle(results: list[_Result]) -> None:
    for result in results:
        done = result.job.done
        if done.done():
            continue
        if result.error is None:
            done.set_result(result.value)
        else:
            done.set_exception(result.error)


def _settle_open(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


@functools.lru_cache(maxsize=1024)
def _check(sql: str) -> None:
    """Refuses statements that would end the group's transaction or change the connection for everyone."""
    words = sql.split(None, 1)
    if not words or words[0].rstrip(";").upper() in _FORBIDDEN:
        raise ValueError(f"not a statement for the journal: {sql!r}")


def _open(path: Path, migrations: Sequence[str], sync: Literal["normal", "full"]) -> sqlite3.Connection:
    connection: sqlite3.Connection | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        connection = sqlite3.connect(
            path, timeout=_LOCK_WAIT_S, isolation_level=None, cached_statements=_STATEMENT_CACHE
        )
        connection.row_factory = sqlite3.Row
        # Exclusive before WAL: no shared-memory file, and the lock lasts as long as the process, however it ends.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {sync.upper()}")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("COMMIT")
        _migrate(connection, path, migrations)
    except (sqlite3.DatabaseError, OSError) as error:
        if connection is not None:
            connection.close()
        raise _open_error(path, error) from error
    except BaseException:
        if connection is not None:
            connection.close()
        raise
    return connection


def _open_error(path: Path, error: Exception) -> Exception:
    code = getattr(error, "sqlite_errorcode", None)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return FailedPrecondition(
            f"Another process uses {path}. Stop it, or give this one its own state directory.",
            reason="JOURNAL_IN_USE",
        )
    if isinstance(error, OSError) or code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_CANTOPEN):
        return FailedPrecondition(f"{path} cannot be opened as a journal: {error}.", reason="JOURNAL_UNREADABLE")
    return error


def _migrate(connection: sqlite3.Connection, path: Path, migrations: Sequence[str]) -> None:
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > len(migrations):
        raise FailedPrecondition(
            f"{path} was written by a newer version (schema {version}, known {len(migrations)}). Upgrade this service.",
            reason="JOURNAL_TOO_NEW",
        )
    for number, script in enumerate(migrations[version:], start=version + 1):
        try:
            connection.executescript(f"BEGIN IMMEDIATE;\n{script}\n;PRAGMA user_version = {number};\nCOMMIT;")
        except sqlite3.Error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
