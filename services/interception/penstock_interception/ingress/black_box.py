"""Black box mode: forwards a request to the operator's or caller's endpoint, streams the answer back and counts both.

`black_box_filter` decides which paths, headers, provider tools and models pass. The agent key is replaced by the
endpoint's key, which goes to no other address (R11), in the header that the agent's dialect uses. A generation is
recorded as a call without content: only the body's digest and size, and the removed tools.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Awaitable
from functools import partial
from typing import Final

import aiohttp
import structlog
from aiohttp import web
from yarl import URL

from penstock_codec.chat import Sampling
from penstock_interception.domain.audit import Event
from penstock_interception.domain.calls import CallRequest, Dialect
from penstock_interception.domain.completions import Failure
from penstock_interception.domain.requests import MOST_NAME_CHARS, bounded
from penstock_interception.domain.state import Call, Rollout
from penstock_interception.ingress import auth, black_box_filter, bodies, errors
from penstock_interception.ingress.black_box_filter import Onward
from penstock_interception.ingress.connections import Connections
from penstock_interception.ingress.dialects.base import BadRequest
from penstock_interception.interceptor import INLINE_BYTES, Interceptor
from penstock_interception.sources.registry import Sources
from penstock_interception.sources.upstream import UpstreamSource, refusal

_log = structlog.get_logger(__name__)

# The base URL contains the version.
_VERSION: Final = re.compile(r"^/v1(beta)?(?=/)")
# Headers for keys besides the bearer token.
_GOOGLE: Final = "x-goog-api-key"
_KEYS: Final = (_GOOGLE, "x-api-key")


class _AgentGone(Exception):
    """The agent's connection is gone. Distinct, because a failed write to it looks like an error of the endpoint."""


class _BrokeOff(aiohttp.ClientError):
    """The endpoint broke off in the middle of its answer."""


class Passthrough:
    """Forwards requests of black box rollouts."""

    def __init__(
        self,
        interceptor: Interceptor,
        sources: Sources,
        http: aiohttp.ClientSession,
        connections: Connections,
        *,
        refuse_provider_tools: bool = False,
    ) -> None:
        self._refuse_provider_tools = refuse_provider_tools
        self._connections = connections
        self._interceptor = interceptor
        self._sources = sources
        self._http = http

    async def forward(self, request: web.Request, rollout: Rollout, path: str, dialect: Dialect) -> web.StreamResponse:
        """Forwards one request and streams its answer back."""
        source = self._sources.source(rollout.spec.mode, rollout.spec.source, rollout.caller_key)
        if not isinstance(source, UpstreamSource):
            raise BadRequest("This rollout has no endpoint.", None, "no_upstream")
        if not black_box_filter.is_offered(request.method, path):
            raise BadRequest("There is no such route.", None, "unknown_url")
        auth.check_size(rollout, request.content_length)
        body = await bodies.in_time(request, self._connections.limits.body_s)
        auth.check_size(rollout, len(body))
        onward = Onward(path, b"")
        call = None
        if request.method == "POST":
            onward = await self._read(rollout, source, path, body, request.remote)
        rollout.check_open()
        if request.method == "POST" and path != auth.COUNTS:
            call = self._interceptor.begin_black_box(rollout, _call_request(body, dialect, onward))
        try:
            return await self._exchange(request, rollout, source, onward, call)
        except _AgentGone:
            raise ConnectionResetError from None  # the call is cancelled below
        except (aiohttp.ClientError, TimeoutError) as error:
            _log.warning("upstream unreachable", rollout_id=rollout.id, error=type(error).__name__)
            if call is not None:
                self._interceptor.end_black_box(call, Failure("UPSTREAM_UNREACHABLE"))
            if isinstance(error, _BrokeOff):
                # An answer that has begun cannot become an error: appended text would belong to the answer. The
                # connection is aborted, since some clients accept an orderly close as the end of the answer.
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionResetError from error
            return web.json_response(
                {"error": {"message": "The model could not answer.", "type": "server_error", "code": "unavailable"}},
                status=503,
            )
        finally:
            if call is not None:
                self._interceptor.end_black_box(call, agent_gone=True)

    async def _read(self, rollout: Rollout, source: UpstreamSource, path: str, body: bytes, peer: str | None) -> Onward:
        """Filters a request for the endpoint. Raises BadRequest if it may not pass."""
        work = partial(black_box_filter.read, path, body, source.model)
        onward = work() if len(body) <= INLINE_BYTES else await self._interceptor.in_thread(work)
        if onward.hosted and self._refuse_provider_tools:
            self._interceptor.audit.record(Event.PROVIDER_TOOL_REFUSED, rollout_id=rollout.id, peer=peer)
            refused = errors.of_provider_tools(onward.hosted)
            raise BadRequest(refused.message, refused.param, refused.code)
        if not source.allows(onward.model):
            raise BadRequest("model: not one of the allowed models.", "model", "model_not_allowed")
        return onward

    async def _exchange(
        self, request: web.Request, rollout: Rollout, source: UpstreamSource, onward: Onward, call: Call | None
    ) -> web.StreamResponse:
        headers = black_box_filter.onward_headers(request.headers)
        # The answer's compression is between agent and endpoint: nothing is decompressed here.
        headers.setdefault("accept-encoding", "identity")
        if onward.body:
            headers["content-type"] = "application/json"
        given = next((name for name in _KEYS if name in request.headers), "")
        if given != _GOOGLE:  # it accepts only this one credential
            headers.update(source.credentials())
        if given:
            headers.update(source.credentials(given))
        headers.update(source.session(rollout.spec.session_id))
        # Forwarded verbatim: nothing is decoded or resolved again on the way.
        query = black_box_filter.onward_query(request.rel_url.raw_query_string)
        url = URL(source.base_url + _VERSION.sub("", onward.path) + (f"?{query}" if query else ""), encoded=True)
        async with self._http.request(
            request.method, url, data=onward.body or None, headers=headers, allow_redirects=False
        ) as answer:
            response = web.StreamResponse(
                status=answer.status, headers=black_box_filter.returned_headers(answer.headers)
            )
            await _to_agent(response.prepare(request))
            try:
                async for chunk in answer.content.iter_any():
                    await _to_agent(response.write(chunk))
            except (aiohttp.ClientError, TimeoutError) as error:
                raise _BrokeOff(type(error).__name__) from error
            await _to_agent(response.write_eof())
        if call is not None:
            self._interceptor.end_black_box(call, None if answer.status < 400 else refusal(answer.status))
        return response


async def _to_agent(write: Awaitable[object]) -> None:
    try:
        await write
    except ConnectionError as error:
        raise _AgentGone from error


def _call_request(body: bytes, dialect: Dialect, onward: Onward) -> CallRequest:
    """Makes the call's request, without the content: only digest, size and removed tools are recorded."""
    return CallRequest(
        dialect=dialect,
        body=b"",
        body_sha256=hashlib.sha256(body).digest(),
        retry_key="once:" + secrets.token_hex(8),
        stream=False,
        sampling=Sampling(),
        model_requested="",
        normalisations=bounded(
            [f"{name[:MOST_NAME_CHARS]} was left out: it would run at the provider" for name in onward.hosted]
        ),
        body_bytes=len(body),
    )
