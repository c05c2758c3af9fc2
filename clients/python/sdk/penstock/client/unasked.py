"""A model that nobody asks: what a rollout names for its model where its caller answers every call itself.

A rollout without a model is refused, and a real one lends its context and its tokenizer to what it never answers. This
listens on loopback for the one question that the gate has, whether somebody is there.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from penstock.client.tasks import Upstream

NO_UNASKED: Final = frozenset({"UPSTREAM_UNREACHABLE", "UPSTREAM_NOT_ALLOWED"})
"""Reasons why a rollout cannot have it: the gate is on another machine, or the operator allows no such endpoint."""
_MODEL: Final = "scripted"
_BODY: Final = b'{"object":"list","data":[]}'
_ANSWER: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
    % (len(_BODY), _BODY)
)
_HEAD_BYTES: Final = 64 << 10


@asynccontextmanager
async def unasked_model() -> AsyncIterator[Upstream]:
    """Listens for as long as the block; the source to give to rollouts of a gate on this machine."""
    server = await asyncio.start_server(_answer, "127.0.0.1", 0, limit=_HEAD_BYTES)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield Upstream(base_url=f"http://127.0.0.1:{port}/v1", model=_MODEL)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(_ANSWER)
        await writer.drain()
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        pass  # whoever asks so is not the gate
    finally:
        writer.close()
