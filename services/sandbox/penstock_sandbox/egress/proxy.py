"""One connection of a sandbox to the proxy: greeting, HTTP or CONNECT and TLS, and requests one after another (R141).

Invariants: parsing is h11's, and what it or `requests` refuses ends the connection; each step has a deadline; a body of
a response is read from disk as the sandbox reads it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import h11
import structlog

from penstock_sandbox.egress.authority import Authority
from penstock_sandbox.egress.errors import Misused, Refusal
from penstock_sandbox.egress.fetching import Fetcher
from penstock_sandbox.egress.greeting import Greeting, received
from penstock_sandbox.egress.requests import Origin, Request, checked, connected
from penstock_sandbox.egress.store import Response, as_bytes

_CHUNK: Final = 64 * 1024
_MAX_HEADER_BYTES: Final = 64 * 1024
MAX_BODY_BYTES: Final = 1024 * 1024
"""What a git client asks for in one request is shorter, however long its history."""
_BODIES_OF_ONE: Final = 8 * MAX_BODY_BYTES
_BODIES: Final = 128 * MAX_BODY_BYTES
_LINGER_S: Final = 2.0
_IDLE_S: Final = 120.0
_REQUEST_S: Final = 60.0
_WRITE_S: Final = 300.0
"""A part of a response that no program reads for so long ends the connection."""

_log = structlog.get_logger(__name__)


class Bodies:
    """Counts the bytes of requests' bodies in memory: those of one sandbox, and of all."""

    def __init__(self, most_of_one: int = _BODIES_OF_ONE, most: int = _BODIES) -> None:
        self._most_of_one = most_of_one
        self._most = most
        self._by_sandbox: Counter[str] = Counter()

    @contextlib.contextmanager
    def of(self, sandbox_id: str) -> Iterator[Callable[[int], None]]:
        """Yields what a request calls with each part's size; all of it is free at the end.

        The call raises Refusal (PROXY_BUSY).
        """
        held = 0

        def grown(size: int) -> None:
            nonlocal held
            if self._by_sandbox[sandbox_id] + size > self._most_of_one or self._by_sandbox.total() + size > self._most:
                raise Refusal("PROXY_BUSY", "too many requests with bodies at a time", 503)
            held += size
            self._by_sandbox[sandbox_id] += size

        try:
            yield grown
        finally:
            self._by_sandbox[sandbox_id] -= held
            if not self._by_sandbox[sandbox_id]:
                del self._by_sandbox[sandbox_id]


