"""Recorded responses on disk: a table of them, and their bodies by content, once for all recordings (R141).

Invariants
- A response is in the table only once its whole body is in place; a recording's response never changes.
- Bodies, those that are being received, and rows hold at most ``max_bytes``, and one recording a quarter of it, with
  all that it is receiving: whole recordings are evicted, the least recently used first, but none that was used within
  `IN_USE_S`; if that is not enough, nothing more is recorded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from penstock_sandbox.egress.errors import Refusal

IN_USE_S: Final = 3600.0
ROW_BYTES: Final = 1024
"""What a row counts beside its headers, so that many empty bodies are bounded too."""
_SHARE: Final = 4
_SCHEMA = """
CREATE TABLE IF NOT EXISTS recordings (name TEXT PRIMARY KEY, used REAL NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS responses (
    recording TEXT NOT NULL, key TEXT NOT NULL, status INTEGER NOT NULL, reason TEXT NOT NULL, headers TEXT NOT NULL,
    digest TEXT NOT NULL, size INTEGER NOT NULL, PRIMARY KEY (recording, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_digest ON responses (digest);
"""


@dataclass(frozen=True, slots=True)
class Response:
    """A response without its body's framing. ``path`` is its body's file; without one, ``body`` is all of it.

    ``reason`` and ``headers`` have a character for each byte (latin-1): a head may be in any encoding. That to a HEAD
    has a Content-Length if upstream said one, which is that of a body that it does not have.
    """

    status: int
    reason: str
    headers: tuple[tuple[str, str], ...]
    size: int
    path: Path | None = None
    body: bytes = field(default=b"", repr=False)


def as_bytes(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    """Returns a response's headers as on the wire. Raises UnicodeEncodeError for a character that is no byte."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


class Part:
    """A body that is being received."""

    def __init__(self, folder: Path, grow: Callable[[int], None]) -> None:
        self._grow = grow
        descriptor, name = tempfile.mkstemp(dir=folder, prefix="part-")
        self.path = Path(name)
        self._file = os.fdopen(descriptor, "wb")
        self._digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> None:
        """Appends bytes. Raises Refusal (RECORDING_FULL) if there is no room for them."""
        self._grow(len(data))
        self.size += len(data)
        self._file.write(data)
        self._digest.update(data)

    @property
    def digest(self) -> str:
        """The SHA-256 of what was received, in hexadecimal digits."""
        return self._digest.hexdigest()

    def finish(self) -> str:
        """Returns the digest of the whole body, which is on disk. May be called again."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return self.digest

    def discard(self) -> None:
        """Removes it if it was not kept. Called once, at its end."""
        self._file.close()
        self.path.unlink(missing_ok=True)
        self._grow(-self.size)


class Store:
    """One process's store; ``folder`` is its alone."""

    def __init__(self, folder: Path, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._objects = folder / "objects"
        self._objects.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._max_bytes = max_bytes
        self._clock = clock
        self._rows = sqlite3.connect(folder / "recordings.sqlite", isolation_level=None)
        self._rows.execute("PRAGMA journal_mode=WAL")
        # A response that a crash takes is fetched again: no commit has to wait for the disk.
        self._rows.execute("PRAGMA synchronous=NORMAL")
        self._rows.executescript(_SCHEMA)
        known = {digest for (digest,) in self._rows.execute("SELECT DISTINCT digest FROM responses")}
        for file in self._objects.iterdir():
            if file.name not in known:
                file.unlink()
        self.bytes = sum(file.stat().st_size for file in self._objects.iterdir())
        self._pending: Counter[str] = Counter()
        """Bytes that are being received, by recording."""
        self._of: Counter[str] = Counter()
        """Bytes by recording, as if its bodies were its alone."""
        for name, size in self._rows.execute(
            "SELECT recording, SUM(size + length(headers) + ?) FROM responses GROUP BY recording", (ROW_BYTES,)
        ):
            self._of[name] = size
        self.bytes += sum(
            size for (size,) in self._rows.execute("SELECT length(headers) + ? FROM responses", (ROW_BYTES,))
        )

    def close(self) -> None:
        """Closes the table."""
        self._rows.close()

    def part(self, recording: str) -> Part:
        """Returns a new body to receive for a recording. What it holds counts for that at once."""
        return Part(self._objects, partial(self._receive, recording))

    def _receive(self, recording: str, size: int) -> None:
        if size > 0:
            self.make_room(recording, size)
        self._pending[recording] += size
        if not self._pending[recording]:
            del self._pending[recording]

    def find(self, recording: str, key: str) -> Response | None:
        """Returns a recorded response."""
        row = self._rows.execute(
            "SELECT status, reason, headers, digest, size FROM responses WHERE recording = ? AND key = ?",
            (recording, key),
        ).fetchone()
        if row is None:
            return None
        path = self._objects / row[3]
        if not path.exists():
            # The operator removed the file: as if it had not been recorded.
            return None
        self._rows.execute("UPDATE recordings SET used = ? WHERE name = ?", (self._clock(), recording))
        return Response(row[0], row[1], tuple((name, value) for name, value in json.loads(row[2])), row[4], path)

    def make_room(self, recording: str, size: int) -> None:
        """Evicts until ``size`` more bytes fit. Raises Refusal (RECORDING_FULL)."""
        if self._of[recording] + self._pending[recording] + size > self._max_bytes // _SHARE:
            raise Refusal("RECORDING_FULL", "this recording has no room for more responses")
        if self._fits(size):
            return
        idle = self._rows.execute(
            "SELECT name FROM recordings WHERE used < ? AND name != ? ORDER BY used",
            (self._clock() - IN_USE_S, recording),
        ).fetchall()
        for (name,) in idle:
            self._evict(name)
            if self._fits(size):
                return
        raise Refusal("RECORDING_FULL", "there is no room for more responses: all recordings are in use")

    def _fits(self, size: int) -> bool:
        return self.bytes + self._pending.total() + size <= self._max_bytes

    def keep(self, recording: str, key: str, response: Response, part: Part) -> Response:
        """Records a response whose body was received; returns it, or the one that was recorded before."""
        digest = part.finish()
        self.make_room(recording, self._row_bytes(response))  # the part counts already
        target = self._objects / digest
        if target.exists():
            part.path.unlink()
        else:
            part.path.replace(target)
            self.bytes += part.size
        return self._insert(recording, key, response, digest, part.size)

    def keep_known(self, recording: str, key: str, response: Response, digest: str, size: int) -> Response | None:
        """Records a response whose body is here for another one; None if it is not here. Raises as `make_room`."""
        if not (self._objects / digest).exists():
            return None
        self.make_room(recording, size + self._row_bytes(response))
        if not (self._objects / digest).exists():  # evicted for it
            return None
        return self._insert(recording, key, response, digest, size)

    @staticmethod
    def _row_bytes(response: Response) -> int:
        return len(json.dumps(response.headers)) + ROW_BYTES

    def _insert(self, recording: str, key: str, response: Response, digest: str, size: int) -> Response:
        held = self._rows.execute(
            "SELECT length(headers) + ?, size FROM responses WHERE recording = ? AND key = ?",
            (ROW_BYTES, recording, key),
        ).fetchone()
        if held is not None:
            self.bytes -= held[0]
            self._of[recording] -= sum(held)
        headers = json.dumps(response.headers)
        self.bytes += self._row_bytes(response)
        self._of[recording] += size + self._row_bytes(response)
        with self._transaction():
            self._rows.execute(
                "INSERT INTO recordings VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET used = excluded.used",
                (recording, self._clock()),
            )
            self._rows.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (recording, key) DO UPDATE SET "
                "status = excluded.status, reason = excluded.reason, headers = excluded.headers, "
                "digest = excluded.digest, size = excluded.size",
                (recording, key, response.status, response.reason, headers, digest, size),
            )
        return Response(response.status, response.reason, response.headers, size, self._objects / digest)

    def _evict(self, recording: str) -> None:
        digests = self._rows.execute(
            "SELECT DISTINCT digest FROM responses WHERE recording = ?", (recording,)
        ).fetchall()
        (rows,) = self._rows.execute(
            "SELECT COALESCE(SUM(length(headers) + ?), 0) FROM responses WHERE recording = ?", (ROW_BYTES, recording)
        ).fetchone()
        with self._transaction():
            self._rows.execute("DELETE FROM responses WHERE recording = ?", (recording,))
            self._rows.execute("DELETE FROM recordings WHERE name = ?", (recording,))
        self.bytes -= rows
        del self._of[recording]
        for (digest,) in digests:
            if self._rows.execute("SELECT 1 FROM responses WHERE digest = ? LIMIT 1", (digest,)).fetchone():
                continue
            path = self._objects / digest
            with contextlib.suppress(FileNotFoundError):  # the operator removed it
                self.bytes -= path.stat().st_size
                path.unlink()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._rows.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._rows.execute("ROLLBACK")
            raise
        self._rows.execute("COMMIT")
