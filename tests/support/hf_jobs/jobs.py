"""The Jobs API and the proxy to a job's ports, as a process of its own: `python -m tests.support.hf_jobs.jobs FOLDER`.

It prints one line of JSON when it serves (`endpoint`, `proxy`, `ca`), and ends, with every job, when its input ends.

Faults are asked for over HTTP, by tests only (POST /stand-in/...):
- `fail` {"where": "jobs"|"port", "count": n, "path": part}: the next n requests there (whose path holds `path`) get a
  500;
- `cut` {"job": id}: every open stream to the job's ports breaks;
- `vanish` {"job": id}: the job's machine is gone, and the API says so;
- `end` {"job": id, "stage": stage, "message": text}: the job ends like that;
- `hold` {"on": bool}: jobs that are created start only once it is off again.
GET /stand-in/jobs tells of every job: id, stage, labels, names in its environment and secrets, timeout, namespace."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import shutil
import ssl
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import trustme
from aiohttp import web
from tests.support.hf_jobs import machine

TOKEN = "hf_stand-in-token"
NAMESPACE = "penstock-test"
IMAGES = ("python:3.12", "python:3.12-slim")
FLAVORS = ("cpu-basic", "cpu-upgrade")
TERMINAL = ("COMPLETED", "CANCELED", "ERROR", "DELETED")
_HUB_PORT = 49983
_HOP = ("connection", "keep-alive", "transfer-encoding", "content-length", "host", "authorization")


@dataclass
class Job:
    """One job."""

    id: str
    namespace: str
    asked: dict[str, Any]
    folder: Path
    stage: str = "SCHEDULING"
    message: str | None = None
    machine: machine.Machine | None = None
    created_at: float = field(default_factory=time.time)
    life: asyncio.Task[None] | None = None
    streams: set[asyncio.Task[Any]] = field(default_factory=set)


class StandIn:
    """All jobs, and what goes wrong on purpose."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: dict[str, Job] = {}
        self.endpoint = ""
        self.fail: dict[str, tuple[int, str]] = {}
        self.may_start = asyncio.Event()
        self.may_start.set()

    # The Jobs API ------------------------------------------------------------------------------------------------

    async def whoami(self, request: web.Request) -> web.Response:
        return web.json_response({"type": "user", "id": "u1", "name": NAMESPACE, "auth": {"type": "access_token"}})

    async def run(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if asked.get("dockerImage") not in IMAGES:
            return web.json_response({"error": "no such image"}, status=400)
        if asked.get("flavor") not in FLAVORS:
            return web.json_response({"error": "no such flavor"}, status=400)
        job = Job(secrets.token_hex(12), request.match_info["namespace"], asked, self.folder / secrets.token_hex(6))
        self.jobs[job.id] = job
        job.life = asyncio.create_task(self._live(job))
        return web.json_response(self._info(job))

    async def listed(self, request: web.Request) -> web.Response:
        wanted = [tuple(label.split("=", 1)) for label in request.query.getall("label", [])]
        stages = request.query.getall("stage", [])
        found = [
            self._info(job)
            for job in self.jobs.values()
            if job.namespace == request.match_info["namespace"]
            and all(job.asked.get("labels", {}).get(key) == value for key, value in wanted)
            and (not stages or job.stage in stages)
        ]
        return web.json_response(found)

    async def inspected(self, request: web.Request) -> web.Response:
        job = self._find(request)
        return web.json_response(self._info(job))

    async def cancelled(self, request: web.Request) -> web.Response:
        job = self._find(request)
        if job.stage not in TERMINAL:
            await self._end(job, "CANCELED")
        return web.json_response(self._info(job))

    async def logs(self, request: web.Request) -> web.StreamResponse:
        self._find(request)
        return web.Response(body=b"", content_type="text/event-stream")

    def _find(self, request: web.Request) -> Job:
        job = self.jobs.get(request.match_info["job"])
        if job is None or job.namespace != request.match_info["namespace"]:
            raise web.HTTPNotFound(text=json.dumps({"error": "Job not found"}), content_type="application/json")
        return job

    def _info(self, job: Job) -> dict[str, Any]:
        ports = job.asked.get("expose", {}).get("ports", [])
        return {
            "id": job.id,
            "createdAt": time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(job.created_at)),
            "dockerImage": job.asked.get("dockerImage"),
            "command": job.asked.get("command"),
            "arguments": [],
            "environment": job.asked.get("environment"),
            "flavor": job.asked.get("flavor"),
            "labels": job.asked.get("labels"),
            "status": {
                "stage": job.stage,
                "message": job.message,
                "exposeUrls": [f"{self.endpoint}/port/{job.id}--{port}.hf.jobs" for port in ports],
            },
            "owner": {"id": "u1", "name": job.namespace, "type": "user"},
            "initiator": {"type": "user", "id": "u1", "name": NAMESPACE},
        }

    async def _live(self, job: Job) -> None:
        await self.may_start.wait()
        environment = {**job.asked.get("environment", {}), **job.asked.get("secrets", {})}
        ports = job.asked.get("expose", {}).get("ports", [])
        if ports == [_HUB_PORT]:
            job.machine = await machine.boot(job.folder, "sandbox_server.py", ["--ping", "2"], environment)
        else:
            arguments = ["--port", str(ports[0]), "--", *job.asked["command"]]
            job.machine = await machine.boot(job.folder, "relay.py", arguments, {**environment, **_PACKAGES})
        job.stage = "RUNNING"
        timeout_s = job.asked.get("timeoutSeconds", 1800)
        try:
            async with asyncio.timeout(timeout_s):
                code = await job.machine.process.wait()
            await self._end(job, "COMPLETED" if code == 0 else "ERROR", f"exit code {code}")
        except TimeoutError:
            await self._end(job, "ERROR", "Job timeout")

    async def _end(self, job: Job, stage: str, message: str | None = None) -> None:
        if job.stage in TERMINAL:
            return
        job.stage, job.message = stage, message
        if job.life is not None and job.life is not asyncio.current_task():
            job.life.cancel()
            await asyncio.gather(job.life, return_exceptions=True)
        if job.machine is not None:
            await job.machine.kill()
        self._cut(job)
        await asyncio.to_thread(shutil.rmtree, job.folder, ignore_errors=True)

    # The proxy to a job's ports ----------------------------------------------------------------------------------

    async def port(self, request: web.Request) -> web.StreamResponse:
        """`/port/{job}--{port}.hf.jobs/...`, and the same by name over TLS."""
        host = request.match_info.get("host") or request.host.partition(":")[0]
        path = "/" + request.match_info.get("path", request.path.lstrip("/"))
        name, _, port = host.removesuffix(".hf.jobs").rpartition("--")
        job = self.jobs.get(name)
        if job is None or job.stage != "RUNNING" or job.machine is None:
            raise web.HTTPBadGateway(text="no such job or port")
        if int(port) not in job.asked.get("expose", {}).get("ports", []):
            raise web.HTTPNotFound(text="this port is not exposed")
        task = asyncio.current_task()
        assert task is not None
        job.streams.add(task)
        try:
            return await self._pass_on(request, job.machine, path)
        finally:
            job.streams.discard(task)

    async def _pass_on(self, request: web.Request, to: machine.Machine, path: str) -> web.StreamResponse:
        body = await request.read()
        headers = {key: value for key, value in request.headers.items() if key.lower() not in _HOP}
        connector = aiohttp.UnixConnector(str(to.socket))
        try:
            async with (
                aiohttp.ClientSession(
                    connector=connector, timeout=aiohttp.ClientTimeout(None), auto_decompress=False
                ) as session,
                session.request(
                    request.method, f"http://job{path}", params=request.query, data=body, headers=headers
                ) as answer,
            ):
                response = web.StreamResponse(status=answer.status)
                if kind := answer.headers.get("Content-Type"):
                    response.headers["Content-Type"] = kind
                if length := answer.headers.get("Content-Length"):
                    response.headers["Content-Length"] = length
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        except (aiohttp.ClientConnectorError, FileNotFoundError):
            raise web.HTTPBadGateway(text="nothing listens there yet") from None
        except aiohttp.ClientError:
            # The job ended in the middle of its answer: so does the proxy's.
            if request.transport is not None:
                request.transport.abort()
            raise asyncio.CancelledError from None

    def _cut(self, job: Job) -> None:
        for stream in list(job.streams):
            stream.cancel()

    # What tests ask for ------------------------------------------------------------------------------------------

    async def fault(self, request: web.Request) -> web.Response:
        asked = await request.json()
        match request.match_info["what"]:
            case "fail":
                self.fail[asked["where"]] = (asked["count"], asked.get("path", ""))
            case "cut":
                self._cut(self.jobs[asked["job"]])
            case "vanish":
                await self._end(self.jobs[asked["job"]], "DELETED")
            case "end":
                await self._end(self.jobs[asked["job"]], asked["stage"], asked["message"])
            case "hold":
                (self.may_start.clear if asked["on"] else self.may_start.set)()
            case _:
                raise web.HTTPNotFound
        return web.json_response({})

    async def told(self, request: web.Request) -> web.Response:
        return web.json_response(
            [
                {
                    "id": job.id,
                    "namespace": job.namespace,
                    "image": job.asked["dockerImage"],
                    "stage": job.stage,
                    "labels": job.asked.get("labels", {}),
                    "environment": sorted(job.asked.get("environment", {})),
                    "secrets": sorted(job.asked.get("secrets", {})),
                    "timeout_s": job.asked.get("timeoutSeconds"),
                    "command": job.asked.get("command"),
                    "streams": len(job.streams),
                }
                for job in self.jobs.values()
            ]
        )

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Refuses a wrong token, and fails what a test wants failed."""
        where = "jobs" if request.path.startswith("/api/") else "port"
        if not request.path.startswith("/stand-in/"):
            if request.headers.get("Authorization") != f"Bearer {TOKEN}":
                return web.json_response({"error": "Invalid credentials in Authorization header"}, status=401)
            count, part = self.fail.get(where, (0, ""))
            if count and part in request.path:
                self.fail[where] = (count - 1, part)
                return web.Response(status=500, text="<html>internal error</html>")
        answer: web.StreamResponse = await handler(request)
        return answer

    async def aclose(self) -> None:
        """End every job."""
        self.may_start.set()
        await asyncio.gather(*(self._end(job, "CANCELED") for job in self.jobs.values()))


# What the bootstrap of `hf-sandbox` installs is there already: its `pip` does nothing.
_PACKAGES = {
    "PYTHONPATH": ":".join(path for path in sys.path if path.endswith("site-packages")),
    "PATH": f"/opt/stand-in/bin:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
}


@contextlib.asynccontextmanager
async def serving(stand_in: StandIn) -> AsyncIterator[dict[str, str]]:
    """Serve on loopback: plain HTTP, TLS for `*.hf.jobs`, and a proxy that leads there."""
    app = web.Application(middlewares=[stand_in.guard], client_max_size=64 * 1024 * 1024)
    app.router.add_get("/api/whoami-v2", stand_in.whoami)
    app.router.add_post("/api/jobs/{namespace}", stand_in.run)
    app.router.add_get("/api/jobs/{namespace}", stand_in.listed)
    app.router.add_get("/api/jobs/{namespace}/{job}", stand_in.inspected)
    app.router.add_post("/api/jobs/{namespace}/{job}/cancel", stand_in.cancelled)
    app.router.add_get("/api/jobs/{namespace}/{job}/logs", stand_in.logs)
    app.router.add_route("*", "/port/{host}/{path:.*}", stand_in.port)
    app.router.add_post("/stand-in/{what}", stand_in.fault)
    app.router.add_get("/stand-in/jobs", stand_in.told)
    ports = web.Application(middlewares=[stand_in.guard], client_max_size=64 * 1024 * 1024)
    ports.router.add_route("*", "/{path:.*}", stand_in.port)
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("*.hf.jobs").configure_cert(context)
    certificate = stand_in.folder / "ca.pem"
    authority.cert_pem.write_to_path(str(certificate))
    async with contextlib.AsyncExitStack() as stack:
        plain = await _site(stack, app, None)
        tls = await _site(stack, ports, context)

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await _connect(reader, writer, tls)

        proxy = await asyncio.start_server(connect, "127.0.0.1", 0)
        stack.push_async_callback(_stop, proxy)
        stand_in.endpoint = f"http://127.0.0.1:{plain}"
        stack.push_async_callback(stand_in.aclose)
        yield {
            "endpoint": stand_in.endpoint,
            "proxy": f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}",
            "ca": str(certificate),
        }


async def _site(stack: contextlib.AsyncExitStack, app: web.Application, context: ssl.SSLContext | None) -> int:
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context, backlog=512)
    await site.start()
    port: int = runner.addresses[0][1]
    return port


async def _stop(server: asyncio.Server) -> None:
    server.close()


async def _connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tls: int) -> None:
    """CONNECT to anything under hf.jobs; everything else is refused."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        method, target, _ = head.split(b"\r\n", 1)[0].split(b" ")
        if method != b"CONNECT" or not target.endswith(b".hf.jobs:443"):
            writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
            return
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", tls)
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        async with asyncio.TaskGroup() as group:
            group.create_task(_pump(reader, inner_writer))
            group.create_task(_pump(inner_reader, writer))
    except* (OSError, ValueError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def _main(folder: Path) -> None:
    loop = asyncio.get_running_loop()
    async with serving(StandIn(folder)) as addresses:
        print(json.dumps(addresses), flush=True)
        # Whoever started it holds its input open: when that process ends, however it ends, so does everything here.
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        await reader.read()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1])))
