"""What is seen of a request before it is served: whose token it has, what that is good for, how large it may be."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from penstock_interception.calls import Rollout
from penstock_interception.ingress import mcp
from penstock_interception.ingress.dialect import Ask, BadRequest, Route
from penstock_interception.tokens import Scope

COUNTS: Final = "/v1/messages/count_tokens"
"""The one path that asks a black box to count."""


def credential(request: web.Request) -> str:
    """The token, from wherever the dialects' SDKs put it; empty when there is none."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return request.headers.get("x-api-key") or request.headers.get("x-goog-api-key") or ""


def check_headers(request: web.Request) -> None:
    """Refuses headers that are not UTF-8: neither the journal nor a message nor another service takes them.

    Raises BadRequest.
    """
    for name, value in request.headers.items():
        if not value.isascii():
            try:
                value.encode()  # the server keeps other bytes as half surrogate pairs
            except UnicodeEncodeError:
                raise BadRequest(f"The header {name[:64]} is not UTF-8.", None, "invalid_header") from None


def needed(method: str, path: str, route: Route | None) -> Scope:
    """What a token must be good for; `route` is None for what nobody serves, and where nothing is read (black box)."""
    if path == mcp.PATH:
        return Scope.TOOLS
    if route is not None:
        return Scope.COMPLETIONS if route.ask is Ask.COMPLETION else Scope.READ
    return Scope.READ if method == "GET" or path == COUNTS else Scope.COMPLETIONS


def check_size(rollout: Rollout, size: int | None) -> None:
    """Refuses a body that is larger than the rollout's own bound: HTTPRequestEntityTooLarge. None is not known yet."""
    largest = rollout.opening.budgets.max_request_bytes_per_call
    if largest is not None and size is not None and size > largest:
        raise web.HTTPRequestEntityTooLarge(max_size=largest, actual_size=size)
