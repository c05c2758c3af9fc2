"""Sandboxes and commands in them, through gRPC on the local backend, one after another."""

from __future__ import annotations

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

CREATES: Final = 100
RUNS: Final = 300
FORKS: Final = 64


async def measure(place: Path) -> list[Section]:
    """Create, run, write, fork and delete."""
    async with world.scripted(place) as running:
        ps = running.ps
        made: list[float] = []
        deleted: list[float] = []
        executed: list[float] = []
        before = running.cpu_s()
        for _ in range(CREATES):
            sandbox = await _timed(made, ps.sandboxes.create)
            await _timed(deleted, sandbox.delete)
        used = _difference(running.cpu_s(), before)
        rows = [
            *_pair("create", made, f"{CREATES} in turn"),
            *_pair("delete", deleted, f"{CREATES} in turn"),
            Row("create + delete, CPU", 1e3 * used / CREATES, "ms", "service, spawner, bubblewrap, door"),
        ]
        async with await ps.sandboxes.create() as sandbox:
            await sandbox.run(["/bin/true"])
            before = running.cpu_s()
            for _ in range(RUNS):
                await _timed(executed, partial(sandbox.run, ["/bin/true"]))
        used = _difference(running.cpu_s(), before)
        rows += _pair("Run /bin/true", executed, f"{RUNS} in turn in one sandbox")
        rows += [Row("Run /bin/true, CPU", 1e3 * used / RUNS, "ms", "service, door, the command")]
        rows += await _forks(running)
    return [Section("Sandboxes: local backend, through gRPC", rows)]


async def _forks(running: world.World) -> list[Row]:
    service = Service("sandbox", running.stack.endpoints)
    try:
        stub = sandbox_service_pb2_grpc.SandboxServiceStub(service.channel)
        prepare = pb.PrepareSnapshotRequest(spec=pb.SnapshotSpec())
        snapshot = ""
        for message in await service.collect(stub.PrepareSnapshot, prepare):
            snapshot = message.snapshot.snapshot_id or snapshot
        rows: list[Row] = []
        for count in (1, 8, FORKS):
            times: list[float] = []
            for _ in range(20 if count == 1 else 3):
                child = sandbox_pb2.SandboxSpec(labels={"bench": "fork"})
                request = pb.ForkSandboxesRequest(
                    request_id=secrets.token_hex(8), snapshot_id=snapshot, count=count, spec=child
                )
                await _timed(times, partial(service.collect, stub.ForkSandboxes, request))
                gone = pb.DeleteSandboxesRequest(labels={"bench": "fork"})
                await service.call(stub.DeleteSandboxes, gone, timeout=60)
            rows.append(Row(f"fork {count} from a snapshot, p50", 1e3 * percentile(times, 0.5), "ms"))
        return rows
    finally:
        await service.close()


async def _timed(times: list[float], work: Callable[[], Awaitable[Any]]) -> Any:
    began = time.perf_counter()
    result = await work()
    times.append(time.perf_counter() - began)
    return result


def _pair(name: str, times: list[float], note: str) -> list[Row]:
    return [
        Row(f"{name}, p50", 1e3 * percentile(times, 0.5), "ms", note),
        Row(f"{name}, p99", 1e3 * percentile(times, 0.99), "ms"),
    ]


def _difference(after: dict[str, float], before: dict[str, float]) -> float:
    return sum(after[name] - before[name] for name in ("sandbox", "sandboxes"))
