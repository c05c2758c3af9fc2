"""Wires the journal, the sources, the gate, the ingress and the servicers. No other module imports them all."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from itertools import chain

import aiohttp
import grpc
import structlog
from aiohttp import web

from penstock_chassis.auth import Role
from penstock_chassis.channel import connect
from penstock_chassis.errors import FailedPrecondition
from penstock_chassis.health import NOTICE_S, Draining
from penstock_chassis.membership import members
from penstock_chassis.membership.members import Member
from penstock_chassis.server import Service
from penstock_chassis.tls import ClientTls
from penstock_interception.clients.engines.health import EngineHealth
from penstock_interception.clients.engines.pool import EnginePool, engine_list, one_engine, unreachable
from penstock_interception.clients.inference import InferenceSource
from penstock_interception.domain.calls import CodecChoice, Dialect
from penstock_interception.domain.kept_captures import CaptureLimits
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.gate.context import GateLimits, LeasingLimits, ToolLimits
from penstock_interception.ingress.black_box import Passthrough
from penstock_interception.ingress.connections import IDLE_S, ConnectionLimits, Connections
from penstock_interception.ingress.dialects.base import Ask, DialectCodec, Route
from penstock_interception.ingress.dialects.chat.dialect import ChatCompletions
from penstock_interception.ingress.dialects.generate_content.dialect import GenerateContent
from penstock_interception.ingress.dialects.messages.dialect import Messages
from penstock_interception.ingress.dialects.responses.dialect import Responses
from penstock_interception.ingress.server import Ingress, IngressLimits
from penstock_interception.interceptor import Interceptor
from penstock_interception.rpc import gate_service, intercept_service
from penstock_interception.rpc.frames import CallWriter
from penstock_interception.rpc.gate_service import RolloutGateServicer, register_gate
from penstock_interception.rpc.intercept_service import FEATURES, InterceptServicer, register_intercept
from penstock_interception.rpc.results import JUDGED_ALONE
from penstock_interception.settings import DEFAULT, InferenceEndpoint, InterceptionSettings
from penstock_interception.sources.base import ModelSource
from penstock_interception.sources.codecs import CodecCache
from penstock_interception.sources.registry import Endpoint, Sources
from penstock_interception.status.health import Health
from penstock_interception.store.store import CallStore

_log = structlog.get_logger(__name__)

_OWN_ADDRESS = "{address}"
SETTLE_S = 5.0
"""How long a start waits for the first answers of listed engines."""
_GATE = "penstock.interception.v1.RolloutGateService"
_INTERCEPT = "penstock.interception.v1.InterceptService"
ROLES = {
    _GATE: (Role.TRAINER,),
    f"{_GATE}/GetRollout": (Role.TRAINER, Role.OBSERVER),
    f"{_GATE}/ListRollouts": (Role.TRAINER, Role.OBSERVER),
    f"{_GATE}/GetCapture": (Role.TRAINER, Role.OBSERVER),
    f"{_GATE}/WatchCalls": (Role.TRAINER, Role.OBSERVER),
    f"{_GATE}/WatchGate": (Role.TRAINER, Role.OBSERVER),
    _INTERCEPT: (Role.TRAINER,),
    f"{_INTERCEPT}/ListCalls": (Role.TRAINER, Role.OBSERVER),
    f"{_INTERCEPT}/GetCall": (Role.TRAINER, Role.OBSERVER),
}


@asynccontextmanager
async def build(settings: InterceptionSettings) -> AsyncIterator[Service]:
    """Opens everything the settings name, restores the journal, and yields the service to run."""
    async with AsyncExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(settings.codec_threads, thread_name_prefix="codec"))
        store = await CallStore.open(settings.state_dir, sync=settings.journal_sync)
        stack.push_async_callback(store.aclose)
        home = settings.home()
        http = await stack.enter_async_context(
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        )
        untouched = await stack.enter_async_context(_untouched(http))
        codecs = CodecCache(settings.state_dir / "tokenizers", pool)
        tasks = await stack.enter_async_context(_cancelled_at_exit())
        dialects: tuple[DialectCodec, ...] = (ChatCompletions(), Messages(), Responses(), GenerateContent())
        parse = partial(_parse, {dialect.dialect: dialect for dialect in dialects})
        pools = await _pools(settings, stack)
        sources = _sources(settings, codecs, http, parse, pools)
        interceptor = Interceptor(
            store, sources, tasks, pool, parse=parse, limits=_limits(settings), closed_kept=settings.closed_kept
        )
        restored = await interceptor.restore()
        _log.info("restored", rollouts=restored)
        tasks.create_task(interceptor.keep_time())
        for engine_pool in pools.values():
            tasks.create_task(engine_pool.follow(), name=f"engines of {engine_pool.name}")
        health = Health(interceptor.registry, interceptor.clock, interceptor.limits.captures)
        engines = EngineHealth([one for one in pools.values() if one.is_list])
        stack.enter_context(health.gauges())
        stack.enter_context(engines.gauges())
        stopping = asyncio.Event()
        connections = stack.enter_context(closing(Connections(_connection_limits(settings))))
        ingress = Ingress(
            interceptor,
            dialects,
            Passthrough(
                interceptor, sources, untouched, connections, refuse_provider_tools=settings.provider_tools == "refuse"
            ),
            connections,
            IngressLimits(
                settings.max_body_bytes,
                settings.first_byte_s,
                settings.keep_alive_s,
                settings.provider_tools == "refuse",
            ),
        )
        address = await stack.enter_async_context(_listening(ingress.app(), connections, settings))
        intercept = InterceptServicer(
            interceptor,
            CallWriter(parse, interceptor.fail),
            stopping,
            heartbeat_s=settings.heartbeat_s,
            allowed_tools=tuple(settings.host_tools),
            name=home.name,
        )
        reached = await _reached(settings, address)
        gate = RolloutGateServicer(
            interceptor,
            dialects,
            lambda: reached,
            stopping,
            home.name,
            lambda: unreachable(pools.values()),
        )
        yield Service(
            registrations=[
                (gate, register_gate),
                (intercept, register_intercept),
            ],
            roles=ROLES,
            draining=Draining(interceptor.take, interceptor.registry.held, NOTICE_S),
            drain=partial(_drain, interceptor, stopping),
            endpoints={"ingress": address},
            troubles=lambda patience_s: chain(health.troubles(patience_s), engines.troubles()),
            members=engines.members,
            features=FEATURES,
            owned={**gate_service.owned(interceptor), **intercept_service.owned(interceptor)},
            home=home,
            judged_alone=JUDGED_ALONE,
        )


def _untouched(http: aiohttp.ClientSession) -> aiohttp.ClientSession:
    """A client on the same connections that passes bodies through without decompressing them."""
    return aiohttp.ClientSession(
        timeout=http.timeout,
        connector=http.connector,
        connector_owner=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
    )


def _sources(
    settings: InterceptionSettings,
    codecs: CodecCache,
    http: aiohttp.ClientSession,
    parse: Callable[[Dialect, bytes], ChatRequest],
    pools: Mapping[str, EnginePool],
) -> Sources:
    inference: dict[str, Callable[[str, CodecChoice], ModelSource]] = {
        name: partial(InferenceSource, pool, codecs, parse) for name, pool in pools.items()
    }
    upstreams = {
        name: Endpoint(
            upstream.base_url,
            upstream.api_key.get_secret_value() if upstream.api_key else None,
            upstream.models,
            upstream.session_header,
        )
        for name, upstream in settings.upstreams.items()
    }
    return Sources(
        codecs,
        http,
        parse,
        inference=inference,
        upstreams=upstreams,
        tokenizers=settings.tokenizers,
        caller_endpoints=settings.caller_endpoints,
    )


async def _reached(settings: InterceptionSettings, listening: str) -> str:
    """Returns how sandbox services reach the ingress, which listens at host:port.

    This machine's own address stands in the setting where a replica has no other name.
    """
    address = settings.ingress_address
    if not address:
        return f"tls:{listening}" if settings.ingress_tls_cert else listening
    host, _, port = address.rpartition(":")
    if port == "0":
        address = f"{host}:{listening.rpartition(':')[2]}"
    return address.replace(_OWN_ADDRESS, await _own_address()) if _OWN_ADDRESS in address else address


async def _own_address() -> str:
    host = socket.gethostname()
    try:
        [(*_, found), *_] = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise FailedPrecondition(
            f"This machine's name {host} has no address ({error.strerror}): set ingress_address without it.",
            reason="OWN_ADDRESS_UNKNOWN",
        ) from error
    return f"[{found[0]}]" if ":" in str(found[0]) else str(found[0])


async def _pools(settings: InterceptionSettings, stack: AsyncExitStack) -> Mapping[str, EnginePool]:
    """The inference services and pools by name. Waits until the members of lists have been asked once."""
    default = InferenceEndpoint.model_construct(
        address="" if settings.inference_members else settings.inference_address,
        members=settings.inference_members,
        token=settings.inference_token,
        tls_ca=settings.inference_ca,
    )
    found: dict[str, EnginePool] = {}
    for name, endpoint in {DEFAULT: default, **settings.inference}.items():
        token = endpoint.token.get_secret_value() if endpoint.token else None
        dial = partial(_dial, token, None if endpoint.tls_ca is None else ClientTls(endpoint.tls_ca))
        if endpoint.members:
            found[name] = await stack.enter_async_context(engine_list(name, members.parse(endpoint.members), dial))
        elif endpoint.address:
            found[name] = await stack.enter_async_context(one_engine(name, Member(name, endpoint.address), dial))
    async with asyncio.TaskGroup() as settling:
        for pool in found.values():
            if pool.is_list:
                settling.create_task(pool.settled(SETTLE_S))
    return found


def _dial(token: str | None, tls: ClientTls | None, member: Member) -> grpc.aio.Channel:
    return connect(member.address, token, tls, certified=member.certified)


def _limits(settings: InterceptionSettings) -> GateLimits:
    return GateLimits(
        max_rollouts=settings.max_rollouts,
        max_open_calls_per_rollout=settings.max_open_calls,
        max_rollout_bytes=settings.max_rollout_bytes,
        rejoin_grace_s=settings.rejoin_grace_s,
        driver_lease_s=settings.driver_lease_s,
        retention_s=settings.retention_s,
        captures=CaptureLimits(settings.max_kept_captures, settings.max_kept_bytes, settings.max_kept_s),
        quotas=tuple(settings.quotas().items()),
        leasing=LeasingLimits(resume_window_s=settings.resume_window_s),
        tools=ToolLimits(
            max_calls_per_rollout=settings.max_tool_calls,
            max_open_calls_per_rollout=settings.max_open_tool_calls,
            max_bytes=settings.max_tool_bytes,
            call_timeout_s=settings.tool_timeout_s,
        ),
    )


def _connection_limits(settings: InterceptionSettings) -> ConnectionLimits:
    return ConnectionLimits(
        header_s=settings.header_timeout_s,
        body_s=settings.body_timeout_s,
        write_s=settings.write_timeout_s,
        max_header_bytes=settings.max_header_bytes,
        max_connections=settings.max_connections,
        max_per_peer=settings.max_peer_connections,
        max_per_rollout=settings.max_rollout_connections,
    )


def _parse(dialects: dict[Dialect, DialectCodec], dialect: Dialect, body: bytes) -> ChatRequest:
    return dialects[dialect].parse(body, Route(Ask.COMPLETION))


@asynccontextmanager
async def _cancelled_at_exit() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose tasks are cancelled when the context exits."""
    ending = False
    try:
        async with asyncio.TaskGroup() as group:
            yield group
            ending = True
            raise _Ended
    except* _Ended:
        if not ending:
            raise


