"""Proxies the page's calls byte for byte: gRPC-Web from the browser, gRPC to the services.

Invariants: only the methods of `methods.ALLOWED`, and only with the caller's own bearer token, which is passed on and
never kept, logged or replaced, nor sent in clear beyond this machine; a message is never decoded; a stream is read from
the service no faster than the browser reads it; when the browser disconnects or stops reading, its call is cancelled;
resources held for strangers are bounded in number, bytes and time, since the gateway cannot validate tokens; a call
that cannot be proxied ends with a gRPC status, as the services' errors do.

Of several services of a kind, the header `MEMBER_HEADER` names the one to call; without it, that is the connection's.
Which ones there are is the driver's answer to the page's token. A driver that says which other one has a rollout
(HOME_ELSEWHERE) is believed, once for each call.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import grpc
from aiohttp import web
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2

from penstock.client.errors import ConfigurationError, PenstockError, Unauthenticated, from_rpc_error
from penstock.client.transport.cluster import Cluster, Member
from penstock.client.transport.endpoints import SERVICES, Endpoints, ServiceName, is_local
from penstock.client.transport.rpc import Service
from penstock.dashboard import slow_browsers
from penstock.dashboard.framing import (
    CONTENT_TYPE,
    CONTENT_TYPES,
    BadFrame,
    data_frame,
    message_of,
    timeout_of,
    trailers_frame,
)
from penstock.dashboard.methods import ALLOWED, MEMBER_HEADER, SERVICE_HEADER, Method

MAX_REQUEST_BYTES: Final = 8 << 20
"""Maximum size of one request: a task with its files, pasted into a form."""
UNARY_S: Final = 60.0
"""Timeout of a unary call without a deadline of its own."""
_PASSED_ON: Final = ("x-request-id", "traceparent", "tracestate")
_PRINTABLE: Final = re.compile(r"[ -~]*")
"""Characters that gRPC accepts as metadata."""
_HEADERS: Final = {"content-type": CONTENT_TYPE, "cache-control": "no-store"}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of all calls together.

    Attributes:
        calls: at once, including those whose request is still arriving. A page has a few.
        held_bytes: of requests, until their calls end; the memory is twice that.
        read_s: seconds that a request may take to arrive.
        write_s: seconds in which a browser must read some of its pending data (`writing.PROGRESS_BYTES`, or all).
    """

    calls: int = 512
    held_bytes: int = 32 << 20
    read_s: float = 10.0
    write_s: float = 60.0


