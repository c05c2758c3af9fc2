"""Agents' connections: time limits for sending a request and reading an answer, and limits on their number.

Stands between the sockets and the HTTP server, which has no such limits. A connection is

- reading, from its opening, and from the first byte of each further request, until the request's head is complete;
- at work, until that request's handler is done;
- idle, until the next byte; the HTTP server closes a connection that idles too long.

Invariants: a connection is closed if it reads for longer than `header_s`, if its head exceeds `max_header_bytes`, or
if it accepts less than `PROGRESS_BYTES` of pending output in `write_s`. When the limit is reached, a new connection
replaces the oldest one without a valid credential: clients without credentials cannot lock others out (R4). No
connection has a task or timer of its own.

A fully written answer counts as delivered once the reader proves it: by the next request on the connection, or by
closing it without a reset after acknowledging every byte (R105; `sockets` lists what TCP cannot show). Until then a
repeat of the request may join the call, unless the connection is open and everything written to it was sent: then the
client that waits there gets the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias, cast

import structlog
from aiohttp import web

from penstock_chassis import sockets
from penstock_chassis.telemetry.logging import Meter

_log = structlog.get_logger(__name__)

PROGRESS_BYTES: Final = 64 << 10
PASSED_OVER_BYTES: Final = 128 << 20
"""Rest of an unwanted body that is read and dropped, so that its sender sees the answer; for `body_s`, at most 10 s."""
LINGER_S: Final = 1.0
BURST: Final = 20
INTERVAL_S: Final = 10.0
"""Log limit per reason for closed or refused connections: a burst of lines, then one per this many seconds."""
IDLE_S: Final = 75.0
"""How long the HTTP server keeps an idle connection."""
LISTEN_S: Final = 5.0
"""This long before an idle answered connection is closed, its write side is shut down to confirm delivery."""

_END_OF_HEAD: Final = b"\r\n\r\n"
_TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Seconds, bytes and counts."""

    header_s: float = 10.0
    body_s: float = 60.0
    write_s: float = 30.0
    idle_s: float = IDLE_S
    max_header_bytes: int = 64 << 10
    max_connections: int = 16_384
    max_per_peer: int = 8192
    max_per_rollout: int = 256


