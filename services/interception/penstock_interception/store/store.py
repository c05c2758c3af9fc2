"""The gate's journal: rollouts, calls and answers, so that a kill -9 loses none of them (decision 7).

One SQLite file under the chassis's journal. A writing method fixes its place in the order immediately and returns a
future for its commit. No credential is stored: agent keys are computed with a signing key in a file of its own, mode
0600.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal, Self

import structlog

from penstock_chassis.errors import FailedPrecondition
from penstock_chassis.journal import Journal, Statement
from penstock_interception.domain.calls import CallState, Prompt, RolloutState
from penstock_interception.domain.completions import Failure
from penstock_interception.domain.host_tools import HostTool
from penstock_interception.domain.kept_captures import Discarded
from penstock_interception.domain.results import Answered
from penstock_interception.domain.state import Call, Rollout
from penstock_interception.store import agent_keys, discarded_captures, reading, serde
from penstock_interception.store import host_tools as tools_store
from penstock_interception.store import media as media_store
from penstock_interception.store import recordings as recordings_store
from penstock_interception.store import runs as runs_store
from penstock_interception.store.agent_keys import AgentKeyStore
from penstock_interception.store.commits import failed
from penstock_interception.store.discarded_captures import DiscardedStore
from penstock_interception.store.host_tools import ToolStore
from penstock_interception.store.media import MediaStore, cuts_to
from penstock_interception.store.reading import StoredLease, StoredRollout
from penstock_interception.store.recordings import RecordingStore
from penstock_interception.store.runs import Run, RunStore

_log = structlog.get_logger(__name__)

_ANSWERS_SENT_S: Final = 0.02
"""Delay of the deferrable "answer delivered" write, unless another write goes first."""

# `salt` is written as "" and never read: it stays, so that journals of earlier versions open without a migration.
_SCHEMA = """
CREATE TABLE rollouts (
    rollout_id TEXT PRIMARY KEY, request_id TEXT NOT NULL UNIQUE, salt TEXT NOT NULL, opening BLOB NOT NULL,
    state TEXT NOT NULL, created REAL NOT NULL, closed REAL, close_reason TEXT NOT NULL, exhausted TEXT NOT NULL,
    paused_s REAL NOT NULL, facts BLOB NOT NULL, totals BLOB NOT NULL
) STRICT;
CREATE TABLE calls (
    call_id TEXT PRIMARY KEY, rollout_id TEXT NOT NULL REFERENCES rollouts ON DELETE CASCADE, position INTEGER NOT NULL,
    retry_key TEXT NOT NULL, arrival BLOB NOT NULL, body BLOB NOT NULL, body_sha256 BLOB NOT NULL,
    received REAL NOT NULL, expires REAL NOT NULL,
    state TEXT NOT NULL, end_reason TEXT NOT NULL DEFAULT '', ended REAL, leases INTEGER NOT NULL DEFAULT 0,
    injected INTEGER NOT NULL DEFAULT 0, told INTEGER NOT NULL DEFAULT 0, http_attempts INTEGER NOT NULL DEFAULT 1,
    lease_id TEXT NOT NULL DEFAULT '', session_id TEXT NOT NULL DEFAULT '', prompt_sha256 BLOB,
    min_policy_version INTEGER, delegated INTEGER NOT NULL DEFAULT 0, sampling BLOB, answerer TEXT, leased REAL,
    answer_order INTEGER UNIQUE, answer_sha256 BLOB, completion BLOB, failure BLOB, graph BLOB
) STRICT;
CREATE UNIQUE INDEX calls_by_rollout ON calls (rollout_id, position);
"""
# A call's row is rewritten at each change; its large values are in tables of their own, written once.
_LARGE = """
CREATE TABLE bodies (body_id INTEGER PRIMARY KEY, body BLOB NOT NULL) STRICT;
CREATE TABLE graphs (answer_order INTEGER PRIMARY KEY, graph BLOB NOT NULL) STRICT;
INSERT INTO bodies SELECT rowid, body FROM calls WHERE body <> x'';
INSERT INTO graphs SELECT answer_order, graph FROM calls WHERE graph IS NOT NULL;
ALTER TABLE calls ADD COLUMN body_id INTEGER;
UPDATE calls SET body_id = rowid WHERE body <> x'';
ALTER TABLE calls DROP COLUMN body;
ALTER TABLE calls DROP COLUMN graph;
CREATE TRIGGER calls_large AFTER DELETE ON calls BEGIN
    DELETE FROM bodies WHERE body_id = OLD.body_id;
    DELETE FROM graphs WHERE answer_order = OLD.answer_order;
