"""The events of rollouts, and how rollouts stand: written in order, and read by those who watch.

Invariants: an event has the rollout's next sequence number from the moment it is appended, and is shown to watchers
only after it is on disk, so a number never changes its meaning, a kill -9 included; events of all rollouts are written
in one order, `position`, by which a watcher of many rollouts resumes; one writer drains what has gathered, so that a
burst of events is one commit, or some where an agent says much. While the disk is full what has gathered waits, and
those who wait for it are told.
Watchers read from the journal: a slow one costs no memory.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from sqlite3 import OperationalError
from typing import Final, NamedTuple, TypeAlias

import structlog

from penstock_chassis.journal import Journal, Statement
from penstock_driver.events import AgentEvent
from penstock_driver.rollouts import CallFinished, Happening, Phase
from penstock_driver.rows import Changes, counted

PAGE: Final = 256
"""Events that a watcher reads at once."""
RETRY_S: Final = 1.0
"""After how long what the disk did not take is tried again."""
_ROW_BYTES: Final = 256
"""What a row counts for beside its event."""
PIECE_BYTES: Final = 256 << 10
"""Of agents' events in one commit: whoever reads waits for one, and not for all that an agent said at once."""

Encode: TypeAlias = Callable[[str, int, float, Happening], bytes]
"""(rollout id, sequence, time since the epoch, event) to the event in the wire's form."""

_log = structlog.get_logger("penstock.driver")


class _Pending(NamedTuple):
    statement: Statement
    size: int
    stands_alone: bool
    """Whether a commit may end between this and another that stands alone."""


