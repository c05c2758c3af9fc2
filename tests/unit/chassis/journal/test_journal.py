"""The journal against real files, real commits and a real kill -9."""

import asyncio
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock_chassis.errors import FailedPrecondition, Unavailable
from penstock_chassis.journal import Journal, Statement
from penstock_chassis.journal import journal as journals

TABLE = "CREATE TABLE item (id INTEGER PRIMARY KEY, text TEXT NOT NULL)"
INSERT = "INSERT INTO item VALUES (?, ?)"


@pytest.fixture(params=[False, True], ids=["together", "apart"])
async def journal(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Journal]:
    async with await Journal.open(tmp_path / "state" / "test.db", [TABLE], reads_apart=request.param) as opened:
        yield opened


async def ids(journal: Journal) -> list[int]:
    return [row["id"] for row in await journal.query("SELECT id FROM item ORDER BY rowid")]


async def test_writes_are_there_after_reopening(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with await Journal.open(path, [TABLE]) as journal:
        assert await journal.execute(INSERT, (1, "x")) == 1
    async with await Journal.open(path, [TABLE]) as journal:
        assert await ids(journal) == [1]


@pytest.mark.requirement("R8")
async def test_the_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    """State holds what agents said; other users of the machine do not read it."""
    path = tmp_path / "state" / "a.db"
    async with await Journal.open(path, [TABLE]):
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o077 == 0


async def test_many_writers_share_commits_and_each_is_acknowledged(journal: Journal) -> None:
    await asyncio.gather(*(journal.execute(INSERT, (n, "x")) for n in range(2000)))
    assert await ids(journal) == list(range(2000))


async def test_a_read_sees_every_write_submitted_before_it(journal: Journal) -> None:
    written = journal.submit([(INSERT, (1, "x"))])
    assert await ids(journal) == [1]
    assert written.done()


async def test_a_failed_statement_fails_only_its_own_writer(journal: Journal) -> None:
    results = await asyncio.gather(
        journal.execute(INSERT, (1, "a")),
        journal.execute(INSERT, (1, "again")),
        journal.execute("INSERT INTO nowhere VALUES (1)"),
        journal.execute(INSERT, (2, "b")),
        return_exceptions=True,
    )
    assert results[0] == 1
    assert isinstance(results[1], sqlite3.IntegrityError)
    assert isinstance(results[2], sqlite3.OperationalError)
    assert results[3] == 1
    assert await ids(journal) == [1, 2]


async def test_the_statements_of_one_write_happen_all_or_none(journal: Journal) -> None:
    good = journal.submit([(INSERT, (1, "a"))])
    bad = journal.submit([(INSERT, (2, "b")), (INSERT, (1, "again"))])
    after = journal.submit([(INSERT, (3, "c")), (INSERT, (4, "d"))])
    await asyncio.wait([good, bad, after])
    assert isinstance(bad.exception(), sqlite3.IntegrityError)
    assert await after == [1, 1]
    assert await ids(journal) == [1, 3, 4]


async def test_a_value_that_cannot_be_stored_fails_only_its_own_writer(journal: Journal) -> None:
    bad = journal.submit([(INSERT, (1, object()))])  # type: ignore[list-item]
    huge = journal.submit([(INSERT, (2**70, "x"))])
    short = journal.submit([(INSERT, (1,))])
    await journal.execute(INSERT, (3, "c"))
    assert isinstance(bad.exception(), sqlite3.Error)
    assert isinstance(huge.exception(), OverflowError)
    assert isinstance(short.exception(), sqlite3.Error)
    assert await ids(journal) == [3]


async def test_a_statement_that_undoes_the_transaction_fails_everyone_in_it(journal: Journal) -> None:
    """Nobody is told of a success that did not happen."""
    await journal.execute(INSERT, (1, "a"))
    innocent = journal.submit([(INSERT, (2, "b"))])
    guilty = journal.submit([("INSERT OR ROLLBACK INTO item VALUES (1, 'again')", ())])
    await asyncio.wait([innocent, guilty])
    kept = await ids(journal)
    assert isinstance(guilty.exception(), sqlite3.IntegrityError)
    assert (innocent.exception() is None) == (2 in kept)
    await journal.execute(INSERT, (5, "the journal goes on"))


async def test_cancelling_a_waiting_writer_does_not_take_its_write_back(journal: Journal) -> None:
    writers = [asyncio.ensure_future(journal.execute(INSERT, (n, "x"))) for n in range(50)]
    await asyncio.wait(writers, timeout=0)
    for writer in writers[::2]:
        writer.cancel()
    await asyncio.gather(*writers, return_exceptions=True)
    assert await ids(journal) == list(range(50))


async def test_an_insert_with_returning_gives_rows_and_is_durable(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with await Journal.open(path, [TABLE]) as journal:
        rows = await journal.query("INSERT INTO item (text) VALUES ('x') RETURNING id, text")
        assert [tuple(row) for row in rows] == [(1, "x")]
    async with await Journal.open(path, [TABLE]) as journal:
        assert await ids(journal) == [1]


async def test_parameters_may_be_named(journal: Journal) -> None:
    await journal.execute("INSERT INTO item VALUES (:id, :text)", {"id": 7, "text": "x'; DROP TABLE item; --"})
    (row,) = await journal.query("SELECT * FROM item WHERE id = :id", {"id": 7})
    assert row["text"] == "x'; DROP TABLE item; --"


@pytest.mark.parametrize(
    "sql", ["COMMIT", "begin", " ROLLBACK;", "PRAGMA user_version = 9", "ATTACH 'x' AS y", "", "  "]
)
async def test_statements_that_would_break_the_group_are_refused(sql: str, journal: Journal) -> None:
    with pytest.raises(ValueError, match="does not allow the statement"):
        await journal.execute(sql)


async def test_closing_commits_what_was_submitted_and_refuses_more(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    journal = await Journal.open(path, [TABLE])
    pending = [journal.submit([(INSERT, (n, "x"))]) for n in range(3000)]
    await asyncio.gather(journal.aclose(), journal.aclose())
    assert all(item.done() and item.exception() is None for item in pending)
    with pytest.raises(Unavailable) as caught:
        await journal.execute(INSERT, (1, "late"))
    assert caught.value.reason == "JOURNAL_CLOSED"
    async with await Journal.open(path, [TABLE]) as reopened:
        assert len(await ids(reopened)) == 3000


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The thread that committed each batch, and how many writes that had."""
    seen: list[tuple[str, int]] = []
    commit = journals._commit

    def watched(connection: sqlite3.Connection, batch: list[Any]) -> list[Any]:
        seen.append((threading.current_thread().name, len(batch)))
        return commit(connection, batch)

    monkeypatch.setattr(journals, "_commit", watched)
    return seen


async def test_small_writes_are_committed_together_where_they_are(
    journal: Journal, threads: list[tuple[str, int]]
) -> None:
    writes = [journal.submit([(INSERT, (n, "x"))], size=1) for n in range(10)]
    assert not any(write.done() for write in writes)
    assert await asyncio.gather(*writes) == [[1]] * 10
    assert threads == [("MainThread", 10)]


@pytest.mark.requirement("R32")
@pytest.mark.parametrize("size", [None, 8 << 20])
async def test_slow_work_runs_in_the_journals_thread(
    journal: Journal, threads: list[tuple[str, int]], size: int | None
) -> None:
    """Nobody waits on the event loop for a disk."""
    writes = [journal.submit([(INSERT, (n, "x"))], size=1) for n in range(3)]
    writes.append(journal.submit([(INSERT, (3, "x"))], size=size))
    await asyncio.gather(*writes)
    assert await ids(journal) == [0, 1, 2, 3]
    assert threads == [("journal-test", 4), ("journal-test", 1)]


@pytest.mark.requirement("R22")
async def test_while_the_thread_is_at_work_small_writes_wait_their_turn(
    journal: Journal, threads: list[tuple[str, int]]
) -> None:
    """The connection is one's at a time, and a write never overtakes another."""
    first = journal.submit([(INSERT, (1, "x"))])
    await asyncio.sleep(0)
    second = journal.submit([(INSERT, (2, "x"))], size=1)
    await asyncio.gather(first, second)
    assert await ids(journal) == [1, 2]
    assert threads[:2] == [("journal-test", 1), ("MainThread", 1)]


@pytest.mark.requirement("R32")
async def test_a_backlog_is_the_threads(journal: Journal, threads: list[tuple[str, int]]) -> None:
    """Each of many small writes is quick, all of them are not."""
    await asyncio.gather(*(journal.submit([(INSERT, (n, "x"))], size=100) for n in range(1100)))
    assert threads == [("journal-test", 1024), ("MainThread", 76)]


@pytest.mark.requirement("R22")
@pytest.mark.parametrize("size", [1, None])
async def test_unexpected_error_fails_only_its_waiters(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, size: int | None
) -> None:
    """Here or in the thread, no writer waits for ever."""
    commit = journals._commit

    def without_memory(connection: sqlite3.Connection, batch: list[Any]) -> list[Any]:
        monkeypatch.setattr(journals, "_commit", commit)
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(INSERT, (1, "half a batch"))
        raise MemoryError

    monkeypatch.setattr(journals, "_commit", without_memory)
    with pytest.raises(MemoryError):
        await journal.submit([(INSERT, (1, "x"))], size=size)
    await journal.submit([(INSERT, (2, "x"))], size=size)
    assert await ids(journal) == [2]


def log_begun(path: Path) -> int:
    """How often the log of a journal has begun anew: SQLite's checkpoint sequence number in the log's header."""
    return int.from_bytes(path.with_name(path.name + "-wal").read_bytes()[12:16], "big")


@pytest.mark.requirement("R32")
async def test_the_thread_begins_the_log_whose_header_is_synced(tmp_path: Path) -> None:
    """The first write to a log that begins waits for the disk, so it is not left to the loop."""
    path = tmp_path / "a.db"
    async with await Journal.open(path, [TABLE]) as journal:
        begun = log_begun(path)
        await journal.submit([(INSERT, (n, "x" * 500)) for n in range(3000)])
        assert len(await ids(journal)) == 3000  # the thread is done with what it did after that write
        assert log_begun(path) == begun + 1


@pytest.mark.requirement("R23")
async def test_log_of_a_killed_journal_is_in_the_file(tmp_path: Path) -> None:
    """However often it is killed, the log does not grow with it."""
    path, killed = tmp_path / "a.db", tmp_path / "killed.db"
    async with await Journal.open(path, [TABLE]) as journal:
        await journal.submit([(INSERT, (n, "x")) for n in range(100)])
        for end in ("", "-wal"):
            shutil.copy(f"{path}{end}", f"{killed}{end}")
    async with await Journal.open(killed, [TABLE]):
        alone = shutil.copy(killed, tmp_path / "alone.db")
    with closing(sqlite3.connect(alone)) as connection:
        assert connection.execute("SELECT count(*) FROM item").fetchone() == (100,)


async def test_small_writes_in_a_row_go_together(
    tmp_path: Path, threads: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes soon after a commit waits for others, and is committed at the end at the latest."""
    monkeypatch.setattr(journals, "_APART_S", 3600)
    async with await Journal.open(tmp_path / "a.db", [TABLE]) as journal:
        await journal.submit([(INSERT, (0, "x"))], size=1)
        later = []
        for n in range(1, 4):
            later.append(journal.submit([(INSERT, (n, "x"))], size=1))
            await asyncio.sleep(0)
        assert not any(write.done() for write in later)
    assert await asyncio.gather(*later) == [[1]] * 3
    assert threads == [("MainThread", 1), ("MainThread", 3)]


@pytest.mark.requirement("R32")
async def test_threads_writes_survive_a_loss_of_power(tmp_path: Path, threads: list[tuple[str, int]]) -> None:
    """Each commit waits for the disk then."""
    async with await Journal.open(tmp_path / "a.db", [TABLE], sync="full") as journal:
        await journal.submit([(INSERT, (1, "x"))], size=1)
    assert threads == [("journal-a", 1)]


@pytest.mark.requirement("R23")
@pytest.mark.parametrize("size", [1, None])
async def test_the_log_is_copied_to_the_file_before_it_is_long(tmp_path: Path, size: int | None) -> None:
    """By the thread, and a journal that lives for months does not take the disk."""
    path = tmp_path / "a.db"
    async with await Journal.open(path, [TABLE]) as journal:
        for start in range(0, 20_000, 100):
            batch = [journal.submit([(INSERT, (n, "x" * 1000))], size=size) for n in range(start, start + 100)]
            await asyncio.gather(*batch)
        await journal.submit([(INSERT, (-1, "x" * (6 << 20)))])
        await journal.submit([(INSERT, (-2, "x"))])
        assert (tmp_path / "a.db-wal").stat().st_size < 16 << 20
        assert path.stat().st_size > 12 << 20
        assert len(await ids(journal)) == 20_002


async def test_a_second_owner_of_the_file_is_refused(tmp_path: Path, journal: Journal) -> None:
    path = tmp_path / "state" / "test.db"
    with pytest.raises(FailedPrecondition) as caught:
        await Journal.open(path, [TABLE])
    assert caught.value.reason == "JOURNAL_IN_USE"


async def test_migrations_run_once_each_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    second = "ALTER TABLE item ADD COLUMN more TEXT; UPDATE item SET more = text || '!'"
    async with await Journal.open(path, [TABLE]) as journal:
        await journal.execute(INSERT, (1, "x"))
    for _ in range(2):
        async with await Journal.open(path, [TABLE, second]) as journal:
            (row,) = await journal.query("SELECT more FROM item")
            assert row["more"] == "x!"


async def test_a_wrong_migration_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with pytest.raises(sqlite3.Error):
        await Journal.open(path, [TABLE, "CREATE TABLE other (id); NONSENSE"])
    async with await Journal.open(path, [TABLE, "CREATE TABLE other (id INTEGER)"]) as journal:
        await journal.execute("INSERT INTO other VALUES (1)")


async def test_a_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with await Journal.open(path, [TABLE, "CREATE TABLE later (id)"]):
        pass
    with pytest.raises(FailedPrecondition) as caught:
        await Journal.open(path, [TABLE])
    assert caught.value.reason == "JOURNAL_TOO_NEW"


async def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.write_bytes(b"not a database, but somebody's file" * 100)
    before = path.read_bytes()
    with pytest.raises(FailedPrecondition) as caught:
        await Journal.open(path, [TABLE])
    assert caught.value.reason == "JOURNAL_UNREADABLE"
    assert path.read_bytes() == before


KILLED = """
import asyncio, os, signal, sys
from penstock_chassis.journal import Journal

async def main():
    table = "CREATE TABLE item (id INTEGER PRIMARY KEY, text TEXT NOT NULL)"
    journal = await Journal.open(sys.argv[1], [table], reads_apart=sys.argv[3] == "apart")
    async def writer(first):
        for n in range(first, 10**9, 16):
            size = 1 if sys.argv[2] == "small" else None
            await journal.submit([("INSERT INTO item VALUES (?, 'x')", (n,))], size=size)
            os.write(1, b"%d\\n" % n)
    async with asyncio.TaskGroup() as group:
        for first in range(16):
            group.create_task(writer(first))

asyncio.run(main())
"""


@pytest.mark.parametrize("reads", ["together", "apart"])
@pytest.mark.parametrize("size", ["small", "any"])
async def test_acknowledged_writes_survive_a_kill_9(tmp_path: Path, size: str, reads: str) -> None:
    """The promise on which exactly-once calls stand: each id that the process printed is in the file."""
    path = tmp_path / "a.db"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(path), size, reads], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        acknowledged = [int(process.stdout.readline()) for _ in range(500)]
        process.kill()
        acknowledged += [int(line) for line in process.stdout.read().splitlines(keepends=True) if line.endswith(b"\n")]
    async with await Journal.open(path, [TABLE], reads_apart=reads == "apart") as journal:
        assert set(acknowledged) <= set(await ids(journal))


statements = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from(["insert", "delete", "fail"]), st.integers(0, 5)), min_size=1, max_size=3),
        st.sampled_from([None, 1]),
        st.booleans(),
    ),
    max_size=12,
)


@pytest.mark.requirement("R22")
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(statements)
async def test_interleaved_writes_end_as_if_run_one_by_one(
    tmp_path: Path, writes: list[tuple[list[tuple[str, int]], int | None, bool]]
) -> None:
    """Safe under any interleaving; the model is a set changed in order of submission.

    Whatever goes where: small or not, handed over at once or with what comes after.
    """
    model: set[int] = set()
    outcomes: list[bool] = []
    batches: list[tuple[list[Statement], int | None, bool]] = []
    for write, size, at_once in writes:
        tried, good = set(model), True
        for verb, number in write:
            if verb == "insert":
                good = good and number not in tried
                tried.add(number)
            elif verb == "delete":
                tried.discard(number)
            else:
                good = False
            if not good:
                break
        model = tried if good else model
        outcomes.append(good)
        sql = {"insert": INSERT, "delete": "DELETE FROM item WHERE id = ? AND ? = 'x'", "fail": "SELECT ?, ? FROM no"}
        batches.append(([(sql[verb], (number, "x")) for verb, number in write], size, at_once))
    path = tmp_path / "model.db"
    path.unlink(missing_ok=True)
    async with await Journal.open(path, [TABLE]) as journal:
        futures = []
        for batch, size, at_once in batches:
            futures.append(journal.submit(batch, size=size))
            if at_once:
                await asyncio.sleep(0)
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert [not isinstance(result, BaseException) for result in results] == outcomes
        assert set(await ids(journal)) == model
