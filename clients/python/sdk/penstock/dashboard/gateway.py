"""Proxies the page's calls byte for byte: gRPC-Web from the browser, gRPC to the services.

Invariants: only the methods of `methods.ALLOWED`, and only with the caller's own bearer token, which is passed on and
never kept, logged or replaced, nor sent in clear beyond this machine; a message is never decoded; a stream is read from
the service no faster than the browser reads it; when the browser disconnects or stops reading, its call is cancelled;
resources held for strangers are bounded in number, bytes and time, since the gateway cannot validate tokens; a call
that cannot be proxied ends with a gRPC status, as the services' errors do.
"""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc
from aiohttp import web
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2

from penstock.client.errors import ConfigurationError
from penstock.client.transport.endpoints import SERVICES, Endpoints, is_local
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
from penstock.dashboard.methods import ALLOWED, SERVICE_HEADER, Method

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
        self._services: Mapping[str, Service] = {
            name: Service(name, endpoints) for name in SERVICES if endpoints.address(name)
        }
        self._bounds = bounds
        self._calls = 0
        self._held_bytes = 0

    async def close(self) -> None:
        for service in self._services.values():
            await service.close()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Handles one call: POST /rpc/{service}/{method}."""
        body = bytearray()
        self._calls += 1  # before the body is read: that costs memory and time
        try:
            method, service, metadata, timeout = self._admit(request)
            await self._read(request, body)
            message = message_of(body)
            channel = service.channel
            path = f"/{request.match_info['service']}/{request.match_info['method']}"
            if method.streaming:
                open_stream: Any = channel.unary_stream(path)  # without serialisers: raw bytes
                call = open_stream(message, timeout=timeout, metadata=metadata)
                return await _stream(request, call, self._bounds.write_s)
            open_single: Any = channel.unary_unary(path)
            return await _single(open_single(message, timeout=timeout or UNARY_S, metadata=metadata))
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

    def _admit(self, request: web.Request) -> tuple[Method, Service, list[tuple[str, str]], float | None]:
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
        if asked not in SERVICES:
            raise BadFrame(f"the header {SERVICE_HEADER} must be one of {', '.join(SERVICES)}")
        service = self._services.get(asked)
        if service is None:
            text = f"There is no {asked} service."
            raise Refused(grpc.StatusCode.UNAVAILABLE, "SERVICE_ABSENT", text)
        if self._calls > self._bounds.calls:
            text = "The dashboard has too many open calls: close some of its pages."
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "DASHBOARD_BUSY", text)
        metadata = [("authorization", credential[0])]
        for key in _PASSED_ON:
            value = request.headers.get(key)
            if value is not None and _PRINTABLE.fullmatch(value):
                metadata.append((key, value))
        return method, service, metadata, timeout


def _answer(frames: bytes) -> web.Response:
    return web.Response(body=frames, headers=_HEADERS)


async def _single(call: Any) -> web.Response:
    try:
        message = await call
        return _answer(data_frame(message) + await _trailers(call))
    except grpc.aio.AioRpcError as error:
        return _answer(_failed(error))
    finally:
        call.cancel()


async def _stream(request: web.Request, call: Any, write_s: float) -> web.StreamResponse:
    response = web.StreamResponse(headers={**_HEADERS, "x-accel-buffering": "no"})
    try:
        await response.prepare(request)
        try:
            async for message in call:
                await slow_browsers.taken(request, response.write(data_frame(message)), write_s)
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


def _failed(error: grpc.aio.AioRpcError) -> bytes:
    """Returns the last frame of a failed call: the service's own status, details included."""
    return trailers_frame(error.code().value[0], error.details() or "", error.trailing_metadata())
