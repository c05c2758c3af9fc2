"""JSON-RPC 2.0 as MCP's stdio transport uses it: one message a line.

`parse` accepts any bytes and raises only RpcError.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import orjson

PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603

MAX_ID_CHARS: Final = 256

Id: TypeAlias = str | int


class RpcError(Exception):
    """A message that is answered with an error; `id` is None where the message's own is unknown."""

    def __init__(self, code: int, message: str, id: Id | None = None) -> None:  # noqa: A002
        super().__init__(message)
        self.code = code
        self.message = message
        self.id = id


@dataclass(frozen=True, slots=True)
class Request:
    """A message that expects an answer."""

    id: Id
    method: str
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Notification:
    """A message that expects none."""

    method: str
    params: Mapping[str, Any]


def parse(line: bytes) -> Request | Notification | None:
    """Parses a line; None is an answer to a request, of which this server makes none.

    Raises:
        RpcError: it is no message.
    """
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        raise RpcError(PARSE_ERROR, "the line is not JSON") from None
    if not isinstance(value, dict) or value.get("jsonrpc") != "2.0":
        raise RpcError(INVALID_REQUEST, 'a message is an object with "jsonrpc": "2.0"')
    number, method = value.get("id"), value.get("method")
    if "id" in value and not is_id(number):
        raise RpcError(INVALID_REQUEST, f"id: must be a string of at most {MAX_ID_CHARS} characters, or an integer")
    if method is None and ("result" in value or "error" in value):
        return None
    if not isinstance(method, str):
        raise RpcError(INVALID_REQUEST, "method: must be a string", number)
    params = value.get("params", {})
    if not isinstance(params, dict):
        raise RpcError(INVALID_PARAMS, "params: must be an object", number)
    return Notification(method, params) if number is None else Request(number, method, params)


def is_id(value: object) -> bool:
    """Returns whether a value is a valid id."""
    if isinstance(value, str):
        return len(value) <= MAX_ID_CHARS
    return isinstance(value, int) and not isinstance(value, bool)


def result(id: Id, value: Mapping[str, Any]) -> bytes:  # noqa: A002
    """Returns the line that answers a request."""
    return orjson.dumps({"jsonrpc": "2.0", "id": id, "result": value}, option=orjson.OPT_APPEND_NEWLINE)


def error(problem: RpcError) -> bytes:
    """Returns the line that answers with an error."""
    fields = {"code": problem.code, "message": problem.message}
    return orjson.dumps({"jsonrpc": "2.0", "id": problem.id, "error": fields}, option=orjson.OPT_APPEND_NEWLINE)
