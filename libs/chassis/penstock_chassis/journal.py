"""A service's durable state: one SQLite file in WAL mode, written with group commit.

Many tasks of the event loop submit writes; all that wait run in the order of their submission inside one transaction,
with one commit. A writer's `await` returns after the commit, so what was acknowledged survives a kill -9 of the service
(and with `sync="full"` a loss of power).

What one turn of the loop submits is committed together, by a dedicated thread, or where it is when every writer has
said how small its write is: to wake a thread, and to wait for the interpreter's lock twice a statement, costs more
than such a write, which only copies a few pages to the kernel. Whatever may wait for a disk is the thread's: reads,
large writes, the file's checkpoints, and with `sync="full"` everything. While it is at work nothing is written on the
loop, so that no write waits there for a sync (docs/decisions/023).

Invariants:

- Order of submission is order of execution, reads included: a read sees every write submitted before it, and returns
  only once those writes are committed.
- The statements of one `write` happen all or not at all. A statement that fails fails its own writer only.
- Cancelling a task that waits does not take its write back.
- One process owns the file: a second one that opens it is refused.
- The connection is the loop's or the thread's, never both's: it is lent with a batch and comes back when that is done.
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

import structlog

from penstock_chassis.errors import FailedPrecondition, Unavailable
from penstock_chassis.metrics import SHORT_S, histogram

SqlValue: TypeAlias = int | float | str | bytes | None
SqlParams: TypeAlias = Sequence[SqlValue] | Mapping[str, SqlValue]
Statement: TypeAlias = tuple[str, SqlParams]

_log = structlog.get_logger(__name__)

_COMMIT_SECONDS: Final = histogram(
    "penstock_journal_commit_seconds", "Transactions of the journal, begin to commit", buckets=SHORT_S
)

_MAX_BATCH: Final = 1024
"""From so many writers on a transaction takes no more in: bounds how long the first waits for the last."""

_MOST_HERE: Final = 2 << 20
_WRITE_BYTES: Final = 2 << 10
"""What is committed on the event loop at once, and what a write counts for beside what it holds. That is some ten
milliseconds, and less than a tenth of what the loop took for the calls that wrote so much.
"""

_APART_S: Final = 0.001
"""Between one commit on the event loop and the next: where there are many more go together, and one alone waits not."""

_CHECKPOINT_ROWS: Final = 2000
_CHECKPOINT_BYTES: Final = 8 << 20
"""Changed rows, and bytes written beside, from which on the log is copied to the file: 10 to 20 MiB of it, a page being
in it once for each commit that changed it. While that goes on nothing is committed: some 10 ms."""

_STATEMENT_CACHE = 256
_LOCK_WAIT_S = 2.0
"""How long opening waits for the file's lock: a service that was just killed may hold it for a moment more."""

_REFUSED: Final = (sqlite3.Error, ValueError, TypeError, OverflowError)
"""What a statement fails with: besides its own errors, sqlite3 raises the others for values that it cannot bind."""

_OF_THE_DISK: Final = frozenset(
    {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN}
)

_FORBIDDEN = frozenset(
    {"BEGIN", "COMMIT", "END", "ROLLBACK", "SAVEPOINT", "RELEASE", "ATTACH", "DETACH", "VACUUM", "PRAGMA"}
)


def refusal(error: BaseException) -> Unavailable | None:
    """What to tell of a write, or a read, that the disk refused: `JOURNAL_FAILED`, and nothing of it happened.

    None for every other error.
    """
    if not isinstance(error, sqlite3.Error) or getattr(error, "sqlite_errorcode", 0) & 0xFF not in _OF_THE_DISK:
        return None
    return Unavailable(
        f"The service's disk refused to record this ({error}), so it did not happen. Free some of it or mend it, and"
        " try again.",
        reason="JOURNAL_FAILED",
        retry_after_s=2.0,
    )


