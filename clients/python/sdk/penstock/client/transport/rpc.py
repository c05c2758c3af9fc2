"""Calls to one service: its channel, its token, deadlines, retries, typed errors.

A call is retried only if it failed with UNAVAILABLE and repeating it is harmless: reads, and creates with a request id.
The delay grows with jitter; a service's RetryInfo is obeyed. A call of which another service is the home
(`HOME_ELSEWHERE`) is sent there, once; not a stream of requests that goes on after an answer, such as a session's.
"""

import asyncio
import copy
import random
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar, cast

import grpc

from penstock.client.errors import (
    ConfigurationError,
    PenstockError,
    Unauthenticated,
    Unavailable,
    from_rpc_error,
)
from penstock.client.transport import tracing
from penstock.client.transport.endpoints import Endpoints, ServiceName, Tls, is_local
from penstock.client.transport.routed_channel import RoutedChannel, RoutedMethod

if TYPE_CHECKING:
    Unary = grpc.aio.UnaryUnaryMultiCallable
    UnaryStream = grpc.aio.UnaryStreamMultiCallable
    StreamUnary = grpc.aio.StreamUnaryMultiCallable
    StreamStream = grpc.aio.StreamStreamMultiCallable

Q = TypeVar("Q")
A = TypeVar("A")
T = TypeVar("T")

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""Largest message in both directions, as the services have it."""

_MAX_CONNECTIONS: Final = 64

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # The services allow a ping every 10 s; a dead peer is noticed in 40 s.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.enable_http_proxy", 0),
    # A service bounds the calls per connection; a client with more calls opens more connections.
    ("grpc.max_connections_per_subchannel_cap", _MAX_CONNECTIONS),
    ("grpc.service_config", f'{{"connectionScaling": {{"maxConnectionsPerSubchannel": {_MAX_CONNECTIONS}}}}}'),
    # Clients of one process share connections otherwise, and their failures: calls of one that is opened once a service
    # is back would fail as long as an earlier one, closed or not, waits between its attempts to connect.
    ("grpc.use_local_subchannel_pool", 1),
)

_HOST_AND_PORT: Final = re.compile(r"(?!unix:)(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}")
MAX_HOMES: Final = 256
"""Most other services that one client follows HOME_ELSEWHERE to, or uses as members of a cluster."""

DRAINING: Final = "DRAINING"
"""Reason of a service that takes no new work: what it refuses so it has not begun."""

_RESTARTING: Final = frozenset({"TRANSPORT_UNAVAILABLE", "DRIVER_STOPPING"})
"""Reasons of a driver that cannot be reached, or that stops and leaves what runs to its next process."""

_ATTEMPTS: Final = 5
_PATIENCE_S: Final = 10.0
"""Seconds after which no new attempt is begun: callers soon learn that a service is down."""
_RESTART_S: Final = 60.0
"""The same for a driver that has answered this client before, and cannot be reached now: it probably restarts."""


class Backoff:
    """Exponential backoff: 0.1 s, doubled up to 5 s, each delay drawn from its upper half."""

    def __init__(self, first: float = 0.1, cap: float = 5.0) -> None:
        self._first = first
        self._cap = cap
        self._attempt = 0

    def reset(self) -> None:
        """Call after a success: the next delay is short again."""
        self._attempt = 0

    def next(self, error: PenstockError | None = None) -> float:
        """Returns the seconds to wait before the next attempt; a service's RetryInfo is obeyed."""
        ceiling = min(self._cap, self._first * 2.0**self._attempt)
        self._attempt = min(self._attempt + 1, 16)
        delay = random.uniform(ceiling / 2, ceiling)  # noqa: S311 - jitter is no secret
        wish = error.retry_after if error is not None else None
        return delay if wish is None else max(delay, wish)


