"""Builds, runs and stops a service's gRPC server.

`run` is the whole of a service's `__main__`: settings, logs, event loop, signals. Tests use `Server` directly: one
address with health, reflection and the interceptor. It may have several queues of calls, each a gRPC server of its own:
all of them listen at the port, serve the same servicers, and stop together.

A service stops in this order: it refuses new work, and health reports NOT_SERVING; what runs has `drain_s` to end, and
is served as before; the service asks its streams to go away and ends its work; the server refuses new RPCs and lets
open ones end; the service's own resources close and persist the rest.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, closing
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Final, Self, TypeAlias, TypeVar

import grpc
import orjson
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from penstock.ops.v1 import operations_service_pb2_grpc
from penstock_chassis import operations
from penstock_chassis.aio.event_loop import EventLoop
from penstock_chassis.auth import Authenticator, Owned, Role, RoleTable, Token
from penstock_chassis.connections.port import SharedPort
from penstock_chassis.disk import refused_start
from penstock_chassis.errors import FailedPrecondition, PenstockError
from penstock_chassis.garbage_collection import Collector
from penstock_chassis.health import HEALTH_SERVICE, Draining, Health
from penstock_chassis.homes import Home, StateDir
from penstock_chassis.interceptor import ServerInterceptor
from penstock_chassis.journal import refusal
from penstock_chassis.limits import MAX_MESSAGE_BYTES, MIN_PING_S, Limits
from penstock_chassis.operations import Members, Operations, Troubles, no_members, no_troubles
from penstock_chassis.process import set_parent_death_signal
from penstock_chassis.settings import ServiceSettings
from penstock_chassis.telemetry import logging, tracing
from penstock_chassis.telemetry.exposition import exposition
from penstock_chassis.tls import ServerTls

Registration: TypeAlias = tuple[object, Callable[[Any, Any], None]]
"""A servicer and the generated `add_..._to_server` that registers it."""

OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_S * 1000),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
)

LEAVE_S: Final = 0.5
"""How long open calls may take to end once what they are about was left to the next process."""
PARENT_DEATH_VARIABLE: Final = "PENSTOCK_PARENT_DEATH"
"""Set to 1 by a parent process with which this one must end."""

_EVERYONE: Final = frozenset(Role)
_log = structlog.get_logger("penstock.server")

S = TypeVar("S", bound=ServiceSettings)


async def _nothing(_seconds: float = 0.0) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A service's servicers, their roles, and how it starts and stops.

    `roles` maps `package.Service` or `package.Service/Method` to the roles that may call it beside the operator.
    `warm_up` runs while health still reports NOT_SERVING. `draining` refuses new work and counts what runs, which a
    stop lets end first. After that `drain(seconds)` ends what is left within that time.
    `leave(seconds)` refuses new work and leaves what runs to the service's next process instead, on SIGTERM, unless the
    service was drained before; it may wait that long for what could not go on. None = what runs is not left.
    `endpoints` are further addresses to announce, such as an HTTP ingress. `troubles` returns diagnostics for
    operators. `features` are what it serves of the contract beyond revision 1, for GetServerInfo. `owned` says whose
    the resources are that requests name, by `package.Service/Method`. `members` returns the services of each kind of
    which it has a list, for GetServerInfo.
    `home` refuses requests about what another service has; None refuses none.
    `judged_alone` are full names of messages inside requests whose provisional fields the handler refuses itself, by
    `refuse_provisional`, so that one item does not refuse the others.
    """

    registrations: Sequence[Registration]
    roles: Mapping[str, Iterable[Role]] = field(default_factory=dict)
    warm_up: Callable[[], Awaitable[None]] = _nothing
    draining: Draining = field(default_factory=Draining)
    drain: Callable[[float], Awaitable[None]] = _nothing
    leave: Callable[[float], Awaitable[None]] | None = None
    endpoints: Mapping[str, str] = field(default_factory=dict)
    troubles: Troubles = no_troubles
    features: Sequence[str] = ()
    owned: Mapping[str, Owned] = field(default_factory=dict)
    members: Members = no_members
    home: Home | None = None
    judged_alone: frozenset[str] = frozenset()


