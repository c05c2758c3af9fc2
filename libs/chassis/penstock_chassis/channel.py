"""Client channels between services, with shared options, the token and typed errors.

A token is sent in clear to loopback only; any other target needs TLS.

On plaintext loopback `_TokenChannel` adds the token at the call site instead of a grpc.aio interceptor: an interceptor
replaces streaming calls by proxies that copy each message through a queue.

Calls on a channel that is closed, before them or under them, fail with UNAVAILABLE (`connections.closing`).
"""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final, Protocol, Self, TypeVar

import grpc

from penstock.values import routes
from penstock_chassis.aio.retry import Backoff, Delays, retry
from penstock_chassis.auth import HEADER, NAMESPACE_HEADER, acts_in
from penstock_chassis.connections.closing import ClosableCall, ClosableStream, Closing, cancellations
from penstock_chassis.connections.pool import PooledChannel
from penstock_chassis.errors import InvalidArgument, PenstockError
from penstock_chassis.interceptor import REQUEST_ID_HEADER
from penstock_chassis.limits import MAX_MESSAGE_BYTES
from penstock_chassis.rpc_status import broke_while_sending, from_rpc_error, was_refused
from penstock_chassis.settings import is_loopback
from penstock_chassis.telemetry import bound, tracing
from penstock_chassis.tls import ClientTls

MAX_CONNECTIONS: Final = 64
"""Connections per channel; a service allows 256 calls on each, so about 16,000 concurrent calls."""

OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A cut link is seen within 20 s, also by a stream at rest. A server allows a ping each 10 s (`MIN_PING_S`).
    ("grpc.keepalive_time_ms", 12_000),
    ("grpc.keepalive_timeout_ms", 8_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # The default of two minutes between attempts would far outlast a restart of the peer.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # Traffic to loopback and between our services must never go through a proxy from the environment.
    ("grpc.enable_http_proxy", 0),
    # A server bounds the calls per connection (`limits`); a client with more calls opens more connections.
    ("grpc.max_connections_per_subchannel_cap", MAX_CONNECTIONS),
    ("grpc.service_config", f'{{"connectionScaling": {{"maxConnectionsPerSubchannel": {MAX_CONNECTIONS}}}}}'),
    # Channels with the same options share connections otherwise, and their failures: the calls of a channel that is
    # opened once a service is back would fail as long as an earlier one, closed or not, waits between its attempts.
    ("grpc.use_local_subchannel_pool", 1),
)

_REFUSED_AGAIN: Final = Delays(0.02, 1.0, jitter=(0.5, 1.0))
"""Between attempts of a call whose stream the server refused."""


class _Cancellable(Protocol):
    def cancel(self) -> bool: ...


C = TypeVar("C", bound=_Cancellable)
Q = TypeVar("Q")


def connect(
    target: str, token: str | None = None, tls: ClientTls | None = None, *, certified: str = "", connections: int = 1
) -> grpc.aio.Channel:
    """Opens a channel; it connects with the first call. Close it with `await channel.close()` or `async with`.

    Calls that the closing ends fail with UNAVAILABLE, as if nothing listened.

    Args:
        target: `host:port`.
        token: bearer token sent with each call; None sends none.
        tls: certificates; None is plaintext, for loopback.
        certified: the name that the peer's certificate must have; empty = the host of `target`.
        connections: how many to spread calls over (`connections.pool`); each is opened when it is first needed.

    Raises:
        InvalidArgument: `TOKEN_IN_CLEAR` for a token, no TLS and a target that is not loopback; `TLS_FILE`.
    """
    if tls is None:
        if token is not None and not is_loopback(_host(target)):
            raise InvalidArgument(
                f"A token must not be sent in cleartext to {target}: use TLS, or an address on this machine.",
                reason="TOKEN_IN_CLEAR",
            )
        return _TokenChannel(
            _spread(lambda options: grpc.aio.insecure_channel(target, options=options), OPTIONS, connections), token
        )
    credentials = tls.credentials()
    if token is not None:
        credentials = grpc.composite_channel_credentials(credentials, grpc.access_token_call_credentials(token))
    options = (*OPTIONS, ("grpc.ssl_target_name_override", certified)) if certified else OPTIONS
    return _TokenChannel(
        _spread(lambda options: grpc.aio.secure_channel(target, credentials, options=options), options, connections),
        None,
    )


