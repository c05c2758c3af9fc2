"""A sandbox's diff on its way out: a tar in pieces, within bounds that are checked before anything is read.

Purpose: what a sandbox holds is its agent's choice: a file of many terabytes that are all holes, a million entries, a
file that grows while it is read. No such choice costs the service more memory than a few pieces, or time that nobody
waits for.

Invariants
- A member is announced with its size, and refused by it, before its first byte is read; of a file that grows the rest
  is left out, and one that becomes shorter ends the diff with an error.
- What is kept until the end (paths of deletions) is bounded as well.
- ``stepwise`` runs one short step at a time: who gives up waits for that step at most, and then nothing is open.
"""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from typing import Final, TypeVar

from penstock_chassis.errors import FailedPrecondition, ResourceExhausted

DEFAULT_BYTES: Final = 1 << 30
"""Most bytes of a diff's tar, where the caller names no bound."""
MAX_ENTRIES: Final = 500_000
"""Most entries and deletions of a diff."""
MAX_KEPT: Final = 32 << 20
"""Most bytes that are kept of names until the end of a diff, a name being counted with what holds it."""
NAME_COST: Final = 64
CHUNK: Final = 256 * 1024

Piece = bytes | list[str]
T = TypeVar("T")


def too_large(what: str) -> ResourceExhausted:
    """The error of a diff that is beyond a bound."""
    return ResourceExhausted(
        f"the diff is refused: {what}; name fewer directories in `below`, or raise `max_bytes`",
        reason="TREE_TOO_LARGE",
    )


class DiffWriter:
    """Writes one diff. Everything it answers is to be handed on in order, ``end`` last."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._left = max_bytes
        self._entries = 0
        self._kept = 0
        self._pending = bytearray()
        self._deleted: list[str] = []

    def add(self, member: tarfile.TarInfo, read: Callable[[int], bytes] | None = None) -> Iterator[bytes]:
        """Add a member, whose ``size`` bytes come from ``read``. Raises ResourceExhausted, FailedPrecondition."""
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

    def delete(self, path: str) -> None:
        """Note that an absolute path is gone. Raises ResourceExhausted."""
        self._count()
        self._kept += NAME_COST + len(path)
        if self._kept > MAX_KEPT:
            raise too_large(f"the paths that were deleted have more than {MAX_KEPT} bytes")
        self._deleted.append(path)

    def end(self) -> Iterator[Piece]:
        """The end of the tar, then what is gone, by name."""
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
    """The items of ``pieces``, each made by ``run`` in a thread; it ends where its caller does.

    ``run`` must not come back, cancelled or not, before its step has ended. An item that is empty is a sign that the
    work goes on, and is left out; the last may be.
    """
    try:
        while (piece := await run(lambda: next(pieces, None))) is not None:
            if piece != b"":
                yield piece
    finally:
        pieces.close()


async def in_thread(step: Callable[[], T]) -> T:
    """Run one short step; who is cancelled meanwhile waits for its end."""
    running = asyncio.ensure_future(asyncio.to_thread(step))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                continue  # who cancels twice waits as well
        if not running.cancelled():
            running.exception()  # nobody is there to hear of it
        raise
