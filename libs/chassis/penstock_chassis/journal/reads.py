"""Reads of a journal beside its writer, with a connection and a thread of their own: no read waits for a write or for a
checkpoint's sync.
"""

import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, TypeAlias

SqlValue: TypeAlias = int | float | str | bytes | None
SqlParams: TypeAlias = Sequence[SqlValue] | Mapping[str, SqlValue]

Deliver: TypeAlias = Callable[[list[sqlite3.Row] | None, BaseException | None], None]
"""Receives the rows or the error; called in the reader's thread."""


class _Read(NamedTuple):
    sql: str
    params: SqlParams
    deliver: Deliver


class _Rest(NamedTuple):
    begun: threading.Event
    over: threading.Event


class Reader:
    """Runs reads in order of arrival. The journal's thread owns it and ends it before closing its own connection: the
    last connection to close copies the log to the file.
    """

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        """Starts the thread, which closes the connection when it ends."""
        self._connection: Final = connection
        self._waiting: queue.SimpleQueue[_Read | _Rest | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def read(self, sql: str, params: SqlParams, deliver: Deliver) -> None:
        """Queues a read; it sees everything committed when it runs. Callable from any thread until `end`."""
        self._waiting.put(_Read(sql, params, deliver))

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Pauses the reader: nothing is read inside, new reads wait."""
        rest = _Rest(threading.Event(), threading.Event())
        self._waiting.put(rest)
        rest.begun.wait()
        try:
            yield
        finally:
            rest.over.set()

    def end(self) -> None:
        """Returns when all queued reads are done and the connection is closed."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (item := self._waiting.get()) is not None:
                if isinstance(item, _Rest):
                    item.begun.set()
                    item.over.wait()
                    continue
                try:
                    rows = self._connection.execute(item.sql, item.params).fetchall()
                except Exception as error:  # noqa: BLE001 - the reader gets it
                    item.deliver(None, error)
                else:
                    item.deliver(rows, None)
        finally:
            self._connection.close()
