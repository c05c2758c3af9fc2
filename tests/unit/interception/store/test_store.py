"""What is large in the gate's journal is written once, beside the row of its call."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from penstock_chassis.journal import Statement
from penstock_interception.domain.state import Call
from penstock_interception.store import agent_keys, runs, store
from penstock_interception.store import host_tools as tools_store
from penstock_interception.store.store import CallStore

BODY, GRAPH = b"b" * 50_000, b"g" * 50_000
EARLIER = (store._SCHEMA, tools_store.SCHEMA, agent_keys.SCHEMA, runs.SCHEMA)


def written_before(directory: Path) -> Path:
    """A journal of the time when a call's row held its body and its graph's record: three calls, one rollout kept."""
    path = directory / "interception.sqlite3"
    with closing(sqlite3.connect(path)) as connection:
        for script in EARLIER:
            connection.executescript(script)
        for name in ("kept", "deleted"):
            connection.execute(
                "INSERT INTO rollouts VALUES (?, ?, '', x'', 'open', 1, NULL, '', '', 0, x'', x'')", (name, name)
            )
        for rollout, position, body, order, graph in (
            ("deleted", 0, BODY, 1, GRAPH),
            ("kept", 0, BODY, 2, GRAPH),
            ("kept", 1, b"", None, None),
        ):
            connection.execute(
                "INSERT INTO calls (call_id, rollout_id, position, retry_key, arrival, body, body_sha256, received,"
                " expires, state, answer_order, graph) VALUES (?, ?, ?, '', x'', ?, x'', 1, 2, 'queued', ?, ?)",
                (f"{rollout}-{position}", rollout, position, body, order, graph),
            )
        connection.execute(f"PRAGMA user_version = {len(EARLIER)}")
        connection.commit()
    return path


async def test_bodies_and_graphs_of_an_earlier_journal_are_kept(tmp_path: Path) -> None:
    """Decision 7: a service that is updated has what the one before it wrote."""
    path = written_before(tmp_path)
    calls = await CallStore.open(tmp_path)
    assert [await calls.body(f"kept-{index}") for index in (0, 1)] == [BODY, b""]
    await calls.delete_rollout("deleted")
    await calls.aclose()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT answer_order, graph FROM graphs").fetchall() == [(2, GRAPH)]
        assert connection.execute("SELECT count(*) FROM bodies").fetchone() == (1,)


@pytest.mark.requirement("R107")
async def test_request_ids_of_an_earlier_journal_are_of_their_namespaces(tmp_path: Path) -> None:
    """Whatever the ids are, also those of a time without namespaces, and those that look like others' keys."""
    path = tmp_path / "interception.sqlite3"
    asked = [("r1", "a", b"{}"), ("r2", "b", b'{"namespace":"team-b"}'), ("r3", "c", b""), ("r4", "x/c", b"{}")]
    asked += [("r5", "d", b"{}"), ("r6", "default/d", b"{}")]
    with closing(sqlite3.connect(path)) as connection:
        for script in EARLIER:
            connection.executescript(script)
        for row in asked:
            connection.execute("INSERT INTO rollouts VALUES (?, ?, '', ?, 'open', 1, NULL, '', '', 0, x'', x'')", row)
        connection.execute(
            "INSERT INTO calls (call_id, rollout_id, position, retry_key, arrival, body, body_sha256, received,"
            " expires, state) VALUES ('kept', 'r1', 0, '', x'', ?, x'', 1, 2, 'queued')",
            (BODY,),
        )
        connection.execute(f"PRAGMA user_version = {len(EARLIER)}")
        connection.commit()
    calls = await CallStore.open(tmp_path)
    assert await calls.body("kept") == BODY
    await calls.aclose()
    with closing(sqlite3.connect(path)) as connection:
        keys = dict(connection.execute("SELECT rollout_id, request_id FROM rollouts"))
    assert [keys[name] for name in ("r1", "r2", "r3", "r4")] == ["default/a", "team-b/b", "default/c", "default/x/c"]
    # The one may be in the way of the other.
    assert {keys["r5"], keys["r6"]} <= {"d", "default/d", "default/default/d"}


@pytest.mark.requirement("R23")
async def test_a_call_that_changes_writes_neither_its_body_nor_its_graph_again(tmp_path: Path) -> None:
    """What a call costs on disk is what it holds, however often it changes."""
    path = written_before(tmp_path)
    await (await CallStore.open(tmp_path)).aclose()
    log = path.with_name(path.name + "-wal")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("UPDATE calls SET told = 1, http_attempts = 2 WHERE call_id = 'kept-0'")
        assert 0 < log.stat().st_size < len(BODY)


def sent_at(path: Path) -> list[tuple[str, int, int]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT call_id, told, http_attempts FROM calls ORDER BY call_id").fetchall()


@pytest.mark.requirement("R34")
@pytest.mark.parametrize("hastened", ["by a write", "by closing", "by nothing"])
async def test_delivered_answers_are_recorded_together_soon(
    tmp_path: Path, hastened: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry of what the agent has in full is a new call, after a restart too."""
    path = written_before(tmp_path)
    calls = await CallStore.open(tmp_path)
    written = asyncio.Event()
    submit = calls._journal.submit

    def watched(statements: Sequence[Statement], *, size: int | None = None) -> asyncio.Future[list[int]]:
        written.set()
        return submit(statements, size=size)

    monkeypatch.setattr(calls._journal, "submit", watched)
    for name, attempts in (("kept-0", 1), ("kept-1", 3)):
        calls.mark_answer_sent(cast("Call", SimpleNamespace(id=name, http_attempts=attempts)))
    if hastened == "by a write":
        await calls.delete_rollout("nobody")
    elif hastened == "by nothing":
        await written.wait()
    await calls.aclose()
    assert sent_at(path) == [("deleted-0", 0, 1), ("kept-0", 1, 1), ("kept-1", 1, 3)]
