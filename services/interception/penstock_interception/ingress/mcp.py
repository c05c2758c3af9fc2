"""Host tools as an MCP server: streamable HTTP at /rollout/{id}/mcp, for the agent that holds the rollout's token.

Nothing is kept of a connection: an MCP session's id is a name that the client sends back, by which requests of several
clients in one sandbox are told apart. A call that is quick is answered as JSON; a slow one as an event stream with
progress or comments, so that no client gives up. Errors of a tool are results with `isError`, which the model reads;
errors of the protocol are JSON-RPC errors. What happened inside is never told (R8).

Revisions of the protocol: those with a handshake, less batches (2025-03-26 has them, and no client sends them).
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

import orjson
import structlog
from aiohttp import web

from penstock_chassis.errors import PenstockError
from penstock_interception.calls import CallState, Rollout, RolloutState
from penstock_interception.ingress import jsonrpc
from penstock_interception.ingress.connections import BrokenBody, Connections, TooSlow
from penstock_interception.ingress.jsonrpc import Notification, Request, RpcError
from penstock_interception.tools import content, schemas
from penstock_interception.tools.bounded import TooManySteps
from penstock_interception.tools.model import CallKey, HostTool, ToolCall, ToolResult
from penstock_interception.turns import Turns

_log = structlog.get_logger(__name__)

PATH: Final = "/mcp"
VERSIONS: Final = ("2025-11-25", "2025-06-18", "2025-03-26")
"""Newest first."""
INLINE_BYTES: Final = 8 << 10
"""Arguments that are checked where they are, if that takes few steps; all others in a thread."""
INLINE_STEPS: Final = 500

_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"
_SESSION_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_ENVELOPE_BYTES: Final = 16 << 10
"""What a request has beside its arguments."""
_GONE: Final = {
    "EXPIRED": "The tool took too long and was given up. It may still have had an effect.",
    "TRAINER_GONE": "The tool is not available any more. It may have had an effect.",
    "JOURNAL_FAILED": "The tool's result was lost. It may have had an effect.",
}


class McpServer:
    """Answers the MCP requests of all rollouts."""

    def __init__(self, turns: Turns, connections: Connections, *, first_byte_s: float, keep_alive_s: float) -> None:
        """A slow call becomes a stream after `first_byte_s`, and says something every `keep_alive_s`."""
        self._connections = connections
        self._turns = turns
        self._desk = turns.gate.tools
        self._first_byte_s = first_byte_s
        self._keep_alive_s = keep_alive_s

    @staticmethod
    def unauthorised() -> web.Response:
        """For whoever has no token of the rollout."""
        refused = RpcError(jsonrpc.INVALID_REQUEST, "The token is not valid for this address.", status=401)
        return _refusal(refused, {"www-authenticate": "Bearer"})

    @staticmethod
    def forbidden() -> web.Response:
        """For a token of the rollout that is not for tools."""
        return _refusal(RpcError(jsonrpc.INVALID_REQUEST, "The token is not for tools.", status=403))

    async def serve(self, request: web.Request, rollout: Rollout) -> web.StreamResponse:
        """One HTTP request of a rollout's agent."""
        number: jsonrpc.Id | None = None
        try:
            session = _checked(request)
            if request.method == "DELETE":
                if session:
                    self._desk.cancel(rollout.id, "AGENT_CANCELLED", session)
                return web.Response(status=204)
            body = await self._connections.body(request, self._body)
            # In a thread where it may take long: a body that is written with spaces is read twice.
            parse = partial(jsonrpc.parse, body)
            message = parse() if len(body) <= INLINE_BYTES else await self._turns.elsewhere(parse)
            if isinstance(message, Request):
                number = message.id
                return await self._answer(request, rollout, message, session, body)
            if isinstance(message, Notification):
                self._note(rollout, message, session)
            return web.Response(status=202)
        except RpcError as error:
            error.id = error.id if error.id is not None else number
            return _refusal(error)
        except TooSlow:
            return _refusal(RpcError(jsonrpc.INVALID_REQUEST, "The request did not come in time.", status=408))
        except BrokenBody:
            return _refusal(RpcError(jsonrpc.PARSE_ERROR, "The request cannot be read as its headers say.", status=400))
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception:  # noqa: BLE001 - logged; nothing of it reaches the agent (R8)
            _log.exception("an MCP request failed", rollout_id=rollout.id)
            return _refusal(RpcError(jsonrpc.INTERNAL_ERROR, "The service failed.", number, status=500))

    async def _body(self, request: web.Request) -> bytes:
        limit = self._desk.limits.max_bytes + _ENVELOPE_BYTES
        body = bytearray()
        async for chunk in request.content.iter_chunked(64 << 10):
            body += chunk
            if len(body) > limit:
                raise RpcError(jsonrpc.INVALID_REQUEST, f"A request has at most {limit} bytes.", status=413)
        return bytes(body)

    def _note(self, rollout: Rollout, message: Notification, session: str) -> None:
        cancelled = message.params.get("requestId")
        if message.method == "notifications/cancelled" and jsonrpc.is_id(cancelled):
            number = jsonrpc.id_json(cancelled)  # type: ignore[arg-type]
            self._desk.cancel(rollout.id, "AGENT_CANCELLED", session, number)

    async def _answer(
        self, request: web.Request, rollout: Rollout, message: Request, session: str, body: bytes
    ) -> web.StreamResponse:
        match message.method:
            case "initialize":
                given = web.Response(body=jsonrpc.result(message.id, _welcome(message)), content_type=_JSON)
                given.headers["mcp-session-id"] = secrets.token_hex(16)
                return given
            case "ping":
                return web.Response(body=jsonrpc.result(message.id, {}), content_type=_JSON)
            case "tools/list":
                tools = [_listed(tool) for tool in self._desk.of(rollout.id)]
                return web.Response(body=jsonrpc.result(message.id, {"tools": tools}), content_type=_JSON)
            case "tools/call":
                return await self._call_tool(request, rollout, message, session, body)
        raise RpcError(jsonrpc.METHOD_NOT_FOUND, "There is no such method.")

    async def _call_tool(
        self, request: web.Request, rollout: Rollout, message: Request, session: str, body: bytes
    ) -> web.StreamResponse:
        name, arguments = message.params.get("name"), message.params.get("arguments")
        arguments = {} if arguments is None else arguments
        if not isinstance(name, str):
            raise RpcError(jsonrpc.INVALID_PARAMS, "name: a string.")
        if not isinstance(arguments, dict):
            raise RpcError(jsonrpc.INVALID_PARAMS, "arguments: an object.")
        tool = self._desk.tool(rollout.id, name)
        if tool is None:
            raise RpcError(jsonrpc.INVALID_PARAMS, f"Unknown tool: {name[:64]}")
        key = CallKey(session, message.id_json, hashlib.sha256(body).digest())
        call, refusal = self._desk.same_call(rollout.id, key), ""
        if call is None:
            wrong = await self._wrong_with(tool, arguments, len(body))
            if wrong:
                refusal = "The arguments do not fit the tool's schema:\n" + "\n".join(wrong)
            call = self._desk.same_call(rollout.id, key)  # its twin may have come meanwhile
        if call is None:
            if rollout.state is RolloutState.CLOSED:
                return self.unauthorised()
            if self._turns.gate.draining:
                return _failed(message, "The service is stopping. Try again in a moment.")
            given = orjson.dumps(arguments)
            try:
                if refusal:
                    told = ToolResult(orjson.dumps({"text": refusal}), is_error=True)
                    call = self._desk.refuse(rollout.id, tool, given, key, told)
                else:
                    call = self._desk.begin(rollout.id, tool, given, key)
            except PenstockError as error:
                return _failed(message, error.message)
        self._desk.attach(call)
        try:
            return await self._wait(request, message, call)
        finally:
            self._desk.detach(call)

    async def _wrong_with(self, tool: HostTool, arguments: dict[str, Any], size: int) -> list[str]:
        if size <= INLINE_BYTES:
            with suppress(TooManySteps):
                return schemas.problems(tool.schema, arguments, INLINE_STEPS)
        return await self._turns.elsewhere(lambda: schemas.problems(tool.schema, arguments))

    async def _wait(self, request: web.Request, message: Request, call: ToolCall) -> web.StreamResponse:
        streams = _EVENTS in request.headers.get("accept", "")
        await asyncio.wait([call.ended], timeout=self._first_byte_s if streams else None)
        if call.ended.done():
            response: web.StreamResponse = web.Response(body=_result(message, call), content_type=_JSON)
            await response.prepare(request)
        else:
            response = web.StreamResponse(headers={"content-type": _EVENTS, "cache-control": "no-cache, no-transform"})
            await response.prepare(request)
            await self._keep_alive(response, message, call)
            await response.write(_event(_result(message, call)))
        await response.write_eof()
        await self._connections.answered(request, response, call.id, partial(self._desk.told, call))
        return response

    async def _keep_alive(self, response: web.StreamResponse, message: Request, call: ToolCall) -> None:
        """Says something every now and then, until the call has ended."""
        meta = message.params.get("_meta")
        token = meta.get("progressToken") if isinstance(meta, Mapping) else None
        progress = 0
        while not call.ended.done():
            progress += 1
            if jsonrpc.is_id(token):
                params = {"progressToken": token, "progress": progress, "message": "The tool is at work."}
                await response.write(_event(jsonrpc.notification("notifications/progress", params)))
            else:
                await response.write(b": the tool is at work\n\n")
            await asyncio.wait([call.ended], timeout=self._keep_alive_s)


