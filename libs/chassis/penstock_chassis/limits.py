"""Limits of a gRPC server for callers without a token (streams, connections, metadata, handshake time), and how long a
caller with a token may leave a stream unread.

gRPC hands calls to Python one after another, from one queue for all connections of a server. A caller that fills it
makes all others wait, and past its bound gRPC ends everybody's calls with CANCELLED. A reset stream counts until it is
gone, so a bound on a connection's streams also bounds the cost of opening and resetting them ("rapid reset").
"""

import resource
from dataclasses import dataclass
from typing import Final

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""Largest message in both directions; the default of 4 MiB would kill a stream on one long prompt."""

MIN_PING_S: Final = 10
"""Least seconds between a client's pings; ours ping every 12 s (services) or 30 s."""

MAX_PENDING: Final = 20_000
"""Calls queued for Python; each holds some 16 KiB. Past it gRPC refuses calls of every connection."""

MIN_SHARE: Final = 64
"""Connections of each server at least, where several share the limit."""

PENDING_S: Final = 300
"""Seconds that a call may be queued for Python. After gRPC's own 30 s, calls that a busy service would still have
answered end as CANCELLED; their callers have deadlines of their own."""

MAX_METADATA_BYTES: Final = 16 * 1024
"""Maximum metadata of one call. Ours is a token, a request id and a trace context: less than 1 KiB."""

HANDSHAKE_S: Final = 10
"""Seconds from accept to the end of the TLS handshake and of the HTTP/2 settings."""

IDLE_S: Final = 300
"""Seconds without a call after which a connection is closed; a client's next call opens another."""

READER_S: Final = 300.0
"""Seconds that a stream's message may wait for its reader, which already has some MiB of unread messages buffered."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one server.

    Attributes:
        streams: concurrent calls on one connection. Our Python (`channel.OPTIONS`), Go and TypeScript clients open
            further connections by themselves; the further calls of other clients wait.
        connections: open at once; at most half of the process's file limit, so that a service whose connections are
            used up still works for those that are open. Any further one is closed as soon as it is accepted.
        reader_s: seconds that the caller of a stream may take to read a message.
    """

    streams: int = 256
    connections: int = 1_000
    reader_s: float = READER_S

    def queues(self, wanted: int) -> int:
        """Returns how many servers may share the limits: no more than leave MIN_SHARE connections to each, at least 1.

        The kernel assigns connections at random: small shares would be used up long before the whole.
        """
        return max(1, min(wanted, self._connections() // MIN_SHARE))

    def _connections(self) -> int:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return min(self.connections, max(1, files // 2))

    def options(self, queues: int = 1) -> tuple[tuple[str, int], ...]:
        """As gRPC channel arguments of each of so many servers, which together keep to the limits."""
        pending = MAX_PENDING // queues
        return (
            ("grpc.max_concurrent_streams", self.streams),
            ("grpc.max_allowed_incoming_connections", self._connections() // queues),
            ("grpc.server.max_pending_requests", pending),
            ("grpc.server.max_pending_requests_hard_limit", pending),
            ("grpc.server_max_unrequested_time_in_server", PENDING_S),
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_S * 1000),
            ("grpc.max_connection_idle_ms", IDLE_S * 1000),
        )