class Service:
    """Client of one service. Created inside a running event loop, closed with `close`."""

    def __init__(
        self, kind: ServiceName, endpoints: Endpoints, *, address: str = "", name: str = "", certified: str = ""
    ) -> None:
        """`address` replaces that of `endpoints`, which the token was given for: see `may_receive_token`.

        `name` is the service's own, for people; `certified` the name in its certificate, where that is not its host.
        """
        self._endpoints = endpoints
        self._awaits_restarts = kind == "driver"
        self._has_answered = False
        self.address = address or endpoints.address(kind)
        self.peer = f"the {kind} service {name} at {self.address}" if name else f"the {kind} service at {self.address}"
        self.channel = cast("grpc.aio.Channel", RoutedChannel(_open(self.address, endpoints.tls, certified)))
        self._elsewhere: dict[str, RoutedChannel] = {}
        token = () if endpoints.token is None else (("authorization", f"Bearer {endpoints.token}"),)
        named = (("x-penstock-namespace", endpoints.namespace),) if endpoints.namespace else ()
        self.metadata: Sequence[tuple[str, str]] = (*token, *named)
        """Metadata of every request; the tracing ids are added."""

    def briefly(self) -> Self:
        """Returns calls to the same service that do not wait while it restarts.

        For one of several that are asked, and for questions about its state.
        """
        made = copy.copy(self)
        made._awaits_restarts = False  # noqa: SLF001 - its own copy
        return made

    async def prepare(self) -> None:
        """Called before each request is sent; raises PenstockError if none can be."""

    def _metadata(self) -> Sequence[tuple[str, str]]:
        return (*self.metadata, *tracing.metadata())

    def error(self, failure: grpc.aio.AioRpcError, peer: str = "") -> PenstockError:
        """Returns the typed error of a failed call; if the token was refused, with the token's origin.

        `peer` is the service that was called, for people; empty = this one.
        """
        peer = peer or self.peer
        error = from_rpc_error(failure, peer)
        if isinstance(error, Unauthenticated):
            message = f"{error.message.rstrip('.')}, says {peer}. {self._endpoints.token_advice}"
        elif error.reason == "ROLE_NOT_ALLOWED":
            message = f"{error.message} The token that was sent is from {self._endpoints.token_origin}."
        else:
            return error
        return type(error)(message, reason=error.reason, metadata=error.metadata)

    async def close(self) -> None:
        """Closes the channels; calls that are open end."""
        await self.channel.close()
        for channel in self._elsewhere.values():
            await channel.close()

    async def call(
        self,
        method: "Unary[Q, A]",
        request: Q,
        *,
        timeout: float | None = 30.0,
        repeatable: bool = False,
        metadata: Sequence[tuple[str, str]] = (),
        while_draining: bool = True,
    ) -> A:
        """Makes one unary call.

        Args:
            method: of a stub.
            request: its request.
            timeout: seconds for each attempt; None = no limit.
            repeatable: whether to retry on UNAVAILABLE, for ten seconds at most; for a minute where a driver that has
                answered before cannot be reached.
            metadata: sent with this call, beside that of every request.
            while_draining: whether to do so too when the service is there and drains.

        Raises:
            PenstockError: the service's error.
        """

        async def attempt() -> A:
            await self.prepare()
            try:
                answer: A = await method(request, timeout=timeout, metadata=(*self._metadata(), *metadata))
            except grpc.aio.AioRpcError as failure:
                error = self.error(failure)
            else:
                self._has_answered = True
                return answer
            if (there := self._home_of(error)) is None:
                raise error
            try:
                again: A = await cast(RoutedMethod, method).at(there)(
                    request, timeout=timeout, metadata=(*self._metadata(), *metadata)
                )
            except grpc.aio.AioRpcError as failure:
                raise self.error(failure, _home_in(error)) from None
            return again

        if not repeatable:
            return await attempt()
        return await self.repeat(attempt, while_draining=while_draining)

    def _home_of(self, error: PenstockError) -> RoutedChannel | None:
        """Returns a channel to the service that `HOME_ELSEWHERE` names; None if the token must not go there."""
        address = error.metadata.get("address", "") if error.reason == "HOME_ELSEWHERE" else ""
        if not may_receive_token(self._endpoints, self.address, address):
            return None
        if address not in self._elsewhere:
            if len(self._elsewhere) >= MAX_HOMES:
                return None
            self._elsewhere[address] = RoutedChannel(_open(address, self._endpoints.tls))
        return self._elsewhere[address]

    def pages(self, method: "Unary[Q, A]", request: Q, *, timeout: float | None = 30.0) -> AsyncIterator[A]:
        """Yields the pages of a list, fetched on demand: one call each, retried as a read.

        Args:
            method: of a stub; its request has a `page_token`, its answer a `next_page_token`.
            request: for the first page; it is modified for the following ones.
            timeout: seconds for each attempt at a page; None = no limit.

        Raises:
            PenstockError: the service's error.
        """
        return _Pages(self, method, request, timeout)

    async def stream(
        self, method: "UnaryStream[Q, A]", request: Q, *, timeout: float | None = None
    ) -> AsyncGenerator[A, None]:
        """Yields the messages of one server stream; leaving it early cancels the call. Not retried.

        Raises:
            PenstockError: the error that ended the stream.
        """
        to: Any = method
        peer, may_follow = "", True
        while True:
            await self.prepare()
            call: Any = to(request, timeout=timeout, metadata=self._metadata())
            try:
                async for message in call:
                    may_follow, self._has_answered = False, True
                    yield message
                return
            except grpc.aio.AioRpcError as failure:
                error = self.error(failure, peer)
                there = self._home_of(error) if may_follow else None
                if there is None:
                    raise error from None
            finally:
                call.cancel()
            to, peer, may_follow = to.at(there), _home_in(error), False

    async def exchange(self, method: "StreamStream[Q, A]", request: Q, *, timeout: float | None = None) -> A:
        """Sends one message and receives one over a bidirectional stream. Not retried.

        Raises:
            PenstockError: the service's error.
        """
        to: Any = method
        peer, may_follow = "", True
        while True:
            await self.prepare()
            call: Any = to(iter((request,)), timeout=timeout, metadata=self._metadata())
            try:
                async for message in call:
                    answer: A = message
                    return answer
                raise Unavailable(f"{peer or self.peer} ended the stream", reason="STREAM_ENDED")
            except grpc.aio.AioRpcError as failure:
                error = self.error(failure, peer)
                there = self._home_of(error) if may_follow else None
                if there is None:
                    raise error from None
            finally:
                call.cancel()
            to, peer, may_follow = to.at(there), _home_in(error), False

    async def collect(self, method: "UnaryStream[Q, A]", request: Q, *, timeout: float | None = None) -> list[A]:
        """Returns all messages of a short server stream; retried as a read when the service is unavailable."""

        async def attempt() -> list[A]:
            async with aclosing(self.stream(method, request, timeout=timeout)) as messages:
                return [message async for message in messages]

        return await self.repeat(attempt)

    async def repeat(self, read: Callable[[], Awaitable[T]], *, while_draining: bool = True) -> T:
        """Returns the result of `read`; restarts it when the service is unavailable, as long as `call` says.

        `while_draining`: as in `call`.
        """
        backoff, loop = Backoff(), asyncio.get_running_loop()
        began, broke, attempts = loop.time(), 0.0, 0
        while True:
            try:
                return await read()
            except Unavailable as error:
                delay = backoff.next(error)
                restarts = self._awaits_restarts and self._has_answered and error.reason in _RESTARTING
                broke = broke or loop.time()
                attempts += 1
                is_last = attempts >= _ATTEMPTS and not restarts
                if is_last or loop.time() + delay > (broke + _RESTART_S if restarts else began + _PATIENCE_S):
                    raise
                if error.reason == DRAINING and not while_draining:
                    raise
            await asyncio.sleep(delay)

    async def push(
        self, method: "StreamUnary[Q, A]", frames: Callable[[], AsyncIterator[Q]], *, timeout: float | None = None
    ) -> A:
        """Sends one client stream; retried at most twice where grpc.aio lost the service's status. Where another
        service is the home, all of it is sent there: the one that says so has taken nothing of it.

        Args:
            method: of a stub; sending the same twice must change nothing.
            frames: makes the requests of one attempt.
            timeout: seconds for each attempt; None = no limit.

        Raises:
            PenstockError: the service's error.
            Exception: an exception of `frames`, unchanged.
        """
        attempts = 3
        to: Any = method
        peer, may_follow = "", True
        while True:
            attempts -= 1
            await self.prepare()
            source = _Source(frames())
            try:
                first = await source.first()
                answer: A = await to(source.frames(first), timeout=timeout, metadata=self._metadata(), routed=first)
                return answer
            except grpc.aio.AioRpcError as failure:
                if source.failure is not None:
                    raise source.failure from None
                error = self.error(failure, peer)
                if may_follow and (there := self._home_of(error)) is not None:
                    to, peer, may_follow = to.at(there), _home_in(error), False
                elif error.reason != "STREAM_BROKEN" or attempts <= 0:
                    raise error from None
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if source.failure is None or (task is not None and task.cancelling()):
                    raise
                raise source.failure from None


