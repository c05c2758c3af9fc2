"""Writes to slow browsers: the connection of one that stops reading is closed.

Unread data stays in memory until the browser reads it, and its producer waits as well: a call to a service, a slot of
the limit on open calls.
"""

import asyncio
from collections.abc import Awaitable
from typing import Final

from aiohttp import web

PROGRESS_BYTES: Final = 64 << 10


async def taken(request: web.Request, written: Awaitable[None], within_s: float) -> None:
    """Waits for a write to complete.

    Args:
        request: whose answer it is a part of.
        written: the write, which waits while too much earlier data is unread.
        within_s: seconds in which `PROGRESS_BYTES` of it must be sent, or all.

    Raises:
        ConnectionError: less was sent, and the connection is closed; or the browser disconnected.
    """
    write = asyncio.ensure_future(written)
    try:
        before = _left(request)
        while not (await asyncio.wait([write], timeout=within_s))[0]:
            left = _left(request)
            if before - left < PROGRESS_BYTES:
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionResetError("the browser does not read the answer")
            before = left
        await write
    finally:
        write.cancel()


def _left(request: web.Request) -> int:
    """Bytes that were written and that the kernel has not accepted."""
    transport = request.transport
    return transport.get_write_buffer_size() if isinstance(transport, asyncio.WriteTransport) else 0
