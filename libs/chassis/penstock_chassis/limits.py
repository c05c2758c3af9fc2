"""What one who has no token may take of a gRPC server: streams, connections, metadata, and time to show himself.

gRPC hands calls to Python one after another, the callers of all connections in one queue. Who may fill it makes
everybody wait, and past its bound gRPC ends everybody's calls with CANCELLED. A stream that was taken back counts until
it is gone, so a bound on a connection's streams also bounds what opening and resetting them costs ("rapid reset").
"""

import resource
from dataclasses import dataclass
from typing import Final

MAX_PENDING: Final = 20_000
"""Calls that wait for Python; each holds some 16 KiB. Past it gRPC refuses calls of every connection."""

MAX_METADATA_BYTES: Final = 16 * 1024
"""Largest metadata of one call. Ours is a token, a request id and a trace context: less than 1 KiB."""

HANDSHAKE_S: Final = 10
"""Seconds from being accepted to the end of the TLS handshake and of the HTTP/2 settings."""

IDLE_S: Final = 300
"""Seconds without a call after which a connection is closed; a client's next call opens another."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one server.

    Attributes:
        streams: calls at once on one connection. Our Python (`channel.OPTIONS`), Go and TypeScript clients open
            further connections by themselves; another one's further calls wait.
        connections: open at once; at most half of what the process may open files, so that a service whose
            connections are all taken still works for those who have one. One more is closed as soon as it is accepted.
    """

    streams: int = 256
    connections: int = 1_000

    def options(self) -> tuple[tuple[str, int], ...]:
        """As gRPC has them."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            ("grpc.max_concurrent_streams", self.streams),
            ("grpc.max_allowed_incoming_connections", min(self.connections, max(1, files // 2))),
            ("grpc.server.max_pending_requests", MAX_PENDING),
            ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_S * 1000),
            ("grpc.max_connection_idle_ms", IDLE_S * 1000),
        )
