"""A service's durable state: one SQLite file in WAL mode, written with group commit.

Many tasks of the event loop submit writes; all queued ones run in order of submission inside one transaction, with one
commit. A writer's `await` returns after the commit, so acknowledged writes survive a kill -9 of the service (and with
`sync="full"` a loss of power).

The writes submitted in one turn of the loop are committed together: by a dedicated thread, or on the loop itself if
every writer declared how small its write is. Waking a thread and waiting for the GIL twice a statement costs more than
such a write, which only copies a few pages to the kernel. The thread does everything that may wait for a disk: reads,
large writes, checkpoints, and with `sync="full"` everything. While it works nothing is written on the loop, so that no
write there waits for a sync (docs/decisions/023).

With `reads_apart` the file has two further read-only connections: one of a second thread, and one of the loop for reads
of a few rows. Such a read waits for no write and no checkpoint, however much another task writes; and one on the loop
does not wait for the GIL either, which a busy loop can keep from threads for tens of milliseconds.

Invariants:

- Order of submission is order of execution, queries included: a query sees every write submitted before it, and returns
  only once those writes are committed. A `read` sees every write whose `await` returned before it, and none that is not
  committed.
- The statements of one `write` happen all or not at all. A statement that fails fails its own writer only.
- Cancelling a waiting task does not undo its write.
- One process owns the file: a second one that opens it is refused.
- The connection that writes belongs to the loop or to the thread, never to both: it is lent with a batch and returned
  when that is done.
"""

import asyncio
import functools
import queue
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, Final, Literal, Self

import structlog

from penstock_chassis.errors import FailedPrecondition, Unavailable
from penstock_chassis.journal import file
from penstock_chassis.journal.batch import Job, Result, Statement, commit
from penstock_chassis.journal.file import refusal
from penstock_chassis.journal.reads import Reader, SqlParams, SqlValue
from penstock_chassis.telemetry.metrics import SHORT_S, histogram

__all__ = ["Journal", "SqlParams", "SqlValue", "Statement", "refusal"]

_log = structlog.get_logger(__name__)
_commit = commit

_COMMIT_SECONDS: Final = histogram(
    "penstock_journal_commit_seconds", "Transactions of the journal, begin to commit", buckets=SHORT_S
)

_MAX_BATCH: Final = 1024
"""Maximum jobs per transaction: bounds how long the first one waits for the last."""

_MOST_HERE: Final = 2 << 20
_WRITE_BYTES: Final = 2 << 10
"""Bytes committed on the event loop at once, and the fixed cost counted per write beside its size. That is some ten
milliseconds, and less than a tenth of the loop's time for the calls that wrote so much.
"""

_APART_S: Final = 0.001
"""Seconds between two commits on the event loop: under load more writes go together; a single write does not wait."""

_CHECKPOINT_ROWS: Final = 2000
_CHECKPOINT_BYTES: Final = 8 << 20
"""Changed rows, and bytes written, after which the log is checkpointed to the file: 10 to 20 MiB of log, which holds a
page once for each commit that changed it. Nothing is committed during a checkpoint: some 10 ms."""

_FORBIDDEN = frozenset(
    {"BEGIN", "COMMIT", "END", "ROLLBACK", "SAVEPOINT", "RELEASE", "ATTACH", "DETACH", "VACUUM", "PRAGMA"}
)


