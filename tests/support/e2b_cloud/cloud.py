"""The stand-in's control plane: sandboxes and snapshots of one team, by E2B's REST routes.

Invariants: every route needs the team's key; an idempotency key makes one sandbox; a sandbox ends at its timeout; a
snapshot outlives its sandbox.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import web
from tests.support.e2b_cloud.envd import Command
from tests.support.e2b_cloud.machine import Bubblewrap, Machine, copy_disk, make_disk

ENVD_VERSION = "0.6.13"
_MAX_TIMEOUT_S = 86_400
_MAX_FORKS = 100
_PAGE = 100
_TEMPLATE = "base"


class Problem(Exception):
    """An error as E2B's API answers it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class Sandbox:
    """A sandbox of the stand-in."""

    id: str
    template: str
    machine: Machine
    wanted: Mapping[str, Any]
    ends_at: float
    access_token: str = field(default_factory=lambda: secrets.token_hex(16))
    traffic_token: str = field(default_factory=lambda: secrets.token_hex(16))
    started_at: float = field(default_factory=time.time)
    paused: bool = False
    still: bool = False
    """Whether a snapshot is being taken, and nothing of it answers."""
    network: dict[str, Any] = field(default_factory=dict)
    internet: bool | None = None
    commands: dict[int, Command] = field(default_factory=dict)
    streams: set[asyncio.Transport] = field(default_factory=set)
    ending: asyncio.Task[None] | None = None
    metrics: list[dict[str, Any]] = field(default_factory=list)

    def drop_streams(self) -> int:
        """Cut every open stream; answers how many."""
        cut = len(self.streams)
        for transport in list(self.streams):
            transport.abort()
        return cut

    def created(self) -> dict[str, Any]:
        """As it is answered to whoever made it."""
        answer = {"templateID": self.template, "sandboxID": self.id, "clientID": "stand-in", "domain": None}
        answer |= {"envdVersion": ENVD_VERSION, "envdAccessToken": self.access_token}
        if self.network.get("allowPublicTraffic") is False:
            answer["trafficAccessToken"] = self.traffic_token
        return answer

    def detail(self) -> dict[str, Any]:
        """As it is listed and shown."""
        answer: dict[str, Any] = {"templateID": self.template, "sandboxID": self.id, "clientID": "stand-in"}
        answer |= {"startedAt": _time(self.started_at), "endAt": _time(self.ends_at), "envdVersion": ENVD_VERSION}
        answer |= {"cpuCount": 2, "memoryMB": 512, "diskSizeMB": 1024, "state": "paused" if self.paused else "running"}
        answer |= {"metadata": self.wanted.get("metadata", {}), "network": self.network}
        if self.internet is not None:
            answer["allowInternetAccess"] = self.internet
        return answer


@dataclass(eq=False)
class Snapshot:
    """A snapshot: a template that holds the files of a sandbox."""

    id: str
    names: list[str]
    source: str
    disk: Path


