"""The HTTP listener from which Prometheus reads a service's metrics: `GET /metrics`, nothing else.

Off unless `metrics_port` is set. Listens on loopback unless `metrics_host` is set, uses TLS where the service does, and
requires one of the service's tokens, of any role (docs/interfaces.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from penstock_chassis.auth import HEADER, Authenticator
from penstock_chassis.errors import FailedPrecondition, PenstockError
from penstock_chassis.telemetry import metrics
from penstock_chassis.tls import ServerTls

if TYPE_CHECKING:
    from aiohttp import web


@asynccontextmanager
async def exposition(
    host: str, port: int, authenticator: Authenticator, tls: ServerTls | None = None
) -> AsyncIterator[str]:
    """Serves the metrics of this process; yields the address as `host:port`.

    Raises FailedPrecondition `PORT_IN_USE`, InvalidArgument `TLS_FILE`.
    """
    context = None if tls is None else tls.context()
    from aiohttp import web  # loaded only when needed: it costs memory and time

    async def metrics_page(request: web.Request) -> web.Response:
        try:
            authenticator.authenticate([(HEADER, request.headers.get(HEADER, ""))] if HEADER in request.headers else [])
        except PenstockError as error:
            return web.Response(status=401, text=f"{error.message}\n", headers={"WWW-Authenticate": "Bearer"})
        # On the loop, whose state the gauges report: a few milliseconds, once per scrape.
        body, content_type = metrics.exposed(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    app = web.Application(client_max_size=0)
    app.router.add_get("/metrics", metrics_page)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    listener: asyncio.Server | None = None
    try:
        assert runner.server is not None
        try:
            listener = await asyncio.get_running_loop().create_server(runner.server, host, port, ssl=context)
        except OSError as error:
            raise FailedPrecondition(
                f"Metrics cannot be served on {host}:{port}: {error.strerror}. Stop the process that uses it, or "
                "set another metrics_port (0 = any free one).",
                reason="PORT_IN_USE",
            ) from error
        host, port = listener.sockets[0].getsockname()[:2]
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    finally:
        if listener is not None:
            listener.close()
        await runner.cleanup()