class Server:
    """A service's gRPC server, listening inside its `async with`; exit drains and stops it.

    Args:
        service: what to serve.
        authenticator: authenticates callers.
        host: address to listen on.
        port: 0 lets the kernel choose; `address` has the result.
        tls: certificates; None serves plaintext.
        drain_s: seconds that what runs may take to end when stopping; the service refuses new work meanwhile.
        stop_s: seconds that open RPCs may take to end after that.
        limits: limits for callers.
        call_queues: gRPC servers that share the port, >= 1. Each takes one call at a time, which takes five or six
            iterations of the event loop, and the kernel assigns each connection to one of them. They share the limits,
            and are fewer where those are small.

    Entering raises FailedPrecondition `PORT_IN_USE` when the address cannot be bound, and ValueError when `roles` names
    a method that does not exist.
    """

    def __init__(
        self,
        service: Service,
        authenticator: Authenticator,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ServerTls | None = None,
        drain_s: float = 0.0,
        stop_s: float = 10.0,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        call_queues: int = 1,
    ) -> None:
        self._service = service
        self.authenticator = authenticator
        self._host = host
        self._port = port
        self._tls = tls
        self._drain_s = drain_s
        self._stop_s = stop_s
        self._limits = limits
        self._call_queues = limits.queues(call_queues)
        self.is_replaced = False
        """Whether another process is to go on with what this one leaves, if the service can."""
        self._health = Health()
        self._names: Sequence[str] = ()
        self._servers: list[grpc.aio.Server] = []
        self._shared: SharedPort | None = None

    @property
    def address(self) -> str:
        """`host:port` as bound; valid once entered."""
        host = f"[{self._host}]" if ":" in self._host and not self._host.startswith("[") else self._host
        return f"{host}:{self._port}"

    async def __aenter__(self) -> Self:
        recorder = _Recorder()
        for servicer, add in self._service.registrations:
            add(servicer, recorder)
        names = [*recorder.services, reflection.SERVICE_NAME, HEALTH_SERVICE]
        roles = RoleTable({reflection.SERVICE_NAME: _EVERYONE, HEALTH_SERVICE: _EVERYONE, **self._service.roles})
        unknown = roles.unknown([*recorder.methods, f"{reflection.SERVICE_NAME}/", f"{HEALTH_SERVICE}/"])
        if unknown:
            raise ValueError(f"roles are set for methods that are not served: {', '.join(unknown)}")

        if unserved := sorted(self._service.owned.keys() - set(recorder.methods)):
            raise ValueError(f"owners are set for methods that are not served: {', '.join(unserved)}")

        interceptor = ServerInterceptor(
            self.authenticator,
            roles,
            self._limits.reader_s,
            self._service.owned,
            self._service.home,
            self._service.judged_alone,
        )
        servers = [self._made(interceptor, names) for _ in range(self._call_queues)]
        self._bind(servers)
        self._health.serve(names, health_pb2.HealthCheckResponse.NOT_SERVING)
        try:
            for server in servers:
                await server.start()
            await self._service.warm_up()
        except BaseException:
            await self._ended(servers, None)
            raise
        self._servers = servers
        self._names = names
        self._service.draining.on_change = self._tell_health
        self._tell_health()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.stop(self._stop_s, self._drain_s)
        else:
            await self.stop(0.0)

    def _tell_health(self) -> None:
        statuses = health_pb2.HealthCheckResponse
        drains = self._service.draining.is_on
        self._health.serve(self._names, statuses.NOT_SERVING if drains else statuses.SERVING)

    async def _drained(self, drain_s: float) -> bool:
        """Refuses new work, and leaves what runs to the next process (returns True), or lets it end."""
        draining = self._service.draining
        leave = self._service.leave if self.is_replaced and not draining.is_on else None
        if leave is not None:
            # A drain would change what runs, such as by ending its pauses, and the next process would find that.
            draining.leave()
            self._health.stop()
            await leave(drain_s)
            return True
        draining.begin(stopping=True)
        self._health.stop()
        if drain_s <= 0:
            return False
        try:
            async with asyncio.timeout(drain_s):
                await draining.finished()
        except TimeoutError:
            _log.warning("work is left after the drain, and is ended", seconds=drain_s, running=draining.running())
        return False

    async def stop(self, grace_s: float, drain_s: float = 0.0) -> None:
        """Lets work end for at most `drain_s` seconds and RPCs for `grace_s` more, then ends the rest. Idempotent.

        Cancelling it ends all at once.
        """
        servers, self._servers = self._servers, []
        if not servers:
            return
        deadline = 0.0
        try:
            is_left = await self._drained(drain_s)
            until = asyncio.get_running_loop().time() + grace_s
            try:
                async with asyncio.timeout_at(until):
                    await self._service.drain(grace_s)
            except TimeoutError:
                _log.warning("stopping timed out", seconds=grace_s)
            # Callers of what was left wait for the next process, which cannot listen before this one has ended.
            deadline = min(until, asyncio.get_running_loop().time() + LEAVE_S) if is_left else until
        finally:
            self._health.end()
            # Shielded: a second signal cancels the wait above, and the server must still be taken down.
            left = deadline - asyncio.get_running_loop().time()
            await asyncio.shield(asyncio.ensure_future(self._ended(servers, max(0.0, left))))

    def _made(self, interceptor: ServerInterceptor, names: Sequence[str]) -> grpc.aio.Server:
        server = grpc.aio.server(
            interceptors=[interceptor],
            options=(
                *OPTIONS,
                # By default a second instance would silently share the port and get half of the connections.
                ("grpc.so_reuseport", int(self._call_queues > 1)),
                *self._limits.options(self._call_queues),
            ),
        )
        generic = _GenericOnly(server)
        for servicer, add in self._service.registrations:
            add(servicer, generic)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, generic)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflection.aio.ReflectionServicer(names), generic)
        return server

    async def _ended(self, servers: Iterable[grpc.aio.Server], grace_s: float | None) -> None:
        """All stop listening at once, and their calls have the same time."""
        try:
            await asyncio.gather(*(server.stop(grace_s) for server in servers))
        finally:
            if self._shared is not None:
                self._shared.close()

    def _bind(self, servers: Sequence[grpc.aio.Server]) -> None:
        tls = None if self._tls is None else self._tls.credentials()

        def bind_all() -> None:
            for server in servers:
                self._port = (
                    server.add_insecure_port(self.address) if tls is None else server.add_secure_port(self.address, tls)
                )

        try:
            if len(servers) == 1:
                bind_all()
            else:
                self._shared = SharedPort(self._host.strip("[]"), self._port)
                self._port = self._shared.number
                with self._shared.joined():
                    bind_all()
            is_bound = self._port != 0
        except (OSError, RuntimeError):
            is_bound = False
        if not is_bound:
            if self._shared is not None:
                self._shared.close()
            raise FailedPrecondition(
                f"{self.address}: the service cannot listen there, because another process uses it or this machine "
                "lacks the address."
                " Stop that process, or set another port (0 = any free one).",
                reason="PORT_IN_USE",
            )


