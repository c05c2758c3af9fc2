"""Reads a diff to its end at full speed, however slowly its caller consumes it.

Purpose: while a container's files are read the daemon locks it: it cannot be measured, started in or killed. The caller
may be slow, so chunks that it has not consumed wait in a file.

Invariants: pieces come out in order, then the error that ended them, if any; the file has no name, and is at most as
large as the diff; when the caller leaves, this returns after the reading has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import tempfile
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from pathlib import Path

from penstock_chassis.errors import ResourceExhausted
from penstock_sandbox.domain.diffs import Piece, in_thread

_RETRY_AFTER_S = 5.0


async def read_ahead(pieces: AsyncGenerator[Piece, None], folder: Path) -> AsyncGenerator[Piece, None]:
    """Yields the same pieces, buffered in a file in ``folder``.

    Raises what ``pieces`` does, and ResourceExhausted (DISK_LOW) if the disk of ``folder`` is full.
    """
    # For chunks only the lengths: their content is in the file.
    ready: asyncio.Queue[int | list[str] | None] = asyncio.Queue()
    with tempfile.TemporaryFile(dir=folder) as kept:
        filling = asyncio.create_task(_fill(pieces, kept.fileno(), ready), name="diff-read-ahead")
        try:
            at = 0
            while (item := await ready.get()) is not None:
                if isinstance(item, int):
                    yield await in_thread(partial(os.pread, kept.fileno(), item, at))
                    at += item
                else:
                    yield item
            await filling
        finally:
            filling.cancel()
            while not filling.done():
                with contextlib.suppress(asyncio.CancelledError):  # its file is open until it ends
                    await asyncio.wait([filling])


async def _fill(pieces: AsyncGenerator[Piece, None], kept: int, ready: asyncio.Queue[int | list[str] | None]) -> None:
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                if isinstance(piece, list):
                    ready.put_nowait(piece)
                elif piece:
                    await in_thread(partial(_write, kept, piece))
                    ready.put_nowait(len(piece))
    finally:
        ready.put_nowait(None)


def _write(kept: int, chunk: bytes) -> None:
    try:
        while chunk:
            chunk = chunk[os.write(kept, chunk) :]
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ResourceExhausted(
            "the disk of the sandbox service has no room for the changes of a sandbox: free space, then try again",
            reason="DISK_LOW",
            retry_after_s=_RETRY_AFTER_S,
        ) from error
