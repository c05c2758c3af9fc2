"""The page's calls, passed on byte for byte: gRPC-Web from the browser, gRPC to the services.

Invariants: only the methods of `methods.ALLOWED`, and only with the caller's own bearer token, which is passed on and
never kept, logged or replaced, nor sent in clear beyond this machine; a message is never decoded; a stream is read from
the service no faster than the browser takes it; when the browser goes, its call is cancelled; what strangers make it
hold is bounded in number, bytes and time, since it cannot tell a token that is valid from one that is not; what cannot
be passed on is told as a gRPC status, as the services' errors are.
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

from penstock.client.endpoints import SERVICES, Endpoints, is_local
from penstock.client.errors import ConfigurationError
from penstock.client.rpc import Service
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
"""Of one request: a task with its files, pasted into a form."""
UNARY_S: Final = 60.0
"""For a unary call whose caller sets no deadline."""
_PASSED_ON: Final = ("x-request-id", "traceparent", "tracestate")
_PRINTABLE: Final = re.compile(r"[ -~]*")
"""What gRPC takes as metadata."""
_HEADERS: Final = {"content-type": CONTENT_TYPE, "cache-control": "no-store"}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of all calls together.

    Attributes:
        calls: at once, those whose request is still coming included. A page has a few.
        held_bytes: of requests, until their calls end; the memory is twice that.
        read_s: seconds that a request may take to come.
    """

    calls: int = 512
    held_bytes: int = 32 << 20
    read_s: float = 10.0


class Refused(Exception):
    """The gateway itself says no."""

    def __init__(self, code: grpc.StatusCode, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason

    def frame(self) -> bytes:
        """As the services tell their errors."""
        detail = AnyMessage()
        detail.Pack(error_details_pb2.ErrorInfo(reason=self.reason, domain="penstock"))
        status = status_pb2.Status(code=self.code.value[0], message=str(self), details=[detail])
        return trailers_frame(status.code, status.message, [("grpc-status-details-bin", status.SerializeToString())])


class Gateway:
    """One channel to each service that there is. Made inside a running event loop, closed with `close`.

    Raises:
        ConfigurationError: `TOKEN_IN_CLEAR`.
    """

    def __init__(self, endpoints: Endpoints, bounds: Bounds) -> None:
        for name in SERVICES:
            address = endpoints.address(name)
            # Endpoints refuse this for a token of their own; here each page brings one, whatever they have.
            if address and endpoints.tls is None and not is_local(address):
                raise ConfigurationError(
                    f"The pages' tokens are not sent in clear to {address}: name the CA of the services'"
                    " certificates (PENSTOCK_CA_FILE, or a connection file), or reach them through `ssh -L`.",
                    reason="TOKEN_IN_CLEAR",
                )
        self._services: Mapping[str, Service] = {
            name: Service(name, endpoints) for name in SERVICES if endpoints.address(name)
        }
        self._bounds = bounds
        self._calls = 0
        self._held_bytes = 0

    async def close(self) -> None:
        """Ends what is open."""
        for service in self._services.values():
            await service.close()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One call: POST /rpc/{service}/{method}."""
        body = bytearray()
        self._calls += 1  # before anything of the body is read: it costs memory and time
        try:
            method, service, metadata, timeout = self._admit(request)
            await self._read(request, body)
            message = message_of(body)
            channel = service.channel
            path = f"/{request.match_info['service']}/{request.match_info['method']}"
            if method.streaming:
                open_stream: Any = channel.unary_stream(path)  # without serialisers: bytes as they are
                return await _stream(request, open_stream(message, timeout=timeout, metadata=metadata))
            call: Any = channel.unary_unary(path)
            return await _single(call(message, timeout=timeout or UNARY_S, metadata=metadata))
        except Refused as refusal:
            return _answer(refusal.frame())
        except BadFrame as error:
            return _answer(Refused(grpc.StatusCode.INVALID_ARGUMENT, "GRPC_WEB_MALFORMED", f"{error}.").frame())
        finally:
            self._calls -= 1
            self._held_bytes -= len(body)

    async def _read(self, request: web.Request, body: bytearray) -> None:
        """The request's body into `body`; each byte of it is counted as held."""
        try:
            async with asyncio.timeout(self._bounds.read_s):
                async for piece in request.content.iter_any():
                    if len(body) + len(piece) > MAX_REQUEST_BYTES:
                        text = f"A request of the dashboard has at most {MAX_REQUEST_BYTES >> 20} MiB."
                        raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "REQUEST_TOO_LARGE", text)
                    if self._held_bytes + len(piece) > self._bounds.held_bytes:
                        text = "The dashboard holds as many bytes of requests as it may: ask again in a moment."
                        raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "DASHBOARD_BUSY", text)
                    body += piece
                    self._held_bytes += len(piece)
        except TimeoutError:
            text = f"The request did not come within {self._bounds.read_s:g} s."
            raise Refused(grpc.StatusCode.DEADLINE_EXCEEDED, "REQUEST_SLOW", text) from None

    def _admit(self, request: web.Request) -> tuple[Method, Service, list[tuple[str, str]], float | None]:
        name = f"{request.match_info['service']}/{request.match_info['method']}"
        method = ALLOWED.get(name)
        if method is None:
            text = "The dashboard passes on what it shows, and starting and cancelling rollouts; this is neither."
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, "DASHBOARD_METHOD", text)
        credential = request.headers.getall("authorization", [])
        if len(credential) != 1:
            raise Refused(grpc.StatusCode.UNAUTHENTICATED, "CREDENTIAL_MISSING", "The dashboard needs a token.")
        if not _PRINTABLE.fullmatch(credential[0]):
            raise Refused(grpc.StatusCode.UNAUTHENTICATED, "CREDENTIAL_INVALID", "A token is printable ASCII.")
        if request.content_type not in CONTENT_TYPES:
            raise BadFrame(f"the content type is {CONTENT_TYPE}")
        timeout = timeout_of(request.headers.get("grpc-timeout"))
        asked: str | None = method.service or request.headers.get(SERVICE_HEADER)
        if asked not in SERVICES:
            raise BadFrame(f"the header {SERVICE_HEADER} is one of {', '.join(SERVICES)}")
        service = self._services.get(asked)
        if service is None:
            text = f"There is no {asked} service here."
            raise Refused(grpc.StatusCode.UNAVAILABLE, "SERVICE_ABSENT", text)
        if self._calls > self._bounds.calls:
            text = "The dashboard has as many calls open as it may: close some of its pages."
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


async def _stream(request: web.Request, call: Any) -> web.StreamResponse:
    response = web.StreamResponse(headers={**_HEADERS, "x-accel-buffering": "no"})
    try:
        await response.prepare(request)
        try:
            async for message in call:
                await response.write(data_frame(message))
            end = await _trailers(call)
        except grpc.aio.AioRpcError as error:
            end = _failed(error)
        await response.write(end)
        await response.write_eof()
    except ConnectionError as error:
        # The browser went; nobody is left to be told.
        raise asyncio.CancelledError from error
    finally:
        call.cancel()
    return response


async def _trailers(call: Any) -> bytes:
    """The end of a call that went well."""
    return trailers_frame(0, "", await call.trailing_metadata())


def _failed(error: grpc.aio.AioRpcError) -> bytes:
    """The end of a call that did not: the service's own status, details included."""
    return trailers_frame(error.code().value[0], error.details() or "", error.trailing_metadata())
