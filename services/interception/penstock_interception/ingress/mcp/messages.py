"""JSON-RPC in the bodies of HTTP requests: one message per body.

`parse` accepts any bytes and raises only `HttpRpcError`.
"""

from __future__ import annotations

from typing import Any

import orjson

from penstock.values import jsonrpc
from penstock.values.jsonrpc import INVALID_REQUEST, PARSE_ERROR, Id, Message, RpcError
from penstock_interception.ingress.dialects.base import BadRequest
from penstock_interception.ingress.dialects.reading import refuse_repeated_keys


class HttpRpcError(RpcError):
    """An error with a status of HTTP: 200 is the status of every message that could be read."""

    def __init__(self, code: int, message: str, id: Id | None = None, *, status: int = 200) -> None:  # noqa: A002
        super().__init__(code, message, id)
        self.status = status


def parse(body: bytes) -> Message:
    """Parses a body. Raises HttpRpcError with status 400."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise HttpRpcError(PARSE_ERROR, "The body is no JSON.", status=400) from error
    try:
        refuse_repeated_keys(body, value)
    except BadRequest as error:
        raise HttpRpcError(INVALID_REQUEST, error.message, status=400) from None
    try:
        return jsonrpc.message(value)
    except RpcError as error:
        raise HttpRpcError(error.code, error.message, error.id, status=400) from None


def result(id: Id, value: dict[str, Any]) -> bytes:  # noqa: A002
    """Returns the body that answers a request."""
    return orjson.dumps(jsonrpc.result(id, value))
