"""Servers of tests on the loopback, and ports for them."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
from aiohttp import web

_PORTS_EACH = 1400
_handed_out: set[int] = set()


def unused_port() -> int:
    """A port of the loopback where nobody listens yet, and that nobody else gets until the tests are over.

    None that the kernel gives to those who ask for any, and each of the processes that share the tests has its own. So
    a service that is started again on its port finds it free, which a port that the kernel chose need not be by then.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 16
    while True:
        port = 10_000 + _PORTS_EACH * worker + secrets.randbelow(_PORTS_EACH)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _handed_out:
                _handed_out.add(port)
                return port


@asynccontextmanager
async def serving(app: web.Application, port: int = 0, cancels: bool = False) -> AsyncIterator[str]:
    """Serves `app` at a port of the loopback, 0 for one that the kernel chooses. Yields `http://127.0.0.1:PORT`.

    With `cancels` a handler is cancelled when its client leaves.
    """
    runner = web.AppRunner(app, handler_cancellation=cancels, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def event_stream(request: web.Request, content_type: str = "text/event-stream") -> web.StreamResponse:
    """The head of a stream of events."""
    response = web.StreamResponse(headers={"content-type": content_type})
    await response.prepare(request)
    return response


async def send_event(response: web.StreamResponse, event: dict[str, object]) -> None:
    """One event. JSON has no infinities: orjson writes null for them, as servers do that use it."""
    await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
