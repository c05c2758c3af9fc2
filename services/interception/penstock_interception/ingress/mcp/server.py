"""Host tools as an MCP server: streamable HTTP at /rollout/{id}/mcp, authenticated by the rollout's agent key.

The server keeps no connection state: an MCP session id is a name that the client sends back, which separates several
clients in one sandbox. A quick call is answered as JSON, a slow one as an event stream with progress or comments, so
that no client times out. A tool's errors are results with `isError`, which the model reads; protocol errors are
JSON-RPC errors. Internal details are never included (R8).

Protocol revisions: those with a handshake, but without batches (2025-03-26 has them, and no client sends them).
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

from penstock.values import jsonrpc
from penstock.values.jsonrpc import Notification, Request
from penstock_chassis.errors import PenstockError
from penstock_interception.domain.calls import CallState, RolloutState
from penstock_interception.domain.host_tools import CallKey, HostTool, ToolResult
from penstock_interception.domain.recordings import ReplayedResult
from penstock_interception.domain.state import Rollout, ToolCall
from penstock_interception.gate.host_tools import schemas
from penstock_interception.gate.host_tools.bounded import TooManySteps
from penstock_interception.ingress import bodies
from penstock_interception.ingress.bodies import BrokenBody, TooSlow
from penstock_interception.ingress.connections import Connections
from penstock_interception.ingress.encodings import ACCEPTED, EncodingRefused
from penstock_interception.ingress.mcp import messages
from penstock_interception.ingress.mcp.messages import HttpRpcError
from penstock_interception.interceptor import Interceptor

_KEYS: Final = {
    "text": {"type", "text"},
    "image": {"type", "data", "mimeType"},
    "audio": {"type", "data", "mimeType"},
}

_log = structlog.get_logger(__name__)

PATH: Final = "/mcp"
VERSIONS: Final = ("2025-11-25", "2025-06-18", "2025-03-26")
"""Newest first."""
INLINE_BYTES: Final = 8 << 10
"""Arguments up to this size are checked inline, if that takes few steps; others in a thread."""
INLINE_STEPS: Final = 500

_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"
_SESSION_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_ENVELOPE_BYTES: Final = 16 << 10
"""Allowance for a request's bytes besides its arguments."""
_DIVERGED: Final = "REPLAY_DIVERGED: this call differs from what was recorded here, and goes to no tool."
_GONE: Final = {
    "EXPIRED": "The tool timed out. It may still have had an effect.",
    "TRAINER_GONE": "The tool is no longer available. It may have had an effect.",
    "JOURNAL_FAILED": "The tool's result was lost. It may have had an effect.",
}


