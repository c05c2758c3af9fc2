"""Answers requests: from a recording, or once from upstream for all sandboxes of a recording (R141).

Invariants
- Of equal requests of one recording, one is sent upstream; the others wait for its response. It goes on when its first
  asker leaves, and ends in bounded time. Where sandbox services share recordings (`shared`), this holds over all.
- Failures are not recorded (5xx, 401, 403, 429 and others): only what a later replay may rely on.
- Bodies go to disk as they come; those of unrecorded responses are cut at 64 KiB.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

import aiohttp
import h11
import structlog
from yarl import URL

from penstock.values.hosts import address
from penstock_chassis.aio.tasks import TaskOwner
from penstock_sandbox.egress import no_answer
from penstock_sandbox.egress.addresses import Addresses, AddressRefused, CheckedResolver, refused
from penstock_sandbox.egress.credentials import Credentials
from penstock_sandbox.egress.errors import Refusal
from penstock_sandbox.egress.greeting import Greeting
from penstock_sandbox.egress.requests import Request
from penstock_sandbox.egress.shared_recordings import Entry, SharedRecordings
from penstock_sandbox.egress.store import Part, Response, Store, as_bytes

RECORDED: Final = frozenset({200, 203, 204, 301, 302, 303, 307, 308, 404, 410})
_UNRECORDED_BYTES: Final = 64 * 1024
_CHUNK: Final = 64 * 1024
_CONNECT_S: Final = 20.0
_MOST_CONNECTIONS: Final = 512
_MOST_FETCHES: Final = 256
"""Of one recording at a time: fetches whose askers left count too."""
_MOST_SENDING_BYTES: Final = 128 * 1024 * 1024
"""Of the bodies of all requests to upstream."""
_DROPPED: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-connection", "te", "trailer", "transfer-encoding"),
        # Of the connection to upstream, or of one client: a recording is for all.
        *("upgrade", "alt-svc", "set-cookie", "set-cookie2", "strict-transport-security"),
    }
)
_LENGTH: Final = "content-length"
"""The proxy counts bodies itself; but that of a HEAD's answer does not come, and only upstream knows its length."""
_NAME: Final = "Penstock-egress/1"
_OURS: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")

Publish = Callable[[Response, Part], Awaitable[Response | None]]

_log = structlog.get_logger(__name__)


