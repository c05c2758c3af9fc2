"""The far end of a sandbox's one endpoint: how the service connects to it.

Purpose: programs in a sandbox speak plainly to their own loopback; where the way from the service to the upstream
leaves the machine, it is this end that speaks TLS.

Invariants: connected is what the policy names and nothing else; a connection that cannot be made, a certificate that
does not hold included, fails in bounded time.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from functools import lru_cache

from penstock_sandbox.model import NetworkPolicy

CHUNK = 64 * 1024
CONNECT_TIMEOUT_S = 10.0
_TLS = "tls:"

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(policy: NetworkPolicy) -> Streams:
    """Connect to a policy's upstream: ``unix:/path``, ``host:port`` or ``tls:host:port``.

    Raises OSError (a certificate that does not hold is one) or TimeoutError.
    """
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        upstream = policy.upstream
        if upstream.startswith("unix:"):
            return await asyncio.open_unix_connection(upstream.removeprefix("unix:"), limit=CHUNK)
        tls = _context(policy.upstream_ca) if upstream.startswith(_TLS) else None
        host, _, port = upstream.removeprefix(_TLS).rpartition(":")
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=CHUNK, ssl=tls)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return reader, writer


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection so that its peer sees a failure, not an end of file: what was acknowledged was not passed on."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@lru_cache(maxsize=4)
def _context(ca: str) -> ssl.SSLContext:
    """What is trusted; read once, since each connection of an agent would read it again."""
    return ssl.create_default_context(cafile=ca or None)
