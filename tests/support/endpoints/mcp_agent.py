"""An agent's MCP client: the official Python SDK over streamable HTTP, and plain requests beside it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from mcp import Client

HEADERS = {"accept": "application/json, text/event-stream", "content-type": "application/json"}


@asynccontextmanager
async def connected(url: str, token: str, **options: Any) -> AsyncIterator[Client]:
    """The SDK's client, past its handshake. It is imported here: half a second for each process that collects tests."""
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    async with create_mcp_http_client(headers={"authorization": f"Bearer {token}"}) as http:
        transport: Any = streamable_http_client(url, http_client=http)
        async with Client(transport, **options) as client:
            yield client


async def post(
    url: str, token: str | None, message: object, *, headers: Mapping[str, str] | None = None
) -> tuple[int, Any, Mapping[str, str]]:
    """One request; its status, its body (JSON, or the last event's), its headers."""
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    given = {**HEADERS, **({"authorization": f"Bearer {token}"} if token is not None else {}), **(headers or {})}
    async with aiohttp.ClientSession() as http, http.post(url, data=body, headers=given) as answer:
        content = await answer.read()
        if answer.content_type == "text/event-stream":
            content = [line[6:] for line in content.splitlines() if line.startswith(b"data: ")][-1]
        return answer.status, json.loads(content) if content else None, answer.headers


def tool_call(name: str, arguments: Any, number: int | str = 1, **more: Any) -> dict[str, Any]:
    """The request that calls a tool."""
    params = {"name": name, "arguments": arguments, **more}
    return {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}