class Connections:
    """All connections of the ingress. Belongs to one event loop; call `close` after serving."""

    def __init__(self, limits: ConnectionLimits | None = None) -> None:
        self.limits = limits or ConnectionLimits()
        self._loop = asyncio.get_running_loop()
        self._all: dict[asyncio.BaseProtocol, _Connection] = {}
        self._peers: dict[str, _Peer] = {}
        self._rollouts: dict[str, int] = {}
        # Connections without a credential so far, oldest first.
        self._unclaimed: dict[_Connection, None] = {}
        # In deadline order: all entries have the same timeout.
        self._reading: dict[_Connection, float] = {}
        self._stuck: dict[_Connection, tuple[float, int]] = {}
        # Idle connections with an unconfirmed answer.
        self._answered: dict[_Connection, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._meters: dict[str, Meter] = {}
        # By call: the connection that waits for its answer, or whose delivery is unconfirmed.
        self._answers: dict[str, _Connection] = {}

    def __len__(self) -> int:
        return len(self._all)

    def factory(self, inner: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """Wraps the HTTP server's protocol factory for accepted sockets."""
        return lambda: _Connection(self, inner())

    def tracked(self, handler: Handler) -> Handler:
        """Wraps a handler so that its connection is at work until it returns."""

        async def handle(request: web.Request) -> web.StreamResponse:
            connection = self._all.get(request.protocol)
            if connection is None:
                return await handler(request)
            connection.works()
            try:
                response = await handler(request)
                if not request.content.is_eof():
                    connection.passes_over()
                return response
            finally:
                # An unread body still arrives before the next request.
                request.content.on_eof(connection.idles)

        return handle

    def claim(self, request: web.Request, rollout_id: str) -> bool:
        """Assigns the connection to the rollout of its credential; returns False at the rollout's limit."""
        connection = self._all.get(request.protocol)
        if connection is None or connection.rollout_id == rollout_id:
            return True
        count = self._rollouts.get(rollout_id, 0)
        if count >= self.limits.max_per_rollout:
            return False
        self._disown(connection)
        connection.rollout_id = rollout_id
        self._unclaimed.pop(connection, None)
        self._peers[connection.peer].unclaimed.pop(connection, None)
        self._rollouts[rollout_id] = count + 1
        return True

    @contextlib.contextmanager
    def awaiting(self, request: web.Request, key: str) -> Iterator[None]:
        """Marks the request's connection as the one that waits for this answer."""
        connection = self._all.get(request.protocol)
        if connection is None:
            yield
            return
        connection.awaits = key
        self._answers[key] = connection
        try:
            yield
        finally:
            if connection.awaits == key:  # no answer was written
                connection.awaits = ""
                self.forget(key, connection)

    async def answered(
        self, request: web.Request, response: web.StreamResponse, key: str, on_taken: Callable[[], None]
    ) -> None:
        """Tracks a fully written answer. `on_taken` is called once the client has confirmed to have received it.

        If this answer ends the connection, the write side is shut down at once, and the client gets a moment to close
        its side, which confirms the delivery.
        """
        connection = self._all.get(request.protocol)
        if connection is None:
            return
        connection.settle(took=False)
        connection.awaits, connection.answer = "", (key, on_taken)
        self._answers[key] = connection
        if response.keep_alive:
            self._answered[connection] = self._loop.time() + max(0.0, self.limits.idle_s - LISTEN_S)
            self._wind(self._answered[connection])
        else:
            connection.lost = self._loop.create_future()
            connection.ends()
            await asyncio.wait([connection.lost], timeout=LINGER_S)

    def is_taken(self, key: str) -> bool:
        """Returns whether an open connection will get this answer: everything written to it has been sent."""
        connection = self._answers.get(key)
        return connection is not None and connection.gets_all()

    def forget(self, key: str, connection: _Connection) -> None:
        """Stops tracking an answer: its delivery is decided, or no longer awaited."""
        self._answered.pop(connection, None)
        if self._answers.get(key) is connection:
            del self._answers[key]

    def close(self) -> None:
        """Cancels the timer."""
        if self._timer is not None:
            self._timer.cancel()

    # For connections -------------------------------------------------------------------------------------------------

    def opened(self, connection: _Connection) -> bool:
        """Registers an accepted socket; returns False if a limit leaves no room."""
        mine = self._peers.get(connection.peer)
        if mine is not None and mine.count >= self.limits.max_per_peer and not _make_room(mine.unclaimed):
            self._log_limited(
                _log.warning, "too many connections", peer=connection.peer, limit=self.limits.max_per_peer
            )
            return False
        if len(self._all) >= self.limits.max_connections and not _make_room(self._unclaimed):
            self._log_limited(_log.warning, "too many connections", limit=self.limits.max_connections)
            return False
        peer = self._peers.setdefault(connection.peer, _Peer())
        peer.count += 1
        peer.unclaimed[connection] = self._unclaimed[connection] = None
        self._all[connection.inner] = connection
        self.start_head_timeout(connection)
        return True

    def closed(self, connection: _Connection) -> None:
        """Unregisters a connection. Idempotent."""
        if self._all.pop(connection.inner, None) is None:
            return
        self._reading.pop(connection, None)
        self._stuck.pop(connection, None)
        self._answered.pop(connection, None)
        self._disown(connection)
        peer = self._peers[connection.peer]
        peer.unclaimed.pop(connection, None)
        self._unclaimed.pop(connection, None)
        peer.count -= 1
        if not peer.count:
            del self._peers[connection.peer]

    def start_head_timeout(self, connection: _Connection) -> None:
        if connection not in self._reading:
            self._reading[connection] = self._loop.time() + self.limits.header_s
            self._wind(self._reading[connection])

    def end_head_timeout(self, connection: _Connection) -> None:
        self._reading.pop(connection, None)

    def start_write_timeout(self, connection: _Connection, unsent: int) -> None:
        """Starts the timeout of unsent output."""
        due = self._loop.time() + self.limits.write_s
        self._stuck[connection] = (due, unsent)
        self._wind(due)

    def end_write_timeout(self, connection: _Connection) -> None:
        """Ends the timeout of unsent output: all was sent."""
        self._stuck.pop(connection, None)

    def log_aborted(self, why: str, peer: str, rollout_id: str) -> None:
        self._log_limited(_log.info, "a connection was ended", why=why, peer=peer, rollout_id=rollout_id)

    # Private ---------------------------------------------------------------------------------------------------------

    def _log_limited(self, write: Callable[..., None], event: str, **facts: str | int) -> None:
        meter = self._meters.setdefault(str(facts.get("why", event)), Meter(BURST, INTERVAL_S))
        if meter.allows(self._loop.time()):
            write(event, **facts, left_out=meter.left_out())

    def _disown(self, connection: _Connection) -> None:
        if connection.rollout_id:
            left = self._rollouts[connection.rollout_id] - 1
            if left:
                self._rollouts[connection.rollout_id] = left
            else:
                del self._rollouts[connection.rollout_id]
            connection.rollout_id = ""

    def _wind(self, due: float) -> None:
        if self._timer is not None and self._timer.when() > due:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._reading:
            connection, due = next(iter(self._reading.items()))
            if due > now:
                self._wind(due)
                break
            connection.abort("no request in time")
        while self._answered:
            connection, due = next(iter(self._answered.items()))
            if due > now:
                self._wind(due)
                break
            del self._answered[connection]
            if connection.answer is not None and not connection.at_work:
                connection.ends()
        while self._stuck:
            connection, (due, before) = next(iter(self._stuck.items()))
            if due > now:
                self._wind(due)
                break
            del self._stuck[connection]
            unsent = connection.unsent()
            if before - unsent < PROGRESS_BYTES:
                connection.abort("reads too slowly")
            else:
                self._stuck[connection] = (now + self.limits.write_s, unsent)


def _make_room(unclaimed: dict[_Connection, None]) -> bool:
    oldest = next(iter(unclaimed), None)
    if oldest is None:
        return False
    oldest.abort("closed for a newer connection")
    return True


class _Peer:
    """The open connections of one address."""

    __slots__ = ("count", "unclaimed")

    def __init__(self) -> None:
        self.count = 0
        self.unclaimed: dict[_Connection, None] = {}


class _Connection(asyncio.Protocol):
    """One socket: forwards everything to the HTTP server's protocol, and finds the end of each request's head."""

    __slots__ = (
        "_connections",
        "_has_ended",
        "_head",
        "_passed_over",
        "_served",
        "_tail",
        "_transport",
        "answer",
        "at_work",
        "awaits",
        "deaf",
        "inner",
        "lost",
        "peer",
        "rollout_id",
    )

    def __init__(self, connections: Connections, inner: asyncio.Protocol) -> None:
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._served = False
        # The client has shut down its sending side.
        self._has_ended = False
        # All further input is ignored.
        self.deaf = False
        # The current head: bytes so far, and the last few of them, since its end may be split over two reads.
        self._head = 0
        self._tail = b""
        # Bytes read of unwanted input; None while input is wanted.
        self._passed_over: int | None = None
        self.inner = inner
        self.peer = ""
        self.rollout_id = ""
        self.at_work = False
        self.awaits = ""
        self.answer: tuple[str, Callable[[], None]] | None = None
        self.lost: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        address = transport.get_extra_info("peername")
        self.peer = str(address[0]) if address else ""
        # Reports the first unsent byte, not only the first 64 KiB.
        self._transport.set_write_buffer_limits(0)
        sockets.end_if_cut(transport)
        self._served = self._connections.opened(self)
        if self._served:
            self.inner.connection_made(transport)
        else:
            self.deaf = True
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        # A close from this side (too idle, too slow, stopping) confirms nothing about the reader.
        whole = self._has_ended and exc is None and self._transport is not None
        self.settle(took=whole and sockets.ended_whole(cast("asyncio.Transport", self._transport)))
        self._transport = None
        if self.lost is not None and not self.lost.done():
            self.lost.set_result(None)
        self._connections.closed(self)
        if self._served:
            self.inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.answer is not None and self._transport is not None and sockets.has_all(self._transport):
            self.settle(took=True)
        if self._passed_over is not None:
            self._passed_over += len(data)
            if self._passed_over > PASSED_OVER_BYTES:
                self.abort("still sends after it was refused")
                return
        if not self.deaf and (self.at_work or self._read_head(data)):
            self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        self._has_ended = True
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        self._connections.start_write_timeout(self, self.unsent())
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self._connections.end_write_timeout(self)
        self.inner.resume_writing()

    def works(self) -> None:
        """A request's head is complete."""
        self._head, self._tail, self.at_work = 0, b"", True
        self._connections.end_head_timeout(self)

    def idles(self) -> None:
        """A request is done; the next input is another request's head."""
        self.at_work, self._passed_over = False, None

    def passes_over(self) -> None:
        """Drops the rest of a body that is no longer wanted, up to a limit."""
        self._passed_over = 0

    def ends(self) -> None:
        """Shuts down the write side, so that a client that reads until the end of the connection need not wait."""
        if self._transport is not None and self._transport.can_write_eof():
            # A request that arrives now is treated as arriving after the close: its client retries on another
            # connection.
            self.deaf, self._passed_over = True, 0
            self._transport.write_eof()

    def settle(self, *, took: bool) -> None:
        """Decides the delivery of the last answer, if it is still open."""
        if self.answer is None:
            return
        key, on_taken = self.answer
        self.answer = None
        self._connections.forget(key, self)
        if took:
            on_taken()

    def gets_all(self) -> bool:
        """Returns whether the client is there to receive everything written, or still to be written."""
        if self._transport is None or (self.awaits and not sockets.is_open(self._transport)):
            return False
        return sockets.gets_all(self._transport) or (self._has_ended and sockets.ended_whole(self._transport))

    def unsent(self) -> int:
        """Returns the bytes written but not yet accepted by the kernel."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def abort(self, why: str) -> None:
        """Closes the connection immediately, dropping unsent output."""
        self._connections.log_aborted(why, self.peer, self.rollout_id)
        self.settle(took=False)
        self._connections.closed(self)
        if self._transport is not None:
            self._transport.abort()

    def _refuse(self, answer: bytes) -> None:
        """Writes a last answer past the HTTP server; drops further input, so that the client can read it."""
        self.deaf, self._passed_over = True, 0
        if self._transport is None:
            return
        self._transport.write(answer)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    def _read_head(self, data: bytes) -> bool:
        """Scans a part of a head; if the head is too large, refuses the request and returns False."""
        if not self._head:
            data = data.lstrip(b"\r\n")  # RFC 9112, 2.2: ignores empty lines before a request
            if not data:
                return True
            self._connections.start_head_timeout(self)
        joined = self._tail + data
        end = joined.find(_END_OF_HEAD)
        self._head += len(data) if end < 0 else end
        if self._head > self._connections.limits.max_header_bytes:
            self._refuse(_TOO_LARGE)
            return False
        if end >= 0:
            self.works()
        else:
            self._tail = joined[1 - len(_END_OF_HEAD) :]
        return True
