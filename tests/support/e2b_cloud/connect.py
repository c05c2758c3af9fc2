"""Connect's wire in JSON, server side: enveloped frames, end-of-stream frames, and typed errors."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import StreamReader, web

_END = 2
_STATUS = {
    "invalid_argument": 400,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "unauthenticated": 401,
    "unimplemented": 501,
    "deadline_exceeded": 504,
    "unavailable": 503,
}


class ConnectError(Exception):
    """An error with one of Connect's codes."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def body(self) -> dict[str, str]:
        """As it stands in a response."""
        return {"code": self.code, "message": str(self)}


def frame(message: Any, flags: int = 0) -> bytes:
    """One enveloped message."""
    data = json.dumps(message).encode()
    return struct.pack(">BI", flags, len(data)) + data


def end(error: ConnectError | None = None) -> bytes:
    """The frame that ends a stream."""
    return frame({"error": error.body()} if error is not None else {}, _END)


async def frames(content: StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The messages of a request's body."""
    while True:
        head = await content.read(1)
        if not head:
            return
        head += await content.readexactly(4)
        flags, length = struct.unpack(">BI", head)
        data = await content.readexactly(length)
        if flags & _END:
            return
        yield json.loads(data)


def failed(error: ConnectError) -> web.Response:
    """The response of a unary call that failed."""
    return web.json_response(error.body(), status=_STATUS.get(error.code, 500))
