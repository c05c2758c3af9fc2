"""The event log of all rollouts: ordered writes of events and states, and reads by watchers.

Invariants: an event gets its rollout's next sequence number when it is appended, and watchers see it only once it is on
disk, so a number never changes its meaning, even after a kill -9. The events of all rollouts share one order,
`position`, at which a watcher of many rollouts resumes. One writer commits whatever is pending: a burst of events is
one commit, or a few if an agent prints a lot. While the disk is full, pending writes wait, and callers of `flush` get
the error. Watchers read from the journal, so a slow one costs no memory.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, groupby
from sqlite3 import OperationalError
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

import structlog

from penstock.driver.v1 import rollout_pb2
from penstock_chassis.aio.broadcast import Signal
from penstock_chassis.journal import Journal, Statement
from penstock_driver.agents.output_events import AgentEvent
from penstock_driver.domain.pauses import Pause
from penstock_driver.domain.records import RolloutEnd
from penstock_driver.domain.rollout import CallFinished, Phase, RolloutEvent
from penstock_driver.domain.unended import AttemptPlace, Stage
from penstock_driver.store.exports import to_be_exported
from penstock_driver.store.summaries import Changes, counted
from penstock_driver.wire.to_proto import decode_event, event_to_proto

PAGE: Final = 256
"""Maximum number of events per read of a watcher."""
_FEW: Final = 16
"""The part of a page read on the event loop: a watcher that keeps up finds no more."""
RETRY_S: Final = 1.0
"""Delay before retrying a failed write."""
_ROW_BYTES: Final = 256
"""Size counted per row in addition to its event."""
_SMALL_BYTES: Final = 16 << 10
"""Maximum of a commit that the event loop may make itself, which saves waking the journal's thread: some 60 events, for
which the loop stops about as long as for a rollout's creation. What an agent prints in a burst is the thread's."""
PIECE_BYTES: Final = 64 << 10
"""Maximum of agents' events per commit: a caller waits for one such commit, not for an agent's whole burst."""

_log = structlog.get_logger("penstock.driver")


_INSERT: Final = "INSERT INTO events (rollout_id, group_id, sequence, is_summary, payload) VALUES"
_ROW: Final = "(?, ?, ?, ?, ?)"
_MOST_ROWS: Final = 64
"""Rows per statement: each statement waits a few times for the interpreter lock while the event loop holds it."""


class _Pending(NamedTuple):
    statement: Statement
    size: int
    stands_alone: bool
    """Whether a commit may end between this item and an adjacent one that also stands alone."""


_TRIM: Final = """
WITH RECURSIVE
ranked AS (
    SELECT SUM(bytes) OVER up - bytes AS below, COUNT(*) OVER () - ROW_NUMBER() OVER up + 1 AS sharers
    FROM kept_specs WHERE bytes > 0 WINDOW up AS (ORDER BY bytes, namespace)
),
share AS (SELECT MAX((? - below) / sharers) AS bytes FROM ranked),
doomed (namespace, ended, spec_id, excess) AS (
    SELECT namespace, -1.0, '', kept_specs.bytes - share.bytes FROM kept_specs, share
    WHERE kept_specs.bytes > share.bytes
    UNION ALL
    SELECT doomed.namespace, sealed_specs.ended, sealed_specs.spec_id, excess - LENGTH(sealed)
    FROM doomed JOIN sealed_specs ON sealed_specs.spec_id = (
        SELECT spec_id FROM sealed_specs AS next WHERE next.ended IS NOT NULL AND next.namespace = doomed.namespace
        AND (next.ended, next.spec_id) > (doomed.ended, doomed.spec_id) ORDER BY next.ended, next.spec_id LIMIT 1
    ) WHERE excess > 0
)
DELETE FROM sealed_specs WHERE spec_id IN (SELECT spec_id FROM doomed)
"""
"""Deletes the oldest specs of ended rollouts of those namespaces that have more than their share, until all together
have no more than the given bytes. The share is the greatest with which that holds: what a namespace leaves free of an
equal part is divided among the others. It reads the namespaces and what it deletes, so each end can afford it."""


class EventLog:
    """The events of all rollouts. `aclose()` writes what is pending."""

    def __init__(self, journal: Journal, *, exports: bool = False, kept_spec_bytes: int = 0) -> None:
        """`kept_spec_bytes`: the most bytes of sealed specs of ended rollouts that are kept, for branches of them."""
        self._journal = journal
        self._kept_spec_bytes = kept_spec_bytes
        self._exports = exports
        """Whether rollouts that end are to be exported."""
        self._pending: list[_Pending] = []
        self._touched: dict[str, bool] = {}
        """Ids with pending writes: rollouts (True) and groups (False)."""
        self._watchers: set[Changes] = set()
        self._flushes: list[asyncio.Future[None]] = []
        self._signals: WeakValueDictionary[str, Signal] = WeakValueDictionary()
        """By rollout or group, while somebody watches it."""
        self._wake = asyncio.Event()
        self._closing = asyncio.Event()
        self._broken: Exception | None = None
        self._put((_TRIM, (kept_spec_bytes,)))  # the last driver may have been allowed more
        self._wake.set()
        self._writer = asyncio.ensure_future(self._write())

    async def aclose(self) -> None:
        """Write what is pending and stop."""
        self._closing.set()
        self._wake.set()
        await asyncio.shield(self._writer)

    async def until_broken(self) -> None:
        """Raise the error that breaks the journal for good, once it happens; return when the event log is closed."""
        await asyncio.shield(self._writer)

    def append(
        self, rollout_id: str, group_id: str | None, sequence: int, event: RolloutEvent, *, is_summary: bool
    ) -> int:
        """Append an event and return its size in bytes; it is on disk and visible to watchers a moment later."""
        payload = event_to_proto(rollout_id, sequence, time.time(), event).SerializeToString()
        statement: Statement = (f"{_INSERT} {_ROW}", (rollout_id, group_id, sequence, is_summary, payload))
        self._put(statement, len(payload), stands_alone=isinstance(event, AgentEvent))
        if isinstance(event, CallFinished):
            self._put(counted(rollout_id, event.spent))
        self._touch(rollout_id, group_id)
        return len(payload)

    def count(self, rollout_id: str, group_id: str | None, event: CallFinished) -> None:
        """Add a call to its rollout's sums without recording an event."""
        self._put(counted(rollout_id, event.spent))
        self._touch(rollout_id, group_id)

    def set_phase(
        self,
        rollout_id: str,
        phase: Phase,
        attempt: int,
        fork_kind: int,
        *,
        place: AttemptPlace | None = None,
        stage: Stage = Stage.NONE,
        so_far: rollout_pb2.Outcome | None = None,
    ) -> None:
        """Append a change of phase or stage, with the attempt and how its sandbox was forked (0: not yet).

        `place`, `stage` and `so_far` as in `Unended`.
        """
        sql = (
            "UPDATE rollouts SET phase = ?, attempts = ?, fork_kind = ?, place = ?, stage = ?, so_far = ?"
            " WHERE rollout_id = ?"
        )
        known = None if place is None else place.to_json()
        outcome = None if so_far is None else so_far.SerializeToString()
        self._put((sql, (int(phase), attempt, fork_kind, known, stage.value, outcome, rollout_id)))
        self._wake.set()

    def set_owed(self, rollout_id: str) -> None:
        """Append that an attempt of a rollout left something in other services."""
        self._put(("UPDATE rollouts SET owed = 1 WHERE rollout_id = ?", (rollout_id,)))
        self._wake.set()

    def set_home(self, rollout_id: str, home: rollout_pb2.Home) -> None:
        """Append which services have the rollout."""
        self._put(("UPDATE rollouts SET home = ? WHERE rollout_id = ?", (home.SerializeToString(), rollout_id)))
        self._wake.set()

    def set_pause(self, rollout_id: str, pause: Pause | None, paused_s: float, pauses: int) -> None:
        """Append a pause or its end; `paused_s` and `pauses` as in `Record`."""
        known = None if pause is None else pause.to_json()
        sql = "UPDATE rollouts SET pause = ?, paused_s = ?, pauses = ? WHERE rollout_id = ?"
        self._put((sql, (known, paused_s, pauses, rollout_id)))
        self._wake.set()

    async def last_sequence(self, rollout_id: str) -> int:
        """The last sequence number of a rollout on disk, 0 for none; OperationalError when the read fails."""
        rows = await self._journal.query("SELECT MAX(sequence) FROM events WHERE rollout_id = ?", (rollout_id,))
        return rows[0][0] or 0

    def end(self, rollout_id: str, group_id: str | None, end: RolloutEnd) -> None:
        """Append the end of a rollout, after its events."""
        self._put((
            "UPDATE rollouts SET phase = ?, end_time = ?, phase_times = ?, outcome = ?, is_result = ?, fork_kind = ?,"
            " last_sequence = ?, attempts = ?, place = NULL, stage = '', so_far = NULL, owed = 0,"
            " pause = NULL WHERE rollout_id = ?",
            (
                int(Phase.ENDED), time.time(), _dump_times(end.phase_times), end.outcome.SerializeToString(),
                end.is_result, end.fork_kind, end.last_sequence, end.attempts, rollout_id,
            ),
        ))  # fmt: skip
        self._put(self._spec_ended(group_id or rollout_id, group_id))
        if self._kept_spec_bytes:
            self._put((_TRIM, (self._kept_spec_bytes,)))
        if end.cleanup_pending:
            self._put(("INSERT OR IGNORE INTO owed VALUES (?)", (rollout_id,)))
        if self._exports:
            self._put(to_be_exported(rollout_id, end.gates))
        self._touch(rollout_id, group_id)

    def _spec_ended(self, spec_id: str, group_id: str | None) -> Statement:
        """Once the last rollout of a sealed spec has ended, the spec is kept for branches, or deleted."""
        is_over = "NOT EXISTS (SELECT 1 FROM rollouts WHERE group_id = ? AND end_time IS NULL)"
        if not self._kept_spec_bytes:
            return f"DELETE FROM sealed_specs WHERE spec_id = ? AND {is_over}", (spec_id, group_id)  # noqa: S608
        sql = f"UPDATE sealed_specs SET ended = ? WHERE spec_id = ? AND {is_over}"  # noqa: S608 - fixed texts
        return sql, (time.time(), spec_id, group_id)

    def _put(self, statement: Statement, size: int = 0, *, stands_alone: bool = False) -> None:
        self._pending.append(_Pending(statement, size, stands_alone))

    def _touch(self, rollout_id: str, group_id: str | None) -> None:
        self._touched[rollout_id] = True
        if group_id:
            self._touched.setdefault(group_id, False)
        self._wake.set()

    async def flush(self) -> None:
        """Wait until everything appended before is on disk.

        Raises the error of a failed write; an OperationalError may be transient, and its write is retried.
        """
        if self._broken:
            raise self._broken
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flushes.append(done)
        self._wake.set()
        await done

    def wake(self) -> None:
        """Make all watchers look again."""
        for signal in list(self._signals.values()):
            signal.notify()

    def signal(self, resource_id: str) -> Signal:
        """Counts the writes of this rollout or group, for as long as the watcher keeps it."""
        return self._signals.setdefault(resource_id, Signal())

    @contextmanager
    def changes(self, namespace: str | None = None) -> Iterator[Changes]:
        """The rollouts that were written or deleted since the block began.

        Of deleted ones only those of this namespace; None = of all.
        """
        changes = Changes(namespace)
        self._watchers.add(changes)
        try:
            yield changes
        finally:
            self._watchers.discard(changes)

    def deleted(self, rollout_ids: Collection[str], namespace: str) -> None:
        """Notify the watchers of all rollouts of a deletion."""
        for watcher in self._watchers:
            if watcher.namespace in (None, namespace):
                watcher.add(rollout_ids, deleted=True)

    def changed(self, rollout_ids: Collection[str]) -> None:
        """Notify the watchers of all rollouts of a change that is on disk."""
        for watcher in self._watchers:
            watcher.add(rollout_ids)

    async def events(self, rollout_id: str, after: int) -> list[rollout_pb2.RolloutEvent]:
        """Up to PAGE events of a rollout after a sequence number."""
        sql = "SELECT sequence, payload FROM events WHERE rollout_id = ? AND sequence > ? ORDER BY sequence LIMIT ?"
        rows = await self._journal.read(sql, (rollout_id, after, _FEW), few=True)
        if len(rows) == _FEW:
            rows += await self._journal.read(sql, (rollout_id, rows[-1][0], PAGE - _FEW))
        return [decode_event(row[1]) for row in rows]

    async def history(self, rollout_id: str, after: int) -> list[tuple[int, rollout_pb2.RolloutEvent]]:
        """Up to PAGE events of a rollout after a sequence number, each with its size in bytes as it was appended."""
        sql = "SELECT payload FROM events WHERE rollout_id = ? AND sequence > ? ORDER BY sequence LIMIT ?"
        rows = await self._journal.read(sql, (rollout_id, after, PAGE))
        return [(len(row[0]), decode_event(row[0])) for row in rows]

    async def group_events(
        self, group_id: str, after_position: int, *, summary: bool
    ) -> list[tuple[int, rollout_pb2.RolloutEvent]]:
        """Up to PAGE events of a group's rollouts after a position, each with its own position."""
        rows = await self._journal.read(
            "SELECT position, payload FROM events WHERE group_id = ? AND position > ?"
            " AND is_summary >= ? ORDER BY position LIMIT ?",
            (group_id, after_position, summary, PAGE),
        )
        return [(row[0], decode_event(row[1])) for row in rows]

    async def _write(self) -> None:
        """Write pending items in a loop; a broken journal ends the driver with this error."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            pending, self._pending = self._pending, []
            touched, self._touched = self._touched, {}
            flushes, self._flushes = self._flushes, []
            try:
                while pending:
                    count = _piece(pending)
                    size = sum(item.size + _ROW_BYTES for item in pending[:count])
                    statements = list(_joined([item.statement for item in pending[:count]]))
                    await self._journal.submit(statements, size=size if size <= _SMALL_BYTES else None)
                    del pending[:count]
            except Exception as error:
                _log.exception("the journal cannot be written")
                if not isinstance(error, OperationalError) or self._closing.is_set():
                    self._broken = error
                for flush in (*flushes, *self._flushes):
                    if not flush.done():
                        flush.set_exception(error)
                self._flushes.clear()
                if self._broken:
                    raise
                # Usually a full disk, which is transient: a lost end would be recorded later with another outcome.
                self._pending[:0] = pending
                self._touched = touched | self._touched
                with suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S):
                        await self._closing.wait()
                self._wake.set()
                continue
            for flush in flushes:
                if not flush.done():
                    flush.set_result(None)
            rollouts = [resource_id for resource_id, is_rollout in touched.items() if is_rollout]
            for watcher in self._watchers:
                watcher.add(rollouts)
            for resource_id in touched:
                if (signal := self._signals.get(resource_id)) is not None:
                    signal.notify()
            if self._closing.is_set() and not self._pending and not self._flushes:
                return


def _piece(pending: Sequence[_Pending]) -> int:
    """The number of items in the next commit: all, except that agents' events are limited to about PIECE_BYTES."""
    size = 0
    for number, item in enumerate(pending):
        if size >= PIECE_BYTES and item.stands_alone and pending[number - 1].stands_alone:
            return number
        size += item.size + _ROW_BYTES
    return len(pending)


def _joined(statements: Sequence[Statement]) -> Iterator[Statement]:
    """The same statements in order, with consecutive events merged into statements of 64, 32, 16 and so on rows."""
    for is_event, run in groupby(statements, lambda statement: statement[0] == f"{_INSERT} {_ROW}"):
        if not is_event:
            yield from run
            continue
        rows = [parameters for _, parameters in run]
        while rows:
            count = min(_MOST_ROWS, 1 << (len(rows).bit_length() - 1))  # few distinct texts, each parsed once
            yield f"{_INSERT} {', '.join([_ROW] * count)}", list(chain.from_iterable(rows[:count]))
            del rows[:count]


def _dump_times(times: Mapping[Phase, float]) -> str:
    return json.dumps({phase.name: round(seconds, 6) for phase, seconds in times.items()})
