"""Black box mode: the bytes of a request go to the operator's or caller's endpoint and back, and are counted.

What may go on is `blackbox`'s matter: paths, headers, tools of the provider, models. The agent's credential is replaced
by the endpoint's key, which goes to no other address (R11) and in the header that the agent's dialect has for it. A
request that was begun is recorded as a call without content.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from functools import partial
from typing import Final

import aiohttp
import structlog
from aiohttp import web
from yarl import URL

from penstock_codec.chat import Sampling
from penstock_interception.audit import Event
from penstock_interception.calls import Arrival, Call, Dialect, Rollout
from penstock_interception.completions import Failure
from penstock_interception.ingress import admission, blackbox, outcomes
from penstock_interception.ingress.blackbox import Onward
from penstock_interception.ingress.connections import Connections
from penstock_interception.ingress.dialect import BadRequest
from penstock_interception.requests import MOST_NAME_CHARS, bounded
from penstock_interception.sources.registry import Sources
from penstock_interception.sources.upstream import UpstreamSource
from penstock_interception.turns import INLINE_BYTES, Turns

_log = structlog.get_logger(__name__)

# The version is the base URL's matter.
_VERSION: Final = re.compile(r"^/v1(beta)?(?=/)")
# Where dialects have a key, if not in a bearer token alone.
_GOOGLE: Final = "x-goog-api-key"
_KEYS: Final = (_GOOGLE, "x-api-key")


class Passthrough:
    """Forwards requests of black box rollouts."""

    def __init__(
        self,
        turns: Turns,
        sources: Sources,
        http: aiohttp.ClientSession,
        connections: Connections,
        *,
        refuse_provider_tools: bool = False,
    ) -> None:
        """`refuse_provider_tools`: as IngressLimits has it."""
        self._refuse_provider_tools = refuse_provider_tools
        self._connections = connections
        self._turns = turns
        self._sources = sources
        self._http = http

    async def forward(self, request: web.Request, rollout: Rollout, path: str, dialect: Dialect) -> web.StreamResponse:
        """One request there and its answer back, streamed as it comes."""
        source = self._sources.source(rollout.opening.mode, rollout.opening.source, rollout.caller_key)
        if not isinstance(source, UpstreamSource):
            raise BadRequest("This rollout has no endpoint.", None, "no_upstream")
        if not blackbox.is_offered(request.method, path):
            raise BadRequest("There is no such route.", None, "unknown_url")
        admission.check_size(rollout, request.content_length)
        body = await self._connections.body(request)
        admission.check_size(rollout, len(body))
        onward = Onward(path, b"")
        call = None
        if request.method == "POST":
            onward = await self._read(rollout, source, path, body, request.remote)
        if request.method == "POST" and path != admission.COUNTS:
            call = self._turns.gate.admit(rollout, _arrival(body, dialect, onward))
            self._turns.gate.journal(call)
        try:
            return await self._exchange(request, source, onward, call)
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

    async def _read(self, rollout: Rollout, source: UpstreamSource, path: str, body: bytes, peer: str | None) -> Onward:
        """What of a request goes on. Raises BadRequest for what may not."""
        work = partial(blackbox.read, path, body, source.model)
        onward = work() if len(body) <= INLINE_BYTES else await self._turns.elsewhere(work)
        if onward.hosted and self._refuse_provider_tools:
            self._turns.gate.audit.tell(Event.PROVIDER_TOOL_REFUSED, rollout_id=rollout.id, peer=peer)
            refused = outcomes.of_provider_tools(onward.hosted)
            raise BadRequest(refused.message, refused.param, refused.code)
        if not source.allows(onward.model):
            raise BadRequest("model: not among the models that are served here.", "model", "model_not_allowed")
        return onward

    async def _exchange(
        self, request: web.Request, source: UpstreamSource, onward: Onward, call: Call | None
    ) -> web.StreamResponse:
        headers = blackbox.onward_headers(request.headers)
        if onward.body:
            headers["content-type"] = "application/json"
        given = next((name for name in _KEYS if name in request.headers), "")
        if given != _GOOGLE:  # it takes one credential and no other
            headers.update(source.credentials())
        if given:
            headers.update(source.credentials(given))
        # As it is: nothing of what the agent wrote is decoded or resolved once more on the way.
        query = blackbox.onward_query(request.rel_url.raw_query_string)
        url = URL(source.base_url + _VERSION.sub("", onward.path) + (f"?{query}" if query else ""), encoded=True)
        async with self._http.request(
            request.method, url, data=onward.body or None, headers=headers, allow_redirects=False
        ) as answer:
            response = web.StreamResponse(status=answer.status, headers=blackbox.returned_headers(answer.headers))
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


def _arrival(body: bytes, dialect: Dialect, onward: Onward) -> Arrival:
    """A request whose content nobody keeps."""
    return Arrival(
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
