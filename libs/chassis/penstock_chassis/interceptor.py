"""The one interceptor of every server. For each RPC, in this order:

1. a request id: the caller's `x-request-id` if it is well formed, a fresh one otherwise;
2. the context: that id, and what the caller says it works for (`tracing`), are on every line that the handler's task
   writes and go on with the calls that it makes; where the caller is traced, so is the handler;
3. who calls, and whether that role may call this method (R5: before the request is looked at);
4. the handler;
5. the error table: a `PenstockError` becomes its status, anything else INTERNAL with an incident id (R8);
6. one log line: method, code, duration, role; never a body; and the same in the metrics.

A cancelled RPC's `CancelledError` passes through untouched. A call without a deadline is served like any other.
"""

from __future__ import annotations  # grpc's classes take type arguments in their stubs only

import asyncio
import itertools
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
import structlog
from google.protobuf.message import DecodeError

from penstock_chassis import journal, rpc_status, tracing
from penstock_chassis.auth import HEALTH_CHECK, Authenticator, RoleTable, authorize
from penstock_chassis.errors import InvalidArgument, Unauthenticated
from penstock_chassis.metrics import histogram

REQUEST_ID_HEADER: Final = "x-request-id"
"""Metadata key of the id that ties the log lines of one request together across services."""

RPC_SECONDS: Final = histogram("penstock_rpc_seconds", "RPCs served, streams with all of their life", "method", "code")

OPEN_REQUEST_S: Final = 10.0
"""Seconds in which the request of a method that needs no token must have come."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_RUN: Final = secrets.token_hex(8)
"""Of this process; with a count behind it the ids that it gives are nobody else's."""
_COUNT: Final = itertools.count()
_OPEN: Final = frozenset({HEALTH_CHECK})
_MALFORMED: Final = object()
"""Stands for a request that could not be read."""

_CODE_NAMES: Final[dict[Any, str]] = {key: item.name for item in grpc.StatusCode for key in (item, item.value[0])}
_log = structlog.get_logger("penstock.rpc")


