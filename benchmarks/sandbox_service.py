"""A backend of the sandbox service through gRPC and the Python client: the same figures whatever the backend is."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from benchmarks import processes, world
from benchmarks.report import Row, percentile
from benchmarks.timing import milliseconds, timed
from penstock.client import SandboxSpec
from penstock.client.sandboxes.handle import SandboxHandle
from penstock.client.transport.rpc import Service
from penstock.sandbox.v1 import process_service_pb2, sandbox_pb2, sandbox_service_pb2_grpc
from penstock.sandbox.v1 import sandbox_service_pb2 as pb

TREE_FILES: Final = 1000
TREE_BYTES: Final = 250 * 1024 * 1024
TREE_FORKS: Final = 64
FILE_BYTES: Final = 100 * 1024 * 1024
FILE_TIMES: Final = 3

# Names that other systems' rows share, so that they can stand beside each other.
CREATE: Final = "create"
DELETE: Final = "delete"
RUN: Final = "run /bin/true"
RATE: Final = "creates per second"
FORKS: Final = f"fork {TREE_FORKS} of a 250 MB tree"
FILE_IN: Final = "100 MB file in"
FILE_OUT: Final = "100 MB file out"
MEMORY: Final = "memory of an idle one"

_LABELS: Final = {"bench": "here"}
TREE: Final = f"mkdir tree && head -c {TREE_BYTES} /dev/urandom | split -b {TREE_BYTES // TREE_FILES} -a 3 - tree/"
_SETTLED: Final = 0.02


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is done of each: what takes a backend seconds is done less often."""

    creates: int
    runs: int
    burst: int
    live: int
    """Idle sandboxes whose memory is measured."""
    forks: Sequence[tuple[int, int]]
    """How many children of an empty snapshot, how often."""
    tree_forks: int = TREE_FORKS
    """How many children of a tree of 250 MB at once."""


async def figures(running: world.World, sizes: Sizes) -> list[Row]:
    """All of them, one after another; the service must be idle."""
    return [
        *await _create(running, sizes),
        *await _run(running, sizes),
        *await _many(running, sizes),
        *await _forks(running, sizes),
        *await _files(running),
    ]


async def _create(running: world.World, sizes: Sizes) -> list[Row]:
    made: list[float] = []
    deleted: list[float] = []
    # The first one pays for what is made once.
    await (await running.ps.sandboxes.create()).delete()
    before = running.cpu_s()
    for _ in range(sizes.creates):
        sandbox = await timed(made, running.ps.sandboxes.create)
        await timed(deleted, sandbox.delete)
    used = _difference(running.cpu_s(), before)
    return [
        *milliseconds(CREATE, made, f"{sizes.creates} in turn"),
        *milliseconds(DELETE, deleted),
        Row("create and delete, CPU", 1e3 * used / sizes.creates, "ms", "service and what it started"),
    ]