class Conversation:
    """One connection."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        authority: Authority,
        fetcher: Fetcher,
        bodies: Bodies,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._authority = authority
        self._fetcher = fetcher
        self._bodies = bodies

    async def run(self) -> None:
        """Serves it until it ends."""
        try:
            async with asyncio.timeout(_REQUEST_S):
                greeting = await received(self._reader)
            origin = await self._serve(greeting, None)
            if origin is not None:
                await self._writer.start_tls(self._authority.context(origin.host), ssl_handshake_timeout=_REQUEST_S)
                await self._serve(greeting, origin)
        except (OSError, TimeoutError, ssl.SSLError, h11.RemoteProtocolError, asyncio.IncompleteReadError) as error:
            _log.debug("a sandbox's connection broke", error=repr(error))
        finally:
            self._writer.close()

    async def _serve(self, greeting: Greeting, inside: Origin | None) -> Origin | None:
        """Answers requests; returns the origin of a CONNECT that was accepted."""
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEADER_BYTES)
        while True:
            async with asyncio.timeout(_IDLE_S):
                try:
                    event = await self._next(http)
                except h11.RemoteProtocolError as error:
                    await self._refuse(http, Refusal("BAD_REQUEST", f"no valid HTTP request: {error}", 400), head=False)
                    return None
            if not isinstance(event, h11.Request):
                return None
            head = event.method == b"HEAD"
            try:
                if event.method == b"CONNECT" and inside is None:
                    origin = connected(event.target, greeting)
                    await self._accept(http)
                    return origin
                with self._bodies.of(greeting.sandbox_id) as grown:
                    request = await self._received(http, event, greeting, inside, grown)
                    response = await self._fetcher.answer(request, greeting)
            except (Misused, Refusal) as error:
                refusal = error.refusal if isinstance(error, Misused) else error
                await self._refuse(http, refusal, head=head)
                return None
            await self._send(http, response, head=head)
            if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
                return None
            http.start_next_cycle()

    async def _next(self, http: h11.Connection) -> type[h11.NEED_DATA | h11.PAUSED] | h11.Event:
        while (event := http.next_event()) is h11.NEED_DATA:
            if http.they_are_waiting_for_100_continue:
                await self._write(http.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")))
            http.receive_data(await self._reader.read(_CHUNK))
        return event

    async def _received(
        self,
        http: h11.Connection,
        event: h11.Request,
        greeting: Greeting,
        inside: Origin | None,
        grown: Callable[[int], None],
    ) -> Request:
        request = checked(event.method, event.target, list(event.headers), inside, greeting)
        body = bytearray()
        async with asyncio.timeout(_REQUEST_S):
            while True:
                try:
                    data = await self._next(http)
                except h11.RemoteProtocolError as error:
                    raise Misused(f"the request's body is no valid HTTP: {error}") from error
                if not isinstance(data, h11.Data):
                    break
                if request.method != "POST":
                    raise Misused(f"a {request.method} has no body")
                body += data.data
                grown(len(data.data))
                if len(body) > MAX_BODY_BYTES:
                    raise Refusal("REQUEST_TOO_LARGE", f"a request has at most {MAX_BODY_BYTES} bytes", 413)
        if not isinstance(data, h11.EndOfMessage):
            raise Misused("the request ended early")
        if http.their_state not in (h11.DONE, h11.MUST_CLOSE):
            raise Misused("no other protocol is spoken here")
        return replace(request, body=bytes(body))

    async def _accept(self, http: h11.Connection) -> None:
        async with asyncio.timeout(_REQUEST_S):
            end = await self._next(http)
        if not isinstance(end, h11.EndOfMessage) or http.trailing_data[0]:
            # TLS begins after the answer; what came before it would not be of TLS.
            raise Misused("a CONNECT has no body and waits for its answer")
        await self._write(http.send(h11.Response(status_code=200, headers=[], reason=b"Connection established")))

    async def _refuse(self, http: h11.Connection, refusal: Refusal, *, head: bool) -> None:
        if http.our_state is not h11.SEND_RESPONSE and http.our_state is not h11.IDLE:
            return
        body = f"Penstock egress: {refusal.reason}: {refusal.message}\n".encode()
        headers = [
            ("Content-Type", "text/plain; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Penstock-Egress-Error", refusal.reason),
            ("Connection", "close"),
        ]
        answer = h11.Response(status_code=refusal.status, headers=headers, reason=refusal.phrase)
        await self._write(http.send(answer))
        await self._write(http.send(h11.Data(data=b"" if head else body)))
        # Closing with unread bytes would reset the connection, and its peer might never see the answer.
        unread = MAX_BODY_BYTES
        try:
            async with asyncio.timeout(_LINGER_S):
                while unread > 0 and (data := await self._reader.read(_CHUNK)):
                    unread -= len(data)
        except TimeoutError:
            return

    async def _send(self, http: h11.Connection, response: Response, *, head: bool) -> None:
        headers = as_bytes(response.headers)
        if not head:
            headers.append((b"Content-Length", b"%d" % response.size))
        file = None if response.path is None else response.path.open("rb")
        try:
            await self._write(
                http.send(
                    h11.Response(status_code=response.status, headers=headers, reason=response.reason.encode("latin-1"))
                )
            )
            if not head:
                if file is None:
                    await self._write(http.send(h11.Data(data=response.body)))
                else:
                    while data := file.read(_CHUNK):
                        await self._write(http.send(h11.Data(data=data)))
            await self._write(http.send(h11.EndOfMessage()))
        finally:
            if file is not None:
                file.close()

    async def _write(self, data: bytes | None) -> None:
        if data:
            self._writer.write(data)
            async with asyncio.timeout(_WRITE_S):
                await self._writer.drain()
