"""Black box mode: the bytes of a request go to the operator's or caller's endpoint and back, unread, only counted.

Headers of the hop stay on the hop; the agent's credential is replaced by the endpoint's key, which goes to no other
address (R11) and in the header that the agent's dialect has for it. A request that was begun is recorded as a call
without content.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Final

import aiohttp
import structlog
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from penstock_codec.chat import Sampling
from penstock_interception.calls import Arrival, Call, Dialect, Rollout
from penstock_interception.completions import Failure
from penstock_interception.ingress import admission
from penstock_interception.ingress.connections import Connections
from penstock_interception.ingress.dialect import BadRequest
from penstock_interception.sources.registry import Sources
from penstock_interception.sources.upstream import UpstreamSource
from penstock_interception.turns import Turns

_log = structlog.get_logger(__name__)

# What a model is asked by; the key behind it may open more, such as files or an account, and that is not for agents.
_OFFERED: Final = re.compile(
    r"/v1/(chat/completions|completions|responses|messages|messages/count_tokens|embeddings)"
    r"|/v1(beta)?/models(/[A-Za-z0-9_:@-][A-Za-z0-9_.:@-]*)*"
)
# The version is the base URL's matter.
_VERSION: Final = re.compile(r"^/v1(beta)?(?=/)")
# Where dialects have a key, if not in a bearer token alone.
_GOOGLE: Final = "x-goog-api-key"
_KEYS: Final = (_GOOGLE, "x-api-key")

_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
        "content-encoding",
        "authorization",
        "x-api-key",
        "x-goog-api-key",
        "cookie",
        "set-cookie",
        "accept-encoding",
        "expect",
        "forwarded",
        "x-forwarded-for",
        "x-forwarded-host",
        "x-forwarded-proto",
    }
)


class Passthrough:
    """Forwards requests of black box rollouts."""

    def __init__(self, turns: Turns, sources: Sources, http: aiohttp.ClientSession, connections: Connections) -> None:
        self._connections = connections
        self._turns = turns
        self._sources = sources
        self._http = http

    async def forward(self, request: web.Request, rollout: Rollout, path: str, dialect: Dialect) -> web.StreamResponse:
        """One request there and its answer back, streamed as it comes."""
        source = self._sources.source(rollout.opening.mode, rollout.opening.source, rollout.caller_key)
        if not isinstance(source, UpstreamSource):
            raise BadRequest("This rollout has no endpoint.", None, "no_upstream")
        if request.method not in ("GET", "POST") or not _OFFERED.fullmatch(path):
            raise BadRequest("There is no such route.", None, "unknown_url")
        admission.check_size(rollout, request.content_length)
        body = await self._connections.body(request)
        admission.check_size(rollout, len(body))
        call = None
        if request.method == "POST" and path != admission.COUNTS:
            call = self._turns.gate.admit(rollout, _arrival(body, dialect))
            self._turns.gate.journal(call)
        try:
            return await self._exchange(request, source, path, body, call)
        except (aiohttp.ClientError, TimeoutError) as error:
            _log.warning("upstream unreachable", rollout_id=rollout.id, error=type(error).__name__)
            if call is not None:
                self._turns.gate.fail(call, Failure("UPSTREAM_UNREACHABLE"))
            return web.json_response(
                {"error": {"message": "The model could not answer.", "type": "server_error", "code": "unavailable"}},
                status=503,
            )
        finally:
            if call is not None and not call.state.terminal:
                self._turns.gate.cancel(call, "AGENT_GONE")

    async def _exchange(
        self, request: web.Request, source: UpstreamSource, path: str, body: bytes, call: Call | None
    ) -> web.StreamResponse:
        headers = _onward(request.headers)
        given = next((name for name in _KEYS if name in request.headers), "")
        if given != _GOOGLE:  # it takes one credential and no other
            headers.update(source.credentials())
        if given:
            headers.update(source.credentials(given))
        # As it is: nothing of what the agent wrote is decoded or resolved once more on the way.
        url = URL(
            source.base_url
            + _VERSION.sub("", path)
            + (f"?{request.rel_url.raw_query_string}" if request.query_string else ""),
            encoded=True,
        )
        async with self._http.request(
            request.method, url, data=body or None, headers=headers, allow_redirects=False
        ) as answer:
            response = web.StreamResponse(status=answer.status, headers=_onward(answer.headers))
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
        if call is not None:
            if answer.status < 400:
                self._turns.gate.pass_through(call)
            else:
                self._turns.gate.fail(call, Failure("UPSTREAM_REFUSED", f"HTTP {answer.status}"))
        return response


def _arrival(body: bytes, dialect: Dialect) -> Arrival:
    """A request whose content nobody looks at: not even its digest is kept."""
    return Arrival(
        dialect=dialect,
        body=b"",
        body_sha256=hashlib.sha256(body).digest(),
        retry_key="once:" + secrets.token_hex(8),
        stream=False,
        sampling=Sampling(),
        model_requested="",
        body_bytes=len(body),
    )


def _onward(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    onward: CIMultiDict[str] = CIMultiDict()
    named = {name.strip().lower() for name in headers.get("connection", "").split(",")}
    for name, value in headers.items():
        if name.lower() not in _HOP and name.lower() not in named:
            onward.add(name, value)
    return onward
