"""The one interceptor of every server. For each RPC, in this order:

1. authentication: the caller's role and namespace, and whether it may call this method (R5: before the request is
   read); a method that is declared and not served yet is refused;
2. a request id: the caller's `x-request-id` if it is well formed, a fresh one otherwise;
3. the context: that id and the caller's tracing ids (`tracing`) are on every log line of the handler's task and on the
   calls that it makes; if the caller is traced, so is the handler;
4. fields of the request, and of each message of a stream, that are declared and not served yet: refused;
5. the ids in the request: a resource of another namespace is unknown to the caller (`auth.ownership`); the handler;
6. the error table: a `PenstockError` becomes its status, anything else INTERNAL with an incident id (R8);
7. for streams, no message waits longer for its reader than `reader_s`: the handler ends, which frees its resources, and
   the call ends with RESOURCE_EXHAUSTED (READER_TOO_SLOW);
8. one log line: method, code, duration, role, never a body; and the same as metrics. Calls refused at step 1 are logged
   up to REFUSED_BURST at once, then one per REFUSED_INTERVAL_S with the number left out.

A cancelled RPC's `CancelledError` passes through untouched. A call without a deadline is served like any other.
"""

from __future__ import annotations  # grpc's classes take type arguments in their stubs only

import asyncio
import itertools
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import grpc
import structlog
from google.protobuf.message import DecodeError

from penstock.values.provisional import feature_of_method, takes_provisional
from penstock.values.routes import declared
from penstock_chassis import journal, rpc_status
from penstock_chassis.auth import HEALTH, Authenticator, Caller, Hidden, Owned, Role, RoleTable, authorize, serve_for
from penstock_chassis.errors import (
    InvalidArgument,
    PenstockError,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unsupported,
)
from penstock_chassis.homes import Home
from penstock_chassis.limits import READER_S
from penstock_chassis.telemetry import bound, tracing
from penstock_chassis.telemetry.logging import Meter
from penstock_chassis.telemetry.metrics import histogram
from penstock_chassis.validation import refuse_provisional, refuse_unknown, selects

REQUEST_ID_HEADER: Final = "x-request-id"
"""Metadata key of the request id, which ties one request's log lines together across services."""

RPC_SECONDS: Final = histogram(
    "penstock_rpc_seconds", "RPCs served; a stream counts for its whole duration", "method", "code"
)

MOST_NAMED: Final = 64
"""Kept handlers of one method beyond which none is kept for a namespace that an operator named: as a driver does in
each of its calls, for the namespaces of its rollouts."""

OPEN_REQUEST_S: Final = 10.0
"""Seconds within which the request of a method that needs no token must arrive."""

LAST_WORD_S: Final = 1.0
"""Seconds that a call ended for a slow reader gets to send its status. Later it is still sent once the caller reads
again; the handler does not wait for that."""

