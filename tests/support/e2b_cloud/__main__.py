"""Runs the stand-in until its standard input ends: `python -m tests.support.e2b_cloud`, key in STAND_IN_API_KEY.

The first line on standard output is JSON with its address. Beside E2B's own routes there is /control, for tests:
- GET /control/requests: every request so far, those to the control plane with their bodies.
- POST /control/faults: a list of faults; each has `match` ("POST /v2/sandboxes" or a prefix of it), `times`, and either
  `drop` (the connection is cut) or `status`, `body` and `headers`; `after` lets the request take effect first.
- POST /control/vanish/{id}: that sandbox ends without a word. POST /control/drop: every open stream is cut.
- PUT /control/behaviour: `refuse_network`, `ignore_network`, `refuse_pause`, `refuse_snapshots`, `refuse_metrics`,
  `most`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from tests.support.e2b_cloud.cloud import Cloud, Problem
from tests.support.e2b_cloud.envd import Envd

_BODY_BYTES = 1024 * 1024 * 1024
_RECORDED = ("idempotency-key", "user-agent")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class StandIn:
    """The application: control plane, envd, and what tests do to them."""

    def __init__(self, state: Path, api_key: str) -> None:
        self.cloud = Cloud(state, api_key)
        self._envd = Envd(self.cloud)
        self._requests: list[dict[str, Any]] = []
        self._faults: list[dict[str, Any]] = []

    def app(self) -> web.Application:
        """The application."""
        app = web.Application(client_max_size=_BODY_BYTES, middlewares=[self._around])
        app.add_routes(self.cloud.routes())
        app.add_routes(self._envd.routes())
        app.add_routes(
            [
                web.get("/control/requests", self._told),
                web.get("/control/sandboxes", self._all),
                web.post("/control/faults", self._break),
                web.post("/control/vanish/{id}", self._vanish),
                web.post("/control/drop", self._drop),
                web.put("/control/behaviour", self._behave),
            ]
        )
        return app

    @web.middleware
    async def _around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith("/control/"):
            return await handler(request)
        fault = self._fault(f"{request.method} {request.path}")
        if fault is not None and not fault.get("after"):
            return _broken(request, fault)
        is_data = request.path.startswith(("/process.", "/filesystem.")) or request.path in ("/health", "/files")
        try:
            if not is_data and not self.cloud.authorised(request):
                raise Problem(401, "invalid API key")
            await self._record(request, with_body=not is_data)
            response = await handler(request)
        except Problem as problem:
            response = web.json_response({"code": problem.status, "message": str(problem)}, status=problem.status)
        return _broken(request, fault) if fault is not None else response

    async def _record(self, request: web.Request, *, with_body: bool) -> None:
        body = await request.read() if with_body else b""
        told = {"method": request.method, "path": request.path, "query": dict(request.query)}
        headers = {name: request.headers[name] for name in _RECORDED if name in request.headers}
        self._requests.append({**told, "body": json.loads(body) if body else None, "headers": headers})

    def _fault(self, what: str) -> dict[str, Any] | None:
        for fault in self._faults:
            if what.startswith(fault["match"]) and fault["times"] > 0:
                fault["times"] -= 1
                return fault
        return None

    async def _told(self, _request: web.Request) -> web.Response:
        return web.json_response(self._requests)

    async def _all(self, _request: web.Request) -> web.Response:
        return web.json_response(
            {
                "sandboxes": [one.detail() for one in self.cloud.sandboxes.values()],
                "snapshots": [{"id": one.id, "names": one.names} for one in self.cloud.snapshots.values()],
            }
        )

    async def _break(self, request: web.Request) -> web.Response:
        self._faults = await request.json()
        return web.json_response({})

    async def _vanish(self, request: web.Request) -> web.Response:
        sandbox = self.cloud.sandboxes.get(request.match_info["id"])
        if sandbox is None:
            raise web.HTTPNotFound
        await self.cloud.kill(sandbox)
        return web.json_response({})

    async def _drop(self, _request: web.Request) -> web.Response:
        dropped = sum(one.drop_streams() for one in self.cloud.sandboxes.values())
        return web.json_response({"dropped": dropped})

    async def _behave(self, request: web.Request) -> web.Response:
        for name, value in (await request.json()).items():
            setattr(self.cloud, name, value)
        return web.json_response({})


def _broken(request: web.Request, fault: dict[str, Any]) -> web.Response:
    if fault.get("drop"):
        assert request.transport is not None
        request.transport.abort()
    headers = {"Content-Type": "text/html", **fault.get("headers", {})}
    return web.Response(status=fault.get("status", 500), text=fault.get("body", ""), headers=headers)


async def serve(state: Path, api_key: str) -> None:
    """Serve until standard input ends."""
    stand_in = StandIn(state, api_key)
    runner = web.AppRunner(stand_in.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        print(json.dumps({"address": f"http://{host}:{port}"}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await stand_in.cloud.aclose()
        await runner.cleanup()


def main() -> None:
    """Entry point."""
    if sys.version_info < (3, 12):
        # A thread for each child's end, the default before 3.12, and forking do not go together.
        asyncio.set_child_watcher(asyncio.PidfdChildWatcher())
    with tempfile.TemporaryDirectory(prefix="penstock-e2b-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)
        asyncio.run(serve(Path(folder), os.environ["STAND_IN_API_KEY"]))


if __name__ == "__main__":
    main()