class _Ended(Exception):
    """Cancels the group's tasks when the service stops."""


@asynccontextmanager
async def _listening(
    app: web.Application, connections: Connections, settings: InterceptionSettings
) -> AsyncIterator[str]:
    """Serves the ingress; yields its address as host:port."""
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        auto_decompress=False,  # `ingress.encodings` decompresses
        shutdown_timeout=1.0,
        keepalive_timeout=IDLE_S,
        # How long the rest of a refused body is read, so that its client receives the response.
        lingering_time=min(10.0, settings.body_timeout_s),
    )
    await runner.setup()
    listener: asyncio.Server | None = None
    try:
        if runner.server is None:
            raise RuntimeError("the runner started")
        tls = None
        if settings.ingress_tls_cert is not None:
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            tls.load_cert_chain(settings.ingress_tls_cert, settings.ingress_tls_key)
        try:
            # Not aiohttp's own site: `Connections` applies its limits from a connection's first byte.
            listener = await asyncio.get_running_loop().create_server(
                connections.factory(runner.server),
                settings.ingress_host,
                settings.ingress_port,
                backlog=4096,
                reuse_address=True,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else settings.header_timeout_s,
            )
        except OSError as error:
            raise FailedPrecondition(
                f"The ingress cannot listen on {settings.ingress_host}:{settings.ingress_port}: {error.strerror}."
                " Stop the process that uses it, or set another ingress_port (0 = any free one).",
                reason="PORT_IN_USE",
            ) from error
        host, port = listener.sockets[0].getsockname()[:2]
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    finally:
        if listener is not None:
            listener.close()
        await runner.cleanup()


async def _drain(interceptor: Interceptor, stopping: asyncio.Event, grace_s: float) -> None:
    stopping.set()
    await interceptor.drain(grace_s)
