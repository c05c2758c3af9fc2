"""A process's output, kept so that it can be read again from any offset.

Invariants: bytes [0, limit) of a stream are kept, later ones are counted, and the last ``tail`` of those are kept
separately for results that show both ends. Up to ``_IN_MEMORY`` bytes, both ends together, stay in memory; larger
outputs move to a spool file, the tail as a ring after the beginning, so memory is bounded for any amount of output and
any number of remembered processes. Appending happens on the event loop and is a page-cache write. Where the spool
cannot be written, as on a full disk, the limit becomes what is kept by then, and there is no tail from then on.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path
from typing import Final

import structlog

from penstock_sandbox.domain.backend import ProcessSink, RawExit
from penstock_sandbox.domain.model import Stream

_MOST_COLLECTED: Final = 1 << 20

_IN_MEMORY = 64 * 1024

_log = structlog.get_logger(__name__)


class Output:
    """One stream of one process. It spills into a file in ``spool``, created only then."""

    def __init__(self, spool: Path, limit: int, tail: int = 0) -> None:
        self._spool = spool
        self._limit = limit
        self._tail_limit = tail
        self._memory = bytearray()
        self._file: int | None = None
        self._tail = bytearray()
        self.total = 0
        """Bytes that the process wrote, kept or not."""

    @property
    def kept(self) -> int:
        """Number of readable bytes, from offset 0."""
        return min(self.total, self._limit)

    @property
    def truncated(self) -> bool:
        """Whether bytes were discarded."""
        return self.total - self._limit > self._tail_limit

    def append(self, data: bytes) -> None:
        """Appends output. What the spool cannot take is discarded, with all that follows."""
        try:
            self._store(data)
        except OSError as error:
            # Cut for good: what came after a missing piece would stand at the wrong offset.
            self._limit = min(self.total, self._limit)
            self._tail_limit = 0
            self._tail.clear()
            _log.warning("a process's output is cut off: its spool cannot be written", error=repr(error))
        self.total += len(data)

    def read(self, offset: int, length: int) -> bytes:
        """Returns at most ``length`` kept bytes from ``offset``; empty at the end of the kept bytes."""
        if self._file is None:
            return bytes(self._memory[offset : offset + length])
        return os.pread(self._file, max(0, min(length, self.kept - offset)), offset)

    @property
    def has_tail(self) -> bool:
        """Whether the last bytes beyond the limit are kept separately."""
        return self._tail_limit > 0

    def tail(self) -> bytes:
        """Returns the last bytes beyond the limit, as far as they are kept."""
        if self._file is None:
            return bytes(self._tail)
        beyond = max(0, self.total - self._limit)
        length = min(beyond, self._tail_limit)
        if not length:
            return b""
        at = (beyond - length) % self._tail_limit
        first = os.pread(self._file, min(length, self._tail_limit - at), self._limit + at)
        return first + os.pread(self._file, length - len(first), self._limit)

    def ends(self) -> bytes:
        """Returns all kept bytes, then the last bytes beyond the limit."""
        return self.read(0, self.kept) + self.tail()

    def close(self) -> None:
        """Discards everything; the output cannot be read any more."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._memory.clear()
        self._tail.clear()
        self.total = 0

    def _store(self, data: bytes) -> None:
        head = data[: max(0, self._limit - self.total)]
        rest = data[len(head) :] if self._tail_limit else b""
        if self._file is None:
            tail = min(len(self._tail) + len(rest), self._tail_limit)
            if len(self._memory) + len(head) + tail > _IN_MEMORY:
                self._spill()
        if self._file is None:
            self._memory += head
            self._tail += rest
            del self._tail[: max(0, len(self._tail) - self._tail_limit)]
        else:
            _write_all(self._file, head, self.total)
            self._write_tail(self._file, rest, max(0, self.total - self._limit))

    def _spill(self) -> None:
        path = self._spool / secrets.token_hex(8)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Unlinked, so that the space is freed however this service ends.
            path.unlink()
            _write_all(file, bytes(self._memory), 0)
            self._write_tail(file, bytes(self._tail), max(0, self.total - self._limit) - len(self._tail))
        except BaseException:
            os.close(file)
            raise
        self._file = file
        self._memory.clear()
        self._tail.clear()

    def _write_tail(self, file: int, data: bytes, position: int) -> None:
        """Writes into the tail's ring; ``position`` counts from the limit."""
        kept = data[max(0, len(data) - self._tail_limit) :]
        if not kept:
            return
        at = (position + len(data) - len(kept)) % self._tail_limit
        first = kept[: self._tail_limit - at]
        _write_all(file, first, self._limit + at)
        _write_all(file, kept[len(first) :], self._limit)


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written


class Collected(ProcessSink):
    """The combined output of one process, a mebibyte at most, since an image's programs may write any amount.

    `closed_output` is set at the end of the output; `ended` is None when the process was lost.
    """

    def __init__(self) -> None:
        self._text = bytearray()
        self.ended: asyncio.Future[RawExit | None] = asyncio.get_running_loop().create_future()
        self.closed_output = asyncio.Event()

    @property
    def text(self) -> bytes:
        """Returns its output from the beginning."""
        return bytes(self._text)

    def output(self, stream: Stream, data: bytes) -> None:
        self._text += data[: _MOST_COLLECTED - len(self._text)]

    def closed(self, stream: Stream) -> None:
        if stream is Stream.STDOUT:
            self.closed_output.set()

    def exited(self, exit: RawExit) -> None:  # noqa: A002
        self.ended.set_result(exit)

    def lost(self, reason: str = "") -> None:
        self.closed_output.set()
        if not self.ended.done():
            self.ended.set_result(None)