async def _run(running: world.World, sizes: Sizes) -> list[Row]:
    times: list[float] = []
    async with await running.ps.sandboxes.create() as sandbox:
        for _ in range(sizes.runs // 10):
            await sandbox.run(["/bin/true"])
        before = running.cpu_s()
        for _ in range(sizes.runs):
            await timed(times, partial(sandbox.run, ["/bin/true"]))
    # Now that its door has ended, its time is counted too.
    used = _difference(running.cpu_s(), before)
    return [
        *milliseconds(RUN, times, f"{sizes.runs} in turn in one sandbox"),
        Row(f"{RUN}, CPU", 1e3 * used / sizes.runs, "ms", "service, door, the command"),
    ]


async def _many(running: world.World, sizes: Sizes) -> list[Row]:
    """As many at once as the backend takes, and what they keep while nothing happens."""
    began = time.perf_counter()
    await _made(running, sizes.burst)
    rate = sizes.burst / (time.perf_counter() - began)
    rows = [Row(RATE, rate, "/s", f"{sizes.burst} at once")]
    await _delete_all(running)
    if os.geteuid() != 0:
        return rows  # nobody else may look into a door's memory
    before, free = await _settled(running), processes.available_bytes()
    await _made(running, sizes.live)
    after, left = await _settled(running), processes.available_bytes()
    rows += [
        Row(MEMORY, (after - before) / sizes.live / 2**20, "MiB", f"PSS, with {sizes.live} there"),
        Row("memory left less by", (free - left) / sizes.live / 2**20, "MiB", "kernel's included"),
    ]
    await _delete_all(running)
    return rows


async def _made(running: world.World, count: int) -> list[SandboxHandle]:
    return await asyncio.gather(*(running.ps.sandboxes.create(SandboxSpec(labels=_LABELS)) for _ in range(count)))


async def _settled(running: world.World) -> int:
    """Bytes of the service and of all sandboxes, once two looks agree."""
    last = 0
    while True:
        now = processes.tree_pss_bytes([running.pids["sandbox"], *processes.container_shims()])
        if abs(now - last) < _SETTLED * now:
            return now
        last = now


async def _forks(running: world.World, sizes: Sizes) -> list[Row]:
    service = Service("sandbox", running.stack.endpoints)
    try:
        times: list[float] = []
        empty = await _prepare(service, pb.SnapshotSpec(), times)
        rows = [Row("prepare an empty snapshot", 1e3 * times[0], "ms", "create, seal")]
        for count, times_each in sizes.forks:
            forked: list[float] = []
            for _ in range(times_each):
                await timed(forked, partial(_fork, service, empty, count))
                await _delete_all(running)
            rows += [Row(f"fork {count} of nothing, p50", 1e3 * percentile(forked, 0.5), "ms")]
        setup = process_service_pb2.Command(shell=TREE)
        tree = await _prepare(service, pb.SnapshotSpec(setup=[setup]), times)
        rows.append(Row("prepare a 250 MB tree", 1e3 * times[1], "ms", f"{TREE_FILES} files"))
        forked = []
        children = await timed(forked, partial(_fork, service, tree, sizes.tree_forks))
        child = await running.ps.sandboxes.attach(children[-1])
        seen = await child.run(["/bin/sh", "-c", "ls tree | wc -l"])
        if int(seen.stdout) != TREE_FILES:
            raise RuntimeError(f"a fork has {seen.stdout!r} files, not {TREE_FILES}: {seen.stderr!r}")
        await _delete_all(running)
        return [
            *rows,
            Row(FORKS.replace(str(TREE_FORKS), str(sizes.tree_forks)), 1e3 * forked[0], "ms", "all of them ready"),
        ]
    finally:
        await service.close()


async def _prepare(service: Service, spec: pb.SnapshotSpec, times: list[float]) -> str:
    stub = sandbox_service_pb2_grpc.SandboxServiceStub(service.channel)
    request = pb.PrepareSnapshotRequest(spec=spec)
    answers = await timed(times, partial(service.collect, stub.PrepareSnapshot, request))
    return answers[-1].snapshot.snapshot_id


async def _fork(service: Service, snapshot: str, count: int) -> list[str]:
    stub = sandbox_service_pb2_grpc.SandboxServiceStub(service.channel)
    request = pb.ForkSandboxesRequest(
        request_id=secrets.token_hex(8),
        snapshot_id=snapshot,
        count=count,
        spec=sandbox_pb2.SandboxSpec(labels=_LABELS),
    )
    answers = await service.collect(stub.ForkSandboxes, request)
    failed = [answer.failure.reason for answer in answers if answer.HasField("failure")]
    if failed:
        raise RuntimeError(f"{len(failed)} of {count} forks failed: {failed[0]}")
    return [answer.sandbox.sandbox_id for answer in answers]


async def _files(running: world.World) -> list[Row]:
    content = secrets.token_bytes(FILE_BYTES)
    written: list[float] = []
    read: list[float] = []
    async with await running.ps.sandboxes.create() as sandbox:
        for _ in range(FILE_TIMES):
            await timed(written, partial(sandbox.write_file, "large", content))
            if await timed(read, partial(sandbox.read_file, "large")) != content:
                raise RuntimeError("a file came back different")
    return throughput(written, read, "digests checked at both ends")


def throughput(written: Sequence[float], read: Sequence[float], note: str = "") -> list[Row]:
    """The rows of the 100 MB file, from the seconds of each way."""
    return [
        Row(FILE_IN, FILE_BYTES / 1e6 / percentile(written, 0.5), "MB/s", note),
        Row(FILE_OUT, FILE_BYTES / 1e6 / percentile(read, 0.5), "MB/s", note),
    ]


async def _delete_all(running: world.World) -> None:
    service = Service("sandbox", running.stack.endpoints)
    try:
        stub = sandbox_service_pb2_grpc.SandboxServiceStub(service.channel)
        await service.call(stub.DeleteSandboxes, pb.DeleteSandboxesRequest(labels=_LABELS), timeout=300)
    finally:
        await service.close()


def _difference(after: dict[str, float], before: dict[str, float]) -> float:
    return sum(after[name] - before[name] for name in ("sandbox", "sandboxes"))
