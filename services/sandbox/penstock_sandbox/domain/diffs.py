"""Writes a sandbox's diff as a tar stream, within limits that are checked before anything is read.

Purpose: an agent controls what its sandbox holds: a sparse file of many terabytes, a million entries, a file that
grows while it is read. None of these may cost the service more memory than a few chunks, or time after the caller has
left.

Invariants
- A member's size is checked and announced before its first byte is read. Bytes that a file grows by are left out; a
  file that shrinks ends the diff with an error.
- The paths of deletions, which are kept until the end, are limited as well.
- ``stepwise`` runs one short step at a time: cancelling waits for at most that step and leaves nothing open.
"""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from typing import Final, TypeVar

from penstock_chassis.errors import FailedPrecondition, ResourceExhausted

DEFAULT_BYTES: Final = 1 << 30
"""Maximum size of a diff's tar in bytes, unless the caller sets a limit."""
MAX_ENTRIES: Final = 500_000
"""Maximum number of entries and deletions of a diff."""
MAX_KEPT: Final = 32 << 20
"""Maximum bytes of names kept until the end of a diff, including the overhead of each name."""
NAME_COST: Final = 64
CHUNK: Final = 256 * 1024

Piece = bytes | list[str]
T = TypeVar("T")


def too_large(what: str) -> ResourceExhausted:
    """Returns the error for a diff over a limit."""
    return ResourceExhausted(
        f"the diff is refused: {what}; list fewer directories in `below`, or raise `max_bytes`",
        reason="TREE_TOO_LARGE",
    )


class DiffWriter:
    """Writes one diff. The caller must send on all returned pieces in order, those of ``end`` last."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._left = max_bytes
        self._entries = 0
        self._kept = 0
        self._pending = bytearray()
        self._deleted: list[str] = []

    def add(self, member: tarfile.TarInfo, read: Callable[[int], bytes] | None = None) -> Iterator[bytes]:
        """Adds a member, whose ``size`` bytes ``read`` returns. Raises ResourceExhausted, FailedPrecondition."""
        self._count()
        header = member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        size = member.size if member.isreg() else 0
        padding = -size % tarfile.BLOCKSIZE
        self._left -= len(header) + size + padding
        if self._left < 0:
            raise too_large(f"it has more than {self._max_bytes} bytes, /{member.name} has {size}")
        self._pending += header
        while size > 0:
            assert read is not None
            data = read(min(CHUNK, size))
            if not data:
                raise FailedPrecondition(
                    f"/{member.name} became shorter while it was read: pause the sandbox, or try again",
                    reason="FILE_REPLACED",
                )
            size -= len(data)
            self._pending += data
            yield from self._full()
        self._pending += bytes(padding)
        yield from self._full()

    def add_other(self, name: str) -> Iterator[bytes]:
        """Adds a pipe, socket or device, as a pipe: tar has no sockets. Raises ResourceExhausted."""
        member = tarfile.TarInfo(name)
        member.type = tarfile.FIFOTYPE
        return self.add(member)

    def delete(self, path: str) -> None:
        """Records that an absolute path was deleted. Raises ResourceExhausted."""
        self._count()
        self._kept += NAME_COST + len(path)
        if self._kept > MAX_KEPT:
            raise too_large(f"the paths that were deleted have more than {MAX_KEPT} bytes")
        self._deleted.append(path)

    def end(self) -> Iterator[Piece]:
        """Yields the end of the tar, then the deleted paths, sorted by name."""
        self._pending += bytes(2 * tarfile.BLOCKSIZE)
        yield from self._full()
        yield bytes(self._pending)
        yield sorted(set(self._deleted))

    def _count(self) -> None:
        self._entries += 1
        if self._entries > MAX_ENTRIES:
            raise too_large(f"it has more than {MAX_ENTRIES} entries")

    def _full(self) -> Iterator[bytes]:
        while len(self._pending) >= CHUNK:
            piece = bytes(self._pending[:CHUNK])
            del self._pending[:CHUNK]
            yield piece


async def stepwise(
    pieces: Generator[T, None, None], run: Callable[[Callable[[], T | None]], Awaitable[T | None]]
) -> AsyncGenerator[T, None]:
    """Yields the items of ``pieces``, each computed by ``run`` in a thread; closes ``pieces`` when the caller stops.

    ``run`` must not return, even if cancelled, before its step has ended. ``b""`` means that the work goes on and is
    skipped; the last item, a list, may be empty.
    """
    try:
        while (piece := await run(lambda: next(pieces, None))) is not None:
            if piece != b"":
                yield piece
    finally:
        pieces.close()


async def in_thread(step: Callable[[], T]) -> T:
    """Runs one short step in a thread; a cancelled caller still waits for its end."""
    running = asyncio.ensure_future(asyncio.to_thread(step))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                continue  # repeated cancellation waits as well
        if not running.cancelled():
            running.exception()  # retrieved: no caller is left to get it
        raise
