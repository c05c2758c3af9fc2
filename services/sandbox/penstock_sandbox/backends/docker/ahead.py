"""A diff that is read to its end whether or not its caller takes it.

Purpose: the daemon keeps a container to itself for as long as somebody reads its files: nobody measures it, starts a
program in it or kills it meanwhile. How long a caller takes is the caller's choice, so what it has not taken yet waits
in a file.

Invariants: pieces come out in order, then the error that ended them, if one did; the file has no name, and is as large
as the diff at most; when the caller leaves, the reading has ended before that returns.
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
from penstock_sandbox.backends.diffs import Piece, in_thread

_RETRY_AFTER_S = 5.0


async def read_ahead(pieces: AsyncGenerator[Piece, None], folder: Path) -> AsyncGenerator[Piece, None]:
    """The same pieces, which are kept in a file in ``folder`` until they are taken.

    Raises what ``pieces`` does, and ResourceExhausted (DISK_LOW) where the disk of ``folder`` is full.
    """
    # Of chunks the lengths: what they hold is in the file.
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
            "the disk of the sandbox service has no room for the changes of a sandbox: free some, and try again",
            reason="DISK_LOW",
            retry_after_s=_RETRY_AFTER_S,
        ) from error