END;
"""
_HELD = "ALTER TABLE rollouts ADD COLUMN held_since REAL;"
# Records may have alternatives: changes no table, but an earlier version, which cannot read them, refuses the file.
_TOP = "SELECT 1;"
_STORED = "ALTER TABLE rollouts ADD COLUMN stored INTEGER NOT NULL DEFAULT 0;"
# `held_since` is when any pause began; this says that it lasts over a restart.
_LASTING = "ALTER TABLE rollouts ADD COLUMN held INTEGER NOT NULL DEFAULT 0;"
# Position of a call's model among its rollout's; NULL: it is not chosen yet, or the rollout has one.
_MODELS = "ALTER TABLE calls ADD COLUMN model INTEGER;"
# From here on `request_id` holds RolloutSpec.request_key: two namespaces may have one request id. The table is not made
# anew, since dropping the old one would delete what refers to it. Where another row still has the key as its id, a row
# keeps its own id, which is unique too; the column is never read.
_REQUEST_KEYS = """
UPDATE OR IGNORE rollouts SET request_id = coalesce(
    CASE WHEN json_valid(CAST(opening AS TEXT)) THEN json_extract(CAST(opening AS TEXT), '$.namespace') END, 'default'
) || '/' || request_id;
"""
# Seconds of a unary request's lease, NULL: it lasts as long as its session; and what identifies that request.
_LEASES = """
ALTER TABLE calls ADD COLUMN lease_s REAL;
ALTER TABLE calls ADD COLUMN lease_request TEXT NOT NULL DEFAULT '';
"""


class CallStore:
    """The gate's tables. Opens with `open`, closes with `aclose`."""

    def __init__(self, journal: Journal, key: bytes) -> None:
        self._journal = journal
        self.agent_keys = AgentKeyStore(journal, key, self._submit_all)
        self.runs = RunStore(journal, self._submit_all)
        self.tools = ToolStore(journal, self._submit_all)
        self.discarded = DiscardedStore(journal)
        self.media = MediaStore(journal)
        self.recordings = RecordingStore(journal, self._submit_all)
        self._answers = 0
        self._bodies = 0
        self._last: asyncio.Future[list[int]] | None = None
        # Calls with delivered answers that are not written yet, with their HTTP attempts.
        self._answers_sent: dict[str, int] = {}
        self._writing_answers: asyncio.TimerHandle | None = None

    @classmethod
    async def open(cls, directory: Path, *, sync: Literal["normal", "full"] = "normal") -> Self:
        """Opens or creates the state in `directory`. Raises FailedPrecondition as Journal.open does."""
        schemas = [
            _SCHEMA,
            tools_store.SCHEMA,
            agent_keys.SCHEMA,
            runs_store.SCHEMA,
            _LARGE,
            _HELD,
            _TOP,
            runs_store.NAMESPACES,
            _STORED,
            discarded_captures.SCHEMA,
            recordings_store.SCHEMA,
            recordings_store.HOST_TOOLS,
            _LASTING,
            recordings_store.BRANCHES,
            _MODELS,
            media_store.SCHEMA,
            _REQUEST_KEYS,
            _LEASES,
        ]
        journal = await Journal.open(directory / "interception.sqlite3", schemas, sync=sync)
        try:
            store = cls(journal, _load_key(directory / "token.key"))
            last = (
                "SELECT max(coalesce((SELECT max(answer_order) FROM calls), 0),"
                " coalesce((SELECT max(answer_order) FROM graphs), 0)), (SELECT max(body_id) FROM bodies)"
            )
            store._answers, store._bodies = (number or 0 for number in (await journal.query(last))[0])
        except BaseException:
            await journal.aclose()
            raise
        return store

    async def aclose(self) -> None:
        """Commits all submitted writes and closes the journal."""
        self._write_answers_sent()
        await self._journal.aclose()

    # Writes ----------------------------------------------------------------------------------------------------------

    def put_rollout(
        self, rollout: Rollout, tools: Iterable[HostTool] = (), run: Run | None = None
    ) -> asyncio.Future[list[int]]:
        """Inserts a rollout with its agent keys, its offered host tools and, if it has budgets, its run."""
        spec = rollout.spec
        values = (
            spec.rollout_id,
            spec.request_key,
            "",
            serde.dump_spec(spec),
            rollout.state.value,
            rollout.created,
            serde.dump_facts(rollout.facts),
            serde.dump_totals(rollout.totals),
        )
        opened: Statement = (
            "INSERT INTO rollouts VALUES (?, ?, ?, ?, ?, ?, NULL, '', '', 0, ?, ?, NULL, 0, 0)",
            values,
        )
        granted = [AgentKeyStore.opening(rollout.id, grant) for grant in rollout.keys.values()]
        joined = [RunStore.opening(run)] if run is not None else []
        # Committed in the journal's thread, like a rollout's end: what arrives during a commit shares the next one.
        return self._submit_all([opened, *granted, *joined, *ToolStore.opening(spec.rollout_id, tools)])

    def update_rollout(self, rollout: Rollout) -> asyncio.Future[list[int]]:
        """Writes the rollout's state and totals."""
        changed: Statement = (
            "UPDATE rollouts SET state = ?, closed = ?, close_reason = ?, exhausted = ?, paused_s = ?,"
            " totals = ? WHERE rollout_id = ?",
            (
                rollout.state.value,
                rollout.closed,
                rollout.close_reason,
                rollout.exhausted_budget,
                rollout.paused_s,
                serde.dump_totals(rollout.totals),
                rollout.id,
            ),
        )
        return self._submit_all([changed])

    def put_pause(self, rollout: Rollout, moved: Iterable[Call] = ()) -> asyncio.Future[list[int]]:
        """Writes a pause or its end, and the calls whose expiry it moved."""
        changed: Statement = (
            "UPDATE rollouts SET held_since = ?, paused_s = ?, held = ? WHERE rollout_id = ?",
            (rollout.paused_since, rollout.paused_s, rollout.is_held, rollout.id),
        )
        later: list[Statement] = [
            ("UPDATE calls SET expires = ? WHERE call_id = ?", (call.expires, call.id)) for call in moved
        ]
        return self._submit_all([changed, *later], size=0)

    def put_stored(self, rollout: Rollout) -> asyncio.Future[list[int]]:
        """Writes that the driver has stored a rollout's capture."""
        return self._submit("UPDATE rollouts SET stored = 1 WHERE rollout_id = ?", rollout.id)

    def delete_rollout(
        self, rollout_id: str, run: Run | None = None, discarded: Discarded | None = None
    ) -> asyncio.Future[list[int]]:
        """Deletes a rollout and its calls; its run keeps their usage. `discarded` records what is lost by it."""
        kept = [RunStore.changed(run)] if run is not None else []
        if discarded is not None:
            kept += self.discarded.adding(discarded)
        return self._submit_all([("DELETE FROM rollouts WHERE rollout_id = ?", (rollout_id,)), *kept])

    def put_call(self, call: Call) -> asyncio.Future[list[int]]:
        """Inserts an admitted call."""
        request = call.request
        body_id = None
        large: list[Statement] = []
        size = len(request.body)
        if request.body:
            self._bodies += 1
            body_id, folded = self._bodies, request.folded
            kept, cuts = (request.body, None) if folded is None else (folded.body, cuts_to(folded))
            large = [("INSERT INTO bodies VALUES (?, ?, ?)", (body_id, kept, cuts))]
            if folded is not None:
                large += MediaStore.adding(call.rollout, folded)
        put: Statement = (
            "INSERT INTO calls (call_id, rollout_id, position, retry_key, arrival, body_id, body_sha256, received,"
            " expires, delegated, state, end_reason, ended, failure, lease_id, session_id, lease_s, lease_request,"
            " prompt_sha256, min_policy_version, leases, model)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                call.id,
                call.rollout.id,
                call.index,
                request.retry_key,
                serde.dump_request(request),
                body_id,
                request.body_sha256,
                call.received,
                call.expires,
                int(call.delegated),
                call.state.value,
                call.end_reason,
                call.ended_at,
                serde.dump_failure(call.failure) if call.failure is not None else None,
                call.lease_id,
                call.holder.id if call.holder is not None else "",
                call.lease_s,
                call.lease_request,
                _prompt_digest(call),
                call.min_policy_version,
                call.leases,
                call.model,
            ),
        )
        written = self._submit_all([put, *large], size=size)
        if request.folded is not None:
            known, digests = call.rollout.images, request.folded.images.keys()
            written.add_done_callback(lambda done: None if failed(done) else known.update(digests))
        return written

    def put_request(self, call: Call) -> asyncio.Future[list[int]]:
        """Updates what the record of an admitted call holds about its request."""
        return self._submit("UPDATE calls SET arrival = ? WHERE call_id = ?", serde.dump_request(call.request), call.id)

    def put_model(self, call: Call) -> asyncio.Future[list[int]]:
        """Writes which of its rollout's models an admitted call is for, and whether that one's source answers it."""
        return self._submit(
            "UPDATE calls SET model = ?, delegated = ? WHERE call_id = ?", call.model, int(call.delegated), call.id
        )

    def put_lease(self, call: Call) -> asyncio.Future[list[int]]:
        """Writes a lease, or that nobody has the call; after a restart the lease's session may resume it."""
        return self._submit(
            "UPDATE calls SET lease_id = ?, session_id = ?, lease_s = ?, lease_request = ?, prompt_sha256 = ?,"
            " min_policy_version = ?, leases = ?, delegated = 0 WHERE call_id = ?",
            call.lease_id,
            call.holder.id if call.holder is not None else "",
            call.lease_s,
            call.lease_request,
            _prompt_digest(call),
            call.min_policy_version,
            call.leases,
            call.id,
        )

    def put_delegation(self, call: Call) -> asyncio.Future[list[int]]:
        """Writes the delegation of a call to the rollout's model source."""
        return self._submit(
            "UPDATE calls SET delegated = 1, session_id = '', sampling = ? WHERE call_id = ?",
            serde.dump_sampling(call.sampling),
            call.id,
        )

    def put_answer(self, call: Call, answered: Answered) -> asyncio.Future[list[int]]:
        """Writes a call's accepted answer in one transaction."""
        self._answers += 1
        answer, read = answered.answer, answered.prepared
        failure = answer if isinstance(answer, Failure) else None
        state = CallState.FAILED if read is None else CallState.DELIVERED
        record = read.record if read is not None else b""
        put: Statement = (
            "UPDATE calls SET state = ?, end_reason = ?, ended = ?, leases = ?, injected = ?, http_attempts = ?,"
            " answerer = ?, answer_order = ?, answer_sha256 = ?, completion = ?, failure = ?,"
            " leased = ?, sampling = ? WHERE call_id = ?",
            (
                state.value,
                failure.reason if failure is not None else "",
                answered.at,
                call.leases,
                int(read is not None and read.injected),
                call.http_attempts,
                answered.answerer.value,
                self._answers,
                answered.digest,
                serde.dump_extras(read.completion) if read is not None else None,
                serde.dump_failure(failure) if failure is not None else None,
                call.leased_at,
                serde.dump_sampling(call.sampling),
                call.id,
            ),
        )
        # Only for an existing call: otherwise nothing would ever delete it.
        graph = "INSERT INTO graphs SELECT answer_order, ? FROM calls WHERE call_id = ?"
        large: list[Statement] = [(graph, (record, call.id))] if record else []
        return self._submit_all([put, *large], size=len(record))

    def end_call(self, call: Call) -> asyncio.Future[list[int]]:
        """Writes the end of a call without an answer."""
        return self._submit(
            "UPDATE calls SET state = ?, end_reason = ?, ended = ?, leases = ?, failure = ? WHERE call_id = ?",
            call.state.value,
            call.end_reason,
            call.ended_at,
            call.leases,
            serde.dump_failure(call.failure) if call.failure is not None else None,
            call.id,
        )

    def mark_answer_sent(self, call: Call) -> None:
        """Records that the agent received the whole answer."""
        # No caller waits for it: a crash before its commit equals a crash before the last byte was confirmed. Several
        # are combined into one write, which goes with the next write or after a short delay.
        if not self._answers_sent:
            self._writing_answers = asyncio.get_running_loop().call_later(_ANSWERS_SENT_S, self._write_answers_sent)
        self._answers_sent[call.id] = call.http_attempts

    def _write_answers_sent(self) -> None:
        if not self._answers_sent:
            return
        answers_sent, self._answers_sent = json.dumps(self._answers_sent), {}
        if self._writing_answers is not None:
            self._writing_answers.cancel()
            self._writing_answers = None
        self._write(
            [
                (
                    "UPDATE calls SET told = 1, http_attempts = given.value FROM json_each(?) AS given"
                    " WHERE call_id = given.key",
                    (answers_sent,),
                )
            ],
            size=0,
        )

    async def settled(self) -> None:
        """Waits until all earlier writes are committed or have failed (and were logged), except deferred ones."""
        if self._last is not None and not self._last.done():
            await asyncio.wait([self._last])

    # Reads -----------------------------------------------------------------------------------------------------------

    async def body(self, call_id: str) -> bytes:
        """Returns a call's request body, byte for byte; empty if the call is unknown."""
        rows = await self._journal.query(
            "SELECT rollout_id, body, cuts FROM calls JOIN bodies USING (body_id) WHERE call_id = ?", (call_id,)
        )
        if not rows:
            return b""
        (row,) = rows
        return await self.media.unfolded(row["rollout_id"], bytes(row["body"]), row["cuts"])

    async def rollouts(self) -> list[Rollout]:
        """Returns all rollouts, oldest first, without their calls."""
        rows = await self._journal.query("SELECT * FROM rollouts ORDER BY created")
        keys = await self.agent_keys.load()
        return [reading.load_rollout(row, keys.get(row["rollout_id"], {})) for row in rows]

    async def rollout_of(self, call_id: str) -> str | None:
        """Returns the rollout id of a call; None if the call is unknown."""
        rows = await self._journal.query("SELECT rollout_id FROM calls WHERE call_id = ?", (call_id,))
        return str(rows[0][0]) if rows else None

    async def load(self, rollout: Rollout) -> StoredRollout:
        """Returns a rollout's calls, graph and leases; sets its totals from them."""
        self._write_answers_sent()
        rows = await self._journal.query(
            # Bodies of answered calls are not loaded.
            "SELECT calls.*, body, cuts, graph FROM calls"
            " LEFT JOIN bodies ON bodies.body_id = calls.body_id AND calls.answer_order IS NULL"
            " LEFT JOIN graphs ON graphs.answer_order = calls.answer_order WHERE rollout_id = ? ORDER BY position",
            (rollout.id,),
        )
        calls: list[Call] = []
        for item in rows:
            body = await self.media.unfolded(rollout.id, item["body"] or b"", item["cuts"])
            calls.append(reading.load_call(rollout, item, body))
        by_id = {call.id: call for call in calls}
        answered = sorted((item for item in rows if item["graph"]), key=lambda item: int(item["answer_order"]))
        graph = reading.readable(rollout, answered)
        for index, (item, record) in enumerate(zip(answered, graph, strict=False)):
            call = by_id[item["call_id"]]
            call.completion = serde.completion_of(record.sampled, item["completion"])
            call.message = record.sampled.message
            call.policy_id = record.sampled.policy_id
            call.chain_sha256, call.chain_index = record.chain, index
            count = record.keep + int(record.suffix.size)
            call.prompt = Prompt(count, record.keep, record.call_class, record.branch_id, record.parent_call_id)
        rollout.totals = replace(reading.count(calls), refused=rollout.totals.refused)
        rollout.image_bytes.update(await self.media.sizes(rollout.id))
        rollout.images.update(rollout.image_bytes)
        rollout.recording = await self.recordings.load(rollout.id, is_open=rollout.state is not RolloutState.CLOSED)
        reading.use_recorded(rollout.recording, calls)
        leases = {
            call.id: StoredLease(
                item["session_id"],
                item["lease_id"],
                item["prompt_sha256"] or b"",
                item["lease_s"],
                item["lease_request"],
            )
            for call, item in zip(calls, rows, strict=True)
            if item["session_id"] and not call.state.terminal
        }
        return StoredRollout(rollout, calls, graph, leases, len(answered))

    def _submit(self, sql: str, *params: str | float | bytes | None) -> asyncio.Future[list[int]]:
        return self._submit_all([(sql, params)], size=0)

    def _submit_all(self, statements: Sequence[Statement], *, size: int | None = None) -> asyncio.Future[list[int]]:
        self._write_answers_sent()
        return self._write(statements, size=size)

    def _write(self, statements: Sequence[Statement], *, size: int | None) -> asyncio.Future[list[int]]:
        written = self._journal.submit(statements, size=size)
        written.add_done_callback(_report)
        self._last = written
        return written


def _prompt_digest(call: Call) -> bytes | None:
    """Digest that shows after a restart whether a lease was given for the same prompt."""
    return call.plan.prompt_sha256 if call.plan is not None else None


def _report(written: asyncio.Future[list[int]]) -> None:
    # Most writes have no waiting caller, only an order: a failure must be logged.
    if not written.cancelled() and (error := written.exception()) is not None:
        _log.error("the journal refused a write", error=repr(error))


def _load_key(path: Path) -> bytes:
    """Returns the key that signs agent keys; created once, readable only by the service's user."""
    try:
        key = path.read_bytes()
    except FileNotFoundError:
        key = secrets.token_bytes(32)
        fresh = path.with_suffix(".new")
        fresh.unlink(missing_ok=True)  # left by a start that was killed here
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(key)
            file.flush()
            os.fsync(file.fileno())
        fresh.rename(path)
        return key
    if len(key) != 32:
        raise FailedPrecondition(
            f"{path.name} is damaged: remove the state directory, or restore it from a backup.",
            reason="TOKEN_KEY_INVALID",
        )
    return key