class Refused(Exception):
    """The gateway itself refuses the call."""

    def __init__(self, code: grpc.StatusCode, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason

    def frame(self) -> bytes:
        """Returns the error in the services' form."""
        detail = AnyMessage()
        detail.Pack(error_details_pb2.ErrorInfo(reason=self.reason, domain="penstock"))
        status = status_pb2.Status(code=self.code.value[0], message=str(self), details=[detail])
        return trailers_frame(status.code, status.message, [("grpc-status-details-bin", status.SerializeToString())])


class Gateway:
    """Channels to the available services. Created inside a running event loop, closed with `close`.

    Raises:
        ConfigurationError: `TOKEN_IN_CLEAR`.
    """

    def __init__(self, endpoints: Endpoints, bounds: Bounds) -> None:
        for name in SERVICES:
            address = endpoints.address(name)
            # Endpoints refuse this for a token of their own; here each page brings one, whatever they have.
            if address and endpoints.tls is None and not is_local(address):
                raise ConfigurationError(
                    f"The pages' tokens must not be sent in cleartext to {address}: set the CA of the services' "
                    "certificates (PENSTOCK_CA_FILE, or a connection file), or reach them through `ssh -L`.",
                    reason="TOKEN_IN_CLEAR",
                )
        endpoints = replace(endpoints, token=None)
        self._services: Mapping[str, Service] = {
            name: Service(name, endpoints) for name in SERVICES if endpoints.address(name)
        }
        self._cluster = Cluster(endpoints, self._services)
        self._bounds = bounds
        self._calls = 0
        self._held_bytes = 0

    async def close(self) -> None:
        await self._cluster.close()
        for service in self._services.values():
            await service.close()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Handles one call: POST /rpc/{service}/{method}."""
        body = bytearray()
        self._calls += 1  # before the body is read: that costs memory and time
        try:
            method, kind, metadata, timeout = self._admit(request)
            service = await self._member(kind, request.headers.get(MEMBER_HEADER, ""), metadata[:1])
            await self._read(request, body)
            message = message_of(body)
            path = f"/{request.match_info['service']}/{request.match_info['method']}"
            while True:
                if method.streaming:
                    open_stream: Any = service.channel.unary_stream(path)  # without serialisers: raw bytes
                    call = open_stream(message, timeout=timeout, metadata=metadata)
                else:
                    open_single: Any = service.channel.unary_unary(path)
                    call = open_single(message, timeout=timeout or UNARY_S, metadata=metadata)
                try:
                    first = await _first(call, method.streaming)
                except grpc.aio.AioRpcError as error:
                    there = await self._home(kind, error, service, metadata[:1])
                    if there is None:
                        return _answer(_failed(error))
                    service = there
                    continue
                if method.streaming:
                    return await _stream(request, call, first, self._bounds.write_s)
                return _answer(data_frame(first) + await _trailers(call))
        except Refused as refusal:
            return _answer(refusal.frame())
        except BadFrame as error:
            return _answer(Refused(grpc.StatusCode.INVALID_ARGUMENT, "GRPC_WEB_MALFORMED", f"{error}.").frame())
        finally:
            self._calls -= 1
            self._held_bytes -= len(body)

    async def _read(self, request: web.Request, body: bytearray) -> None:
        """Reads the request's body into `body`; counts each byte of it as held."""
        try:
            async with asyncio.timeout(self._bounds.read_s):
                async for piece in request.content.iter_any():
                    if len(body) + len(piece) > MAX_REQUEST_BYTES:
                        text = f"A request of the dashboard must have at most {MAX_REQUEST_BYTES >> 20} MiB."
                        raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "REQUEST_TOO_LARGE", text)
                    if self._held_bytes + len(piece) > self._bounds.held_bytes:
                        text = "The dashboard's request buffer is full: try again in a moment."
                        raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "DASHBOARD_BUSY", text)
                    body += piece
                    self._held_bytes += len(piece)
        except TimeoutError:
            text = f"The request was not received within {self._bounds.read_s:g} s."
            raise Refused(grpc.StatusCode.DEADLINE_EXCEEDED, "REQUEST_SLOW", text) from None

    async def _member(self, kind: ServiceName, name: str, credential: Sequence[tuple[str, str]]) -> Service:
        """Returns the service of a kind that has this name; an empty one is the connection's.

        A name is ignored where the driver has no list of the kind: then there is one service.

        Raises:
            Refused: `MEMBER_UNKNOWN`, or why the driver cannot be asked.
        """
        if not name:
            return self._services[kind]
        for member in await self._members(kind, credential):
            if member.name in (name, ""):
                return member.service
        # Without their names: the list may have been asked for with another page's token.
        text = f"The driver lists no {kind} service {_printable(name)}: the page Services has the names."
        raise Refused(grpc.StatusCode.NOT_FOUND, "MEMBER_UNKNOWN", text)

    async def _members(self, kind: ServiceName, credential: Sequence[tuple[str, str]]) -> Sequence[Member]:
        try:
            return await self._cluster.members(kind, patient=False, metadata=credential)
        except Unauthenticated as error:
            raise Refused(grpc.StatusCode.UNAUTHENTICATED, error.reason, error.message) from None
        except ConfigurationError as error:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, error.reason, error.message) from None
        except PenstockError as error:
            raise Refused(grpc.StatusCode.UNAVAILABLE, error.reason, error.message) from None

    async def _home(
        self, kind: ServiceName, failure: grpc.aio.AioRpcError, asked: Service, credential: Sequence[tuple[str, str]]
    ) -> Service | None:
        """Returns the service that the failed call names as the right one, if it is a member and not the one asked."""
        error = from_rpc_error(failure, asked.peer)
        if error.reason != "HOME_ELSEWHERE" or asked is not self._services[kind]:
            return None
        # Of a member whose certificate has another name than its address, the driver says the name alone.
        home, address = error.metadata.get("home", ""), error.metadata.get("address", "")
        members = await self._members(kind, credential)
        found = (
            member.service
            for member in members
            if (home and member.name == home) or (address and member.service.address == address)
        )
        return next((service for service in found if service is not asked), None)

    def _admit(self, request: web.Request) -> tuple[Method, ServiceName, list[tuple[str, str]], float | None]:
        name = f"{request.match_info['service']}/{request.match_info['method']}"
        method = ALLOWED.get(name)
        if method is None:
            text = "The dashboard allows reading, and starting and cancelling rollouts. This method is neither."
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, "DASHBOARD_METHOD", text)
        credential = request.headers.getall("authorization", [])
        if len(credential) != 1:
            raise Refused(grpc.StatusCode.UNAUTHENTICATED, "CREDENTIAL_MISSING", "The dashboard needs a token.")
        if not _PRINTABLE.fullmatch(credential[0]):
            raise Refused(grpc.StatusCode.UNAUTHENTICATED, "CREDENTIAL_INVALID", "A token must be printable ASCII.")
        if request.content_type not in CONTENT_TYPES:
            raise BadFrame(f"the content type must be {CONTENT_TYPE}")
        timeout = timeout_of(request.headers.get("grpc-timeout"))
        asked: str | None = method.service or request.headers.get(SERVICE_HEADER)
        kind = next((name for name in SERVICES if name == asked), None)
        if kind is None:
            raise BadFrame(f"the header {SERVICE_HEADER} must be one of {', '.join(SERVICES)}")
        if kind not in self._services:
            text = f"There is no {kind} service."
            raise Refused(grpc.StatusCode.UNAVAILABLE, "SERVICE_ABSENT", text)
        if self._calls > self._bounds.calls:
            text = "The dashboard has too many open calls: close some of its pages."
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "DASHBOARD_BUSY", text)
        metadata = [("authorization", credential[0])]
        for key in _PASSED_ON:
            value = request.headers.get(key)
            if value is not None and _PRINTABLE.fullmatch(value):
                metadata.append((key, value))
        return method, kind, metadata, timeout