def _checked(request: web.Request) -> str:
    """The MCP session that a request names, "" for none. Raises RpcError for what is no request of MCP."""
    origin = request.headers.get("origin")
    if origin is not None and _host(origin) not in ("127.0.0.1", "localhost", "::1"):
        raise RpcError(jsonrpc.INVALID_REQUEST, "This origin is not served.", status=403)
    if request.method not in ("POST", "DELETE"):
        raise RpcError(jsonrpc.INVALID_REQUEST, "Use POST.", status=405)
    if request.method == "POST" and request.content_type != _JSON:
        raise RpcError(jsonrpc.INVALID_REQUEST, f"Content-Type: {_JSON}.", status=415)
    session = request.headers.get("mcp-session-id", "")
    if session and not _SESSION_ID.fullmatch(session):
        raise RpcError(jsonrpc.INVALID_REQUEST, "Mcp-Session-Id: at most 128 visible characters.", status=400)
    return session


def _host(origin: str) -> str | None:
    try:
        return urlsplit(origin).hostname
    except ValueError:  # such as half of an IPv6 address
        return None


def _welcome(message: Request) -> dict[str, Any]:
    asked = message.params.get("protocolVersion")
    return {
        "protocolVersion": asked if asked in VERSIONS else VERSIONS[0],
        "capabilities": {"tools": {"listChanged": False}},
        "serverInfo": {"name": "penstock", "version": "1"},
    }


def _listed(tool: HostTool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "inputSchema": orjson.Fragment(tool.schema)}


def _result(message: Request, call: ToolCall) -> bytes:
    if call.state is not CallState.DELIVERED or call.result is None:
        return _failure(message, _GONE.get(call.end_reason, "The call was cancelled."))
    blocks, structured = content.shown(call.result.content)
    told: dict[str, Any] = {"content": blocks, "isError": call.result.is_error}
    if structured is not None and not call.result.is_error:
        told["structuredContent"] = structured
    return jsonrpc.result(message.id, told)


def _failure(message: Request, words: str) -> bytes:
    return jsonrpc.result(message.id, {"content": [content.text(words)], "isError": True})


def _failed(message: Request, words: str) -> web.Response:
    return web.Response(body=_failure(message, words), content_type=_JSON)


def _event(data: bytes) -> bytes:
    return b"event: message\ndata: " + data + b"\n\n"


def _refusal(refused: RpcError, headers: Mapping[str, str] | None = None) -> web.Response:
    given = web.Response(status=refused.status, body=jsonrpc.error(refused), content_type=_JSON, headers=headers)
    if refused.status == 408:
        given.force_close()
    if refused.status == 405:
        given.headers["allow"] = "POST, DELETE"
    return given