class Cloud:
    """One team's sandboxes and snapshots.

    ``refuse_network`` plays a deployment that has no network rules, ``refuse_pause``, ``refuse_snapshots`` and
    ``refuse_metrics`` one that has no such routes.
    """

    def __init__(self, state: Path, api_key: str) -> None:
        self._state = state
        self._key = api_key
        self._bwrap = Bubblewrap(state)
        self.sandboxes: dict[str, Sandbox] = {}
        self.snapshots: dict[str, Snapshot] = {}
        self._by_key: dict[str, asyncio.Task[Sandbox]] = {}
        self.refuse_network = False
        self.ignore_network = False
        self.refuse_pause = False
        self.refuse_snapshots = False
        self.refuse_metrics = False
        self.most = 10_000

    def running(self, sandbox_id: str) -> Sandbox | None:
        """A running sandbox."""
        sandbox = self.sandboxes.get(sandbox_id)
        if sandbox is None or sandbox.paused or sandbox.still or not sandbox.machine.alive:
            return None
        return sandbox

    def routes(self) -> list[web.RouteDef]:
        """Everything that it answers."""
        one = "/sandboxes/{id}"
        return [
            web.post("/v2/sandboxes", self._create),
            web.get("/v2/sandboxes", self._list),
            web.get(one, self._get),
            web.delete(one, self._delete),
            web.post(one + "/timeout", self._timeout),
            web.post("/v2" + one + "/connect", self._connect),
            web.post(one + "/pause", self._pause),
            web.get(one + "/metrics", self._metrics),
            web.post(one + "/fork", self._fork),
            web.post(one + "/snapshots", self._snapshot),
            web.put(one + "/network", self._network),
            web.get("/snapshots", self._list_snapshots),
            web.delete("/templates/{id}", self._delete_template),
        ]

    def authorised(self, request: web.Request) -> bool:
        """Whether a request carries the team's key."""
        return request.headers.get("X-API-KEY") == self._key

    def _find(self, request: web.Request) -> Sandbox:
        sandbox = self.sandboxes.get(request.match_info["id"])
        if sandbox is None:
            raise Problem(404, f"sandbox {request.match_info['id']} not found")
        return sandbox

    # Sandboxes ---------------------------------------------------------------------------------------------------

    async def _create(self, request: web.Request) -> web.Response:
        wanted = await request.json()
        key = request.headers.get("Idempotency-Key") or secrets.token_hex(16)
        if key not in self._by_key:
            self._by_key[key] = asyncio.create_task(self._make(wanted))
        making = self._by_key[key]
        try:
            # Whoever asked may go away: what they asked for is made all the same, as a distant service would.
            sandbox = await asyncio.shield(making)
        except Problem:
            self._by_key.pop(key, None)
            raise
        return web.json_response(sandbox.created(), status=201)

    async def _make(self, wanted: Mapping[str, Any]) -> Sandbox:
        template = wanted["templateID"]
        snapshot = self.snapshots.get(template)
        if snapshot is None and template != _TEMPLATE:
            raise Problem(404, f"template '{template}' not found")
        timeout = _checked(wanted.get("timeout", 15))
        network = dict(wanted.get("network") or {})
        internet = wanted.get("allow_internet_access")
        if self.refuse_network and (network or internet is not None):
            raise Problem(400, "network configuration is not supported by this deployment")
        if self.ignore_network:
            network, internet = {}, None
        if len(self.sandboxes) >= self.most:
            raise Problem(429, f"you have reached the maximum number of concurrent sandboxes ({self.most})")
        sandbox_id = secrets.token_hex(10)
        disk = self._state / "disks" / sandbox_id
        disk.parent.mkdir(mode=0o711, exist_ok=True)
        if snapshot is not None:
            await asyncio.to_thread(copy_disk, snapshot.disk, disk)
        else:
            disk.mkdir()
            make_disk(disk)
        sandbox = Sandbox(sandbox_id, template, self._machine(disk), wanted, 0.0)
        return await self._boot(sandbox, timeout, network, internet)

    def _machine(self, disk: Path) -> Machine:
        return Machine(self._bwrap, disk)

    async def _boot(self, sandbox: Sandbox, timeout: int, network: dict[str, Any], internet: bool | None) -> Sandbox:
        sandbox.network, sandbox.internet = network, internet
        await sandbox.machine.start()
        self.sandboxes[sandbox.id] = sandbox
        self._ends_in(sandbox, timeout)
        return sandbox

    def _ends_in(self, sandbox: Sandbox, seconds: int) -> None:
        if sandbox.ending is not None:
            sandbox.ending.cancel()
        sandbox.ends_at = time.time() + seconds

        async def end() -> None:
            await asyncio.sleep(seconds)
            sandbox.ending = None
            await self.kill(sandbox)

        sandbox.ending = asyncio.create_task(end())

    async def kill(self, sandbox: Sandbox) -> None:
        """End a sandbox and forget it."""
        self.sandboxes.pop(sandbox.id, None)
        if sandbox.ending is not None:
            sandbox.ending.cancel()
        sandbox.drop_streams()
        await sandbox.machine.stop()
        await asyncio.to_thread(shutil.rmtree, sandbox.machine.disk, True)

    async def aclose(self) -> None:
        """End everything."""
        await asyncio.gather(*(self.kill(sandbox) for sandbox in list(self.sandboxes.values())))

    async def _list(self, request: web.Request) -> web.Response:
        text = request.query.get("metadata", "")
        metadata = {urllib.parse.unquote(k): urllib.parse.unquote(v) for k, v in urllib.parse.parse_qsl(text)}
        states = request.query.get("state", "running,paused").split(",")
        found = [
            one.detail()
            for one in self.sandboxes.values()
            if ("paused" if one.paused else "running") in states
            and not one.still
            and metadata.items() <= dict(one.wanted.get("metadata", {})).items()
        ]
        return _paged(request, found)

    async def _get(self, request: web.Request) -> web.Response:
        return web.json_response(self._find(request).detail())

    async def _delete(self, request: web.Request) -> web.Response:
        await self.kill(self._find(request))
        return web.Response(status=204)

    async def _timeout(self, request: web.Request) -> web.Response:
        sandbox, asked = self._find(request), await request.json()
        if sandbox.paused:
            raise Problem(404, "the sandbox is not running")
        self._ends_in(sandbox, _checked(asked["timeout"]))
        return web.Response(status=204)

    async def _connect(self, request: web.Request) -> web.Response:
        sandbox, asked = self._find(request), await request.json()
        resumed = sandbox.paused
        if resumed:
            await asyncio.to_thread(sandbox.machine.thaw)
            sandbox.paused = False
            # Whoever knew the one of before knows this one's no more.
            sandbox.access_token = secrets.token_hex(16)
        if "timeout" in asked and (resumed or time.time() + asked["timeout"] > sandbox.ends_at):
            self._ends_in(sandbox, _checked(asked["timeout"]))
        return web.json_response(sandbox.created(), status=201 if resumed else 200)

    async def _pause(self, request: web.Request) -> web.Response:
        if self.refuse_pause:
            raise Problem(404, "404 page not found")
        sandbox = self._find(request)
        if sandbox.paused:
            raise Problem(409, "the sandbox is already paused")
        sandbox.paused = True
        if sandbox.ending is not None:
            sandbox.ending.cancel()
        sandbox.drop_streams()
        await asyncio.to_thread(sandbox.machine.freeze)
        return web.Response(status=204)

    async def _metrics(self, request: web.Request) -> web.Response:
        if self.refuse_metrics:
            raise Problem(404, "404 page not found")
        sandbox = self._find(request)
        used = await asyncio.to_thread(sandbox.machine.memory_bytes)
        disk = await asyncio.to_thread(sandbox.machine.disk_bytes)
        now = time.time()
        measured = {"timestamp": _time(now), "timestampUnix": int(now), "cpuCount": 2, "cpuUsedPct": 0.0}
        measured |= {"memUsed": used, "memTotal": 1 << 29, "memCache": 0, "diskUsed": disk, "diskTotal": 1 << 30}
        sandbox.metrics.append(measured)
        return web.json_response(sandbox.metrics)

    async def _network(self, request: web.Request) -> web.Response:
        sandbox, asked = self._find(request), await request.json()
        if self.refuse_network:
            raise Problem(400, "network configuration is not supported by this deployment")
        sandbox.internet = asked.get("allow_internet_access", sandbox.internet)
        kept = {name: sandbox.network[name] for name in ("allowPublicTraffic",) if name in sandbox.network}
        sandbox.network = {name: value for name, value in asked.items() if name != "allow_internet_access"} | kept
        return web.Response(status=204)

    # Snapshots ---------------------------------------------------------------------------------------------------

    async def _take(self, sandbox: Sandbox, names: list[str]) -> Snapshot:
        if self.refuse_snapshots:
            raise Problem(404, "404 page not found")
        if sandbox.paused or sandbox.still:
            raise Problem(409, "the sandbox is not running")
        snapshot_id = secrets.token_hex(10)
        disk = self._state / "snapshots" / snapshot_id
        disk.parent.mkdir(mode=0o711, exist_ok=True)
        # Stopped for as long as it takes, and cut off from everybody.
        sandbox.still = True
        sandbox.drop_streams()
        await asyncio.to_thread(sandbox.machine.freeze)
        try:
            await asyncio.to_thread(copy_disk, sandbox.machine.disk, disk)
        finally:
            await asyncio.to_thread(sandbox.machine.thaw)
            sandbox.still = False
        snapshot = Snapshot(snapshot_id, names, sandbox.id, disk)
        self.snapshots[snapshot_id] = snapshot
        return snapshot

    async def _snapshot(self, request: web.Request) -> web.Response:
        sandbox, asked = self._find(request), await request.json()
        names = [f"team/{asked['name']}:default"] if asked.get("name") else []
        snapshot = await self._take(sandbox, names)
        return web.json_response({"snapshotID": snapshot.id, "names": snapshot.names}, status=201)

    async def _fork(self, request: web.Request) -> web.Response:
        sandbox, asked = self._find(request), await request.json()
        count = asked.get("count", 1)
        if not 1 <= count <= _MAX_FORKS:
            raise Problem(400, f"count must be between 1 and {_MAX_FORKS}")
        snapshot = await self._take(sandbox, [])
        wanted = {**sandbox.wanted, "templateID": snapshot.id, "timeout": asked.get("timeout", 15)}

        async def one() -> dict[str, Any]:
            try:
                return {"sandbox": (await self._make(wanted)).created()}
            except Problem as problem:
                return {"error": {"code": problem.status, "message": str(problem)}}

        return web.json_response(await asyncio.gather(*(one() for _ in range(count))), status=201)

    async def _list_snapshots(self, request: web.Request) -> web.Response:
        if self.refuse_snapshots:
            raise Problem(404, "404 page not found")
        source = request.query.get("sandboxID")
        found = [
            {"snapshotID": one.id, "names": one.names}
            for one in self.snapshots.values()
            if source in (None, one.source)
        ]
        return _paged(request, found)

    async def _delete_template(self, request: web.Request) -> web.Response:
        snapshot = self.snapshots.pop(request.match_info["id"], None)
        if snapshot is None:
            raise Problem(404, "template not found")
        await asyncio.to_thread(shutil.rmtree, snapshot.disk, True)
        return web.Response(status=204)


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()


def _checked(timeout: int) -> int:
    if not 0 <= timeout <= _MAX_TIMEOUT_S:
        raise Problem(400, "Timeout cannot be greater than 24 hours")
    return timeout


def _paged(request: web.Request, found: list[dict[str, Any]]) -> web.Response:
    start = int(request.query.get("nextToken", 0))
    limit = int(request.query.get("limit", _PAGE))
    headers = {"x-next-token": str(start + limit)} if start + limit < len(found) else {}
    return web.json_response(found[start : start + limit], headers=headers)