class History:
    """The events of all rollouts. `aclose()` writes what is pending."""

    def __init__(self, journal: Journal, encode: Encode) -> None:
        self._journal = journal
        self._encode = encode
        self._pending: list[_Pending] = []
        self._touched: dict[str, bool] = {}
        """Rollouts (True) and groups of which something is pending."""
        self._watchers: set[Changes] = set()
        self._flushes: list[asyncio.Future[None]] = []
        self._signals: dict[str, set[asyncio.Event]] = {}
        self._wake = asyncio.Event()
        self._closing = asyncio.Event()
        self._broken: Exception | None = None
        self._writer = asyncio.ensure_future(self._write())

    async def aclose(self) -> None:
        """Write what is pending and stop."""
        self._closing.set()
        self._wake.set()
        await asyncio.shield(self._writer)

    async def until_broken(self) -> None:
        """Raise what breaks the journal for good, when it does; return when the history is closed."""
        await asyncio.shield(self._writer)

    def append(
        self, rollout_id: str, group_id: str | None, sequence: int, event: Happening, *, is_summary: bool
    ) -> int:
        """Put an event in order, and return its size in bytes; it is on disk, and seen by watchers, a moment later."""
        payload = self._encode(rollout_id, sequence, time.time(), event)
        statement: Statement = (
            "INSERT INTO events (rollout_id, group_id, sequence, is_summary, payload) VALUES (?, ?, ?, ?, ?)",
            (rollout_id, group_id, sequence, is_summary, payload),
        )
        self._put(statement, len(payload), stands_alone=isinstance(event, AgentEvent))
        if isinstance(event, CallFinished):
            self._put(counted(rollout_id, event.spent))
        self._touch(rollout_id, group_id)
        return len(payload)

    def count(self, rollout_id: str, group_id: str | None, event: CallFinished) -> None:
        """Add a call to its rollout's sums without an event of it."""
        self._put(counted(rollout_id, event.spent))
        self._touch(rollout_id, group_id)

    def set_phase(self, rollout_id: str, phase: Phase, attempt: int) -> None:
        """Put a change of phase in order."""
        sql = "UPDATE rollouts SET phase = ?, attempts = ? WHERE rollout_id = ?"
        self._put((sql, (int(phase), attempt, rollout_id)))
        self._wake.set()

    async def last_sequence(self, rollout_id: str) -> int:
        """The newest sequence number of a rollout that is on disk, 0 for none; OperationalError when it is not read."""
        rows = await self._journal.query("SELECT MAX(sequence) FROM events WHERE rollout_id = ?", (rollout_id,))
        return rows[0][0] or 0

    def end(
        self,
        rollout_id: str,
        group_id: str | None,
        outcome: bytes,
        phase_times: Mapping[Phase, float],
        *,
        is_result: bool,
        fork_kind: int,
        last_sequence: int,
        attempts: int,
        owes: bool,
    ) -> None:
        """Put the end of a rollout in order, behind its events; `owes` when something of it is still to be released."""
        self._put((
            "UPDATE rollouts SET phase = ?, end_time = ?, phase_times = ?, outcome = ?, is_result = ?, fork_kind = ?,"
            " last_sequence = ?, attempts = ? WHERE rollout_id = ?",
            (
                int(Phase.ENDED), time.time(), _dump_times(phase_times), outcome, is_result, fork_kind, last_sequence,
                attempts, rollout_id,
            ),
        ))  # fmt: skip
        if owes:
            self._put(("INSERT OR IGNORE INTO owed VALUES (?)", (rollout_id,)))
        self._touch(rollout_id, group_id)

    def _put(self, statement: Statement, size: int = 0, *, stands_alone: bool = False) -> None:
        self._pending.append(_Pending(statement, size, stands_alone))

    def _touch(self, rollout_id: str, group_id: str | None) -> None:
        self._touched[rollout_id] = True
        if group_id:
            self._touched.setdefault(group_id, False)
        self._wake.set()

    async def flush(self) -> None:
        """Return when everything that was put in order before is on disk.

        Raises what kept it from getting there: OperationalError for what may pass, and is tried again all the same.
        """
        if self._broken:
            raise self._broken
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flushes.append(done)
        self._wake.set()
        await done

    @contextmanager
    def signal(self, resource_id: str) -> Iterator[asyncio.Event]:
        """An event that is set whenever something of a rollout or a group was written; the watcher clears it."""
        signal = asyncio.Event()
        self._signals.setdefault(resource_id, set()).add(signal)
        try:
            yield signal
        finally:
            self._signals[resource_id].discard(signal)
            if not self._signals[resource_id]:
                del self._signals[resource_id]

    @contextmanager
    def changes(self) -> Iterator[Changes]:
        """The rollouts of which something was written, or that were deleted, since the block began."""
        changes = Changes()
        self._watchers.add(changes)
        try:
            yield changes
        finally:
            self._watchers.discard(changes)

    def deleted(self, rollout_ids: Collection[str]) -> None:
        """Rollouts are forgotten: tells those who watch all."""
        for watcher in self._watchers:
            watcher.add(rollout_ids)

    async def events(self, rollout_id: str, after: int) -> list[tuple[int, bytes]]:
        """Up to PAGE events of a rollout after a sequence number, as (sequence, payload)."""
        rows = await self._journal.query(
            "SELECT sequence, payload FROM events WHERE rollout_id = ? AND sequence > ? ORDER BY sequence LIMIT ?",
            (rollout_id, after, PAGE),
        )
        return [(row[0], row[1]) for row in rows]

    async def group_events(
        self, group_id: str, after_position: int, *, summary: bool
    ) -> list[tuple[int, str, int, bytes]]:
        """Up to PAGE events of a group's rollouts after a position, as (position, rollout id, sequence, payload)."""
        rows = await self._journal.query(
            "SELECT position, rollout_id, sequence, payload FROM events WHERE group_id = ? AND position > ?"
            " AND is_summary >= ? ORDER BY position LIMIT ?",
            (group_id, after_position, summary, PAGE),
        )
        return [(row[0], row[1], row[2], row[3]) for row in rows]

    async def _write(self) -> None:
        """Write what has gathered, again and again; a journal that is broken ends the driver's work loudly."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            pending, self._pending = self._pending, []
            touched, self._touched = self._touched, {}
            flushes, self._flushes = self._flushes, []
            try:
                while pending:
                    count = _piece(pending)
                    await self._journal.write([item.statement for item in pending[:count]])
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
                # No room, as a rule: that may pass, and an end that is lost would be told as another one.
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
                for signal in self._signals.get(resource_id, ()):
                    signal.set()
            if self._closing.is_set() and not self._pending and not self._flushes:
                return


def _piece(pending: Sequence[_Pending]) -> int:
    """How many go into the next commit: all, but of agents' events at most some PIECE_BYTES."""
    size = 0
    for number, item in enumerate(pending):
        if size >= PIECE_BYTES and item.stands_alone and pending[number - 1].stands_alone:
            return number
        size += item.size + _ROW_BYTES
    return len(pending)


def _dump_times(times: Mapping[Phase, float]) -> str:
    return json.dumps({phase.name: round(seconds, 6) for phase, seconds in times.items()})
