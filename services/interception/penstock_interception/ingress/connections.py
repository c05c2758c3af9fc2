"""Connections of agents: how long one may take to say what it wants or to read what it is told, and how many may be.

Stands between the sockets and the HTTP server, which knows none of these limits. A connection is

- reading, from its opening, and from the first byte of each further request, until the request's head is complete;
- at work, until that request's handler is done;
- idle, until the next byte; the HTTP server ends what is idle for long.

Invariants: a connection that reads for longer than `header_s`, or whose head grows beyond `max_header_bytes`, is
ended; so is one that takes less than `PROGRESS_BYTES` of what is written to it in `write_s`. When all places are taken,
the oldest connection that has shown no credential gives way to a new one: who holds none cannot keep others out (R4).
Nothing here costs a task or a timer for each connection.

An answer that was written out is taken once its reader shows it: by the next request on the connection, or by ending it
without a reset, with every byte acknowledged (R105). Until then a repeat of its request belongs to it, unless its
connection stands and all of it that was written went out: who waits on it gets it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias, cast

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from penstock_chassis import sockets
from penstock_chassis.logging import Meter

_log = structlog.get_logger(__name__)

PROGRESS_BYTES: Final = 64 << 10
LINGER_S: Final = 1.0
BURST: Final = 20
INTERVAL_S: Final = 10.0
"""Lines of connections that were ended or not taken, for each reason, and seconds for each further one."""
IDLE_S: Final = 75.0
"""How long the HTTP server keeps a connection between two requests."""

_END_OF_HEAD: Final = b"\r\n\r\n"
_TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class TooSlow(Exception):
    """A request's body did not come in time."""


class BrokenBody(Exception):
    """A request's body is not what its head says: chunks or a compression that cannot be read."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Seconds, bytes and counts."""

    header_s: float = 10.0
    body_s: float = 60.0
    write_s: float = 30.0
    max_header_bytes: int = 64 << 10
    max_connections: int = 16_384
    max_per_peer: int = 8192
    max_per_rollout: int = 256


async def _read(request: web.Request) -> bytes:
    """As `Request.read`, but without its loop where the body is here as a whole."""
    if not request.content.is_eof():
        return await request.read()
    body = request.content.read_nowait()
    most = request.client_max_size
    if most and len(body) > most:
        raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=len(body))
    return body


