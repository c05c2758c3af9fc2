"""A disk that refuses what a service's journal writes: SQLite's own errors, injected below the journal.

The connection that the journal opens is wrapped; nothing of the product knows of it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from penstock_chassis.journal import file

FULL: Final = sqlite3.SQLITE_FULL
IOERR: Final = sqlite3.SQLITE_IOERR
_TEXTS: Final = {FULL: "database or disk is full", IOERR: "disk I/O error"}
_CONTROL: Final = ("BEGIN", "ROLLBACK", "SAVEPOINT", "RELEASE", "PRAGMA", "SELECT")
_TRIES: Final = 2
"""The journal tries a batch twice: as a whole, and then each writer by itself."""


class Disk:
    """Refuses one write: the `at`-th statement or, with `commits`, the `at`-th commit; or all, from `fill` to `free`.

    Nothing is refused, nor counted, while it is not `armed`. `undoes` says that SQLite undoes the whole transaction
    with it, as it does for most of these errors.
    """

    def __init__(self, code: int = FULL, *, at: int = 0, commits: bool = False, undoes: bool = True) -> None:
        self.code = code
        self.undoes = undoes
        self.refused: list[str] = []
        self.seen: list[str] = []
        """The writes of the kind that was asked for, up to the one that is refused."""
        self._at = at
        self._commits = commits
        self._victim: object = None
        self._left = _TRIES
        self._full = False
        self.armed = True

    @property
    def reached(self) -> bool:
        """Whether the write was there to be refused."""
        return bool(self.refused)

    def fill(self) -> None:
        """Every write is refused from now on."""
        self._full = True

    def free(self) -> None:
        """No write is refused any more."""
        self._full = False

    def judge(self, connection: sqlite3.Connection, sql: str, parameters: Any) -> None:
        """Raises for a statement that is refused."""
        if not self.armed or sql.startswith(_CONTROL):
            return
        if self._full:
            self._refuse(connection, sql)
        if (sql == "COMMIT") is not self._commits:
            return
        what = sql if self._commits else (sql, parameters)
        if self._victim is None:
            self.seen.append(sql)
            if len(self.seen) != self._at:
                return
            self._victim = what
        if what == self._victim and self._left:
            self._left -= 1
            self._refuse(connection, sql)

    def _refuse(self, connection: sqlite3.Connection, sql: str) -> None:
        self.refused.append(sql)
        if self.undoes and connection.in_transaction:
            connection.execute("ROLLBACK")
        error = sqlite3.OperationalError(_TEXTS[self.code])
        error.sqlite_errorcode = self.code
        raise error


class _Connection:
    """A connection on such a disk."""

    def __init__(self, real: sqlite3.Connection, disk: Disk) -> None:
        self._real = real
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
        self._disk.judge(self._real, sql, parameters)
        return self._real.execute(sql, parameters)


class Opening(Disk):
    """Refuses the `at`-th step of opening a journal: each pragma, each statement of the schema, and what is read."""

    def judge(self, connection: sqlite3.Connection, sql: str, parameters: Any) -> None:
        """Raises for a step that is refused."""
        if not self.armed or sql.startswith("ROLLBACK") or self.refused:
            return
        self.seen.append(sql)
        if len(self.seen) == self._at:
            self._refuse(connection, sql)


@contextmanager
def failing_to_open(disk: Opening) -> Iterator[Opening]:
    """Journals are opened on this disk meanwhile, and stay on it."""

    class Connection(sqlite3.Connection):
        def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
            disk.judge(self, sql.strip(), parameters)
            return super().execute(sql, parameters)

        def executescript(self, script: str) -> sqlite3.Cursor:
            statement = ""
            for piece in script.split(";"):
                statement += piece + ";"
                if sqlite3.complete_statement(statement) and statement.strip("; \n"):
                    self.execute(statement)
                    statement = ""
            return self.cursor()

    def connect(path: Path, **options: Any) -> sqlite3.Connection:
        return real(path, factory=Connection, **options)

    real = sqlite3.connect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", connect)
        yield disk


@contextmanager
def failing(disk: Disk) -> Iterator[Disk]:
    """Journals that are opened meanwhile are on this disk."""

    def opened(path: Path, *rest: Any, **named: Any) -> Any:
        return _Connection(real(path, *rest, **named), disk)

    real = file.open_writer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file, "open_writer", opened)
        yield disk
