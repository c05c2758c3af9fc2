"""End states of ended rollouts: each agent's changes as they were before a verifier ran, for verifiers to come.

Purpose: a rollout can be graded again without its policy (R140, decision 070).

Invariants: a file is named by the SHA-256 of its layer, so that equal changes are one file, and is complete before the
journal names it. Rows without a file, and files without a row, are removed at the start. When a bound is exceeded, the
least recently used go first. What is too old is removed whenever something is kept or read. A file stays while it is
being read. An agent chooses how large its changes are: packing them stops at the bound, few large ones are packed at
once, and a full disk damages none that is kept.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import os
import secrets
import shutil
import tempfile
import threading
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final, cast

import structlog

from penstock.driver.v1 import rollout_pb2
from penstock_chassis.errors import FailedPrecondition
from penstock_chassis.journal import Journal
from penstock_driver.domain.rollout import Changes
from penstock_driver.wire.outcomes import changes_from_proto
from penstock_driver.wire.to_proto import changes_to_proto

MIGRATION: Final = """
ALTER TABLE rollouts ADD COLUMN grades BLOB;
CREATE TABLE end_states (
    rollout_id TEXT PRIMARY KEY, namespace TEXT NOT NULL, attempt INTEGER NOT NULL, sha256 TEXT NOT NULL,
    size INTEGER NOT NULL, changes BLOB NOT NULL, used REAL NOT NULL
) WITHOUT ROWID;
"""
"""Adds the further grades of rollouts, and the end states that are kept for them."""
ROW_BYTES: Final = 512
"""What an end state counts in addition to its file: its row, here and in memory, without the changes that it lists."""
BLOCK_BYTES: Final = 4096
"""A file counts whole blocks of the disk."""
_SMALL_BYTES: Final = 64 << 10
"""A layer of at most so many bytes is compressed on the event loop, in about a millisecond."""
_IN_MEMORY_BYTES: Final = 64 << 10
_LARGE: Final = 2
"""Large layers that are packed at once: each takes a processor, and its share of the disk beyond the bounds."""
_LEVEL: Final = 1
_PIECE: Final = 1 << 20
_ALL: Final = ""
"""Stands for all namespaces: none has an empty name."""
_DAMAGE: Final = (gzip.BadGzipFile, EOFError, ValueError, zlib.error)
"""What reading a damaged file raises. Any other OSError, as of a full disk, says nothing of the file."""
_log = structlog.get_logger("penstock.driver")


@dataclass(frozen=True, slots=True)
class Bounds:
    """`total` bytes of this driver, `each` of one namespace (None: as `total`), for `kept_s` seconds after their last
    use. `total` 0 keeps none.
    """

    total: int
    each: int | None
    kept_s: float


@dataclass(frozen=True, slots=True)
class EndState:
    """Changes and their layer, a tar that is read from its current position; close it."""

    changes: Changes
    layer: BinaryIO


@dataclass(frozen=True, slots=True)
class _Entry:
    namespace: str
    attempt: int
    sha256: str
    size: int
    """What its file counts."""
    row: int
    """What its row counts."""
    used: float


class EndStates:
    """All end states of one driver, below `directory`. Use `open`."""

    def __init__(
        self,
        journal: Journal,
        directory: Path,
        bounds: Bounds,
        clock: Callable[[], float] = time.time,
        spool: Path | None = None,
    ) -> None:
        """`clock` gives seconds since the epoch. `spool` is where layers are unpacked; None = `directory`."""
        self._journal = journal
        self._directory = directory
        self._bounds = bounds
        self._clock = clock
        self._spool = spool or directory
        self._packing = asyncio.Semaphore(_LARGE)
        self._removals: dict[str, asyncio.Future[None]] = {}
        """Of files that are being removed, by SHA-256."""
        self._known: dict[str, _Entry] = {}
        """By rollout id."""
        self._order: dict[str, OrderedDict[str, None]] = {_ALL: OrderedDict()}
        """The rollouts of a namespace, "" for all, least recently used first."""
        self._users: Counter[str] = Counter()
        """How many end states need a file, and those that read or write it."""
        self._entries: Counter[tuple[str, str]] = Counter()
        """How many end states of a namespace, "" for all, have a file."""
        self._bytes: Counter[str] = Counter()
        """What the end states of a namespace count, "" for all."""

    @classmethod
    async def open(
        cls,
        journal: Journal,
        directory: Path,
        bounds: Bounds,
        clock: Callable[[], float] = time.time,
        spool: Path | None = None,
    ) -> EndStates:
        """Find what an earlier process kept, and remove what is left of deleted rollouts and unfinished writes."""
        states = cls(journal, directory, bounds, clock, spool)
        await journal.execute("DELETE FROM end_states WHERE rollout_id NOT IN (SELECT rollout_id FROM rollouts)")
        there = await asyncio.to_thread(_files, directory)
        rows = await journal.query(
            "SELECT rollout_id, namespace, attempt, sha256, size, length(changes) AS listed, used FROM end_states"
            " ORDER BY used"
        )
        for row in rows:
            if row["sha256"] in there:
                size, counts = row["size"], ROW_BYTES + row["listed"]
                entry = _Entry(row["namespace"], row["attempt"], row["sha256"], size, counts, row["used"])
                states._add(row["rollout_id"], entry)
            else:
                await journal.execute("DELETE FROM end_states WHERE rollout_id = ?", (row["rollout_id"],))
        for name in there - states._users.keys():
            (directory / name).unlink(missing_ok=True)
        await states._trim()
        return states

    @property
    def is_on(self) -> bool:
        """Whether any are kept."""
        return self._bounds.total > 0

    @property
    def kept_bytes(self) -> int:
        """What all of them count."""
        return self._bytes[_ALL]

    async def keep(self, rollout_id: str, namespace: str, attempt: int, changes: Changes, layer: BinaryIO) -> bool:
        """Keep an end state in place of an earlier attempt's; on disk when this returns True. False: it alone exceeds a
        bound.

        `layer` is read from its current position. OSError and sqlite3.Error: it is not kept.
        """
        if not self.is_on:
            return False
        begin = layer.tell()
        length = layer.seek(0, os.SEEK_END) - begin
        layer.seek(begin)
        self._directory.mkdir(mode=0o700, exist_ok=True)
        new = self._directory / f"{secrets.token_hex(16)}.new"
        try:
            digest = await self._packed(layer, length, new)
            if digest is None:
                await self.forget(rollout_id)
                return False
            listed = changes_to_proto(changes).SerializeToString()
            size = -(-new.stat().st_size // BLOCK_BYTES) * BLOCK_BYTES
            entry = _Entry(namespace, attempt, digest, size, ROW_BYTES + len(listed), self._clock())
            return await self._adopt(rollout_id, new, entry, listed)
        finally:
            new.unlink(missing_ok=True)

    async def _packed(self, layer: BinaryIO, length: int, path: Path) -> str | None:
        """Pack a layer of `length` bytes; return its SHA-256, or None if the file alone exceeds a bound."""
        if length <= _SMALL_BYTES:
            return _write(layer, path, self._most)
        stopped = threading.Event()
        async with self._packing:
            work = asyncio.ensure_future(asyncio.to_thread(_write, layer, path, self._most, stopped.is_set))
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                stopped.set()  # its caller closes the layer
                await asyncio.wait([work])
                raise

    async def _adopt(self, rollout_id: str, new: Path, entry: _Entry, listed: bytes) -> bool:
        if entry.size + entry.row > self._most:
            await self.forget(rollout_id)
            return False
        self._users[entry.sha256] += 1  # until the row is there, or refused
        former: _Entry | None = None
        try:
            if (removal := self._removals.get(entry.sha256)) is not None:
                await asyncio.wait([removal])
            new.replace(self._directory / entry.sha256)
            await self._journal.execute(
                "INSERT OR REPLACE INTO end_states VALUES (?, ?, ?, ?, ?, ?, ?)",
                (rollout_id, entry.namespace, entry.attempt, entry.sha256, entry.size, listed, entry.used),
            )
            former = self._remove(rollout_id)
            self._add(rollout_id, entry)
        finally:
            await self._let_go(entry.sha256)
        if former is not None:
            await self._let_go(former.sha256)
        await self._trim()
        return True

    async def open_state(self, rollout_id: str, attempt: int) -> EndState:
        """The end state of a rollout's last attempt, which counts as used.

        FailedPrecondition (END_STATE_GONE). OSError: it is there, and there is no room to unpack it.
        """
        await self._trim()
        entry = self._known.get(rollout_id)
        if entry is None or entry.attempt != attempt:
            raise gone(rollout_id, "it was never kept, or made room for others")
        self._users[entry.sha256] += 1
        try:
            return await self._opened(rollout_id, entry)
        finally:
            await self._let_go(entry.sha256)

    async def _opened(self, rollout_id: str, entry: _Entry) -> EndState:
        used = self._clock()
        self._known[rollout_id] = replace(entry, used=used)
        for name in (entry.namespace, _ALL):
            self._order[name].move_to_end(rollout_id)
        rows = await self._journal.query(
            "UPDATE end_states SET used = ? WHERE rollout_id = ? RETURNING changes", (used, rollout_id)
        )
        if not rows:
            raise gone(rollout_id, "its rollout was deleted")
        layer = await self._layer(rollout_id, entry)
        return EndState(changes_from_proto(rollout_pb2.Grading.Changes.FromString(rows[0]["changes"])), layer)

    async def _layer(self, rollout_id: str, entry: _Entry) -> BinaryIO:
        path = self._directory / entry.sha256
        try:
            # A small file may unpack to a large one: an agent chooses its content.
            return await asyncio.to_thread(_read, path, entry.sha256, self._spool)
        except _DAMAGE as error:  # as after a power failure
            _log.error("an end state is damaged", rollout_id=rollout_id, error=repr(error))
            await self.forget(rollout_id)
            raise gone(rollout_id, "its file is damaged") from error

    async def forget(self, rollout_id: str) -> None:
        """Remove a rollout's end state; idempotent."""
        if rollout_id in self._known:
            await self._journal.execute("DELETE FROM end_states WHERE rollout_id = ?", (rollout_id,))
            if (removed := self._remove(rollout_id)) is not None:
                await self._let_go(removed.sha256)

    # Bounds -----------------------------------------------------------------------------------------------------------

    @property
    def _each(self) -> int:
        return self._bounds.total if self._bounds.each is None else self._bounds.each

    @property
    def _most(self) -> int:
        """What one end state may count."""
        return min(self._bounds.total, self._each)

    async def _trim(self) -> None:
        """Remove what is too old, and the least recently used while a bound is exceeded."""
        oldest = self._clock() - self._bounds.kept_s
        while (rollout_id := self._surplus(oldest)) is not None:
            await self.forget(rollout_id)

    def _surplus(self, oldest: float) -> str | None:
        """The next one to go, or None."""
        first = next(iter(self._order[_ALL]), None)
        if first is None:
            return None
        if self._known[first].used < oldest or self.kept_bytes > self._bounds.total:
            return first
        full = next((name for name, size in self._bytes.items() if name != _ALL and size > self._each), None)
        return None if full is None else next(iter(self._order[full]))

    def _add(self, rollout_id: str, entry: _Entry) -> None:
        self._known[rollout_id] = entry
        for name in (entry.namespace, _ALL):
            is_shared = self._entries[name, entry.sha256] > 0
            self._bytes[name] += entry.row if is_shared else entry.row + entry.size
            self._entries[name, entry.sha256] += 1
            self._order.setdefault(name, OrderedDict())[rollout_id] = None
        self._users[entry.sha256] += 1

    def _remove(self, rollout_id: str) -> _Entry | None:
        """What is removed, of which the file is to be let go."""
        entry = self._known.pop(rollout_id, None)
        if entry is None:
            return None
        for name in (entry.namespace, _ALL):
            self._entries[name, entry.sha256] -= 1
            is_shared = self._entries[name, entry.sha256] > 0
            self._bytes[name] -= entry.row if is_shared else entry.row + entry.size
            if not is_shared:
                del self._entries[name, entry.sha256]
            del self._order[name][rollout_id]
            if not self._order[name] and name != _ALL:
                del self._order[name], self._bytes[name]
        return entry

    async def _let_go(self, sha256: str) -> None:
        """Remove a file that nobody needs any more. A removal waits for the disk: in a thread."""
        self._users[sha256] -= 1
        if self._users[sha256]:
            return
        del self._users[sha256]
        removal = asyncio.ensure_future(asyncio.to_thread((self._directory / sha256).unlink, missing_ok=True))
        self._removals[sha256] = removal
        removal.add_done_callback(lambda _: self._removals.pop(sha256, None))
        await asyncio.shield(removal)