class Connections:
    """All connections of the ingress. Belongs to one event loop; `close` when nothing is served any more."""

    def __init__(self, limits: ConnectionLimits | None = None) -> None:
        self.limits = limits or ConnectionLimits()
        self._loop = asyncio.get_running_loop()
        self._all: dict[asyncio.BaseProtocol, _Connection] = {}
        self._peers: dict[str, _Peer] = {}
        self._rollouts: dict[str, int] = {}
        # Without a credential so far, oldest first.
        self._unclaimed: dict[_Connection, None] = {}
        # In the order of their deadlines, since all of a kind have the same span of time.
        self._reading: dict[_Connection, float] = {}
        self._stuck: dict[_Connection, tuple[float, int]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._meters: dict[str, Meter] = {}
        # Whose answers are awaited, or were written out and not seen to be taken, by what they answer.
        self._answers: dict[str, _Connection] = {}

    def __len__(self) -> int:
        return len(self._all)

    def factory(self, inner: Callable[[], asyncio.Protocol]) -> Callable[[], asyncio.Protocol]:
        """What makes the protocol of an accepted socket, given what makes the HTTP server's."""
        return lambda: _Connection(self, inner())

    def tracked(self, handler: Handler) -> Handler:
        """A handler whose connection is at work until it returns."""

        async def handle(request: web.Request) -> web.StreamResponse:
            connection = self._all.get(request.protocol)
            if connection is None:
                return await handler(request)
            connection.works()
            try:
                return await handler(request)
            finally:
                # A body that nobody wanted to read is still to come before the next request.
                request.content.on_eof(connection.idles)

        return handle

    def claim(self, request: web.Request, rollout_id: str) -> bool:
        """The request showed this rollout's credential; False when the rollout has as many connections as it may."""
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

    async def body(self, request: web.Request, read: Callable[[web.Request], Awaitable[bytes]] = _read) -> bytes:
        """A request's body. Raises TooSlow, BrokenBody, and what `read` raises beside."""
        try:
            if request.content.is_eof():  # all of it came with the head: no deadline is needed
                return await read(request)
            async with asyncio.timeout(self.limits.body_s):
                return await read(request)
        except TimeoutError:
            raise TooSlow from None
        except (web.RequestPayloadError, HttpProcessingError):
            raise BrokenBody from None

    @contextlib.contextmanager
    def awaiting(self, request: web.Request, key: str) -> Iterator[None]:
        """During this, the request's connection waits for an answer, and then is written it."""
        connection = self._all.get(request.protocol)
        if connection is None:
            yield
            return
        connection.awaits = key
        self._answers[key] = connection
        try:
            yield
        finally:
            if connection.awaits == key:  # it was not answered
                connection.awaits = ""
                self.forget(key, connection)

    async def answered(
        self, request: web.Request, response: web.StreamResponse, key: str, on_taken: Callable[[], None]
    ) -> None:
        """An answer was written out as a whole. `on_taken` is called when it is seen that the other end took it.

        Where the connection ends with this answer, its reader is given a moment to end it first, which tells.
        """
        connection = self._all.get(request.protocol)
        if connection is None:
            return
        connection.settle(took=False)
        connection.awaits, connection.answer = "", (key, on_taken)
        self._answers[key] = connection
        if not response.keep_alive:
            connection.lost = self._loop.create_future()
            await asyncio.wait([connection.lost], timeout=LINGER_S)

    def is_taken(self, key: str) -> bool:
        """Whether who waits on an open connection gets an answer: nothing of it was written that did not go out."""
        connection = self._answers.get(key)
        return connection is not None and connection.gets_all()

    def forget(self, key: str, connection: _Connection) -> None:
        """Whether that answer was taken is known, or never will be; or it is awaited no more."""
        if self._answers.get(key) is connection:
            del self._answers[key]

    def close(self) -> None:
        """Ends the timer."""
        if self._timer is not None:
            self._timer.cancel()

    # For connections -------------------------------------------------------------------------------------------------

    def opened(self, connection: _Connection) -> bool:
        """A socket was accepted; False when there is no place for it."""
        mine = self._peers.get(connection.peer)
        if mine is not None and mine.count >= self.limits.max_per_peer and not _make_room(mine.unclaimed):
            self._tell(_log.warning, "too many connections", peer=connection.peer, limit=self.limits.max_per_peer)
            return False
        if len(self._all) >= self.limits.max_connections and not _make_room(self._unclaimed):
            self._tell(_log.warning, "too many connections", limit=self.limits.max_connections)
            return False
        peer = self._peers.setdefault(connection.peer, _Peer())
        peer.count += 1
        peer.unclaimed[connection] = self._unclaimed[connection] = None
        self._all[connection.inner] = connection
        self.reads(connection)
        return True

    def closed(self, connection: _Connection) -> None:
        """A connection is over. Idempotent."""
        if self._all.pop(connection.inner, None) is None:
            return
        self._reading.pop(connection, None)
        self._stuck.pop(connection, None)
        self._disown(connection)
        peer = self._peers[connection.peer]
        peer.unclaimed.pop(connection, None)
        self._unclaimed.pop(connection, None)
        peer.count -= 1
        if not peer.count:
            del self._peers[connection.peer]

    def reads(self, connection: _Connection) -> None:
        """A request's head begins, or is awaited on a new connection."""
        if connection not in self._reading:
            self._reading[connection] = self._loop.time() + self.limits.header_s
            self._wind(self._reading[connection])

    def has_read(self, connection: _Connection) -> None:
        """A request's head is complete."""
        self._reading.pop(connection, None)

    def is_stuck(self, connection: _Connection, unsent: int) -> None:
        """What was written does not go out."""
        due = self._loop.time() + self.limits.write_s
        self._stuck[connection] = (due, unsent)
        self._wind(due)

    def goes_on(self, connection: _Connection) -> None:
        """Everything that was written is gone."""
        self._stuck.pop(connection, None)

    def ended(self, why: str, peer: str, rollout_id: str) -> None:
        """A connection was ended from here."""
        self._tell(_log.info, "a connection was ended", why=why, peer=peer, rollout_id=rollout_id)

    # Private ---------------------------------------------------------------------------------------------------------

    def _tell(self, write: Callable[..., None], event: str, **facts: str | int) -> None:
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
    oldest.abort("made room for another")
    return True


class _Peer:
    """What one address has open."""

    __slots__ = ("count", "unclaimed")

    def __init__(self) -> None:
        self.count = 0
        self.unclaimed: dict[_Connection, None] = {}


class _Connection(asyncio.Protocol):
    """One socket: passes everything on to the HTTP server's protocol, and looks for where a request's head ends."""

    __slots__ = (
        "_connections",
        "_deaf",
        "_head",
        "_served",
        "_tail",
        "_transport",
        "answer",
        "at_work",
        "awaits",
        "inner",
        "lost",
        "peer",
        "rollout_id",
    )

    def __init__(self, connections: Connections, inner: asyncio.Protocol) -> None:
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._served = False
        # Nothing that comes is of interest any more.
        self._deaf = False
        # Of the head that is coming in: its bytes so far, and the last of them, since its end may come in two pieces.
        self._head = 0
        self._tail = b""
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
        # To be told of the first byte that does not go out, and not of the first 64 KiB.
        self._transport.set_write_buffer_limits(0)
        self._served = self._connections.opened(self)
        if self._served:
            self.inner.connection_made(transport)
        else:
            self._deaf = True
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.settle(took=exc is None and self._transport is not None and sockets.has_all(self._transport))
        self._transport = None
        if self.lost is not None and not self.lost.done():
            self.lost.set_result(None)
        self._connections.closed(self)
        if self._served:
            self.inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.answer is not None and self._transport is not None and sockets.has_all(self._transport):
            self.settle(took=True)
        if not self._deaf and (self.at_work or self._read_head(data)):
            self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        self._connections.is_stuck(self, self.unsent())
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self._connections.goes_on(self)
        self.inner.resume_writing()

    def works(self) -> None:
        """A request's head is complete."""
        self._head, self._tail, self.at_work = 0, b"", True
        self._connections.has_read(self)

    def idles(self) -> None:
        """A request is done with; what comes next is another one's head."""
        self.at_work = False

    def settle(self, *, took: bool) -> None:
        """What became of the last answer, if that is still open."""
        if self.answer is None:
            return
        key, on_taken = self.answer
        self.answer = None
        self._connections.forget(key, self)
        if took:
            on_taken()

    def gets_all(self) -> bool:
        """Whether what was written, or will be, goes to an end that is there."""
        if self._transport is None or (self.awaits and not sockets.is_open(self._transport)):
            return False
        return sockets.gets_all(self._transport)

    def unsent(self) -> int:
        """Bytes that were written and that the kernel has not taken."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def abort(self, why: str) -> None:
        """Ends the connection at once, whatever is still to be sent."""
        self._connections.ended(why, self.peer, self.rollout_id)
        self.settle(took=False)
        self._connections.closed(self)
        if self._transport is not None:
            self._transport.abort()

    def _refuse(self, answer: bytes) -> None:
        """The last answer, past the HTTP server; what still comes is passed over, so that it can be read."""
        self._deaf = True
        if self._transport is None:
            return
        self._transport.write(answer)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    def _read_head(self, data: bytes) -> bool:
        """Looks at a part of a head; False when there was too much of it, which is answered here."""
        if not self._head:
            data = data.lstrip(b"\r\n")  # RFC 9112, 2.2: empty lines before a request are nothing
            if not data:
                return True
            self._connections.reads(self)
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