class _Job(NamedTuple):
    statements: Sequence[Statement]
    rows: bool
    """True: the one statement's rows are the result. False: the changed row counts are."""
    size: int | None
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
        self._connection: sqlite3.Connection | None = None
        # For the thread, one batch at a time; None ends it.
        self._jobs: queue.SimpleQueue[list[_Job] | None] = queue.SimpleQueue()
        # Submitted, and neither committed nor with the thread.
        self._waiting: list[_Job] = []
        # The thread has the connection.
        self._lent = False
        # What is submitted sooner waits a little: the loop's time.
        self._next = 0.0
        # At the last checkpoint, rows as the connection counts them; since then, bytes of what was written.
        self._rows_then = 0
        self._bytes = 0
        self._due = False
        self._over = False
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
            Unavailable: `JOURNAL_FAILED` when the disk is full or broken.
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

    def submit(self, statements: Sequence[Statement], *, size: int | None = None) -> asyncio.Future[list[int]]:
        """Puts a write in order at once and returns what to await for its commit.

        For code that must fix the order of several writes without waiting in between. Cancelling the future does not
        take the write back. `size` is about how many bytes it writes, for one that changes a few rows, which it finds
        by their keys: it may be committed on the event loop.
        """
        return self._enqueue(statements, rows=False, size=size)

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
            self._begin()
        await asyncio.shield(self._ended)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _enqueue(self, statements: Sequence[Statement], *, rows: bool, size: int | None = None) -> asyncio.Future[Any]:
        for sql, _ in statements:
            _check(sql)
        if self._closing:
            raise Unavailable("The service is stopping and records nothing more.", reason="JOURNAL_CLOSED")
        done: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.append(_Job(statements, rows, size, done))
        if not self._due:
            self._due = True
            if self._loop.time() < self._next:
                self._loop.call_later(_APART_S, self._begin)
            else:
                self._loop.call_soon(self._begin)
        return done

    def _begin(self) -> None:
        """Commits what waits, or lets the thread do it; what the thread is busy with comes first."""
        self._due = False
        while self._waiting and not self._lent:
            batch = self._waiting[:_MAX_BATCH]
            del self._waiting[:_MAX_BATCH]
            connection, size = self._connection, _size_of(batch)
            if connection is not None and size is not None and size <= _MOST_HERE:
                _settle(_commit_timed(connection, batch))
                self._next = self._loop.time() + _APART_S
                self._bytes += size
                if self._checkpoint_due(connection):
                    self._lend([])
            else:
                self._lend(batch)
        if self._closing and not self._lent and not self._over:
            self._over = True
            self._jobs.put(None)

    def _lend(self, batch: list[_Job]) -> None:
        self._lent = True
        self._jobs.put(batch)

    def _take_back(self, results: list[_Result]) -> None:
        self._lent = False
        _settle(results)
        self._begin()

    # The thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            connection = _open(self._path, self._migrations, self._sync)
        except BaseException as error:  # noqa: BLE001 - handed to the task that opens
            self._call(_settle_open, self._opened, error)
            self._call(_settle_open, self._ended, None)
            return
        try:
            self._serve(connection)
        finally:
            self._connection = None
            connection.close()
            self._call(_settle_open, self._ended, None)

    def _serve(self, connection: sqlite3.Connection) -> None:
        self._checkpoint(connection)  # of what a killed one left
        if self._sync != "full":
            self._connection = connection
        self._call(_settle_open, self._opened, None)
        while (batch := self._jobs.get()) is not None:
            results = _commit_timed(connection, batch) if batch else []
            self._bytes += sum(map(_bytes_of, batch))
            if self._checkpoint_due(connection):
                self._call(_settle, results)  # they need not wait for it
                results = []
                self._checkpoint(connection)
            self._call(self._take_back, results)

    # Whoever has the connection --------------------------------------------------------------------------------------

    def _checkpoint_due(self, connection: sqlite3.Connection) -> bool:
        return connection.total_changes - self._rows_then >= _CHECKPOINT_ROWS or self._bytes >= _CHECKPOINT_BYTES

    def _checkpoint(self, connection: sqlite3.Connection) -> None:
        """Copies the log to the file, and begins it anew; both are synced."""
        self._rows_then, self._bytes = connection.total_changes, 0
        try:
            connection.execute("PRAGMA wal_checkpoint").fetchall()
            # The first write to a log that begins syncs its header: that is not left to the loop.
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            connection.execute(f"PRAGMA user_version = {version}")
        except sqlite3.Error as error:
            # Nothing is lost: the log has it, and grows until one succeeds.
            _log.warning("the journal's log could not be copied to its file", path=str(self._path), error=repr(error))

    def _call(self, function: Any, *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The loop is closed: nobody waits any more. What the thread had is recorded.
            if not self._loop.is_closed():
                raise


def _commit_timed(connection: sqlite3.Connection, batch: list[_Job]) -> list[_Result]:
    began = time.perf_counter()
    try:
        results = _commit(connection, batch)
    except Exception as error:  # noqa: BLE001 - no memory, or a disk that refuses the way back too: everyone is told
        results = [_Result(job, None, error) for job in batch]
    _COMMIT_SECONDS.observe(time.perf_counter() - began)
    return results


def _size_of(batch: list[_Job]) -> int | None:
    """What a batch writes, when every writer has said so."""
    size = _WRITE_BYTES * len(batch)
    for job in batch:
        if job.size is None:
            return None
        size += job.size
    return size


def _bytes_of(job: _Job) -> int:
    """What a write writes beside numbers."""
    if job.size is not None:
        return job.size
    given = (params.values() if isinstance(params, Mapping) else params for _, params in job.statements)
    return sum(len(value) for values in given for value in values if isinstance(value, str | bytes))


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
            path,
            timeout=_LOCK_WAIT_S,
            isolation_level=None,
            cached_statements=_STATEMENT_CACHE,
            check_same_thread=False,  # it is lent, and used by one at a time
        )
        connection.row_factory = sqlite3.Row
        # Exclusive before WAL: no shared-memory file, and the lock lasts as long as the process, however it ends.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {sync.upper()}")
        # The thread does that, and not whoever happens to commit the thousandth page.
        connection.execute("PRAGMA wal_autocheckpoint = 0")
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
    return refusal(error) or error


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
