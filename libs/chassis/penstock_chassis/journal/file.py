"""The file of a journal: opened by one owner, migrated to its schema, and the errors of its disk."""

import fcntl
import os
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from penstock_chassis import disk
from penstock_chassis.errors import FailedPrecondition, Unavailable

OWNER_SUFFIX: Final = "-owner"
"""Suffix of the empty file whose lock marks the owner of a journal with separate reads."""

_STATEMENT_CACHE: Final = 256
_LOCK_WAIT_S: Final = 2.0
"""How long opening waits for the file's lock: a service that was just killed may hold it a moment longer."""
_LOCK_ASKED_S: Final = 0.02

_OF_THE_DISK: Final = frozenset(
    {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN}
)


def refusal(error: BaseException) -> Unavailable | None:
    """The error for a write or read that the disk refused: `JOURNAL_FAILED`, and nothing of it happened.

    None for every other error.
    """
    if not isinstance(error, sqlite3.Error) or getattr(error, "sqlite_errorcode", 0) & 0xFF not in _OF_THE_DISK:
        return None
    return Unavailable(
        f"The service's disk refused to record this ({error}), so nothing was changed. Free space on the disk or "
        "repair it, then try again.",
        reason="JOURNAL_FAILED",
        retry_after_s=2.0,
    )


class Owner:
    """Holds a journal's owner file locked until `close` or the end of the process."""

    def __init__(self, path: Path) -> None:
        """Locks it. Raises FailedPrecondition (JOURNAL_IN_USE) if another process has it; OSError on disk errors."""
        # A separate file: closing a descriptor of the database's own file drops all of the process's SQLite locks.
        lock = path.with_name(path.name + OWNER_SUFFIX)
        self._file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        until = time.monotonic() + _LOCK_WAIT_S
        try:
            while not self._taken():
                if time.monotonic() > until:
                    raise _in_use(path)
                time.sleep(_LOCK_ASKED_S)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Releases the lock."""
        os.close(self._file)

    def _taken(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def make(path: Path) -> None:
    """Creates a journal's file (mode 0600) and its directory if absent. Raises as `open_writer`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
    except OSError as error:
        raise _open_error(path, error) from error


def open_writer(
    path: Path, migrations: Sequence[str], sync: Literal["normal", "full"], *, exclusive: bool
) -> sqlite3.Connection:
    """Opens the one connection that writes, and migrates the file; `exclusive` allows no other connection.

    Raises as `Journal.open`.
    """
    connection: sqlite3.Connection | None = None
    try:
        connection = _connect(path)
        if exclusive:
            # Before WAL: no shared-memory file, and the lock lasts as long as the process, however it ends.
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {sync.upper()}")
        # The thread checkpoints, not the commit that happens to write the thousandth page.
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


def open_reader(path: Path) -> sqlite3.Connection:
    """Opens a read-only connection beside a writer that is not exclusive. Raises sqlite3.Error."""
    connection = _connect(path)
    try:
        connection.execute("PRAGMA query_only = ON")
        connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()  # attaches to the log
    except BaseException:
        connection.close()
        raise
    return connection


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path,
        timeout=_LOCK_WAIT_S,
        isolation_level=None,
        cached_statements=_STATEMENT_CACHE,
        check_same_thread=False,  # lent to one user at a time
    )
    connection.row_factory = sqlite3.Row
    return connection


def _in_use(path: Path) -> FailedPrecondition:
    return FailedPrecondition(
        f"Another process uses {path}. Stop it, or give this one its own state directory.",
        reason="JOURNAL_IN_USE",
    )


def _open_error(path: Path, error: Exception) -> Exception:
    code = getattr(error, "sqlite_errorcode", None)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return _in_use(path)
    if (code != sqlite3.SQLITE_CANTOPEN and refusal(error) is not None) or getattr(error, "errno", 0) in disk.REFUSED:
        why = getattr(error, "strerror", None) or error
        return Unavailable(f"{path} cannot be written: {why}. {disk.MEND}", reason="JOURNAL_FAILED", retry_after_s=2.0)
    if isinstance(error, OSError) or code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_CANTOPEN):
        return FailedPrecondition(
            f"{path} cannot be opened as a journal: {error}. Check the file and its owner; an empty state_dir "
            "starts without state.",
            reason="JOURNAL_UNREADABLE",
        )
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