class McpServer:
    """Answers the MCP requests of all rollouts."""

    def __init__(
        self, interceptor: Interceptor, connections: Connections, *, first_byte_s: float, keep_alive_s: float
    ) -> None:
        """A slow call becomes a stream after `first_byte_s`, with a keep-alive every `keep_alive_s`."""
        self._connections = connections
        self._interceptor = interceptor
        self._broker = interceptor.tools
        self._first_byte_s = first_byte_s
        self._keep_alive_s = keep_alive_s

    @staticmethod
    def unauthorised() -> web.Response:
        """The answer to a request without a valid agent key of the rollout."""
        refused = HttpRpcError(jsonrpc.INVALID_REQUEST, "The agent key is not valid for this address.", status=401)
        return _refusal(refused, {"www-authenticate": "Bearer"})

    @staticmethod
    def forbidden() -> web.Response:
        """The answer to an agent key without the tools scope."""
        return _refusal(HttpRpcError(jsonrpc.INVALID_REQUEST, "The agent key does not allow tools.", status=403))

    async def serve(self, request: web.Request, rollout: Rollout) -> web.StreamResponse:
        """Serves one HTTP request of a rollout's agent."""
        number: jsonrpc.Id | None = None
        try:
            session = _checked(request)
            if request.method == "DELETE":
                if session:
                    self._broker.cancel(rollout.id, "AGENT_CANCELLED", session)
                return web.Response(status=204)
            within_s = self._connections.limits.body_s
            body = await bodies.in_time(request, within_s, self._body, most=self._most_bytes)
            # In a thread if large: `messages.parse` may read a body with white space twice.
            parse = partial(messages.parse, body)
            message = parse() if len(body) <= INLINE_BYTES else await self._interceptor.in_thread(parse)
            if rollout.state is RolloutState.CLOSED:
                # Its key was good before its body came; its id may be another rollout's by now.
                return self.unauthorised()
            if isinstance(message, Request):
                number = message.id
                return await self._answer(request, rollout, message, session, body)
            if isinstance(message, Notification):
                self._note(rollout, message, session)
            return web.Response(status=202)
        except HttpRpcError as error:
            error.id = error.id if error.id is not None else number
            return _refusal(error)
        except TooSlow:
            return _refusal(HttpRpcError(jsonrpc.INVALID_REQUEST, "The request was not received in time.", status=408))
        except EncodingRefused as error:
            refused = HttpRpcError(jsonrpc.INVALID_REQUEST, str(error), status=415)
            return _refusal(refused, {"accept-encoding": ACCEPTED})
        except web.HTTPRequestEntityTooLarge:
            return _refusal(self._too_large())
        except BrokenBody:
            return _refusal(HttpRpcError(jsonrpc.PARSE_ERROR, "The request does not match its headers.", status=400))
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception:  # noqa: BLE001 - logged; nothing of it reaches the agent (R8)
            _log.exception("an MCP request failed", rollout_id=rollout.id)
            return _refusal(HttpRpcError(jsonrpc.INTERNAL_ERROR, "The service failed.", number, status=500))

    async def _body(self, request: web.Request) -> bytes:
        body = bytearray()
        async for chunk in request.content.iter_chunked(64 << 10):
            body += chunk
            if len(body) > self._most_bytes:
                raise self._too_large()
        return bytes(body)

    @property
    def _most_bytes(self) -> int:
        return self._broker.limits.max_bytes + _ENVELOPE_BYTES

    def _too_large(self) -> HttpRpcError:
        return HttpRpcError(
            jsonrpc.INVALID_REQUEST, f"A request must have at most {self._most_bytes} bytes.", status=413
        )

    def _note(self, rollout: Rollout, message: Notification, session: str) -> None:
        cancelled = message.params.get("requestId")
        if message.method == "notifications/cancelled" and jsonrpc.is_id(cancelled):
            number = jsonrpc.id_json(cancelled)  # type: ignore[arg-type]
            self._broker.cancel(rollout.id, "AGENT_CANCELLED", session, number)

    async def _answer(
        self, request: web.Request, rollout: Rollout, message: Request, session: str, body: bytes
    ) -> web.StreamResponse:
        match message.method:
            case "initialize":
                given = web.Response(body=messages.result(message.id, _welcome(message)), content_type=_JSON)
                given.headers["mcp-session-id"] = secrets.token_hex(16)
                return given
            case "ping":
                return web.Response(body=messages.result(message.id, {}), content_type=_JSON)
            case "tools/list":
                tools = [_listed(tool) for tool in self._broker.of(rollout.id)]
                return web.Response(body=messages.result(message.id, {"tools": tools}), content_type=_JSON)
            case "tools/call":
                return await self._call_tool(request, rollout, message, session, body)
        raise HttpRpcError(jsonrpc.METHOD_NOT_FOUND, "There is no such method.")

    async def _call_tool(
        self, request: web.Request, rollout: Rollout, message: Request, session: str, body: bytes
    ) -> web.StreamResponse:
        name, arguments = message.params.get("name"), message.params.get("arguments")
        arguments = {} if arguments is None else arguments
        if not isinstance(name, str):
            raise HttpRpcError(jsonrpc.INVALID_PARAMS, "name: a string.")
        if not isinstance(arguments, dict):
            raise HttpRpcError(jsonrpc.INVALID_PARAMS, "arguments: must be an object.")
        tool = self._broker.tool(rollout.id, name)
        if tool is None:
            raise HttpRpcError(jsonrpc.INVALID_PARAMS, f"Unknown tool: {name[:64]}")
        key = CallKey(session, message.id_json, hashlib.sha256(body).digest())
        call, refusal = self._broker.same_call(rollout.id, key), ""
        recorded: ReplayedResult | None = None
        given, replays = orjson.dumps(arguments), self._interceptor.replays
        if call is None:
            wrong = await self._wrong_with(tool, arguments, len(body))
            if wrong:
                refusal = "The arguments do not match the tool's schema:\n" + "\n".join(wrong)
            else:
                recorded = await replays.take_tool(rollout, name, arguments)
            if rollout.state is RolloutState.CLOSED:
                return self.unauthorised()
            call = self._broker.same_call(rollout.id, key)  # a duplicate may have arrived meanwhile
            if recorded is not None and (call is not None or self._interceptor.registry.draining):
                replays.give_tool_back(rollout, recorded)
        if call is None:
            if self._interceptor.registry.draining:
                return _failed(message, "The service is stopping. Try again in a moment.")
            try:
                if refusal:
                    refused = ToolResult(orjson.dumps({"text": refusal}), is_error=True)
                    call = self._broker.refuse(rollout.id, tool, given, key, refused)
                elif recorded is not None:
                    call = self._broker.replay(rollout.id, tool, given, key, recorded)
                elif replays.refuses_tools(rollout):
                    refused = ToolResult(orjson.dumps({"text": _DIVERGED}), is_error=True)
                    call = self._broker.refuse(rollout.id, tool, given, key, refused, "REPLAY_DIVERGED")
                else:
                    call = self._broker.begin(rollout.id, tool, given, key)
            except PenstockError as error:
                if recorded is not None:
                    replays.give_tool_back(rollout, recorded)
                return _failed(message, error.message)
        self._broker.attach(call)
        try:
            return await self._wait(request, message, call)
        finally:
            self._broker.detach(call)

    async def _wrong_with(self, tool: HostTool, arguments: dict[str, Any], size: int) -> list[str]:
        if size <= INLINE_BYTES:
            with suppress(TooManySteps):
                return schemas.problems(tool.schema, arguments, INLINE_STEPS)
        return await self._interceptor.in_thread(lambda: schemas.problems(tool.schema, arguments))

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
        await self._connections.answered(request, response, call.id, partial(self._broker.answer_sent, call))
        return response

    async def _keep_alive(self, response: web.StreamResponse, message: Request, call: ToolCall) -> None:
        """Writes progress or comments until the call has ended."""
        meta = message.params.get("_meta")
        token = meta.get("progressToken") if isinstance(meta, Mapping) else None
        progress = 0
        while not call.ended.done():
            progress += 1
            if jsonrpc.is_id(token):
                params = {"progressToken": token, "progress": progress, "message": "The tool is at work."}
                await response.write(_event(orjson.dumps(jsonrpc.notification("notifications/progress", params))))
            else:
                await response.write(b": the tool is at work\n\n")
            await asyncio.wait([call.ended], timeout=self._keep_alive_s)


