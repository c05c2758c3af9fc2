"""What both of OpenAI's dialects say alike: errors and the list of models."""

from __future__ import annotations

from typing import Any, Final

import orjson

from penstock_interception.ingress.dialect import Ask, Problem, Route

_MODELS: Final = "/v1/models"
_TYPES: Final = {401: "invalid_request_error", 429: "rate_limit_error"}


def models_route(method: str, path: str) -> Route | None:
    """What a request wants of the models; None when it is about something else."""
    if method == "GET" and path == _MODELS:
        return Route(Ask.MODELS)
    if method == "GET" and path.startswith(f"{_MODELS}/"):
        return Route(Ask.MODEL, path.removeprefix(f"{_MODELS}/"))
    return None


def models(name: str) -> bytes:
    """The list of models, which is the one."""
    return orjson.dumps({"object": "list", "data": [_model(name)]})


def model(name: str) -> bytes:
    """That one model by itself."""
    return orjson.dumps(_model(name))


def error(problem: Problem) -> dict[str, Any]:
    """The `error` object."""
    kind = _TYPES.get(problem.status, "server_error" if problem.status >= 500 else "invalid_request_error")
    kind = "insufficient_quota" if problem.code == "budget_exhausted" else kind
    return {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "penstock"}