def _spread(
    dial: Callable[[Sequence[tuple[str, Any]]], grpc.aio.Channel], options: Sequence[tuple[str, Any]], connections: int
) -> grpc.aio.Channel:
    if connections == 1:
        return dial(options)
    return PooledChannel(lambda: dial(options), connections)


def error_from_rpc(error: grpc.aio.AioRpcError) -> PenstockError:
    """Returns the typed error for a failed call: the one that the other service raised."""
    return from_rpc_error(error)


@contextmanager
def typed_errors() -> Iterator[None]:
    """Converts failed RPCs inside to the `PenstockError` that the other service raised. Use around awaits."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def read(method: Callable[[Q], Any], request: Q) -> AsyncGenerator[Any, None]:
    """Yields the messages of a server stream; makes the call again while its stream is refused, as `_Unary` does.

    Raises:
        PenstockError: the error that ended the stream.
    """
    backoff = Backoff(_REFUSED_AGAIN)
    while True:
        try:
            with streaming(method(request)) as messages:
                async for message in messages:
                    yield message
            return
        except PenstockError as error:
            if error.reason != "STREAM_REFUSED":
                raise
        await backoff.wait()


async def upload(
    method: Callable[..., Any], frames: Callable[[], AsyncIterator[Any] | Iterator[Any]], *, timeout: float | None
) -> Any:
    """Sends a client stream and returns its answer; retries at most twice if grpc.aio lost the peer's status.

    Only for streams that state their write position, so that sending one twice changes nothing.

    Args:
        method: a client-streaming method of a stub.
        frames: makes the requests of one attempt.
        timeout: seconds for each attempt; None = no limit.

    Raises:
        grpc.aio.AioRpcError: the peer's status.
        Exception: what the iterator of `frames` raised.
    """
    for _ in range(2):
        try:
            return await send(method, frames(), timeout=timeout)
        except grpc.aio.AioRpcError as error:
            if not broke_while_sending(error):
                raise
    return await send(method, frames(), timeout=timeout)


async def send(method: Any, frames: AsyncIterator[Any] | Iterator[Any], *, timeout: float | None) -> Any:
    """Sends a client stream once and returns its answer.

    grpc.aio cancels a call whose requests end with an error, and the error is lost: it is raised here.

    Args:
        method: a client-streaming method of a stub.
        frames: the requests.
        timeout: in seconds; None = no limit.

    Raises:
        grpc.aio.AioRpcError: the peer's status.
        Exception: what `frames` raised.
    """
    failures: list[Exception] = []
    before = cancellations()
    try:
        if isinstance(frames, Iterator):
            return await method(_noted(frames, failures), timeout=timeout)
        first = await anext(frames, None)
        routed = routes.headers(getattr(method, "method", ""), first)
        return await method(_noted_async(first, frames, failures), timeout=timeout, metadata=routed)
    except asyncio.CancelledError:
        if failures and cancellations() <= before:
            raise failures[0] from None
        raise


def _noted(frames: Iterator[Any], failures: list[Exception]) -> Iterator[Any]:
    try:
        yield from frames
    except Exception as error:
        failures.append(error)
        raise


async def _noted_async(first: Any, frames: AsyncIterator[Any], failures: list[Exception]) -> AsyncIterator[Any]:
    if first is not None:
        yield first
    try:
        async for frame in frames:
            yield frame
    except Exception as error:
        failures.append(error)
        raise


@contextmanager
def streaming(call: C) -> Iterator[C]:
    """Scopes a streaming RPC: `with streaming(stub.Watch(request)) as events: async for event in events: ...`.

    The RPC is cancelled on every exit, and failures are raised as in `typed_errors`. Without this, a cancelled task may
    leave its RPC open: grpc.aio misses a cancellation that comes while the request is being sent (seen with 1.85 on
    Python 3.13), and the server keeps serving until the call object is garbage-collected.
    """
    try:
        with typed_errors():
            yield call
    finally:
        call.cancel()


def _host(target: str) -> str:
    """Returns the host of `host:port`; empty, hence not loopback, for other forms of target."""
    host, colon, port = target.rpartition(":")
    return host if colon and port.isdigit() and "/" not in host else ""


class _TokenChannel(grpc.aio.Channel):
    """A channel that adds metadata to each call: the token, the namespace that is acted in, the routing headers, the id
    of the request being served and the tracing ids.
    """

    def __init__(self, channel: grpc.aio.Channel, token: str | None) -> None:
        self._channel = channel
        self._closing = Closing()
        self._metadata: tuple[tuple[str, str], ...] = () if token is None else ((HEADER, f"Bearer {token}"),)

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _Unary(method, self._channel.unary_unary(method, *args, **kwargs), self._metadata, self._closing)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _WithMetadata(method, self._channel.unary_stream(method, *args, **kwargs), self._metadata, self._closing)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _WithMetadata(method, self._channel.stream_unary(method, *args, **kwargs), self._metadata, self._closing)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _WithMetadata(
            method, self._channel.stream_stream(method, *args, **kwargs), self._metadata, self._closing
        )

    async def close(self, grace: float | None = None) -> None:
        self._closing.is_closed = True
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _WithMetadata:
    """A method of a stub that adds metadata to each call.

    Of a stream, the first request decides the routing headers. It is taken from an iterator before the call begins; the
    caller of a method that takes an asynchronous one passes `metadata` from `routes.headers` itself (see `upload`).
    """

    __slots__ = ("_call", "_closing", "_metadata", "method")

    def __init__(self, method: str, call: Any, metadata: Sequence[tuple[str, str]], closing: Closing) -> None:
        self.method = method
        self._closing = closing
        self._call = call
        self._metadata = tuple(metadata)

    def __call__(self, request: Any = None, *args: Any, metadata: Any = None, **kwargs: Any) -> Any:
        request, sent = self._routed(request, metadata)
        given = () if request is None else (request,)
        call = None if self._closing.is_closed else self._call(*given, *args, metadata=sent, **kwargs)
        return (ClosableCall if hasattr(call, "__await__") else ClosableStream)(call, self._closing)

    def _routed(self, request: Any, metadata: Any) -> tuple[Any, tuple[tuple[str, str], ...]]:
        """Returns the request, whose iterator may have begun, and what is sent with it."""
        routed: tuple[tuple[str, str], ...] = ()
        if routes.declared(self.method):
            first = request
            if isinstance(request, Iterator) and (first := next(request, None)) is not None:
                request = chain((first,), request)
            routed = (*routes.headers(self.method, first), *(metadata or ()))
        elif metadata:
            routed = tuple(metadata)
        facts = bound.facts()
        request_id = facts.get("request_id")
        traced: tuple[tuple[str, str], ...] = ()
        if request_id is not None:
            sent = {name for name, _ in routed}
            traced = tuple(item for item in tracing.handed_on(facts) if item[0] not in sent)
            traced = ((REQUEST_ID_HEADER, str(request_id)), *traced)
        namespace = acts_in()
        acting = () if namespace is None else ((NAMESPACE_HEADER, namespace),)
        return request, (*self._metadata, *acting, *traced, *routed)


class _Unary(_WithMetadata):
    """A method with one request and one answer, whose call is made again if the server refused its stream.

    A server refuses streams of a connection that has as many as it allows, and it counts those that have ended until
    they are freed, which a busy service does late. It has not seen the request (RFC 9113, 8.7), so that any call may be
    made again; gRPC itself does so once.
    """

    __slots__ = ()

    def __call__(  # type: ignore[override]  # a coroutine: nothing but its answer is wanted
        self, request: Any, *, timeout: float | None = None, metadata: Any = None, **kwargs: Any
    ) -> Any:
        request, sent = self._routed(request, metadata)
        return self._answer(request, timeout, sent, kwargs)

    async def _answer(self, request: Any, timeout: float | None, sent: Any, options: Any) -> Any:
        loop = asyncio.get_running_loop()
        until = math.inf if timeout is None else loop.time() + timeout

        async def attempt() -> Any:
            left = None if timeout is None else max(0.0, until - loop.time())
            self._closing.check()
            return await self._closing.outcome(lambda: self._call(request, timeout=left, metadata=sent, **options))

        def patience_s(error: Exception) -> float:
            refused = isinstance(error, grpc.aio.AioRpcError) and was_refused(error)
            return (math.inf if timeout is None else timeout) if refused else 0.0

        return await retry(attempt, _REFUSED_AGAIN, patience_s=patience_s, retry_info=False)
