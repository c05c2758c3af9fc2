"""What is seen of a request before it is served: whose token it has, what that must be good for, how large it is."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from penstock_interception.calls import Rollout
from penstock_interception.ingress import mcp
from penstock_interception.ingress.dialect import Ask, Route
from penstock_interception.tokens import Scope

COUNTS: Final = "/v1/messages/count_tokens"
"""The one path that asks a black box to count."""


def credential(request: web.Request) -> str:
    """The token, from wherever the dialects' SDKs put it; empty when there is none."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return request.headers.get("x-api-key") or request.headers.get("x-goog-api-key") or ""


def needed(method: str, path: str, route: Route | None) -> Scope:
    """What a token must be good for; `route` is None for what nobody serves, and where nothing is read (black box)."""
    if path == mcp.PATH:
        return Scope.TOOLS
    if route is not None:
        return Scope.COMPLETIONS if route.ask is Ask.COMPLETION else Scope.READ
    return Scope.READ if method == "GET" or path == COUNTS else Scope.COMPLETIONS


async def body(request: web.Request, rollout: Rollout) -> bytes:
    """The body. Raises HTTPRequestEntityTooLarge: before it is read, where its length is told."""
    largest = rollout.opening.budgets.max_request_bytes_per_call
    told = request.content_length
    if largest is not None and told is not None and told > largest:
        raise web.HTTPRequestEntityTooLarge(max_size=largest, actual_size=told)
    data = await request.read()
    if largest is not None and len(data) > largest:
        raise web.HTTPRequestEntityTooLarge(max_size=largest, actual_size=len(data))
    return data
