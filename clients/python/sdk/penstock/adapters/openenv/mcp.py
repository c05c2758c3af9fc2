"""The tool over JSON-RPC 2.0: `tools/list`, `tools/call`, and the session methods of the `openenv` client.

One request in, one answer out, always: an invalid request gets a protocol error (-32700 and its kin), a refusal of the
services is -32603 with the reason, and exceptions of ours are never exposed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.adapters.openenv.sessions import Session, Sessions, tools
from penstock.client.errors import InvalidArgument, NotFound, PenstockError
from penstock.values.jsonrpc import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    PARSE_ERROR,
    SERVER_ERROR,
    Id,
    RpcError,
    error,
    result,
)

_log = logging.getLogger("penstock.adapters.openenv")


class Request(BaseModel):
    """A request."""

    model_config = ConfigDict(extra="forbid")

    jsonrpc: Literal["2.0"]
    method: str = Field(max_length=128)
    params: dict[str, Any] = Field(default_factory=dict)
    id: str | int | None = None


def tool_result(text: str) -> dict[str, Any]:
    """Returns a tool's text in all forms that clients read: as content, as structured content and as data."""
    return {
        "content": [{"type": "text", "text": text, "annotations": None, "meta": None}],
        "structured_content": {"result": text},
        "meta": None,
        "data": text,
        "is_error": False,
    }


async def answer_text(body: bytes | str, sessions: Sessions, bound: Session | None = None) -> dict[str, Any]:
    """Answers a raw request; see `answer`."""
    try:
        message = orjson.loads(body)
    except orjson.JSONDecodeError:
        return error(RpcError(PARSE_ERROR, "Parse error: not JSON"))
    return await answer(message, sessions, bound)


async def answer(message: Any, sessions: Sessions, bound: Session | None = None) -> dict[str, Any]:
    """Answers a request; `bound` is the session of its connection."""
    known_id = message.get("id") if isinstance(message, dict) else None
    request_id = known_id if isinstance(known_id, str | int) and not isinstance(known_id, bool) else None
    try:
        request = Request.model_validate(message)
    except ValidationError as refused:
        fields = ", ".join(".".join(map(str, item["loc"])) or "request" for item in refused.errors())
        return error(RpcError(INVALID_REQUEST, f"Invalid request: {fields[:200]}", request_id))
    try:
        return result(request_id, await _result(request, sessions, bound))
    except RpcError as problem:
        problem.id = request_id
        return error(problem)
    except PenstockError as refused:
        return error(refusal(refused, request_id))
    except Exception:  # noqa: BLE001 - a caller never sees an exception of ours, and always gets an answer (R8)
        _log.exception("a fault of the server")
        return error(RpcError(INTERNAL_ERROR, "an internal error of the server; its log has the details", request_id))


def refusal(refused: PenstockError, request_id: Id | None = None) -> RpcError:
    """Returns the error that says why the services refused a request."""
    if isinstance(refused, InvalidArgument | NotFound):
        return RpcError(INVALID_PARAMS, str(refused), request_id, data={"reason": refused.reason})
    code = SERVER_ERROR if refused.reason == "OPENENV_CAPACITY" else INTERNAL_ERROR
    numbers = {name: int(value) for name, value in refused.metadata.items() if value.isdecimal()}
    return RpcError(code, f"{refused.reason}: {refused}", request_id, data={"reason": refused.reason, **numbers})


async def _result(request: Request, sessions: Sessions, bound: Session | None) -> Any:
    match request.method:
        case "openenv/session/create":
            return {"session_id": (bound or sessions.create()).session_id}
        case "openenv/session/close":
            return await _close(request.params, sessions, bound)
        case "tools/list":
            if bound is None and "session_id" in request.params:
                sessions.find(_text(request.params, "session_id"))
            return {"tools": _tools()}
        case "tools/call":
            return await _call(request.params, sessions, bound)
        case _:
            raise RpcError(METHOD_NOT_FOUND, f"Method not found: {request.method[:80]}")


def _tools() -> list[dict[str, Any]]:
    """Returns the tools with the schema under the names of both generations of clients."""
    return [{**tool, "inputSchema": tool["input_schema"]} for tool in tools()]


async def _call(params: Mapping[str, Any], sessions: Sessions, bound: Session | None) -> dict[str, Any]:
    name = _text(params, "name")
    arguments = params.get("arguments", {})
    if not isinstance(arguments, dict):
        raise RpcError(INVALID_PARAMS, "Invalid params - 'arguments' must be an object")
    if bound is None and "session_id" not in params:
        async with sessions.own() as session:
            return tool_result((await session.environment.call_tool(name, arguments)).text)
    session = bound or sessions.find(_text(params, "session_id"))
    async with sessions.held(session) as environment:
        return tool_result((await environment.call_tool(name, arguments)).text)


async def _close(params: Mapping[str, Any], sessions: Sessions, bound: Session | None) -> dict[str, Any]:
    session = sessions.find(_text(params, "session_id"))
    if session is bound:
        raise RpcError(INVALID_REQUEST, "Cannot close the session of this connection: close the connection")
    if session.attached:
        session.closing = True
        return {"session_id": session.session_id, "closed": False, "closing": True}
    await sessions.close(session)
    return {"session_id": session.session_id, "closed": True}


def _text(params: Mapping[str, Any], name: str) -> str:
    value = params.get(name)
    if not isinstance(value, str) or not value:
        raise RpcError(INVALID_PARAMS, f"Invalid params - '{name}' is required")
    return value