REFUSED_BURST: Final = 20
REFUSED_INTERVAL_S: Final = 10.0
"""Bounds of log lines for refused calls, for each reason: callers without a token may call any number of times."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_RUN: Final = secrets.token_hex(8)
"""Random per process; with a counter appended it makes unique request ids."""
_COUNT: Final = itertools.count()
_OPEN: Final = HEALTH
_CODE_NAMES: Final[dict[Any, str]] = {key: item.name for item in grpc.StatusCode for key in (item, item.value[0])}
_log = structlog.get_logger("penstock.rpc")


@dataclass(frozen=True, slots=True)
class _Method:
    """One method of a server and its handlers: one per admitted caller, one per reason of refusal.

    An operator may name any namespace, so of operators that name one, no more than MOST_NAMED handlers are kept.
    """

    name: str
    handler: grpc.RpcMethodHandler[Any, Any]
    admitted: dict[Caller | None, grpc.RpcMethodHandler[Any, Any]] = field(default_factory=dict)
    refused: dict[tuple[Role | None, str], grpc.RpcMethodHandler[Any, Any]] = field(default_factory=dict)


class ServerInterceptor(grpc.aio.ServerInterceptor):
    """The interceptor that the module's text describes.

    Args:
        authenticator: knows the tokens.
        roles: the roles that may call each method.
        reader_s: seconds that the caller of a stream may take to read a message.
        owned: whose the resources are that requests name, by `package.Service/Method`.
        home: refuses requests about what another service has; None refuses none.
        judged_alone: see `Service`.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        roles: RoleTable,
        reader_s: float = READER_S,
        owned: Mapping[str, Owned] | None = None,
        home: Home | None = None,
        judged_alone: frozenset[str] = frozenset(),
    ) -> None:
        self._authenticator = authenticator
        self._judged_alone = judged_alone
        self._home = home
        self._reader_s = reader_s
        self._roles = roles
        self._owned = dict(owned or {})
        self._methods: dict[str, _Method] = {}
        self._meters: dict[str, Meter] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wraps the method's handler, once per role; a server's handlers and roles never change.

        A refused caller's request is not read, so a request that never arrives holds no resources.
        """
        method = self._methods.get(handler_call_details.method)
        if method is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None  # gRPC answers UNIMPLEMENTED: the methods are no secret, the protos are public
            method = _Method(handler_call_details.method.removeprefix("/"), handler)
            self._methods[handler_call_details.method] = method
        caller = None
        try:
            if method.name not in _OPEN:
                caller = self._authenticator.authenticate(handler_call_details.invocation_metadata or ())
            return method.admitted.get(caller) or self._admitted(method, caller)
        except (Unauthenticated, PermissionDenied, InvalidArgument, Unsupported) as error:
            return self._refused(method, None if caller is None else caller.role, error)

    def _admitted(self, method: _Method, caller: Caller | None) -> grpc.RpcMethodHandler[Any, Any]:
        """Raises PermissionDenied, or Unsupported `RPC_NOT_SERVED`."""
        if caller is not None:
            authorize(caller.role, method.name, self._roles)
        if feature := feature_of_method(method.name):
            raise Unsupported(
                f"{method.name} is not served yet: nothing was done. The protos declare it as provisional, so it may "
                f"still change. Its feature will be {feature}.",
                reason="RPC_NOT_SERVED",
            )
        wrapped = self._wrap(method.name, method.handler, caller)
        is_named = caller is not None and caller.role is Role.OPERATOR and caller.namespace is not None
        if not is_named or len(method.admitted) < MOST_NAMED:
            method.admitted[caller] = wrapped
        return wrapped

    def _refused(self, method: _Method, role: Role | None, error: PenstockError) -> grpc.RpcMethodHandler[Any, Any]:
        """Answers at once: gRPC runs the handler of a request stream before any message has arrived."""
        reason = error.reason
        refused = method.refused.get((role, reason))
        if refused is None:
            status = rpc_status.to_status(error)  # the text is the same for the same reason and role
            meter = self._meters.setdefault(reason, Meter(REFUSED_BURST, REFUSED_INTERVAL_S))

            async def refuse(_requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
                started = time.perf_counter()
                _enter(context, None if role is None else Caller(role, None))
                took = time.perf_counter() - started
                if meter.allows(started):
                    left_out = meter.left_out()
                    facts = {"left_out": left_out} if left_out else {}
                    _report(method.name, took, status.code.name, reason=reason, **facts)
                else:
                    RPC_SECONDS.labels(method.name, status.code.name).observe(took)
                await context.abort(status.code, status.message, status.trailing_metadata)

            refused = grpc.stream_stream_rpc_method_handler(refuse, None, method.handler.response_serializer)
            method.refused[role, reason] = refused
        return refused

    def _wrap(
        self, method: str, handler: grpc.RpcMethodHandler[Any, Any], caller: Caller | None
    ) -> grpc.RpcMethodHandler[Any, Any]:
        owned = self._owned.get(method)
        # The four arities differ in the response only.
        checked = _checked if self._home is None or not declared(method) else partial(_checked_at, self._home, method)
        if handler.response_streaming:
            kind, make = (
                (handler.stream_stream, grpc.stream_stream_rpc_method_handler)
                if handler.request_streaming
                else (handler.unary_stream, grpc.unary_stream_rpc_method_handler)
            )
            if method in _OPEN:
                kind, make = _soon_stream(kind), grpc.stream_stream_rpc_method_handler
            behaviour = _streaming(method, kind, caller, self._reader_s, owned, checked)
            return make(behaviour, self._reader(method, handler), handler.response_serializer)
        kind, make = (
            (handler.stream_unary, grpc.stream_unary_rpc_method_handler)
            if handler.request_streaming
            else (handler.unary_unary, grpc.unary_unary_rpc_method_handler)
        )
        if method in _OPEN:
            kind, make = _soon(kind), grpc.stream_unary_rpc_method_handler
        return make(
            _single(method, kind, caller, owned, checked), self._reader(method, handler), handler.response_serializer
        )

    def _reader(self, method: str, handler: grpc.RpcMethodHandler[Any, Any]) -> Any:
        """Returns the deserializer of a method's requests; for a unary request, an error is returned, not raised.

        gRPC parses a unary request before the handler runs and would answer with the parser's own text. So the error is
        raised after the caller was admitted; in a request stream it is raised in the handler.
        """
        parse, alone = handler.request_deserializer, self._judged_alone
        if parse is None:
            return parse
        selecting, unserved = selects(method), takes_provisional(method, alone)

        def strict(data: bytes) -> Any:
            request = parse(data)
            if selecting:
                refuse_unknown(request)
            if unserved:
                refuse_provisional(request, alone)
            return request

        def tolerant(data: bytes) -> Any:
            try:
                return strict(data)
            except DecodeError:
                return _malformed()
            except InvalidArgument as error:
                return error

        return strict if handler.request_streaming else tolerant


def _single(
    method: str, behaviour: Any, caller: Caller | None, owned: Owned | None, checked: Callable[[Any], Any]
) -> Any:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        started = time.perf_counter()
        hidden = _hiding(owned, caller)
        try:
            with tracing.served(method, _enter(context, caller)):
                response = await behaviour(await _reached(checked(request), hidden), context)
        except BaseException as error:
            await _fail(method, started, context, error if hidden is None else hidden.shown(error))
            raise
        # After the answer, which is sent as soon as this returns: the caller does not wait for the log.
        took = time.perf_counter() - started
        asyncio.get_running_loop().call_soon(_report, method, took, _code(context, grpc.StatusCode.OK))
        return response

    return call


def _streaming(
    method: str,
    behaviour: Any,
    caller: Caller | None,
    reader_s: float,
    owned: Owned | None,
    checked: Callable[[Any], Any],
) -> Any:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        started = time.perf_counter()
        loop = asyncio.get_running_loop()
        patience = asyncio.timeout(None)
        hidden = _hiding(owned, caller)

        async def write(response: Any) -> None:
            patience.reschedule(loop.time() + reader_s)
            await context.write(response)
            patience.reschedule(None)

        try:
            with tracing.served(method, _enter(context, caller)):
                async with patience:
                    responses = behaviour(await _reached(checked(request), hidden), context)
                    if hasattr(responses, "__aiter__"):
                        try:
                            async for response in responses:
                                await write(response)
                        finally:
                            # A generator that is left early must run its clean-up now, not when it is collected.
                            await responses.aclose()
                    else:
                        await responses  # a handler that calls context.write itself
        except BaseException as error:
            if patience.expired():
                await _end_unread(method, started, context, reader_s)
            await _fail(method, started, context, error if hidden is None else hidden.shown(error))
            raise
        _report(method, time.perf_counter() - started, _code(context, grpc.StatusCode.OK))

    return call


async def _end_unread(
    method: str, started: float, context: grpc.aio.ServicerContext[Any, Any], reader_s: float
) -> None:
    """Ends a call whose caller does not read; always raises. Its status queues behind the unread messages."""
    refused = ResourceExhausted(
        f"The stream was not read for {reader_s:g} s, so it was ended. Open it again; a resumable stream continues "
        "after the last position that you read.",
        reason="READER_TOO_SLOW",
    )
    try:
        async with asyncio.timeout(LAST_WORD_S):
            await _fail(method, started, context, refused)
    except TimeoutError:
        raise asyncio.CancelledError from None  # nothing is left to do for this call


def _enter(context: grpc.aio.ServicerContext[Any, Any], caller: Caller | None) -> str:
    """Binds the caller, and the fields that the call's log lines share.

    Returns the caller's trace context, or an empty string.
    """
    metadata: Any = context.invocation_metadata() or ()
    request_id = next((str(value) for key, value in metadata if key == REQUEST_ID_HEADER), "")
    if not _REQUEST_ID.fullmatch(request_id):
        request_id = f"{_RUN}{next(_COUNT):016x}"
    if caller is None:
        bound.bind_only(request_id=request_id)
        return ""
    serve_for(caller)
    named = {} if caller.namespace is None else {"namespace": caller.namespace}
    bound.bind_only(request_id=request_id, role=str(caller.role), **named)
    return tracing.taken_up(metadata)


def _hiding(owned: Owned | None, caller: Caller | None) -> Hidden | None:
    """Returns what hides ids of other namespaces; None where there is nothing to hide."""
    return None if owned is None or caller is None or caller.namespace is None else Hidden(owned, caller)


async def _reached(request: Any, hidden: Hidden | None) -> Any:
    if hidden is None:
        return request
    return hidden.hide_each(request) if hasattr(request, "__aiter__") else await hidden.hide(request)


def _soon(behaviour: Any) -> Any:
    """Wraps a method without authentication: reads its one request with a timeout, since gRPC would wait forever."""

    async def call(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        return await behaviour(await _only(requests), context)

    return call


def _soon_stream(behaviour: Any) -> Any:
    """The same for a method that answers with a stream."""

    async def call(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        async with aclosing(behaviour(await _only(requests), context)) as responses:
            async for response in responses:
                yield response

    return call


async def _only(requests: AsyncIterator[Any]) -> Any:
    try:
        async with asyncio.timeout(OPEN_REQUEST_S):
            request = await anext(requests)
    except (TimeoutError, StopAsyncIteration):
        raise InvalidArgument("The call has no request message.", reason="REQUEST_MALFORMED") from None
    return _checked(request)


def _checked(request: Any) -> Any:
    if isinstance(request, InvalidArgument):
        raise request
    return request


def _checked_at(home: Home, method: str, request: Any) -> Any:
    """Returns the request or stream; raises FailedPrecondition `HOME_ELSEWHERE`, of a stream when it is read."""
    _checked(request)
    if not hasattr(request, "__aiter__"):
        home.check(method, request)
        return request

    async def stream() -> AsyncIterator[Any]:
        is_first = True
        async for message in request:
            if is_first:
                home.check(method, message)
                is_first = False
            yield message

    return stream()


def _malformed() -> InvalidArgument:
    return InvalidArgument("The request is not a message of the method's type.", reason="REQUEST_MALFORMED")


async def _fail(method: str, started: float, context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> None:
    """Logs the end of a failed RPC and aborts it with its status; returns only if the exception must propagate."""
    if isinstance(error, grpc.aio.AbortError):
        _report(method, time.perf_counter() - started, _code(context, grpc.StatusCode.UNKNOWN))
        return
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        _report(method, time.perf_counter() - started, grpc.StatusCode.CANCELLED.name)
        return
    reported = rpc_status.expected(_malformed() if isinstance(error, DecodeError) else error)
    if reported is None:
        if not isinstance(error, Exception):
            return  # KeyboardInterrupt and its like end the process
        reported = rpc_status.unexpected()
        _log.error("rpc failed", method=method, incident_id=reported.metadata[rpc_status.INCIDENT], exc_info=error)
    elif journal.refusal(error):
        _log.error("the disk refused an rpc's record", method=method, exc_info=error)
    status = rpc_status.to_status(reported)
    _report(method, time.perf_counter() - started, status.code.name, reason=reported.reason)
    trailing = (*(context.trailing_metadata() or ()), *status.trailing_metadata)
    await context.abort(status.code, status.message, trailing)


def _code(context: grpc.aio.ServicerContext[Any, Any], default: grpc.StatusCode) -> str:
    """Returns the name of the code that the handler set, which may be the enum, its number, or nothing (0 or None)."""
    code: Any = context.code()
    return _CODE_NAMES.get(code, default.name) if code else default.name


def _report(method: str, took_s: float, code: str, **facts: str | int) -> None:
    RPC_SECONDS.labels(method, code).observe(took_s)
    write = _log.debug if method in _OPEN else _log.info
    write("rpc", method=method, code=code, ms=round(took_s * 1e3, 2), **facts)