class Journal:
    """Owns the file and its thread. Open with `Journal.open`, close with `aclose` (or use as a context manager).

    All methods belong to the event loop that opened it.
    """

    def __init__(
        self, path: Path, migrations: Sequence[str], sync: Literal["normal", "full"], reads_apart: bool
    ) -> None:
        """Use `open`, which also starts the thread."""
        self._path = path
        self._migrations = tuple(migrations)
        self._sync = sync
        self._reads_apart = reads_apart
        self._reader: Reader | None = None
        self._here: sqlite3.Connection | None = None
        self._loop = asyncio.get_running_loop()
        self._connection: sqlite3.Connection | None = None
        # Jobs for the thread, one batch at a time; None ends it.
        self._jobs: queue.SimpleQueue[list[Job] | None] = queue.SimpleQueue()
        # Submitted, neither committed nor with the thread.
        self._waiting: list[Job] = []
        # The thread has the connection.
        self._lent = False
        # Loop time before which submitted writes wait a little.
        self._next = 0.0
        # Total changed rows at the last checkpoint, as the connection counts them; bytes written since then.
        self._rows_then = 0
        self._bytes = 0
        self._due = False
        self._over = False
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._closing = False
        # A daemon: an interpreter that exits without aclose() must not hang. No acknowledged write is lost.
        self._thread = threading.Thread(target=self._run, name=f"journal-{path.stem}", daemon=True)

    @classmethod
    async def open(
        cls,
        path: Path | str,
        migrations: Sequence[str],
        *,
        sync: Literal["normal", "full"] = "normal",
        reads_apart: bool = False,
    ) -> Self:
        """Opens the file at `path`, creates it (mode 0600) and its directory when absent, and migrates it.

        Args:
            path: the database file.
            migrations: SQL scripts in order; script i brings the schema from version i to i + 1. A released script
                never changes; new ones are appended.
            sync: "normal" survives the death of the process; "full" also survives a loss of power, at one fsync per
                group commit.
            reads_apart: `read` waits for no write. Costs a shared-memory file beside the log, and locks at each
                commit; where the disk has no room for them, reads are queries.

        Raises:
            FailedPrecondition: `JOURNAL_IN_USE` when another process owns the file, `JOURNAL_TOO_NEW` when a newer
                version wrote it, `JOURNAL_UNREADABLE` when it is no database or cannot be opened.
            Unavailable: `JOURNAL_FAILED` when the disk is full or broken.
            sqlite3.Error: a migration is wrong; the file stays at the version before it.
        """
        journal = cls(Path(path), migrations, sync, reads_apart)
        journal._thread.start()
        try:
            await asyncio.shield(journal._opened)
        except asyncio.CancelledError:
            await journal.aclose()
            raise
        return journal

    async def execute(self, sql: str, params: SqlParams = ()) -> int:
        """Runs one writing statement durably; returns its changed row count (-1 where SQLite reports none).

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
        """Queues a write at once and returns a future for its commit.

        For code that must fix the order of several writes without waiting in between. Cancelling the future does not
        undo the write. `size` declares the approximate bytes of a write that changes a few rows found by their keys: it
        may then be committed on the event loop.
        """
        return self._enqueue(statements, rows=False, size=size)

    async def query(self, sql: str, params: SqlParams = ()) -> list[sqlite3.Row]:
        """Runs one statement and returns its rows; `INSERT ... RETURNING` and its like are allowed and durable.

        Raises as `execute` does.
        """
        rows: list[sqlite3.Row] = await self._enqueue([(sql, params)], rows=True)
        return rows

    async def read(self, sql: str, params: SqlParams = (), *, few: bool = False) -> list[sqlite3.Row]:
        """Runs a SELECT over committed data, all awaited writes included; waits for no write.

        `few` declares that it finds a few rows by their keys: it may then run on the event loop.

        Raises:
            sqlite3.Error: the statement failed.
            ValueError: it is no SELECT.
            Unavailable: `JOURNAL_CLOSED`.
        """
        if not sql.startswith("SELECT "):
            raise ValueError(f"expected a statement that reads: {sql!r}")
        if self._reader is None or self._here is None:
            return await self.query(sql, params)
        self._check_open()
        if few:
            return self._here.execute(sql, params).fetchall()
        done: asyncio.Future[list[sqlite3.Row]] = self._loop.create_future()
        self._reader.read(sql, params, functools.partial(self._call, _settle_read, done))
        return await done

    async def aclose(self) -> None:
        """Commits queued writes, closes the file and ends the thread. Idempotent and safe from several tasks."""
        if not self._closing:
            self._closing = True
            self._begin()
        await asyncio.shield(self._ended)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _enqueue(self, statements: Sequence[Statement], *, rows: bool, size: int | None = None) -> asyncio.Future[Any]:
        for sql, _ in statements:
            _check(sql)
        self._check_open()
        done: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.append(Job(statements, rows, size, done))
        if not self._due:
            self._due = True
            if self._loop.time() < self._next:
                self._loop.call_later(_APART_S, self._begin)
            else:
                self._loop.call_soon(self._begin)
        return done

    def _check_open(self) -> None:
        if self._closing:
            raise Unavailable("The service is stopping and accepts no writes.", reason="JOURNAL_CLOSED")

    def _begin(self) -> None:
        """Commits queued jobs or hands them to the thread; the thread's current batch comes first."""
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

    def _lend(self, batch: list[Job]) -> None:
        self._lent = True
        self._jobs.put(batch)

    def _take_back(self, results: list[Result]) -> None:
        self._lent = False
        _settle(results)
        self._begin()

    # The thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with ExitStack() as held:
                try:
                    connection = self._open(held)
                except BaseException as error:  # noqa: BLE001 - handed to the task that opens
                    self._call(_settle_open, self._opened, error)
                    return
                try:
                    self._serve(connection)
                finally:
                    self._connection = None
        finally:
            self._call(_settle_open, self._ended, None)

    def _open(self, held: ExitStack) -> sqlite3.Connection:
        """Returns the connection that writes, and opens the reader beside it; `held` closes both."""
        file.make(self._path)
        if self._reads_apart:
            try:
                return self._open_apart(held)
            except (OSError, sqlite3.Error, Unavailable, FailedPrecondition) as error:
                if isinstance(error, FailedPrecondition) and error.reason != "JOURNAL_UNREADABLE":
                    raise
                # Errors of the file itself are found again below.
                _log.warning("the journal's reads wait for its writes", path=str(self._path), error=repr(error))
        connection = file.open_writer(self._path, self._migrations, self._sync, exclusive=True)
        held.callback(connection.close)
        return connection

    def _open_apart(self, held: ExitStack) -> sqlite3.Connection:
        with ExitStack() as own:
            own.callback(file.Owner(self._path).close)
            connection = file.open_writer(self._path, self._migrations, self._sync, exclusive=False)
            own.callback(connection.close)
            here = file.open_reader(self._path)
            own.callback(here.close)
            reader = Reader(file.open_reader(self._path), f"{self._thread.name}-reads")
            own.callback(reader.end)
            held.push(own.pop_all())
        self._reader, self._here = reader, here
        return connection

    def _serve(self, connection: sqlite3.Connection) -> None:
        self._checkpoint(connection)  # the log of a killed process
        if self._sync != "full":
            self._connection = connection
        self._call(_settle_open, self._opened, None)
        while (batch := self._jobs.get()) is not None:
            results = _commit_timed(connection, batch) if batch else []
            self._bytes += sum(map(_bytes_of, batch))
            if self._checkpoint_due(connection):
                self._call(_settle, results)  # they need not wait for the checkpoint
                results = []
                self._checkpoint(connection)
            self._call(self._take_back, results)

    # Whichever holds the connection ----------------------------------------------------------------------------------

    def _checkpoint_due(self, connection: sqlite3.Connection) -> bool:
        return connection.total_changes - self._rows_then >= _CHECKPOINT_ROWS or self._bytes >= _CHECKPOINT_BYTES

    def _checkpoint(self, connection: sqlite3.Connection) -> None:
        """Copies the log to the file and restarts it; both are synced."""
        self._rows_then, self._bytes = connection.total_changes, 0
        try:
            ((_, pages, copied),) = connection.execute("PRAGMA wal_checkpoint").fetchall()
            # The first write to a restarted log syncs its header, so it is done here and not on the loop. The log is
            # neither restarted nor copied past a reader's position while that reader is active.
            with self._reader.at_rest() if self._reader is not None else nullcontext():
                if copied < pages:
                    connection.execute("PRAGMA wal_checkpoint").fetchall()
                (version,) = connection.execute("PRAGMA user_version").fetchone()
                connection.execute(f"PRAGMA user_version = {version}")
        except sqlite3.Error as error:
            # Nothing is lost: the data is in the log, which grows until a checkpoint succeeds.
            _log.warning("the journal's log could not be copied to its file", path=str(self._path), error=repr(error))

    def _call(self, function: Any, *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The loop is closed: nobody waits any more. The thread's writes are recorded.
            if not self._loop.is_closed():
                raise


def _commit_timed(connection: sqlite3.Connection, batch: list[Job]) -> list[Result]:
    began = time.perf_counter()
    try:
        results = _commit(connection, batch)
    except Exception as error:  # noqa: BLE001 - no memory, or a disk that refuses the way back too: every waiter gets it
        results = [Result(job, None, error) for job in batch]
    _COMMIT_SECONDS.observe(time.perf_counter() - began)
    return results


def _size_of(batch: list[Job]) -> int | None:
    """Returns a batch's size in bytes if every writer declared one, otherwise None."""
    size = _WRITE_BYTES * len(batch)
    for job in batch:
        if job.size is None:
            return None
        size += job.size
    return size


def _bytes_of(job: Job) -> int:
    """Returns a write's declared size, or else the size of its strings and blobs."""
    if job.size is not None:
        return job.size
    given = (params.values() if isinstance(params, Mapping) else params for _, params in job.statements)
    return sum(len(value) for values in given for value in values if isinstance(value, str | bytes))


def _settle(results: list[Result]) -> None:
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


def _settle_read(
    future: asyncio.Future[list[sqlite3.Row]], rows: list[sqlite3.Row] | None, error: BaseException | None
) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(rows or [])


@functools.lru_cache(maxsize=1024)
def _check(sql: str) -> None:
    """Refuses statements that would end the group's transaction or change the connection for everyone."""
    words = sql.split(None, 1)
    if not words or words[0].rstrip(";").upper() in _FORBIDDEN:
        raise ValueError(f"the journal does not allow the statement: {sql!r}")