def _answer(frames: bytes) -> web.Response:
    return web.Response(body=frames, headers=_HEADERS)


async def _first(call: Any, streaming: bool) -> Any:
    """Returns the first message of a call's answer; `EOF` of a stream that has none.

    Raises:
        grpc.aio.AioRpcError: the call failed before it.
    """
    try:
        return await (call.read() if streaming else call)
    except BaseException:
        call.cancel()
        raise


async def _stream(request: web.Request, call: Any, message: Any, write_s: float) -> web.StreamResponse:
    """Passes a stream on, of which `message` has been read."""
    response = web.StreamResponse(headers={**_HEADERS, "x-accel-buffering": "no"})
    try:
        await response.prepare(request)
        try:
            while message is not grpc.aio.EOF:
                await slow_browsers.taken(request, response.write(data_frame(message)), write_s)
                message = await call.read()
            end = await _trailers(call)
        except grpc.aio.AioRpcError as error:
            end = _failed(error)
        await slow_browsers.taken(request, response.write_eof(end), write_s)
    except ConnectionError as error:
        # The browser disconnected; there is no one to answer.
        raise asyncio.CancelledError from error
    finally:
        call.cancel()
    return response


async def _trailers(call: Any) -> bytes:
    """Returns the last frame of a successful call."""
    return trailers_frame(0, "", await call.trailing_metadata())


def _printable(name: str) -> str:
    return "".join(character for character in name[:100] if character.isprintable())


def _failed(error: grpc.aio.AioRpcError) -> bytes:
    """Returns the last frame of a failed call: the service's own status, details included."""
    return trailers_frame(error.code().value[0], error.details() or "", error.trailing_metadata())