class ServerInterceptor(grpc.aio.ServerInterceptor):
    """See the module's text.

    Args:
        authenticator: knows the tokens.
        roles: says which roles may call which method.
    """

    def __init__(self, authenticator: Authenticator, roles: RoleTable) -> None:
        self._authenticator = authenticator
        self._roles = roles
        self._wrapped: dict[str, tuple[grpc.RpcMethodHandler[Any, Any], grpc.RpcMethodHandler[Any, Any]]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wraps the method's handler, once; a server's handlers never change.

        Who has no right token is refused without reading what he sends: a request that never comes holds nothing.
        """
        method = handler_call_details.method
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None  # gRPC answers UNIMPLEMENTED: which methods exist is no secret, the protos are public
            name = method.removeprefix("/")
            wrapped = self._wrapped[method] = self._wrap(name, handler), self._refusing(name, handler)
        admitted, refused = wrapped
        return admitted if self._knows(method, handler_call_details.invocation_metadata) else refused

    def _knows(self, method: str, metadata: Any) -> bool:
        """Whether the caller may be waited for; `_admit` then says who he is, or what is wrong with him."""
        if method.removeprefix("/") in _OPEN:
            return True
        try:
            self._authenticator.authenticate(metadata or ())
        except Unauthenticated:
            return False
        return True

    def _refusing(self, method: str, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
        """Answers at once: gRPC runs a handler that takes a stream before anything was sent."""
        refuse = self._streaming(method, _never)
        return grpc.stream_stream_rpc_method_handler(refuse, None, handler.response_serializer)

    def _wrap(self, method: str, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
        # The four arities differ in the response only: a request stream is handed on as it is.
        if handler.response_streaming:
            kind, make = (
                (handler.stream_stream, grpc.stream_stream_rpc_method_handler)
                if handler.request_streaming
                else (handler.unary_stream, grpc.unary_stream_rpc_method_handler)
            )
            return make(self._streaming(method, kind), _reader(handler), handler.response_serializer)
        kind, make = (
            (handler.stream_unary, grpc.stream_unary_rpc_method_handler)
            if handler.request_streaming
            else (handler.unary_unary, grpc.unary_unary_rpc_method_handler)
        )
        if method in _OPEN:
            kind, make = _soon(kind), grpc.stream_unary_rpc_method_handler
        return make(self._single(method, kind), _reader(handler), handler.response_serializer)

    def _single(self, method: str, behaviour: Any) -> Any:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            started = time.perf_counter()
            try:
                with tracing.served(method, self._admit(method, context)):
                    response = await behaviour(_checked(request), context)
            except BaseException as error:
                await _fail(method, started, context, error)
                raise
            # After the answer, which is sent as soon as this returns: who waits for it does not wait for the log.
            took = time.perf_counter() - started
            asyncio.get_running_loop().call_soon(_report, method, took, _code(context, grpc.StatusCode.OK))
            return response

        return call

    def _streaming(self, method: str, behaviour: Any) -> Any:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            started = time.perf_counter()
            try:
                with tracing.served(method, self._admit(method, context)):
                    responses = behaviour(_checked(request), context)
                    if hasattr(responses, "__aiter__"):
                        try:
                            async for response in responses:
                                yield response
                        finally:
                            # A generator that is left early must run its clean-up now, not when it is collected.
                            await responses.aclose()
                    else:
                        await responses  # a handler that calls context.write itself
            except BaseException as error:
                await _fail(method, started, context, error)
                raise
            _report(method, time.perf_counter() - started, _code(context, grpc.StatusCode.OK))

        return call

    def _admit(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        """Lets the caller in; returns the trace context that it came with, or nothing."""
        metadata = [(str(key), value) for key, value in context.invocation_metadata() or ()]
        request_id = next((str(value) for key, value in metadata if key == REQUEST_ID_HEADER), "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = f"{_RUN}{next(_COUNT):016x}"
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=request_id)
        if method in _OPEN:
            return ""
        role = self._authenticator.authenticate(metadata)
        structlog.contextvars.bind_contextvars(role=str(role))
        authorize(role, method, self._roles)
        return tracing.taken_up(metadata)


def _reader(handler: grpc.RpcMethodHandler[Any, Any]) -> Any:
    """The deserializer of a method's requests; of a single one, bytes that are no message are an answer, not an error.

    gRPC reads a single request before the handler runs and would answer with the parser's own words. So it is looked at
    after the caller was admitted; in a stream of requests the error comes up in the handler.
    """
    read = handler.request_deserializer
    if read is None or handler.request_streaming:
        return read

    def tolerant(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError:
            return _MALFORMED

    return tolerant


def _soon(behaviour: Any) -> Any:
    """A method that anybody may call, with its one request read here: gRPC itself would wait for it for ever."""

    async def call(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            async with asyncio.timeout(OPEN_REQUEST_S):
                request = await anext(requests)
        except (TimeoutError, StopAsyncIteration):
            raise InvalidArgument("No request came with the call.", reason="REQUEST_MALFORMED") from None
        return await behaviour(_checked(request), context)

    return call


async def _never(_request: Any, _context: grpc.aio.ServicerContext[Any, Any]) -> None:
    raise AssertionError("a caller without a right token was let in")


def _checked(request: Any) -> Any:
    if request is _MALFORMED:
        raise _malformed()
    return request


def _malformed() -> InvalidArgument:
    return InvalidArgument("The request is no message of the method's type.", reason="REQUEST_MALFORMED")


async def _fail(method: str, started: float, context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> None:
    """Logs the end of a failed RPC and aborts it with its status; returns only where the exception is to go on."""
    if isinstance(error, grpc.aio.AbortError):
        _report(method, time.perf_counter() - started, _code(context, grpc.StatusCode.UNKNOWN))
        return
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        _report(method, time.perf_counter() - started, grpc.StatusCode.CANCELLED.name)
        return
    told = rpc_status.expected(_malformed() if isinstance(error, DecodeError) else error)
    if told is None:
        if not isinstance(error, Exception):
            return  # KeyboardInterrupt and its like end the process
        told = rpc_status.unexpected()
        _log.error("rpc failed", method=method, incident_id=told.metadata[rpc_status.INCIDENT], exc_info=error)
    elif journal.refusal(error):
        _log.error("the disk refused what an rpc was to record", method=method, exc_info=error)
    status = rpc_status.to_status(told)
    _report(method, time.perf_counter() - started, status.code.name, reason=told.reason)
    trailing = (*(context.trailing_metadata() or ()), *status.trailing_metadata)
    await context.abort(status.code, status.message, trailing)


def _code(context: grpc.aio.ServicerContext[Any, Any], default: grpc.StatusCode) -> str:
    """The name of the code that the handler set, which may be the enum, its number, or nothing (0 or None)."""
    code: Any = context.code()
    return _CODE_NAMES.get(code, default.name) if code else default.name


def _report(method: str, took_s: float, code: str, **facts: str) -> None:
    RPC_SECONDS.labels(method, code).observe(took_s)
    write = _log.debug if method in _OPEN else _log.info
    write("rpc", method=method, code=code, ms=round(took_s * 1e3, 2), **facts)
