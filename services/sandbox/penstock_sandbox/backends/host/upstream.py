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
from pathlib import Path

from penstock_chassis import sockets
from penstock_sandbox.domain.model import NetworkPolicy

CHUNK = 64 * 1024
CONNECT_TIMEOUT_S = 10.0
_TLS = "tls:"

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(policy: NetworkPolicy) -> Streams:
    """Connects to a policy's proxy, or to its upstream.

    That is ``unix:/path``, ``host:port``, ``tls:host:port`` or ``tls:name@host:port``.

    With a name, the certificate must be that one's, not the host's: a service whose replicas share one certificate.

    Raises OSError (also for an invalid certificate) or TimeoutError.
    """
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        if policy.proxy:
            with sockets.short_path(Path(policy.proxy)) as path:
                reader, writer = await asyncio.open_unix_connection(path, limit=CHUNK)
            writer.write(policy.proxy_greeting)
            return reader, writer
        upstream = policy.upstream
        if upstream.startswith("unix:"):
            return await asyncio.open_unix_connection(upstream.removeprefix("unix:"), limit=CHUNK)
        tls = _context(policy.upstream_ca) if upstream.startswith(_TLS) else None
        place, _, port = upstream.removeprefix(_TLS).rpartition(":")
        name, _, host = place.rpartition("@")
        reader, writer = await asyncio.open_connection(
            host.strip("[]"), int(port), limit=CHUNK, ssl=tls, server_hostname=name or None
        )
        connection = _socket(writer)
        if connection is None:
            raise ConnectionResetError("the upstream ended the connection at once")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets.end_if_cut(writer.transport)
        return reader, writer


def reset(writer: asyncio.StreamWriter) -> None:
    """Resets a connection, so that its peer sees a failure, not an end of file: acknowledged bytes were lost."""
    connection = _socket(writer)
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _socket(writer: asyncio.StreamWriter) -> socket.socket | None:
    """Returns the connection's socket; None once it is lost, which a TLS transport forgets and others have closed."""
    connection: socket.socket | None = writer.get_extra_info("socket")
    return None if connection is None or connection.fileno() < 0 else connection


@lru_cache(maxsize=4)
def _context(ca: str) -> ssl.SSLContext:
    """Returns the TLS context; cached, since every connection needs it."""
    return ssl.create_default_context(cafile=ca or None)
