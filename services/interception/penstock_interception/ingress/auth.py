"""Checks before a request is served: its agent key, the scope it needs, its size."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from penstock_interception.domain.agent_keys import Scope
from penstock_interception.domain.state import Rollout
from penstock_interception.ingress.dialects.base import Ask, BadRequest, Route
from penstock_interception.ingress.mcp import server

COUNTS: Final = "/v1/messages/count_tokens"
"""The only black box POST that counts tokens: it needs the READ scope and is not recorded as a call."""


def credential(request: web.Request) -> str:
    """Returns the agent key from wherever the dialects' SDKs put it; "" if there is none."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip()
    return request.headers.get("x-api-key") or request.headers.get("x-goog-api-key") or ""


def check_headers(request: web.Request) -> None:
    """Refuses headers that are not UTF-8: neither the journal nor protobuf nor other services accept them.

    Raises BadRequest.
    """
    for name, value in request.headers.items():
        if not value.isascii():
            try:
                value.encode()  # the server keeps other bytes as lone surrogates
            except UnicodeEncodeError:
                raise BadRequest(f"The header {name[:64]} is not UTF-8.", None, "invalid_header") from None


def needed(method: str, path: str, route: Route | None) -> Scope:
    """Returns the scope that a request needs; `route` is None for unknown routes and in black box mode."""
    if path == server.PATH:
        return Scope.TOOLS
    if route is not None:
        return Scope.COMPLETIONS if route.ask is Ask.COMPLETION else Scope.READ
    return Scope.READ if method == "GET" or path == COUNTS else Scope.COMPLETIONS


def check_size(rollout: Rollout, size: int | None) -> None:
    """Raises HTTPRequestEntityTooLarge for a body beyond the rollout's limit. `size` None means not known yet."""
    largest = rollout.spec.budgets.max_request_bytes_per_call
    if largest is not None and size is not None and size > largest:
        raise web.HTTPRequestEntityTooLarge(max_size=largest, actual_size=size)
