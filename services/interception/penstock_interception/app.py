"""Wiring: the journal, the sources, the gate, the ingress and the servicers. The only module that knows them all."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from functools import partial
from pathlib import Path

import aiohttp
import structlog
from aiohttp import web

from penstock_chassis.auth import Role
from penstock_chassis.channel import connect
from penstock_chassis.errors import FailedPrecondition
from penstock_chassis.server import Service
from penstock_chassis.tls import ClientTls
from penstock_interception.calls import CodecChoice, Dialect
from penstock_interception.codecs import CodecCache
from penstock_interception.dispatch import DispatchLimits
from penstock_interception.gate import Gate
from penstock_interception.ingress.app import Ingress, IngressLimits
from penstock_interception.ingress.chat import ChatCompletions
from penstock_interception.ingress.connections import IDLE_S, ConnectionLimits, Connections
from penstock_interception.ingress.dialect import Ask, DialectCodec, Route
from penstock_interception.ingress.generate_content import GenerateContent
from penstock_interception.ingress.messages import Messages
from penstock_interception.ingress.passthrough import Passthrough
from penstock_interception.ingress.responses import Responses
from penstock_interception.limits import GateLimits
from penstock_interception.oversight import Oversight
from penstock_interception.requests import ChatRequest
from penstock_interception.rpc.frames import CallWriter
from penstock_interception.rpc.gate_service import RolloutGateServicer, register_gate
from penstock_interception.rpc.inference import InferenceSource
from penstock_interception.rpc.intercept_service import InterceptServicer, register_intercept
from penstock_interception.settings import InterceptionSettings
from penstock_interception.sources.base import ModelSource
from penstock_interception.sources.registry import Endpoint, Sources
from penstock_interception.store import CallStore
from penstock_interception.tools.desk import ToolLimits
from penstock_interception.turns import Turns

_log = structlog.get_logger(__name__)

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
    """Opens what the settings name, takes back what the journal has, and yields what to serve."""
    async with AsyncExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(settings.codec_threads, thread_name_prefix="codec"))
        store = await CallStore.open(settings.state_dir, sync=settings.journal_sync)
        stack.push_async_callback(store.aclose)
        http = await stack.enter_async_context(
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        )
        codecs = CodecCache(settings.state_dir / "tokenizers", pool)
        tasks = await stack.enter_async_context(_cancelled_at_exit())
        dialects: tuple[DialectCodec, ...] = (ChatCompletions(), Messages(), Responses(), GenerateContent())
        parse = partial(_parse, {dialect.dialect: dialect for dialect in dialects})
        sources = await _sources(settings, codecs, http, parse, stack)
        turns = Turns(
            store, sources, tasks, pool, parse=parse, limits=_limits(settings), closed_kept=settings.closed_kept
        )
        restored = await turns.restore()
        _log.info("restored", rollouts=restored)
        tasks.create_task(_keep_time(turns.gate))
        oversight = Oversight(turns.gate)
        stack.enter_context(oversight.told())
        stopping = asyncio.Event()
        connections = stack.enter_context(closing(Connections(_connection_limits(settings))))
        ingress = Ingress(
            turns,
            dialects,
            Passthrough(turns, sources, http, connections, refuse_provider_tools=settings.provider_tools == "refuse"),
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
            turns,
            CallWriter(parse, turns.gate.fail),
            stopping,
            heartbeat_s=settings.heartbeat_s,
            allowed_tools=tuple(settings.host_tools),
        )
        reached = settings.ingress_address or (f"tls:{address}" if settings.ingress_tls_cert else address)
        gate = RolloutGateServicer(turns, dialects, lambda: reached, stopping)
        yield Service(
            registrations=[
                (gate, register_gate),
                (intercept, register_intercept),
            ],
            roles=ROLES,
            drain=partial(_drain, turns.gate, stopping),
            endpoints={"ingress": address},
            troubles=oversight.troubles,
        )


async def _sources(
    settings: InterceptionSettings,
    codecs: CodecCache,
    http: aiohttp.ClientSession,
    parse: Callable[[Dialect, bytes], ChatRequest],
    stack: AsyncExitStack,
) -> Sources:
    inference: dict[str, Callable[[str, CodecChoice], ModelSource]] = {}
    if settings.inference_address:
        token = settings.inference_token.get_secret_value() if settings.inference_token else None
        tls = _tls(settings.inference_ca)
        channel = await stack.enter_async_context(connect(settings.inference_address, token, tls))
        inference["default"] = partial(InferenceSource, channel, codecs, parse)
    for name, endpoint in settings.inference.items():
        token = endpoint.token.get_secret_value() if endpoint.token else None
        channel = await stack.enter_async_context(connect(endpoint.address, token, _tls(endpoint.tls_ca)))
        inference[name] = partial(InferenceSource, channel, codecs, parse)
    upstreams = {
        name: Endpoint(
            upstream.base_url, upstream.api_key.get_secret_value() if upstream.api_key else None, upstream.models
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


def _tls(ca: Path | None) -> ClientTls | None:
    return None if ca is None else ClientTls(ca)


def _limits(settings: InterceptionSettings) -> GateLimits:
    return GateLimits(
        max_rollouts=settings.max_rollouts,
        max_open_calls_per_rollout=settings.max_open_calls,
        rejoin_grace_s=settings.rejoin_grace_s,
        retention_s=settings.retention_s,
        dispatch=DispatchLimits(resume_window_s=settings.resume_window_s),
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
    """A task group whose tasks end with the service."""
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
    """The service stops."""


@asynccontextmanager
async def _listening(
    app: web.Application, connections: Connections, settings: InterceptionSettings
) -> AsyncIterator[str]:
    """Serves the ingress; yields its address as host:port."""
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=1.0,
        keepalive_timeout=IDLE_S,
        # How long the rest of a body that was refused is read, so that its client sees the answer.
        lingering_time=min(10.0, settings.body_timeout_s),
    )
    await runner.setup()
    listener: asyncio.Server | None = None
    try:
        if runner.server is None:
            raise RuntimeError("the runner was set up")
        tls = None
        if settings.ingress_tls_cert is not None:
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            tls.load_cert_chain(settings.ingress_tls_cert, settings.ingress_tls_key)
        try:
            # Not aiohttp's own site: every connection is under its limits from its first byte on.
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
                " Stop the process that has it, or set ingress_port (0 takes a free one).",
                reason="PORT_IN_USE",
            ) from error
        host, port = listener.sockets[0].getsockname()[:2]
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    finally:
        if listener is not None:
            listener.close()
        await runner.cleanup()


async def _keep_time(gate: Gate) -> None:
    """Does what is due."""
    while True:
        gate.sooner.clear()
        due = gate.next_deadline()
        wait = None if due is None else max(0.0, due - gate.clock.steady())
        with suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await gate.sooner.wait()
        try:
            await gate.tick()
        except Exception:  # noqa: BLE001 - one deadline's trouble must not stop all others
            _log.exception("a deadline could not be served")


async def _drain(gate: Gate, stopping: asyncio.Event, grace_s: float) -> None:
    """Takes nothing new, tells the trainers, waits for answers that are under way."""
    gate.draining = True
    stopping.set()
    for session in gate.dispatcher.sessions():
        session.wake()
    gate.changes.wake()
    waiting = [call.ended for call in gate.open_calls()]
    if waiting:
        await asyncio.wait(waiting, timeout=grace_s)
