"""The HTTP server: routes, authentication, and cleanup when a connection ends.

| route | what |
|---|---|
| `GET /health` | alive, without a credential, and nothing else |
| `WS /ws` | a client's connection: reset, step, state, mcp, close; `?session_id=` joins a session made over `/mcp` |
| `POST /mcp`, `WS /mcp` | JSON-RPC: tools and sessions |
| `POST /reset`, `POST /step`, `GET /state` | one environment for the one request |
| `GET /metadata`, `GET /schema` | a description of this server |

Invariants: callers are authorised before anything is read (R5); a browser page of another origin is refused, so that an
open loopback port is not reachable from web pages; a client that disconnects ends its call and its rollout; bodies are
bounded.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict
from importlib import metadata
from typing import Any, Final
from urllib.parse import urlsplit

import orjson
from aiohttp import WSCloseCode, WSMsgType, web
from aiohttp.typedefs import Handler, Middleware

from penstock.adapters.openenv import frames, mcp
from penstock.adapters.openenv.sessions import Session, Sessions, State, tools
from penstock.client.errors import InvalidArgument, PenstockError
from penstock.values import jsonrpc

MAX_BODY_BYTES: Final = 16 << 20
MAX_AHEAD: Final = 32
"""Messages that a connection may send before the first is answered."""
HEARTBEAT_S: Final = 20.0
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_OPEN: Final = "/health"

_log = logging.getLogger("penstock.adapters.openenv")


def application(sessions: Sessions, token: str | None) -> web.Application:
    """Returns the routes. Without a token only requests to a loopback name are answered."""
    app = web.Application(middlewares=[_guard(token)], client_max_size=MAX_BODY_BYTES)
    server = _Server(sessions)
    app.add_routes(
        [
            web.get(_OPEN, server.health),
            web.get("/metadata", server.metadata),
            web.get("/schema", server.schema),
            web.get("/ws", server.connection),
            web.get("/mcp", server.rpc_connection),
            web.post("/mcp", server.rpc),
            web.post("/reset", server.reset),
            web.post("/step", server.step),
            web.get("/state", server.state),
        ]
    )
    app.on_shutdown.append(server.shut_down)
    return app


class _Server:
    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._connections: set[web.WebSocketResponse] = set()

    async def shut_down(self, _: web.Application) -> None:
        """Notifies the connections and ends every session."""
        for connection in list(self._connections):
            await connection.close(code=WSCloseCode.GOING_AWAY, message=b"the server stops")
        await self._sessions.close_all()

    # Plain requests ---------------------------------------------------------------------------------------------------

    async def health(self, _: web.Request) -> web.Response:
        return _json({"status": "healthy"})

    async def metadata(self, _: web.Request) -> web.Response:
        description = "Runs coding agents on tasks with Penstock, each in its own sandbox."
        return _json(
            {
                "name": "penstock",
                "description": description,
                "readme_content": None,
                "version": metadata.version("penstock"),
                "author": None,
                "documentation_url": None,
            }
        )

    async def schema(self, _: web.Request) -> web.Response:
        state: dict[str, Any] = {name: {} for name in State.__dataclass_fields__}
        action = {
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {"enum": ["list_tools", "call_tool"]},
                "tool_name": {"enum": [tool["name"] for tool in tools()]},
                "arguments": tools()[0]["input_schema"],
            },
        }
        return _json(
            {"action": action, "observation": {"type": "object"}, "state": {"type": "object", "properties": state}}
        )

    async def reset(self, request: web.Request) -> web.Response:
        given = await _object(request)
        async with self._sessions.own() as session:
            return _json(await frames.reset(session.environment, given))

    async def step(self, request: web.Request) -> web.Response:
        given = await _object(request)
        action = given.get("action")
        if not isinstance(action, dict):
            raise InvalidArgument("action is required, as an object", reason="OPENENV_ARGUMENTS")
        timeout = given.get("timeout_s")
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0):
            raise InvalidArgument("timeout_s: must be a number of seconds above 0", reason="OPENENV_ARGUMENTS")
        async with self._sessions.own() as session:
            try:
                async with asyncio.timeout(timeout):
                    return _json(await frames.step(session.environment, action))
            except TimeoutError:
                return _refused(408, "OPENENV_TIMEOUT", "the step took longer than timeout_s; its rollout was ended")

    async def state(self, _: web.Request) -> web.Response:
        async with self._sessions.own() as session:
            return _json(asdict(session.environment.state))

    async def rpc(self, request: web.Request) -> web.Response:
        return _json(await mcp.answer_text(await request.read(), self._sessions))

    # Connections ------------------------------------------------------------------------------------------------------

    async def connection(self, request: web.Request) -> web.StreamResponse:
        wanted = request.query.get("session_id")

        async def converse(socket: web.WebSocketResponse) -> None:
            try:
                async with AsyncExitStack() as stack:
                    if wanted:
                        session = self._sessions.find(wanted)
                        await stack.enter_async_context(self._sessions.attached(session))
                    else:
                        session = await stack.enter_async_context(self._sessions.own())
                    await _answer_all(socket, session, lambda raw: frames.answer(raw, session, self._sessions))
            except PenstockError as error:
                full = error.reason == "OPENENV_CAPACITY"
                numbers = {name: int(value) for name, value in error.metadata.items()}
                refused = frames.refusal(str(error), "CAPACITY_REACHED" if full else "SESSION_ERROR", **numbers)
                await _send(socket, refused)

        return await self._upgraded(request, converse)

    async def rpc_connection(self, request: web.Request) -> web.StreamResponse:
        async def converse(socket: web.WebSocketResponse) -> None:
            try:
                async with self._sessions.own() as session:
                    await _answer_all(socket, session, lambda raw: mcp.answer_text(raw, self._sessions, session))
            except PenstockError as error:
                await _send(socket, jsonrpc.error(mcp.refusal(error)))

        return await self._upgraded(request, converse)

    async def _upgraded(
        self, request: web.Request, converse: Callable[[web.WebSocketResponse], Awaitable[None]]
    ) -> web.StreamResponse:
        # A client's close is answered when its session has ended: until then its slot is in use.
        socket = web.WebSocketResponse(heartbeat=HEARTBEAT_S, max_msg_size=MAX_BODY_BYTES, autoclose=False)
        if not socket.can_prepare(request).ok:
            return _refused(426, "OPENENV_ARGUMENTS", "this route is a WebSocket")
        await socket.prepare(request)
        self._connections.add(socket)
        try:
            await converse(socket)
        finally:
            self._connections.discard(socket)
            await socket.close()
        return socket


async def _answer_all(
    socket: web.WebSocketResponse, session: Session, answer: Callable[[str], Awaitable[dict[str, Any]]]
) -> None:
    """Answers message after message; keeps reading the connection, so that its end cancels work in progress."""
    waiting: asyncio.Queue[str] = asyncio.Queue(MAX_AHEAD)

    async def work() -> None:
        while True:
            await _send(socket, await answer(await waiting.get()))

    working = asyncio.create_task(work(), name=f"openenv-{session.session_id[:8]}")
    reading = asyncio.create_task(_read(socket, waiting), name=f"openenv-read-{session.session_id[:8]}")
    try:
        await asyncio.wait((working, reading), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, reading):
            task.cancel()
        await asyncio.wait((working, reading))
    for task in (working, reading):
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, ConnectionError):
            raise error


async def _read(socket: web.WebSocketResponse, waiting: asyncio.Queue[str]) -> None:
    """Queues messages until the connection ends or asks to close."""
    async with aclosing(_texts(socket)) as texts:
        async for text in texts:
            if frames.is_close(text):
                return
            if waiting.full():
                await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=b"too many messages ahead")
                return
            waiting.put_nowait(text)


async def _texts(socket: web.WebSocketResponse) -> AsyncGenerator[str, None]:
    async for message in socket:
        if message.type is not WSMsgType.TEXT:
            await socket.close(code=WSCloseCode.UNSUPPORTED_DATA, message=b"text is expected")
            return
        yield message.data


async def _send(socket: web.WebSocketResponse, message: dict[str, Any]) -> None:
    if not socket.closed:
        await socket.send_str(orjson.dumps(message).decode())


async def _object(request: web.Request) -> dict[str, Any]:
    body = await request.read()
    try:
        given = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError:
        given = None
    if not isinstance(given, dict):
        raise InvalidArgument("the body is not a JSON object", reason="OPENENV_ARGUMENTS")
    return given


def _guard(token: str | None) -> Middleware:
    """Authenticates requests, and gives errors one format."""
    expected = None if token is None else hashlib.sha256(token.encode()).digest()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != _OPEN:
            if expected is not None and not hmac.compare_digest(_presented(request), expected):
                headers = {"www-authenticate": 'Bearer realm="penstock", Basic realm="penstock"'}
                return _refused(401, "OPENENV_UNAUTHENTICATED", "a token is needed", headers)
            if not _is_own(request, lenient=expected is not None):
                return _refused(403, "OPENENV_ORIGIN", "requests from pages of other origins are refused")
        try:
            return await handler(request)
        except InvalidArgument as error:
            return _refused(422, error.reason, str(error))
        except PenstockError as error:
            return _refused(503 if error.reason == "OPENENV_CAPACITY" else 502, error.reason, str(error))
        except web.HTTPException as error:
            return _refused(error.status, "OPENENV_HTTP", error.reason)
        except Exception:  # noqa: BLE001 - a caller never sees an exception of ours, and always gets an answer (R8)
            _log.exception("a fault of the server")
            return _refused(500, "INTERNAL", "an internal error of the server; its log has the details")

    return guard


def _presented(request: web.Request) -> bytes:
    """Returns the digest of a request's token: a bearer token, or the password of basic authentication."""
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "basic":
        try:
            value = base64.b64decode(value, validate=True).decode().partition(":")[2]
        except ValueError:  # no base64, or no text
            value = ""
    elif kind.lower() != "bearer":
        value = ""
    return hashlib.sha256(value.strip().encode(errors="surrogateescape")).digest()  # a header may be any bytes


def _is_own(request: web.Request, *, lenient: bool) -> bool:
    """Whether it is not from another origin's page, nor, without a token, for a name that resolves here by DNS."""
    host = _hostname(f"//{request.host}")
    if not lenient and host not in _LOOPBACK:
        return False
    origin = request.headers.get("origin")
    return origin is None or _hostname(origin) == host


def _hostname(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json", headers=headers)


def _refused(status: int, reason: str, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return _json({"detail": message, "reason": reason}, status, headers)
