"""Connects the service to the upstream of a sandbox's one endpoint.

Purpose: programs in a sandbox use plain connections to their own loopback; if the connection from the service to the
upstream leaves the machine, the service uses TLS.

Invariants: only the upstream of the policy is connected; a failed connection, including an invalid certificate, fails
in bounded time.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from functools import lru_cache

from penstock_chassis import sockets
from penstock_sandbox.domain.model import NetworkPolicy

CHUNK = 64 * 1024
CONNECT_TIMEOUT_S = 10.0
_TLS = "tls:"

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(policy: NetworkPolicy) -> Streams:
    """Connects to a policy's upstream: ``unix:/path``, ``host:port`` or ``tls:host:port``.

    Raises OSError (also for an invalid certificate) or TimeoutError.
    """
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        upstream = policy.upstream
        if upstream.startswith("unix:"):
            return await asyncio.open_unix_connection(upstream.removeprefix("unix:"), limit=CHUNK)
        tls = _context(policy.upstream_ca) if upstream.startswith(_TLS) else None
        host, _, port = upstream.removeprefix(_TLS).rpartition(":")
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=CHUNK, ssl=tls)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets.end_if_cut(writer.transport)
        return reader, writer


def reset(writer: asyncio.StreamWriter) -> None:
    """Resets a connection, so that its peer sees a failure, not an end of file: acknowledged bytes were lost."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@lru_cache(maxsize=4)
def _context(ca: str) -> ssl.SSLContext:
    """Returns the TLS context; cached, since every connection needs it."""
    return ssl.create_default_context(cafile=ca or None)