def gone(rollout_id: str, why: str) -> FailedPrecondition:
    """The error of an end state that is not there."""
    message = (
        f"the driver has no end state of {rollout_id}: {why}. Create rollouts with keep_end_state, and raise"
        " kept_end_state_bytes or kept_end_state_s to keep more of them"
    )
    return FailedPrecondition(message, reason="END_STATE_GONE")


def _files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} if directory.is_dir() else set()


def _write(layer: BinaryIO, path: Path, most: int, is_stopped: Callable[[], bool] = lambda: False) -> str | None:
    """Compress a layer into a file; return the SHA-256 of what was compressed. None: the file exceeds `most` bytes, or
    `is_stopped`. Blocks.
    """
    digest = hashlib.sha256()
    with (
        os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file,
        gzip.GzipFile(fileobj=file, mode="wb", compresslevel=_LEVEL, mtime=0, filename="") as packed,
    ):
        while piece := layer.read(_PIECE):
            digest.update(piece)
            packed.write(piece)
            if file.tell() > most or is_stopped():
                return None
    return digest.hexdigest()


def _read(path: Path, sha256: str, spool: Path) -> BinaryIO:
    """A file's layer, unpacked into memory or, if it is large, into `spool`. Blocks.

    ValueError if it is another, or not there.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise ValueError("its file is not there") from error
    with file, gzip.open(file, "rb") as packed:
        # No context manager: the caller gets it.
        spooled = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES, dir=str(spool))  # noqa: SIM115
        found = cast("BinaryIO", spooled)
        try:
            shutil.copyfileobj(packed, found, _PIECE)
            found.seek(0)
            if hashlib.file_digest(found, "sha256").hexdigest() != sha256:  # type: ignore[arg-type]  # it is a file
                raise ValueError("its content has another SHA-256")
            found.seek(0)
        except BaseException:
            found.close()
            raise
    return found
