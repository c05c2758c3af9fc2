"""Reads of a journal that wait for none of its writes."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest

from penstock_chassis.errors import FailedPrecondition, Unavailable
from penstock_chassis.journal import Journal
from penstock_chassis.journal import journal as journals
from penstock_chassis.journal.file import OWNER_SUFFIX
from penstock_chassis.journal.reads import Reader

TABLE = "CREATE TABLE item (id INTEGER PRIMARY KEY, text TEXT NOT NULL)"
INSERT = "INSERT INTO item VALUES (?, ?)"
ALL = "SELECT id FROM item ORDER BY id"


def log_begun(path: Path) -> int:
    """How often the log of a journal has begun anew: SQLite's checkpoint sequence number in the log's header."""
    return int.from_bytes(path.with_name(f"{path.name}-wal").read_bytes()[12:16], "big")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.db"


@pytest.fixture
async def journal(path: Path) -> AsyncIterator[Journal]:
    async with await Journal.open(path, [TABLE], reads_apart=True) as opened:
        yield opened


@pytest.fixture(params=["commit", "checkpoint"])
def busy(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[threading.Event]:
    """The thread that writes does not get on until this is set; the checkpoint is what follows each write."""
    go_on = threading.Event()
    if request.param == "commit":
        commit = journals._commit

        def late(connection: sqlite3.Connection, batch: list[Any]) -> list[Any]:
            go_on.wait()
            return commit(connection, batch)

        monkeypatch.setattr(journals, "_commit", late)
    else:
        checkpoint = Journal._checkpoint

        def later(self: Journal, connection: sqlite3.Connection) -> None:
            if connection.total_changes:
                go_on.wait()
            checkpoint(self, connection)

        monkeypatch.setattr(journals, "_CHECKPOINT_ROWS", 1)
        monkeypatch.setattr(Journal, "_checkpoint", later)
    yield go_on
    go_on.set()


@pytest.mark.requirement("R96")
@pytest.mark.parametrize("few", [True, False])
async def test_a_read_waits_for_no_write_and_for_no_checkpoint(
    journal: Journal, busy: threading.Event, few: bool
) -> None:
    """However much an agent makes the service write, a neighbour is answered."""
    first = journal.submit([(INSERT, (1, "x"))])
    await asyncio.sleep(0)
    second = journal.submit([(INSERT, (2, "x"))])
    seen = [row["id"] for row in await journal.read(ALL, few=few)]
    assert not second.done()
    busy.set()
    await asyncio.gather(first, second)
    assert seen in ([], [1])
    assert [row["id"] for row in await journal.read(ALL, few=few)] == [1, 2]


@pytest.mark.requirement("R22")
@pytest.mark.parametrize("few", [True, False])
async def test_a_read_sees_what_was_awaited_before_it(journal: Journal, few: bool) -> None:
    """Who was answered finds what he was told."""
    for number in range(50):
        await journal.submit([(INSERT, (number, "x"))], size=1 if number % 2 else None)
        assert len(await journal.read(ALL, few=few)) == number + 1


@pytest.mark.parametrize("apart", [True, False])
async def test_writing_statement_is_no_read(path: Path, apart: bool) -> None:
    async with await Journal.open(path, [TABLE], reads_apart=apart) as journal:
        with pytest.raises(ValueError, match="expected a statement that reads"):
            await journal.read(f"{INSERT} RETURNING id", (1, "x"))
        assert await journal.read(ALL) == []


@pytest.mark.parametrize("few", [True, False])
async def test_a_read_that_fails_fails_alone(journal: Journal, few: bool) -> None:
    with pytest.raises(sqlite3.OperationalError):
        await journal.read("SELECT * FROM nothing", few=few)
    assert await journal.read(ALL, few=few) == []


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
async def test_a_second_owner_is_refused_however_either_reads(
    path: Path, first: bool, second: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock_chassis.journal.file._LOCK_WAIT_S", 0.0)
    async with await Journal.open(path, [TABLE], reads_apart=first):
        with pytest.raises(FailedPrecondition) as caught:
            await Journal.open(path, [TABLE], reads_apart=second)
    assert caught.value.reason == "JOURNAL_IN_USE"


@pytest.mark.requirement("R23")
async def test_closing_answers_what_was_asked_and_leaves_no_log(path: Path) -> None:
    """What was committed is in the file itself, which another program may copy."""
    journal = await Journal.open(path, [TABLE], reads_apart=True)
    await journal.submit([(INSERT, (1, "x"))])
    asked = [asyncio.ensure_future(journal.read(ALL)) for _ in range(20)]
    await asyncio.sleep(0)
    await journal.aclose()
    assert [len(rows) for rows in await asyncio.gather(*asked)] == [1] * 20
    for few in (True, False):
        with pytest.raises(Unavailable, match="stopping"):
            await journal.read(ALL, few=few)
    assert not path.with_name("a.db-wal").exists()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute(ALL).fetchall() == [(1,)]


@pytest.mark.requirement("R23")
async def test_a_log_that_somebody_reads_begins_anew_when_he_has_read(
    journal: Journal, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read keeps the log from being copied beyond where it began; so however much is read, it stays short."""
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> int:
        begun.set()
        go_on.wait()
        return 0

    def at_rest(self: Reader) -> AbstractContextManager[None]:
        go_on.set()
        return rest(self)

    rest = Reader.at_rest
    monkeypatch.setattr(Reader, "at_rest", at_rest)
    assert journal._reader is not None and journal._connection is not None
    journal._reader._connection.create_function("wait", 0, wait)
    # He reads on until the log was copied for the first time, whether he is waited for or not.
    journal._connection.set_trace_callback(lambda sql: go_on.set() if "user_version" in sql else None)
    await journal.execute(INSERT, (-1, "x"))
    before = log_begun(path)
    reading = asyncio.ensure_future(journal.read("SELECT wait() FROM item"))
    await asyncio.to_thread(begun.wait)
    await journal.write([(INSERT, (number, "x" * 500)) for number in range(3000)])
    assert len(await reading) == 1
    assert len(await journal.query(ALL)) == 3001  # the thread is done with what it did after that write
    assert log_begun(path) == before + 1


@pytest.mark.requirement("R22")
async def test_reads_join_the_writes_when_no_further_file_opens(path: Path) -> None:
    """A service starts on a disk that takes nothing more."""
    path.with_name(path.name + OWNER_SUFFIX).mkdir(parents=True)
    async with await Journal.open(path, [TABLE], reads_apart=True) as journal:
        written = journal.submit([(INSERT, (1, "x"))])
        assert len(await journal.read(ALL, few=True)) == 1
        assert written.done()


async def test_a_file_that_is_no_database_is_refused_where_reads_are_apart(path: Path) -> None:
    path.write_bytes(b"not a database, but somebody's file" * 100)
    with pytest.raises(FailedPrecondition) as caught:
        await Journal.open(path, [TABLE], reads_apart=True)
    assert caught.value.reason == "JOURNAL_UNREADABLE"
