"""Surroundings of some attacks: an endpoint that echoes requests, and a host tool with a difficult schema."""

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator
from typing import Any, Final

from penstock.client.connection import Penstock
from penstock.client.intercept.host_tools import HostTool, HostToolCall
from penstock.client.rollouts.client import RolloutOptions
from penstock.client.tasks.spec import Budgets, Mode, Upstream
from penstock.redteam.attack import Attack

_KEY: Final = "sk-redteam-no-secret"
_MAX_BODY: Final = 1 << 20
_STATUSES: Final = {b"no-such-tier": "400 Bad Request", b"no-such-schema": "500 Internal Server Error"}
"""Markers of requests to fail: as providers refuse an unknown value of a field, and as a server fails inside."""
_HELD: Final = b"no-end"
"""Marker of a request that is not answered, as one that a model answers without end."""
_ANY: Final = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in ("Term", "Not", "All", "Any")]}
_MEMBER: Final = {"type": "array", "items": _ANY}
_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "filter": _ANY,
        "names": {"type": "array", "uniqueItems": True, "items": {"type": "object"}},
        "pattern": {"type": "string", "pattern": "^(a+)+$"},
    },
    "additionalProperties": False,
    "$defs": {
        "Term": {"type": "object", "properties": {"term": {"type": "string"}}, "required": ["term"]},
        "Not": {"type": "object", "properties": {"not": _ANY}, "required": ["not"]},
        "All": {"type": "object", "properties": {"all": _MEMBER, "not": _ANY}, "required": ["all"]},
        "Any": {"type": "object", "properties": {"any": _MEMBER, "not": _ANY}, "required": ["any"]},
    },
}


@contextlib.asynccontextmanager
async def of(ps: Penstock, attack: Attack) -> AsyncIterator[RolloutOptions]:
    """Yields the rollout options for an attack's surroundings, which exist while open.

    Raises InvalidArgument if the operator's settings forbid the host tool, and the errors of sessions.
    """
    options: RolloutOptions = {}
    async with contextlib.AsyncExitStack() as stack:
        if attack.model != "source":
            options["source"] = await stack.enter_async_context(echo())
            options["mode"] = Mode.BLACK_BOX if attack.model == "black_box" else Mode.TRANSPARENT_PROXY
        if attack.call_timeout is not None:
            options["budgets"] = Budgets(max_calls=50, call_timeout=attack.call_timeout)
        if attack.host_tool:
            options["labels"] = {"redteam": secrets.token_hex(8)}
            session = await stack.enter_async_context(ps.intercept(labels=options["labels"]))
            tool = HostTool(name="redteam_filter", function=_done, description="Filters.", parameters=_SCHEMA)
            await session.offer_tools([tool])
        yield options


def _done(_: HostToolCall[Any]) -> str:
    return "filtered"


@contextlib.asynccontextmanager
async def echo() -> AsyncIterator[Upstream]:
    """A model endpoint on this machine's loopback whose answers are the requests: path, names of headers, body.

    A request with a marker is failed, or held until the connection ends.
    """
    server = await asyncio.start_server(_answer, "127.0.0.1", 0, limit=_MAX_BODY)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield Upstream(base_url=f"http://127.0.0.1:{port}/v1", api_key=_KEY, model="m")


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, ValueError, EOFError, asyncio.LimitOverrunError):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.rstrip().split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(min(_MAX_BODY, int(headers.get("content-length", "0"))))
        seen = {"path": first.split(" ")[1], "headers": sorted(headers), "body": body.decode("utf-8", "replace")}
        message = {"role": "assistant", "content": json.dumps(seen)}
        whole = {
            "id": "echo",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        answer = json.dumps(whole).encode()
        status = next((status for marker, status in _STATUSES.items() if marker in body), "200 OK")
        if _HELD in body:
            await reader.read()
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(answer)}\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + answer)
        await writer.drain()
    writer.close()