def may_receive_token(endpoints: Endpoints, own: str, address: str) -> bool:
    """Whether a service at `own` may say that the token is for `address` too.

    It goes to this machine, if it was for this machine, or to a server that the caller's own CA has certified. An
    address is a host and a port, no path and no resolver's name.
    """
    tls = endpoints.tls
    may_go = tls.ca is not None if tls is not None else is_local(own) and is_local(address)
    return may_go and _HOST_AND_PORT.fullmatch(address) is not None


def _home_in(error: PenstockError) -> str:
    return f"the {error.metadata.get('home', '')} service at {error.metadata['address']}"


class _Pages(Generic[Q, A]):
    """Holds no resources between two pages: the caller may stop at any point."""

    def __init__(self, service: Service, method: "Unary[Q, A]", request: Q, timeout: float | None) -> None:
        self._service = service
        self._method = method
        self._request: Any = request
        self._timeout = timeout
        self._is_over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> A:
        if self._is_over:
            raise StopAsyncIteration
        page: Any = await self._service.call(self._method, self._request, timeout=self._timeout, repeatable=True)
        self._request.page_token = page.next_page_token
        self._is_over = not page.next_page_token
        answer: A = page
        return answer


class _Source(Generic[Q]):
    """The requests of a client stream, and the exception that making them raised.

    grpc.aio does not report it: it cancels the call, which looks as if the caller itself had been cancelled.
    """

    def __init__(self, requests: AsyncIterator[Q]) -> None:
        self._requests = requests
        self.failure: Exception | None = None

    async def first(self) -> Q | None:
        """Returns the first request; None if there is none."""
        try:
            return await anext(self._requests, None)
        except Exception as error:
            self.failure = error
            raise

    async def frames(self, first: Q | None = None) -> AsyncGenerator[Q, None]:
        """Yields `first`, if given, and the requests that are left."""
        try:
            if first is not None:
                yield first
            async for request in self._requests:
                yield request
        except Exception as error:
            self.failure = error
            raise


@cache
def user_agent() -> str:
    """Returns the client's name and version, with which each request begins its metadata `user-agent`."""
    try:
        return f"penstock-python/{metadata.version('penstock')}"
    except metadata.PackageNotFoundError:  # sources without an installation
        return "penstock-python"


def _open(address: str, tls: Tls | None, certified: str = "") -> grpc.aio.Channel:
    options: tuple[tuple[str, Any], ...] = (*_OPTIONS, ("grpc.primary_user_agent", user_agent()))
    if certified:
        options = (*options, ("grpc.ssl_target_name_override", certified))
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    try:
        ca, key, cert = (None if file is None else file.read_bytes() for file in (tls.ca, tls.key, tls.cert))
    except OSError as error:
        raise ConfigurationError(f"{error.filename} cannot be read: {error.strerror}", reason="TLS_FILE") from None
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options=options)
