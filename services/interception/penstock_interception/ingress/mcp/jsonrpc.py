"""JSON-RPC 2.0 as MCP uses it: one message per body, named parameters, ids that are strings or integers.

`parse` accepts any bytes and raises only `RpcError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import orjson

from penstock_interception.ingress.dialects.base import BadRequest
from penstock_interception.ingress.dialects.reading import refuse_repeated_keys

PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603

MAX_ID_CHARS: Final = 256

Id: TypeAlias = str | int


class RpcError(Exception):
    """A message that is answered with an error; `id` is None if the message's own id is unknown."""

    def __init__(self, code: int, message: str, id: Id | None = None, status: int = 200) -> None:  # noqa: A002
        super().__init__(message)
        self.code = code
        self.message = message
        self.id = id
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    """A message that expects an answer."""

    id: Id
    method: str
    params: Mapping[str, Any]

    @property
    def id_json(self) -> str:
        """The id as JSON: "1" and 1 are different ids."""
        return id_json(self.id)


@dataclass(frozen=True, slots=True)
class Notification:
    """A message that expects no answer."""

    method: str
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer to a request that the server never made."""


Message: TypeAlias = Request | Notification | Reply


def parse(body: bytes) -> Message:
    """Parses a body. Raises RpcError with status 400."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RpcError(PARSE_ERROR, "The body is no JSON.", status=400) from error
    try:
        refuse_repeated_keys(body, value)
    except BadRequest as error:
        raise RpcError(INVALID_REQUEST, error.message, status=400) from None
    if isinstance(value, list):
        raise RpcError(INVALID_REQUEST, "Batches are not supported: send one message per request.", status=400)
    if not isinstance(value, dict) or value.get("jsonrpc") != "2.0":
        raise RpcError(INVALID_REQUEST, 'A message must be an object with "jsonrpc": "2.0".', status=400)
    number = value.get("id")
    if "id" in value and not is_id(number):
        raise RpcError(
            INVALID_REQUEST, f"id: must be a string of at most {MAX_ID_CHARS} characters, or an integer.", status=400
        )
    if "method" not in value:
        if "id" in value and ("result" in value) != ("error" in value):
            return Reply()
        raise RpcError(INVALID_REQUEST, "method: missing.", number, status=400)
    method, params = value["method"], value.get("params", {})
    if not isinstance(method, str):
        raise RpcError(INVALID_REQUEST, "method: a string.", number, status=400)
    if not isinstance(params, dict):
        raise RpcError(INVALID_PARAMS, "params: an object.", number, status=400)
    return Notification(method, params) if number is None else Request(number, method, params)


def is_id(value: object) -> bool:
    """Returns whether a value is a valid id."""
    if isinstance(value, str):
        return len(value) <= MAX_ID_CHARS
    return isinstance(value, int) and not isinstance(value, bool)


def id_json(value: Id) -> str:
    return orjson.dumps(value).decode()


def result(id: Id, value: Mapping[str, Any]) -> bytes:  # noqa: A002
    return orjson.dumps({"jsonrpc": "2.0", "id": id, "result": value})


def error(problem: RpcError) -> bytes:
    fields = {"code": problem.code, "message": problem.message}
    return orjson.dumps({"jsonrpc": "2.0", "id": problem.id, "error": fields})


def notification(method: str, params: Mapping[str, Any]) -> bytes:
    return orjson.dumps({"jsonrpc": "2.0", "method": method, "params": params})