def _checked(request: web.Request) -> str:
    """Returns the MCP session id of a request, or "". Raises HttpRpcError if it is no valid MCP request."""
    origin = request.headers.get("origin")
    if origin is not None and _host(origin) not in ("127.0.0.1", "localhost", "::1"):
        raise HttpRpcError(jsonrpc.INVALID_REQUEST, "This origin is not allowed.", status=403)
    if request.method not in ("POST", "DELETE"):
        raise HttpRpcError(jsonrpc.INVALID_REQUEST, "Use POST.", status=405)
    if request.method == "POST" and request.content_type != _JSON:
        raise HttpRpcError(jsonrpc.INVALID_REQUEST, f"Content-Type: must be {_JSON}.", status=415)
    session = request.headers.get("mcp-session-id", "")
    if session and not _SESSION_ID.fullmatch(session):
        raise HttpRpcError(
            jsonrpc.INVALID_REQUEST, "Mcp-Session-Id: must have at most 128 visible characters.", status=400
        )
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
    blocks, structured = tool_content(call.result.content)
    body: dict[str, Any] = {"content": blocks, "isError": call.result.is_error}
    if structured is not None and not call.result.is_error:
        body["structuredContent"] = structured
    return messages.result(message.id, body)


def _failure(message: Request, words: str) -> bytes:
    return messages.result(message.id, {"content": [_text_block(words)], "isError": True})


def _failed(message: Request, words: str) -> web.Response:
    return web.Response(body=_failure(message, words), content_type=_JSON)


def _event(data: bytes) -> bytes:
    return b"event: message\ndata: " + data + b"\n\n"


def _refusal(refused: HttpRpcError, headers: Mapping[str, str] | None = None) -> web.Response:
    given = web.Response(
        status=refused.status, body=orjson.dumps(jsonrpc.error(refused)), content_type=_JSON, headers=headers
    )
    if refused.status == 408:
        given.force_close()
    if refused.status == 405:
        given.headers["allow"] = "POST, DELETE"
    return given


def tool_content(result: bytes) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Returns a result's content blocks, and its structured content (a JSON object) or None if the blocks are complete.

    {"text": TEXT} becomes that text, {"content": [BLOCK, ...]} those blocks; anything else becomes JSON text.
    """
    value: dict[str, Any] = orjson.loads(result)
    if value.keys() == {"text"} and isinstance(value["text"], str):
        return [_text_block(value["text"])], None
    if value.keys() == {"content"} and isinstance(value["content"], list) and all(map(_is_block, value["content"])):
        return value["content"], None
    return [_text_block(result.decode())], value


def _text_block(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def _is_block(block: Any) -> bool:
    if not isinstance(block, dict) or not all(isinstance(value, str) for value in block.values()):
        return False
    return block.keys() == _KEYS.get(block.get("type", ""))
