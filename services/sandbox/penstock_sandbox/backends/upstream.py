"""The far end of a sandbox's one endpoint: how the service connects to it, and carries one direction of a connection.

Invariants: connected is what the policy names and nothing else; a connection that cannot be made fails in bounded time.
"""

from __future__ import annotations

import asyncio
import socket

CHUNK = 64 * 1024
CONNECT_TIMEOUT_S = 10.0

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(upstream: str) -> Streams:
    """Connect to ``unix:/path`` or ``host:port``. Raises OSError or TimeoutError."""
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        if upstream.startswith("unix:"):
            return await asyncio.open_unix_connection(upstream.removeprefix("unix:"), limit=CHUNK)
        host, _, port = upstream.rpartition(":")
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=CHUNK)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return reader, writer
