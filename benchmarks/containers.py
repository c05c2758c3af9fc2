"""Docker sandboxes beside bare `docker`, in one run: what the service adds to a container, and what it saves.

The daemon is DOCKER_HOST's, or the local one; the image is `PENSTOCK_BENCH_IMAGE` (default the service's own), which
must be there. Direct needs root on the daemon's machine; the sidecar works anywhere. The bare commands run through
`docker`, as a program that shells out to it would, with the same hardening and no network.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks import world
from benchmarks.report import Row, Section, percentile
from penstock.client.rpc import Service
from penstock.sandbox.v1 import sandbox_pb2, sandbox_service_pb2_grpc
from penstock.sandbox.v1 import sandbox_service_pb2 as pb

CREATES: Final = 20
RUNS: Final = 200
BARE_RUNS: Final = 30
BURST: Final = 16
FORKS: Final = 8
IMAGE: Final = os.environ.get("PENSTOCK_BENCH_IMAGE", "python:3.13-slim-bookworm")
_BARE: Final = ("--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--log-driver", "none")
_LABEL: Final = "bench"


async def measure(place: Path) -> list[Section]:
    """The bare commands, then both ways of the service."""
    bare = await _bare()
    sections = [bare]
    for reach in ("direct", "sidecar"):
        folder = place / reach
        folder.mkdir()
        settings = {
            "default_backend": "docker",
            "docker_reach": reach,
            "docker_image": IMAGE,
            "docker_sidecar_image": IMAGE,
            "docker_host": os.environ.get("DOCKER_HOST", ""),
        }
        async with world.scripted(folder, settings) as running:
            sections.append(await _service(running, reach, {row.name: row.value for row in bare.rows}))
    return sections


async def _bare() -> Section:
    created: list[float] = []
    executed: list[float] = []
    for _ in range(CREATES):
        name = f"bench-{secrets.token_hex(4)}"
        await _timed(created, partial(_docker, "run", "-d", "--name", name, *_BARE, IMAGE, "sleep", "600"))
        await _docker("rm", "-f", name)
    name = f"bench-{secrets.token_hex(4)}"
    await _docker("run", "-d", "--name", name, *_BARE, IMAGE, "sleep", "600")
    for _ in range(BARE_RUNS):
        await _timed(executed, partial(_docker, "exec", name, "/bin/true"))
    committed: list[float] = []
    for index in range(3):
        await _timed(committed, partial(_docker, "commit", name, f"bench-commit:{index}"))
        await _docker("rmi", f"bench-commit:{index}")
    await _docker("rm", "-f", name)
    names = [f"bench-{secrets.token_hex(4)}" for _ in range(BURST)]
    burst: list[float] = []
    await _timed(
        burst,
        lambda: asyncio.gather(
            *(_docker("run", "-d", "--name", name, *_BARE, IMAGE, "sleep", "600") for name in names)
        ),
    )
    await _docker("rm", "-f", *names)
    return Section(
        "Docker alone: the docker command, one after another",
        [
            *_pair("create", created, f"docker run -d, {CREATES} in turn"),
            *_pair("Run /bin/true", executed, f"docker exec, {BARE_RUNS} in turn"),
            Row("seal, p50", 1e3 * percentile(committed, 0.5), "ms", "docker commit"),
            Row("creates per second", BURST / burst[0], "/s", f"{BURST} at once"),
        ],
    )


async def _docker(*arguments: str) -> None:
    process = await asyncio.create_subprocess_exec(
        "docker", *arguments, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"docker {arguments[0]}: {errors.decode(errors='replace')}")


async def _service(running: world.World, reach: str, bare: dict[str, float]) -> Section:
    ps = running.ps
    created: list[float] = []
    deleted: list[float] = []
    executed: list[float] = []
    for _ in range(CREATES):
        sandbox = await _timed(created, ps.sandboxes.create)
        await _timed(deleted, sandbox.delete)
    async with await ps.sandboxes.create() as sandbox:
        await sandbox.run(["/bin/true"])
        for _ in range(RUNS):
            await _timed(executed, partial(sandbox.run, ["/bin/true"]))
    burst: list[float] = []
    made = await _timed(burst, lambda: asyncio.gather(*(ps.sandboxes.create() for _ in range(BURST))))
    await asyncio.gather(*(sandbox.delete() for sandbox in made))
    rows = [
        *_pair("create", created, f"{CREATES} in turn", bare),
        *_pair("delete", deleted, ""),
        *_pair("Run /bin/true", executed, f"{RUNS} in turn in one sandbox", bare),
        Row(
            "creates per second",
            BURST / burst[0],
            "/s",
            _beside(BURST / burst[0], bare.get("creates per second"), f"{BURST} at once"),
        ),
        *await _forks(running, bare),
    ]
    return Section(f"Sandboxes: docker backend ({reach}), through gRPC", rows)


async def _forks(running: world.World, bare: dict[str, float]) -> list[Row]:
    service = Service("sandbox", running.stack.endpoints)
    try:
        stub = sandbox_service_pb2_grpc.SandboxServiceStub(service.channel)
        prepared: list[float] = []
        snapshot = ""
        for message in await _timed(
            prepared, partial(service.collect, stub.PrepareSnapshot, pb.PrepareSnapshotRequest(spec=pb.SnapshotSpec()))
        ):
            snapshot = message.snapshot.snapshot_id or snapshot
        rows = [Row("prepare a snapshot", 1e3 * prepared[0], "ms", "create, seal, delete")]
        for count in (1, FORKS):
            times: list[float] = []
            for _ in range(10 if count == 1 else 3):
                child = sandbox_pb2.SandboxSpec(labels={_LABEL: "fork"})
                request = pb.ForkSandboxesRequest(
                    request_id=secrets.token_hex(8), snapshot_id=snapshot, count=count, spec=child
                )
                await _timed(times, partial(service.collect, stub.ForkSandboxes, request))
                gone = pb.DeleteSandboxesRequest(labels={_LABEL: "fork"})
                await service.call(stub.DeleteSandboxes, gone, timeout=120)
            rows += _pair(f"fork {count} from a snapshot", times, "")
        return rows
    finally:
        await service.close()


async def _timed(times: list[float], work: Callable[[], Awaitable[Any]]) -> Any:
    began = time.perf_counter()
    result = await work()
    times.append(time.perf_counter() - began)
    return result


def _pair(name: str, times: list[float], note: str, bare: dict[str, float] | None = None) -> list[Row]:
    p50 = 1e3 * percentile(times, 0.5)
    return [
        Row(f"{name}, p50", p50, "ms", _beside(p50, (bare or {}).get(f"{name}, p50"), note)),
        Row(f"{name}, p99", 1e3 * percentile(times, 0.99), "ms"),
    ]


def _beside(value: float, alone: float | None, note: str) -> str:
    """A note that tells the ratio to Docker alone."""
    if alone is None:
        return note
    return f"{note}; {value / alone:.2f} of Docker alone"
