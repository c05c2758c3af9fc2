"""What became of a journal write."""

from __future__ import annotations

import asyncio
import sqlite3

from penstock_chassis.errors import Unavailable


def nothing_to_write() -> asyncio.Future[list[int]]:
    """Returns the finished write of a step that the journal does not hold."""
    done: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
    done.set_result([])
    return done


def recorded(written: asyncio.Future[list[int]]) -> bool:
    """Returns whether a finished write is in the journal: it did not fail, and every row that it updates existed."""
    return not written.cancelled() and written.exception() is None and 0 not in written.result()


def failed(written: asyncio.Future[list[int]]) -> bool:
    """Returns whether a finished write failed; a row that it did not find is no failure."""
    return written.cancelled() or written.exception() is not None


async def durable(written: asyncio.Future[list[int]]) -> None:
    """Waits until a write is on disk. Cancelling the wait does not cancel the write.

    Raises Unavailable JOURNAL_FAILED if the write failed; then none of it took effect.
    """
    try:
        await asyncio.shield(written)
    except sqlite3.Error as error:
        raise Unavailable(
            "The service could not record this, so nothing was changed. Check its disk and its log, then try again.",
            reason="JOURNAL_FAILED",
            retry_after_s=2.0,
        ) from error
