"""The HTTP ingress: authenticates, joins retries, waits for answers and writes them in the agent's dialect.

A held call costs one coroutine and one connection. The agent key is checked before anything else; an unknown rollout
and a wrong key get the same answer (R5). For the first second the HTTP status can still report a failure; after that a
stream is opened and kept alive.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import structlog
from aiohttp import web

from penstock_chassis.errors import PenstockError
from penstock_chassis.telemetry.tracing import TRACE_PARENT
from penstock_codec import CodecError
from penstock_interception import cache
from penstock_interception.domain import models
from penstock_interception.domain.audit import Event
from penstock_interception.domain.calls import CallRequest, CallState, Mode
from penstock_interception.domain.folded_bodies import FoldedBody, fold
from penstock_interception.domain.requests import ChatRequest, merged_sampling
from penstock_interception.domain.state import Call, Rollout
from penstock_interception.ingress import auth, bodies, errors
from penstock_interception.ingress.black_box import Passthrough
from penstock_interception.ingress.bodies import BrokenBody, TooSlow
from penstock_interception.ingress.connections import Connections
from penstock_interception.ingress.dialects.base import Ask, BadRequest, DialectCodec, Problem, Route
from penstock_interception.ingress.dialects.images import images_within_limit
from penstock_interception.ingress.encodings import ACCEPTED, EncodingRefused
from penstock_interception.ingress.mcp import server
from penstock_interception.ingress.retries import Identity, identify, same_call
from penstock_interception.interceptor import Interceptor
from penstock_interception.rollouts.agent_keys import Refusal

_log = structlog.get_logger(__name__)

T = TypeVar("T")

MAX_SESSION_HEADER = 256
# Parsing that takes more than about 3 ms runs in a thread. The cost is mostly the number of objects, 5 to 10 us each,
# then the bytes. Objects in small bodies are not counted.
INLINE_BODY_BYTES = 256 << 10
INLINE_OBJECTS = 512
UNCOUNTED_BYTES = 12 << 10
# An answer with logprobs of more tokens, alternatives included, is written in a thread: each costs about 2 us.
INLINE_LOGPROBS = 512
_JSON: Final = "application/json"
_STREAM_HEADERS: Final = {
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",
}


@dataclass(frozen=True, slots=True)
class IngressLimits:
    """Bytes and seconds."""

    max_body_bytes: int = 32 << 20
    first_byte_s: float = 1.0
    keep_alive_s: float = 5.0
    # Whether requests for provider tools are refused; otherwise the tools are removed, which is recorded.
    refuse_provider_tools: bool = False


class Ingress:
    """The aiohttp application."""

    def __init__(
        self,
        interceptor: Interceptor,
        dialects: Iterable[DialectCodec],
        passthrough: Passthrough,
        connections: Connections,
        limits: IngressLimits | None = None,
    ) -> None:
        """The first dialect is tried last, and writes the error if no dialect matches."""
        self._interceptor = interceptor
        self._fallback, *others = dialects
        self._dialects = (*others, self._fallback)
        self._passthrough = passthrough
        self._connections = connections
        self._limits = limits or IngressLimits()
        self._audit = interceptor.audit
        self._mcp = server.McpServer(
            interceptor, connections, first_byte_s=self._limits.first_byte_s, keep_alive_s=self._limits.keep_alive_s
        )

    def app(self) -> web.Application:
        """Builds the application. Run it with handler cancellation."""
        app = web.Application(client_max_size=self._limits.max_body_bytes)
        tracked = self._connections.tracked
        app.router.add_get("/health", tracked(_alive))
        # (?s): a path may contain anything, even line breaks.
        app.router.add_route("*", "/rollout/{rollout_id}{path:/(?s:.*)}", tracked(self._rollout))
        app.router.add_route("*", "/{path:(?s:.*)}", tracked(self._unknown_route))
        return app

    async def _unknown_route(self, request: web.Request) -> web.StreamResponse:
        self._audit.record(Event.ROUTE_UNKNOWN, peer=request.remote)
        return _problem(self._fallback, errors.UNKNOWN_ROUTE)

    async def _rollout(self, request: web.Request) -> web.StreamResponse:
        path = request.match_info["path"]
        nearest = self._nearest(path)
        rollout_id = request.match_info["rollout_id"]
        known = self._interceptor.agent_keys.check(rollout_id, auth.credential(request))
        if isinstance(known, Refusal):
            self._audit.record(Event.CREDENTIAL_REFUSED, rollout_id=rollout_id, peer=request.remote, reason=known.value)
            return self._mcp.unauthorised() if path == server.PATH else _problem(nearest, errors.UNAUTHORISED)
        rollout, scopes = known
        if not self._connections.claim(request, rollout.id):
            self._audit.record(Event.TOO_MANY_CONNECTIONS, rollout_id=rollout.id, peer=request.remote)
            return _last(_problem(nearest, errors.TOO_MANY_CONNECTIONS))
        dialect, route = nearest, None
        try:
            auth.check_headers(request)
            if path != server.PATH and rollout.spec.mode is not Mode.BLACK_BOX:
                dialect, route = self._route(request, rollout, path) or (nearest, None)
            needed = auth.needed(request.method, path, route)
            if needed not in scopes:
                self._audit.record(Event.SCOPE_REFUSED, rollout_id=rollout.id, peer=request.remote, reason=needed.value)
                return self._mcp.forbidden() if path == server.PATH else _problem(dialect, errors.SCOPE_MISSING)
            if path == server.PATH:
                return await self._mcp.serve(request, rollout)
            if rollout.spec.mode is Mode.BLACK_BOX:
                return await self._passthrough.forward(request, rollout, path, nearest.dialect)
            if route is None:
                self._audit.record(Event.ROUTE_UNKNOWN, rollout_id=rollout.id, peer=request.remote)
                return _problem(dialect, errors.UNKNOWN_ROUTE)
            return await self._serve(request, rollout, dialect, route)
        except BadRequest as error:
            return _problem(dialect, errors.of_bad_request(error))
        except PenstockError as error:
            return _problem(dialect, errors.of_refusal(error))
        except CodecError as error:
            return _problem(dialect, errors.of_conversation(error))
        except web.HTTPRequestEntityTooLarge:
            self._audit.record(Event.BODY_TOO_LARGE, rollout_id=rollout.id, peer=request.remote)
            return _problem(dialect, errors.TOO_LARGE)
        except TooSlow:
            self._audit.record(Event.BODY_TOO_SLOW, rollout_id=rollout.id, peer=request.remote)
            return _last(_problem(dialect, errors.TOO_SLOW))
        except BrokenBody:
            return _last(_problem(dialect, errors.BROKEN_BODY))
        except EncodingRefused as error:
            return _problem(dialect, errors.of_encoding(error))
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception:  # noqa: BLE001 - logged; nothing of it reaches the agent (R8)
            _log.exception("a request failed", rollout_id=rollout.id)
            return _problem(dialect, errors.INTERNAL)

    def _route(self, request: web.Request, rollout: Rollout, path: str) -> tuple[DialectCodec, Route] | None:
        """Returns the first allowed dialect that recognises the request, and the route."""
        spoken = rollout.spec.dialects
        for dialect in self._dialects:
            if not spoken or dialect.dialect in spoken:
                route = dialect.route(request.method, path, request.query, request.headers)
                if route is not None:
                    return dialect, route
        return None

    async def _serve(
        self, request: web.Request, rollout: Rollout, dialect: DialectCodec, route: Route
    ) -> web.StreamResponse:
        names = _model_names(rollout)
        if route.ask is Ask.MODELS:
            return web.Response(body=dialect.models(names), content_type=_JSON)
        if route.ask is Ask.MODEL:
            if route.model not in names:
                return _problem(dialect, errors.UNKNOWN_ROUTE)
            return web.Response(body=dialect.model(route.model), content_type=_JSON)
        if request.method != "POST":
            return _problem(dialect, Problem(405, "method_not_allowed", "Use POST."))
        auth.check_size(rollout, request.content_length)
        body = await bodies.in_time(request, self._connections.limits.body_s)
        auth.check_size(rollout, len(body))
        if route.ask is Ask.COUNT:
            parsed = await self._read(body, lambda: dialect.parse(body, route))
            count = await self._interceptor.count(rollout, parsed)
            return web.Response(body=dialect.count(count), content_type=_JSON)
        return await self._complete(request, rollout, dialect, route, body)

    async def _read(self, body: bytes, work: Callable[[], T]) -> T:
        """Parses a body inline, or in a thread if it is large (R32)."""
        return work() if _is_small(body) else await self._interceptor.in_thread(work)

    async def _complete(
        self, request: web.Request, rollout: Rollout, dialect: DialectCodec, route: Route, body: bytes
    ) -> web.StreamResponse:
        headers = request.headers

        def read() -> tuple[ChatRequest, Identity, FoldedBody | None]:
            parsed = cache.for_rollout(rollout.id, lambda: dialect.parse(body, route))
            images = parsed.images and images_within_limit(parsed)
            return parsed, identify(dialect, headers, body, route.model), fold(body, images) if images else None

        parsed, identity, folded = await self._read(body, read)
        call = same_call(rollout, identity, self._connections.is_taken)
        if call is None and parsed.provider_tools and self._limits.refuse_provider_tools:
            self._audit.record(Event.PROVIDER_TOOL_REFUSED, rollout_id=rollout.id, peer=request.remote)
            return _problem(dialect, errors.of_provider_tools(parsed.provider_tools))
        if call is None and not models.takes_name(rollout.spec, parsed.model):
            return _problem(dialect, errors.of_model(parsed.model, _model_names(rollout)))
        if call is None:
            sampling = merged_sampling(parsed.sampling, rollout.spec.sampling_override)
            notes = parsed.normalisations
            if sampling != parsed.sampling:
                notes = (*notes, "the rollout's sampling replaced the agent's")
            asked = CallRequest(
                dialect=dialect.dialect,
                body=body,
                body_sha256=identity.body_sha256,
                retry_key=identity.retry_key,
                stream=parsed.stream,
                sampling=sampling,
                model_requested=parsed.model,
                tools_sha256=parsed.tools_sha256,
                normalisations=notes,
                agent_session=_session(request, rollout),
                body_bytes=len(body),
                trace_parent=headers.get(TRACE_PARENT, ""),
                folded=folded,
            )
            call = await self._interceptor.begin(rollout, asked, parsed)
        else:
            self._interceptor.rejoin(call)
        # A waiting call keeps only its body.
        parsed = parsed.without_content(self._interceptor.spell(rollout) if parsed.logprobs else None)
        try:
            with self._connections.awaiting(request, call.id):
                if parsed.stream:
                    return await self._stream(request, dialect, call, parsed)
                await asyncio.shield(call.ended)
                return await self._answer(request, dialect, call, parsed)
        finally:
            self._interceptor.detach(call)

    async def _answer(
        self, request: web.Request, dialect: DialectCodec, call: Call, parsed: ChatRequest
    ) -> web.StreamResponse:
        problem = errors.of_ended(call)
        if problem is not None:
            return _problem(dialect, problem)
        body = await self._written(call, parsed, lambda: dialect.answer(call, parsed))
        response = web.Response(body=body, content_type=_JSON)
        await response.prepare(request)
        await response.write_eof()
        await self._connections.answered(request, response, call.id, partial(self._interceptor.answer_sent, call))
        return response

    async def _written(self, call: Call, parsed: ChatRequest, write: Callable[[], bytes]) -> bytes:
        """Writes an answer inline, or in a thread if it has many logprobs (R32)."""
        if parsed.spell is None or call.completion is None:
            return write()
        entries = call.completion.count * (1 + (parsed.sampling.top_logprobs or 0))
        return await self._interceptor.in_thread(write) if entries > INLINE_LOGPROBS else write()

    async def _stream(
        self, request: web.Request, dialect: DialectCodec, call: Call, parsed: ChatRequest
    ) -> web.StreamResponse:
        if not call.ended.done():
            await asyncio.wait([call.ended], timeout=self._limits.first_byte_s)
        if call.ended.done() and (problem := errors.of_ended(call)) is not None:
            return _problem(dialect, problem)
        response = web.StreamResponse(headers={**_STREAM_HEADERS, "content-type": dialect.stream_type(parsed)})
        await response.prepare(request)
        stream = dialect.stream(call, parsed)
        opening = stream.open()
        if opening:
            await response.write(opening)
        while not call.ended.done():
            await response.write(stream.keep_alive())
            await asyncio.wait([call.ended], timeout=self._limits.keep_alive_s)
        problem = errors.of_ended(call)
        await response.write(
            await self._written(call, parsed, stream.answer) if problem is None else stream.problem(problem)
        )
        await response.write_eof()
        if call.state is CallState.DELIVERED:
            await self._connections.answered(request, response, call.id, partial(self._interceptor.answer_sent, call))
        return response

    def _nearest(self, path: str) -> DialectCodec:
        """Returns the dialect whose error format fits the path best."""
        return next((dialect for dialect in self._dialects if dialect.owns(path)), self._fallback)


def _is_small(body: bytes) -> bool:
    size = len(body)
    return size <= UNCOUNTED_BYTES or (size <= INLINE_BODY_BYTES and body.count(b"{") <= INLINE_OBJECTS)


def _session(request: web.Request, rollout: Rollout) -> tuple[tuple[str, str], ...]:
    names = rollout.spec.hints.session_headers
    return tuple((name, request.headers[name][:MAX_SESSION_HEADER]) for name in names if name in request.headers)


def _model_names(rollout: Rollout) -> tuple[str, ...]:
    return models.names(rollout.spec, rollout.facts.model or "default")


def _problem(dialect: DialectCodec, problem: Problem) -> web.Response:
    headers = {"x-should-retry": "true" if problem.retry else "false"}
    if problem.status == 415:
        headers["accept-encoding"] = ACCEPTED
    if problem.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(problem.retry_after_s)))
        headers["retry-after-ms"] = str(math.ceil(problem.retry_after_s * 1000))
    return web.Response(
        status=dialect.status(problem), body=dialect.problem(problem), content_type=_JSON, headers=headers
    )


def _last(response: web.Response) -> web.Response:
    """Closes the connection after this answer."""
    response.force_close()
    return response


async def _alive(_request: web.Request) -> web.Response:
    return web.Response(text="ok\n")
