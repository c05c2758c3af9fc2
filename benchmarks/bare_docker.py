"""The docker command by itself, as a program that shells out to it would, with the hardening that the service gives.

The daemon is DOCKER_HOST's, or the local one.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks import processes
from benchmarks import sandbox_service as service
from benchmarks.report import Row, percentile
from benchmarks.timing import milliseconds, timed

TITLE: Final = "docker"
CREATES: Final = 20
RUNS: Final = 30
BURST: Final = 16
COMMITS: Final = 3
_OPTIONS: Final = (
    *("--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
    *("--log-driver", "none", "--workdir", "/tmp"),
)
_IDLE: Final = ("sleep", "3600")


async def rows(place: Path, image: str) -> list[Row]:
    """What a program that calls docker would see; `place` is an empty directory."""
    created: list[float] = []
    deleted: list[float] = []
    for _ in range(CREATES):
        name = await timed(created, partial(_run, image))
        await timed(deleted, partial(_remove, [name]))
    executed: list[float] = []
    name = await _run(image)
    for _ in range(RUNS):
        await timed(executed, partial(_docker, "exec", name, "/bin/true"))
    files = await _files(name, place)
    before = processes.tree_pss_bytes(processes.container_shims())
    burst: list[float] = []
    together = await timed(burst, lambda: asyncio.gather(*(_run(image) for _ in range(BURST))))
    kept = processes.tree_pss_bytes(processes.container_shims()) - before
    await _remove([name, *together])
    return [
        *milliseconds(service.CREATE, created, f"docker run -d, {CREATES} in turn"),
        *milliseconds(service.DELETE, deleted, "docker rm -f"),
        *milliseconds(service.RUN, executed, f"docker exec, {RUNS} in turn"),
        Row(service.RATE, BURST / burst[0], "/s", f"{BURST} at once"),
        *([Row(service.MEMORY, kept / BURST / 2**20, "MiB", "PSS of shim and process")] if os.geteuid() == 0 else []),
        *await _forks(image),
        *files,
    ]


async def _run(image: str) -> str:
    name = f"bench-{secrets.token_hex(6)}"
    await _docker("run", "--detach", "--name", name, *_OPTIONS, image, *_IDLE)
    return name


async def _remove(names: Sequence[str]) -> None:
    await _docker("rm", "--force", "--volumes", *names)


async def _files(name: str, place: Path) -> list[Row]:
    source, target = place / "in", place / "out"
    await asyncio.to_thread(source.write_bytes, os.urandom(service.FILE_BYTES))
    written: list[float] = []
    read: list[float] = []
    for _ in range(service.FILE_TIMES):
        await timed(written, partial(_docker, "cp", str(source), f"{name}:/tmp/large"))
        await timed(read, partial(_docker, "cp", f"{name}:/tmp/large", str(target)))
    return service.throughput(written, read, "docker cp")


async def _forks(image: str) -> list[Row]:
    """A commit for what a snapshot is, a container of it for each child."""
    committed: list[float] = []
    prepared = [f"bench-{secrets.token_hex(6)}:{number}" for number in range(COMMITS)]
    name = await _run(image)
    try:
        await _docker("exec", name, "/bin/sh", "-c", service.TREE)
        for tag in prepared:
            await timed(committed, partial(_docker, "commit", name, tag))
        forked: list[float] = []
        children = await timed(forked, lambda: asyncio.gather(*(_run(prepared[0]) for _ in range(service.TREE_FORKS))))
        await _remove(children)
    finally:
        await _remove([name])
        await _docker("rmi", "--force", *prepared)
    return [
        Row("commit the 250 MB tree, p50", 1e3 * percentile(committed, 0.5), "ms"),
        Row(service.FORKS, 1e3 * forked[0], "ms", "docker run of the committed image"),
    ]


async def _docker(*arguments: str) -> None:
    process = await asyncio.create_subprocess_exec(
        "docker", *arguments, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"docker {arguments[0]}: {errors.decode(errors='replace')}")