class Fetcher:
    """Answers requests. One for the process; closes the store, and what is shared, with itself."""

    def __init__(
        self,
        store: Store,
        addresses: Addresses,
        credentials: Credentials,
        *,
        max_object_bytes: int,
        timeout_s: float,
        ca: Path | None,
        shared: SharedRecordings | None = None,
    ) -> None:
        self._store = store
        self._shared = shared
        self._addresses = addresses
        self._credentials = credentials
        self._max_object_bytes = max_object_bytes
        self._timeout_s = timeout_s
        self._flights: dict[tuple[str, str, bool], asyncio.Task[Response | Refusal]] = {}
        self._tasks = TaskOwner()
        self._fetching: Counter[str] = Counter()
        self._sending = 0
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                resolver=CheckedResolver(addresses),
                use_dns_cache=False,
                limit=_MOST_CONNECTIONS,
                ssl=ssl.create_default_context(cafile=ca),
            ),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            skip_auto_headers=_OURS,
        )

    async def aclose(self) -> None:
        """Ends all fetches."""
        await self._tasks.aclose()
        await self._client.close()
        if self._shared is not None:
            await self._shared.aclose()
        self._store.close()

    async def answer(self, request: Request, greeting: Greeting) -> Response:
        """Returns the response to a request.

        Raises Refusal (NOT_RECORDED, ADDRESS_NOT_ALLOWED, RECORDING_FULL, RECORDING_DAMAGED, RECORDINGS_AWAY,
        RESPONSE_TOO_LARGE, UPSTREAM_UNREACHABLE, UPSTREAM_TIMEOUT, PROXY_BUSY).
        """
        key = request.key()
        shared = self._shared if greeting.shared else None
        recording = greeting.recording if shared is None else shared.own(greeting.recording)
        found = self._store.find(recording, key)
        if found is not None:
            return found
        if greeting.recorded_only and shared is None:
            raise _not_recorded(request)
        # One that asks upstream is none for a sandbox that may get recorded responses only.
        flight = (recording, key, greeting.recorded_only)
        task = self._flights.get(flight)
        if task is None:
            if self._fetching[recording] >= _MOST_FETCHES:
                raise Refusal("PROXY_BUSY", f"at most {_MOST_FETCHES} requests of a recording wait for upstream", 503)
            if self._sending + len(request.body) > _MOST_SENDING_BYTES:
                raise Refusal("PROXY_BUSY", "too many requests with bodies wait for upstream", 503)
            if shared is None:
                work = partial(self._fetch, request, recording, key)
            else:
                work = partial(self._together, shared, request, greeting, key)
            task = self._flights[flight] = self._tasks.start(self._quietly(work, request, recording))
            task.add_done_callback(lambda _: self._flights.pop(flight, None))
        outcome = await asyncio.shield(task)
        if isinstance(outcome, Refusal):
            raise outcome
        return outcome

    async def _quietly(
        self, work: Callable[[], Awaitable[Response]], request: Request, recording: str
    ) -> Response | Refusal:
        """Returns a refusal instead of raising it: every asker gets it, and it is no error of this process."""
        self._fetching[recording] += 1
        self._sending += len(request.body)
        try:
            return await work()
        except Refusal as refusal:
            _log.info("not fetched", url=_shown(request), reason=refusal.reason, cause=repr(refusal.__cause__))
            return refusal
        finally:
            self._sending -= len(request.body)
            self._fetching[recording] -= 1
            if not self._fetching[recording]:
                del self._fetching[recording]

    async def _together(self, shared: SharedRecordings, request: Request, greeting: Greeting, key: str) -> Response:
        """Answers from what any service recorded, or records it for all."""
        recording = shared.own(greeting.recording)
        if greeting.recorded_only:
            entry = await shared.find(greeting.recording, key)
            if entry is None:
                raise _not_recorded(request)
            return await self._adopted(shared, request, recording, key, entry)

        async def publish(response: Response, part: Part) -> Response | None:
            """Returns what another service stored before."""
            ours = Entry(response.status, response.reason, response.headers, part.finish(), part.size)
            entry = await shared.publish(greeting.recording, key, ours, part.path)
            return None if entry == ours else await self._adopted(shared, request, recording, key, entry)

        async with shared.turn(greeting.recording, key) as entry:
            if entry is None:
                return await self._fetch(request, recording, key, publish)
        return await self._adopted(shared, request, recording, key, entry)

    async def _adopted(
        self, shared: SharedRecordings, request: Request, recording: str, key: str, entry: Entry
    ) -> Response:
        """Keeps here what is recorded there."""
        self._check_size(request, entry.size)
        response = Response(entry.status, entry.reason, entry.headers, entry.size)
        known = self._store.keep_known(recording, key, response, entry.digest, entry.size)
        if known is not None:
            return known
        self._store.make_room(recording, entry.size)
        part = self._store.part(recording)
        try:
            await shared.receive(entry, part)
            return self._store.keep(recording, key, response, part)
        finally:
            part.discard()

    async def _fetch(self, request: Request, recording: str, key: str, publish: Publish | None = None) -> Response:
        """Returns upstream's response. ``publish`` gets one that is to be recorded, and may return one in its place."""
        part = self._store.part(recording)
        try:
            response = await self._asked(request, recording, part)
            if response.status not in RECORDED:
                return response
            if publish is not None and (first := await publish(response, part)) is not None:
                return first
            return self._store.keep(recording, key, response, part)
        finally:
            part.discard()

    async def _asked(self, request: Request, recording: str, part: Part) -> Response:
        """Returns upstream's response; its body is in ``part`` if it is to be recorded."""
        written = address(request.origin.host)
        if written is not None:
            # The HTTP client asks no resolver for it.
            self._addresses.check(written)
        # As it is: one body for all, whatever encodings its clients can read.
        headers = {"Accept-Encoding": "identity", "User-Agent": _NAME, **request.headers}
        if (credential := self._credentials.header(request)) is not None:
            headers["Authorization"] = credential
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._client.request(
                    request.method,
                    URL(request.url, encoded=True),
                    headers=headers,
                    data=request.body or None,
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                ) as upstream,
            ):
                return await self._received(request, upstream, recording, part)
        except TimeoutError as error:
            raise Refusal(
                "UPSTREAM_TIMEOUT", f"{request.origin.place} did not answer in {self._timeout_s:g} s", 504
            ) from error
        except AddressRefused as error:
            raise refused(request.origin.host) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error.__cause__, AddressRefused):
                raise refused(request.origin.host) from error
            raise Refusal("UPSTREAM_UNREACHABLE", f"{request.origin.place} {no_answer.why(error)}", 502) from error

    async def _received(
        self, request: Request, upstream: aiohttp.ClientResponse, recording: str, part: Part
    ) -> Response:
        dropped = _DROPPED if request.method == "HEAD" else _DROPPED | {_LENGTH}
        headers = tuple(
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in upstream.raw_headers
            if name.decode("latin-1").lower() not in dropped
        )
        # The HTTP client has it as UTF-8, with surrogates for what is not.
        reason = (upstream.reason or "").encode("utf-8", "surrogateescape")
        response = Response(upstream.status, reason.decode("latin-1"), headers, 0)
        try:
            h11.Response(status_code=response.status, headers=as_bytes(headers), reason=reason)
        except h11.LocalProtocolError as error:
            raise Refusal("UPSTREAM_UNREACHABLE", f"{request.origin.place} gave no valid answer", 502) from error
        length = upstream.content_length
        if upstream.status not in RECORDED:
            body = await _beginning(upstream.content)
            return Response(response.status, response.reason, response.headers, len(body), body=body)
        if length is not None and request.method != "HEAD":
            self._check_size(request, length)
            self._store.make_room(recording, length)
        async for chunk in upstream.content.iter_chunked(_CHUNK):
            self._check_size(request, part.size + len(chunk))
            part.write(chunk)
        return response

    def _check_size(self, request: Request, size: int) -> None:
        if size > self._max_object_bytes:
            raise Refusal("RESPONSE_TOO_LARGE", f"{request.url} has more than {self._max_object_bytes} bytes")


async def _beginning(content: aiohttp.StreamReader) -> bytes:
    """Returns what is kept of a body that is not recorded: all of it up to the bound."""
    body = bytearray()
    # One read returns what has arrived by then.
    while len(body) < _UNRECORDED_BYTES and (piece := await content.read(_UNRECORDED_BYTES - len(body))):
        body += piece
    return bytes(body)


def _not_recorded(request: Request) -> Refusal:
    message = f"{request.method} {request.url} is not recorded, and this sandbox gets recorded responses only"
    return Refusal("NOT_RECORDED", message)


def _shown(request: Request) -> str:
    """A URL without its query, which may hold a signature."""
    return request.url.partition("?")[0]
