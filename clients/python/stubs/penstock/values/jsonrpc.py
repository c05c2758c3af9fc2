"""JSON-RPC 2.0 for all servers that speak it, above any transport: MCP's ids and named parameters, no batches.

`message` accepts any decoded JSON and raises only RpcError. Source: https://www.jsonrpc.org/specification.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603
SERVER_ERROR: Final = -32000
"""The first of the codes that each server defines."""

MAX_ID_CHARS: Final = 256

Id: TypeAlias = str | int


class RpcError(Exception):
    """A message that is answered with an error; `id` is None if the message's own id is unknown."""

    def __init__(
        self,
        code: int,
        message: str,
        id: Id | None = None,  # noqa: A002
        *,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.id = id
        self.data = data


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


def message(value: object) -> Message:
    """Returns the message that a decoded JSON value is.

    Raises:
        RpcError: it is none.
    """
    if isinstance(value, list):
        raise RpcError(INVALID_REQUEST, "Batches are not supported: send one message at a time.")
    if not isinstance(value, dict) or value.get("jsonrpc") != "2.0":
        raise RpcError(INVALID_REQUEST, 'A message must be an object with "jsonrpc": "2.0".')
    number = value.get("id")
    if "id" in value and not is_id(number):
        raise RpcError(INVALID_REQUEST, f"id: must be a string of at most {MAX_ID_CHARS} characters, or an integer.")
    if "method" not in value:
        if "id" in value and ("result" in value) != ("error" in value):
            return Reply()
        raise RpcError(INVALID_REQUEST, "method: missing.", number)
    method, params = value["method"], value.get("params", {})
    if not isinstance(method, str):
        raise RpcError(INVALID_REQUEST, "method: must be a string.", number)
    if not isinstance(params, dict):
        raise RpcError(INVALID_PARAMS, "params: must be an object.", number)
    return Notification(method, params) if number is None else Request(number, method, params)


def is_id(value: object) -> bool:
    """Returns whether a value is a valid id."""
    if isinstance(value, str):
        return len(value) <= MAX_ID_CHARS
    return isinstance(value, int) and not isinstance(value, bool)


def id_json(value: Id) -> str:
    """Returns an id as JSON."""
    return json.dumps(value, ensure_ascii=False)


def result(id: Id | None, value: Any) -> dict[str, Any]:  # noqa: A002
    """Returns the answer to a request."""
    return {"jsonrpc": "2.0", "id": id, "result": value}


def error(problem: RpcError) -> dict[str, Any]:
    """Returns the answer to a request that failed, with its data if it has some."""
    fields: dict[str, Any] = {"code": problem.code, "message": problem.message}
    if problem.data is not None:
        fields["data"] = dict(problem.data)
    return {"jsonrpc": "2.0", "id": problem.id, "error": fields}


def notification(method: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message that expects no answer."""
    return {"jsonrpc": "2.0", "method": method, "params": params}