def run(settings: type[S], name: str, build: Callable[[S], AbstractAsyncContextManager[Service]]) -> None:
    """Runs a service until SIGTERM or SIGINT; the whole of its `main`.

    When it is ready it prints one line of JSON on standard output:
    `{"event": "ready", "service": name, "address": "127.0.0.1:7701", "endpoints": {}, "pid": 1}`.
    A second signal stops without waiting. SIGTERM is a supervisor's, which starts a service again: one that can leave
    its work to its next process does. SIGINT comes from a person, or from what stops all services. Invalid settings or
    a failed start are explained on standard error.

    Args:
        settings: the service's settings class; read from flags, environment and file.
        name: the service's short name, such as "sandbox".
        build: opens the service's resources and yields what to serve; closes them after the server has stopped.

    Raises:
        SystemExit: 2 when the service could not start, 1 when a signal stopped it before it was ready or had drained.
    """
    # gRPC's informational messages (a peer went away) stay out of our log; its errors do not. Read at its first use.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    loaded: S | None = None
    try:
        loaded = settings.load()
        logging.configure(loaded.log_level, loaded.log_format)
        if loaded.parent_pid is not None or os.environ.get(PARENT_DEATH_VARIABLE) == "1":
            set_parent_death_signal(loaded.parent_pid)
        if loaded.state_dir_shared:
            # Kept until this process ends, however it ends.
            loaded = loaded.model_copy(update={"state_dir": StateDir(loaded.state_dir).path})
        _log.info("settings", service=name, **loaded.public())
        with asyncio.Runner(loop_factory=EventLoop) as runner:
            runner.run(_run(loaded, name, build))
    except asyncio.CancelledError:
        sys.stderr.write(f"penstock-{name}: stopped by a signal before it was ready or drained\n")
        raise SystemExit(1) from None
    except Exception as error:
        # A service whose parts run in a task group fails with a group around its own error.
        cause = _only_cause(error)
        where = ""
        if loaded is not None:
            if (of_journal := refusal(cause)) is not None:
                cause, where = of_journal, f" Its state is in {loaded.state_dir} (state_dir)."
            cause = refused_start(cause, loaded.state_dir) or cause
        if not isinstance(cause, PenstockError):
            raise
        sys.stderr.write(f"penstock-{name}: {cause.message}{where}\n")
        raise SystemExit(2) from None


