"""Decompresses request bodies, gzip and deflate only, as a whole and up to a limit; other encodings are refused.

The result does not depend on installed packages. An HTTP server that decompresses by itself accepts more encodings when
their packages are installed, does so before authentication, and accepts truncated bodies as complete.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import Final

from aiohttp import web
from multidict import CIMultiDictProxy

ACCEPTED: Final = "gzip, deflate"
_SAME: Final = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate", "identity": "", "": ""}
_MOST_MEMBERS: Final = 16
"""Members of one gzip body: every client sends one; each further one copies the remaining input."""
_MOST_HERE: Final = 1 << 10
"""Compressed bytes that are expanded on the event loop: they expand to at most 1 MiB."""
_SHOWN: Final = 64


class EncodingRefused(Exception):
    """An unsupported encoding; `str()` is the message for the client."""


class NotWhole(Exception):
    """A body that is incomplete or does not match its encoding."""


def encoding_of(headers: CIMultiDictProxy[str]) -> str:
    """Returns a request body's encoding: "gzip", "deflate" or "" for none. Raises EncodingRefused, which names it."""
    transfer = _named(headers, "transfer-encoding")
    if transfer not in ("", "chunked"):
        raise _refused("Transfer-Encoding", transfer)
    name = _named(headers, "content-encoding")
    encoding = _SAME.get(name)
    if encoding is None:
        raise _refused("Content-Encoding", name)
    return encoding


async def unfolded(body: bytes, encoding: str, most: int) -> bytes:
    """Decompresses a body. Raises NotWhole, and HTTPRequestEntityTooLarge beyond `most` bytes."""
    if not encoding or not body:
        return body
    if len(body) <= _MOST_HERE:
        return _unfold(body, encoding, most)
    return await asyncio.to_thread(_unfold, body, encoding, most)


def _unfold(body: bytes, encoding: str, most: int) -> bytes:
    if encoding == "gzip":
        bits = 16 + zlib.MAX_WBITS
    else:
        # RFC 9110 means the zlib format; some clients send raw deflate, and every server accepts that.
        framed = len(body) > 1 and body[0] & 0xF == 8 and int.from_bytes(body[:2], "big") % 31 == 0
        bits = zlib.MAX_WBITS if framed else -zlib.MAX_WBITS
    found: list[bytes] = []
    room = most
    for _ in range(_MOST_MEMBERS if encoding == "gzip" else 1):
        member = zlib.decompressobj(bits)
        try:
            data = member.decompress(body, room + 1)
        except zlib.error:
            raise NotWhole from None
        if len(data) > room:
            raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=most - room + len(data))
        if not member.eof:
            raise NotWhole
        found.append(data)
        room -= len(data)
        body = member.unused_data
        if not body:
            return b"".join(found)
    raise NotWhole


def _named(headers: CIMultiDictProxy[str], name: str) -> str:
    """Returns a header's values in lower case, joined."""
    return ", ".join(
        part.strip() for value in headers.getall(name, ()) for part in value.lower().split(",") if part.strip()
    )


def _refused(header: str, named: str) -> EncodingRefused:
    shown = named[:_SHOWN]
    return EncodingRefused(f"{header}: {shown} is not supported. Send the body without it, or in one of: {ACCEPTED}.")
