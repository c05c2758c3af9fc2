"""Copies of this machine's directories in volumes of a daemon that does not see its files."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from penstock_sandbox.backends.docker.cleanup.reaper import Owner, Reaper
from penstock_sandbox.backends.docker.engine.daemon import Daemon
from penstock_sandbox.backends.docker.engine.errors import Refused
from penstock_sandbox.backends.docker.mounts import Mounts


class Elsewhere:
    """A daemon's volumes and containers at the wire; it refuses to fill a volume while `fails`."""

    def __init__(self) -> None:
        self.volumes: set[str] = set()
        self.containers: set[str] = set()
        self.fills = 0
        self.fails = False

    async def handle(self, request: web.Request) -> web.Response:
        _, _, *path = request.path.split("/")  # without the version
        match request.method, path:
            case "POST", ["volumes", "create"]:
                name = (await request.json())["Name"]
                self.volumes.add(name)
                return web.json_response({"Name": name}, status=201)
            case "POST", ["containers", "create"]:
                made = f"c{self.fills}"
                self.containers.add(made)
                return web.json_response({"Id": made}, status=201)
            case "PUT", ["containers", str(), "archive"]:
                await request.read()
                self.fills += 1
                return web.json_response({"message": "full"}, status=500) if self.fails else web.Response()
            case "DELETE", ["containers", name]:
                self.containers.discard(name)
                return web.Response(status=204)
            case "DELETE", ["volumes", name]:
                self.volumes.discard(name)
                return web.Response(status=204)
        return web.json_response({"message": f"{request.method} {request.path}"}, status=404)


@pytest.mark.requirement("R50")
async def test_a_copy_is_filled_once_for_all_callers_and_again_after_a_failure(tmp_path: Path) -> None:
    far = Elsewhere()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", far.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, tmp_path / "docker.sock").start()
    daemon = await Daemon.connect(f"unix://{tmp_path / 'docker.sock'}")
    owner = Owner("instance", "run")
    reaper = Reaper(daemon, owner)
    mounts = Mounts(daemon, owner, reaper)

    def archives() -> Iterator[Iterator[bytes]]:
        yield iter([b"tar"])

    try:
        far.fails = True
        with pytest.raises(Refused):
            await mounts.made("key", "/opt/x", "image", archives)
        far.fails = False
        first, second = await asyncio.gather(*(mounts.made("key", "/opt/x", "image", archives) for _ in range(2)))
        assert first == second == await mounts.made("key", "/opt/x", "image", archives)
        assert (first["source"], far.volumes, far.containers, far.fills) == (
            "penstock-run-key",
            {"penstock-run-key"},
            set(),
            2,
        )
        await mounts.aclose()
        assert not far.volumes
    finally:
        await reaper.aclose()
        await daemon.aclose()
        await runner.cleanup()
