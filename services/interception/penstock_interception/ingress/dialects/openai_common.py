"""Shared by both OpenAI dialects: errors and the list of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import orjson

from penstock_interception.ingress.dialects.base import Ask, Problem, Route

_MODELS: Final = "/v1/models"
_TYPES: Final = {401: "invalid_request_error", 429: "rate_limit_error"}


def models_route(method: str, path: str) -> Route | None:
    """Returns the route of a request about models; None for other requests."""
    if method == "GET" and path == _MODELS:
        return Route(Ask.MODELS)
    if method == "GET" and path.startswith(f"{_MODELS}/"):
        return Route(Ask.MODEL, path.removeprefix(f"{_MODELS}/"))
    return None


def models(names: Sequence[str]) -> bytes:
    """Returns the list of models."""
    return orjson.dumps({"object": "list", "data": [*map(_model, names)]})


def model(name: str) -> bytes:
    """Returns the description of a model."""
    return orjson.dumps(_model(name))


def error(problem: Problem) -> dict[str, Any]:
    kind = _TYPES.get(problem.status, "server_error" if problem.status >= 500 else "invalid_request_error")
    kind = "insufficient_quota" if problem.code == "budget_exhausted" else kind
    return {"message": message_of(problem), "type": kind, "param": problem.param, "code": problem.code}


def message_of(problem: Problem) -> str:
    """Returns the message; LiteLLM looks for these words of OpenAI's API, and pi for those before."""
    return problem.beginning("Your input exceeds the context window: this model's maximum context length is exceeded.")


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "penstock"}