def _only_cause(error: BaseException) -> BaseException:
    """Unwraps exception groups that contain a single exception."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


async def _run(settings: S, name: str, build: Callable[[S], AbstractAsyncContextManager[Service]]) -> None:
    with _Signals() as stop:
        async with AsyncExitStack() as stack:
            token = settings.otlp_token.get_secret_value() if settings.otlp_token else None
            await stack.enter_async_context(
                tracing.exporting(
                    name, settings.otlp_endpoint, ratio=settings.trace_ratio, token=token, ca=settings.otlp_ca
                )
            )
            service = await stack.enter_async_context(build(settings))
            watched = stack.enter_context(
                closing(
                    Operations(
                        name,
                        service.troubles,
                        {"state": settings.state_dir},
                        restarts=settings.restarts,
                        last_end=settings.last_end,
                        features=service.features,
                        own_name=service.home.name if service.home is not None else settings.name,
                        draining=service.draining,
                        members=service.members,
                    )
                )
            )
            stack.enter_context(operations.DISK_FREE.supplied_by(watched.free))
            server = await stack.enter_async_context(_server(settings, watched_by(watched, service)))
            endpoints = dict(service.endpoints)
            if settings.metrics_port is not None:
                endpoints["metrics"] = await stack.enter_async_context(
                    exposition(settings.metrics_host, settings.metrics_port, server.authenticator, _tls(settings))
                )
            ready = {
                "event": "ready",
                "service": name,
                "address": server.address,
                "endpoints": endpoints,
                "pid": os.getpid(),
            }
            Collector(asyncio.get_running_loop()).begin()
            sys.stdout.write(orjson.dumps(ready).decode() + "\n")
            sys.stdout.flush()
            watched.begin()
            server.is_replaced = await stop() == signal.SIGTERM
            _log.info("stopping", service=name)


def watched_by(watched: Operations, service: Service) -> Service:
    """Returns the service with the operations servicer added."""
    register = operations_service_pb2_grpc.add_OperationsServiceServicer_to_server
    return replace(
        service,
        registrations=(*service.registrations, (watched, register)),
        roles={**service.roles, **operations.ROLES},
    )


def _tls(settings: ServiceSettings) -> ServerTls | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return ServerTls(settings.tls_cert, settings.tls_key, settings.tls_client_ca)


def _server(settings: ServiceSettings, service: Service) -> Server:
    tokens = {
        role: secret.get_secret_value()
        for role, secret in (
            (Role.OPERATOR, settings.operator_token),
            (Role.TRAINER, settings.trainer_token),
            (Role.OBSERVER, settings.observer_token),
        )
        if secret is not None
    }
    more = [
        Token(role, name, secret.get_secret_value())
        for name, one in settings.namespaces.items()
        for role, secret in ((Role.TRAINER, one.trainer_token), (Role.OBSERVER, one.observer_token))
        if secret is not None
    ]
    return Server(
        service,
        Authenticator(tokens, more=more, anonymous=settings.anonymous),
        host=settings.host,
        port=settings.port,
        tls=_tls(settings),
        drain_s=settings.drain_s,
        stop_s=settings.stop_s,
        limits=Limits(settings.max_streams, settings.max_connections, settings.reader_timeout_s),
        call_queues=settings.call_queues,
    )


class _Signals:
    """Catches SIGTERM and SIGINT. Entering yields a function that waits for the first of them, and returns it.

    A signal that comes before anyone waits (the service is still starting), and any after the first, cancels the task.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._waiter: asyncio.Future[signal.Signals] | None = None

    def __enter__(self) -> Callable[[], Awaitable[signal.Signals]]:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._caught, number)
        return self._wait

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)

    async def _wait(self) -> signal.Signals:
        self._waiter = self._loop.create_future()
        return await self._waiter

    def _caught(self, number: signal.Signals) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(number)
        elif self._task is not None:
            self._task.cancel()


class _GenericOnly:
    """Wraps a server so that generated code registers generic handlers only, which find every method by name.

    Generated code also registers each method by itself, and grpc.aio waits on one task per registered method for every
    call: with the 40 methods of a service that is a sixth of the cost of a small call.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, object]) -> None:
        """Does nothing: the generic handlers have the same methods."""


class _Recorder:
    """Stands in for a server while servicers register, to record the names of their services and methods."""

    def __init__(self) -> None:
        self.services: list[str] = []
        self.methods: list[str] = []

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, object]) -> None:
        self.services.append(service)
        self.methods.extend(f"{service}/{method}" for method in handlers)

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """The same methods again, for servers that look them up by name."""
