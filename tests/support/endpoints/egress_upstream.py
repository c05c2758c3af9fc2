"""What the egress proxy asks in tests: a Python index, an npm registry, a git repository, and paths that misbehave.

It counts what it is asked, so that tests can prove what was asked once, or never.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import ssl
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trustme
from aiohttp import web
from tests.support.endpoints.package_index import integrity, npm_package, wheel

LOGIN = "reader:token-that-no-sandbox-sees"
TOKEN = "bearer-token-that-no-sandbox-sees"
_AUTHORIZATION = "Basic " + base64.b64encode(LOGIN.encode()).decode()
BIG_BYTES = 3 * 1024 * 1024


@dataclass
class Indexes:
    """A running server. ``url`` is that over TLS, ``asked`` counts requests by method and path."""

    url: str
    plain_url: str
    port: int
    plain_port: int
    ca: Path
    asked: Counter[str] = field(default_factory=Counter)
    headers: list[dict[str, str]] = field(default_factory=list)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    """Lets the answers of /held go."""
    holds: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once /held was asked."""


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Indexes]:
    """Serves on 127.0.0.1, whose name in certificates is localhost."""
    authority = trustme.CA()
    ca = folder / "upstream-ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost", "127.0.0.1").configure_cert(context)
    repository = await asyncio.to_thread(_repository, folder / "git")
    indexes = Indexes("", "", 0, 0, ca)
    handlers = _Handlers(indexes, repository)

    @web.middleware
    async def count(request: web.Request, handler: object) -> web.StreamResponse:
        indexes.asked[f"{request.method} {request.path}"] += 1
        indexes.headers.append(dict(request.headers))
        return await handler(request)  # type: ignore[operator,no-any-return]

    app = web.Application(middlewares=[count])
    app.add_routes(
        [
            web.get("/simple/{name}/", handlers.simple),
            web.get("/files/{name}", handlers.file),
            web.get("/npm/{name}", handlers.packument),
            web.get("/npm/{name}/-/{file}", handlers.tarball),
            web.route("*", "/git/{path:.*}", handlers.git),
            web.get("/private/{name}", handlers.private),
            web.get("/token", handlers.token),
            web.get("/count", handlers.counted),
            web.get("/failing", handlers.failing),
            web.get("/big", handlers.big),
            web.get("/held", handlers.held),
            web.get("/to", handlers.redirect),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        secure = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
        plain = web.TCPSite(runner, "127.0.0.1", 0)
        await secure.start()
        await plain.start()
        indexes.port, indexes.plain_port = (address[1] for address in runner.addresses)
        indexes.url = f"https://localhost:{indexes.port}"
        indexes.plain_url = f"http://localhost:{indexes.plain_port}"
        yield indexes
    finally:
        indexes.go_on.set()
        await runner.cleanup()


class _Handlers:
    def __init__(self, indexes: Indexes, repository: Path) -> None:
        self._indexes = indexes
        self._repository = repository
        self._wheel = wheel("snail", {"snail.py": "SLOW = True\n"}, {})
        manifest = {"name": "turtle", "version": "1.0.0", "main": "index.js"}
        self._tarball = npm_package(manifest, {"index.js": "module.exports = 'slow'\n"})

    async def simple(self, request: web.Request) -> web.Response:
        if request.match_info["name"] != "snail":
            raise web.HTTPNotFound
        digest = hashlib.sha256(self._wheel).hexdigest()
        link = f'<a href="/files/snail-1.0-py3-none-any.whl#sha256={digest}">snail-1.0-py3-none-any.whl</a>'
        return web.Response(text=f"<!DOCTYPE html><html><body>{link}</body></html>", content_type="text/html")

    async def file(self, _: web.Request) -> web.Response:
        return web.Response(body=self._wheel, content_type="application/octet-stream")

    async def packument(self, request: web.Request) -> web.Response:
        base = f"{request.scheme}://{request.host}/npm/turtle/-/turtle-1.0.0.tgz"
        dist = {"tarball": base, "integrity": integrity(self._tarball)}
        version = {"name": "turtle", "version": "1.0.0", "dist": dist}
        return web.json_response({"name": "turtle", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}})

    async def tarball(self, _: web.Request) -> web.Response:
        return web.Response(body=self._tarball, content_type="application/octet-stream")

    async def git(self, request: web.Request) -> web.Response:
        body = await request.read()
        environment = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(self._repository),
            "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": "/" + request.match_info["path"],
            "QUERY_STRING": request.query_string,
            "REQUEST_METHOD": request.method,
            "CONTENT_TYPE": request.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": request.headers.get("Content-Encoding", ""),
            "HTTP_GIT_PROTOCOL": request.headers.get("Git-Protocol", ""),
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "safe.directory",
            "GIT_CONFIG_VALUE_0": "*",
        }
        process = await asyncio.create_subprocess_exec(
            *("git", "http-backend"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        answer, _ = await process.communicate(body)
        head, _, content = answer.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        status = int(headers.pop("Status", "200").split()[0])
        return web.Response(body=content, status=status, headers=headers)

    async def private(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != _AUTHORIZATION:
            return web.Response(status=401, headers={"WWW-Authenticate": "Basic"})
        return web.Response(text="for readers", headers={"Set-Cookie": "session=secret"})

    async def token(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.Response(status=401)
        return web.Response(text="for its bearer")

    async def counted(self, request: web.Request) -> web.Response:
        return web.Response(text=str(self._indexes.asked["GET /count"]))

    async def failing(self, _: web.Request) -> web.Response:
        return web.Response(status=503, text="try again")

    async def big(self, _: web.Request) -> web.StreamResponse:
        return web.Response(body=b"x" * BIG_BYTES)

    async def held(self, _: web.Request) -> web.Response:
        self._indexes.holds.set()
        await self._indexes.go_on.wait()
        return web.Response(text="held")

    async def redirect(self, request: web.Request) -> web.Response:
        raise web.HTTPFound(request.query["url"])


def _repository(folder: Path) -> Path:
    """Makes a bare repository with one commit; returns its parent."""
    work = folder / "work"
    work.mkdir(parents=True)
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    (work / "README").write_text("fetched\n")
    for arguments in (
        ("init", "-q", "-b", "main"),
        ("add", "README"),
        (*identity, "commit", "-q", "-m", "one"),
        ("clone", "-q", "--bare", ".", "../repo.git"),
    ):
        subprocess.run(("git", *arguments), cwd=work, env=environment, check=True)
    return folder
