"""Reads request bodies, and classifies those that cannot be read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from penstock_interception.ingress.encodings import NotWhole, encoding_of, unfolded


class TooSlow(Exception):
    """A request's body did not arrive in time."""


class BrokenBody(Exception):
    """A request's body does not match its headers: its chunks or compression are invalid."""


async def whole(request: web.Request) -> bytes:
    """As `Request.read`, but without its loop if the whole body has arrived."""
    if not request.content.is_eof():
        return await request.read()
    body = request.content.read_nowait()
    most = request.client_max_size
    if most and len(body) > most:
        raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=len(body))
    return body


async def in_time(
    request: web.Request,
    within_s: float,
    read: Callable[[web.Request], Awaitable[bytes]] = whole,
    *,
    most: int | None = None,
) -> bytes:
    """Returns a request's body, decompressed.

    Raises EncodingRefused before anything is read; TooSlow; BrokenBody; HTTPRequestEntityTooLarge if the decompressed
    body exceeds `most` bytes or the application's limit; and what `read` raises.
    """
    encoding = encoding_of(request.headers)
    try:
        if request.content.is_eof():  # the whole body has arrived: no timeout is needed
            body = await read(request)
        else:
            async with asyncio.timeout(within_s):
                body = await read(request)
        return await unfolded(body, encoding, most or request.client_max_size) if encoding else body
    except TimeoutError:
        raise TooSlow from None
    except (web.RequestPayloadError, HttpProcessingError, NotWhole):
        raise BrokenBody from None
