"""A local sandbox through its helper beside the same one through a guest, which serves those of every other backend.

By turns in one run, at the backend's interface: without gRPC, which is the same for both.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.report import Row, Section, percentile
from benchmarks.timing import timed
from penstock_sandbox.backends.docker.access.forkserver import Forkserver
from penstock_sandbox.backends.guest_client import launch
from penstock_sandbox.backends.guest_client.pipe import unix_socket
from penstock_sandbox.backends.guest_client.sandbox import BackendHooks, GuestSandbox, ProcessDefaults
from penstock_sandbox.backends.local.backend import LocalBackend, LocalOptions
from penstock_sandbox.backends.local.sandbox import LocalSandbox
from penstock_sandbox.domain import paths
from penstock_sandbox.domain.backend import SandboxHandle
from penstock_sandbox.domain.model import SandboxSpec
from penstock_sandbox.processes.output import Collected

STARTS: Final = 20
RUNS: Final = 300
BLOCK: Final = 5
"""Runs of one kind before the other's turn."""
FILE_BYTES: Final = 50_000_000
FILE_TIMES: Final = 5
_PIECE: Final = 256 * 1024
_USER: Final = (paths.USER_ID, paths.USER_ID)

Starter = Callable[[LocalSandbox, Path], Awaitable[None]]


async def measure(place: Path) -> list[Section]:
    """What a guest's start adds to a create, and what commands and files cost through a helper and through a guest."""
    backend = LocalBackend(LocalOptions(state_dir=place / "state"))
    await backend.open()
    program = launch.write_program(place)
    forkserver = Forkserver(program)
    try:
        if backend.unavailable_reason:
            raise RuntimeError(backend.unavailable_reason)
        starters = {"an interpreter of its own": partial(_start, program), "forked": partial(_fork, forkserver)}
        return [
            Section(f"A guest for a local sandbox, {STARTS} each by turns", await _starts(backend, starters, place)),
            Section(
                f"The same sandbox through its helper and through a guest, {RUNS} commands each by turns",
                await _uses(backend, starters["forked"], place),
            ),
        ]
    finally:
        await forkserver.aclose()
        await backend.aclose()


def _groups(sandbox: LocalSandbox) -> list[str]:
    return sandbox.group.members_files if sandbox.group is not None else []


async def _start(program: Path, sandbox: LocalSandbox, socket: Path) -> None:
    user = _USER if os.geteuid() == 0 else None
    await launch.serve(program, socket, enter=sandbox.first_pid, user=user, cgroups=_groups(sandbox))


async def _fork(forkserver: Forkserver, sandbox: LocalSandbox, socket: Path) -> None:
    arguments = ["--socket", str(socket), "--enter", str(sandbox.first_pid)]
    if os.geteuid() == 0:
        arguments += ["--user", "{}:{}".format(*_USER)]
    for group in _groups(sandbox):
        arguments += ["--cgroup", group]
    await forkserver.serve(arguments)


@asynccontextmanager
async def _made(backend: LocalBackend, name: str, times: list[float]) -> AsyncIterator[LocalSandbox]:
    sandbox = await timed(times, partial(backend.create, name, SandboxSpec(), (), lambda _reason: None))
    assert isinstance(sandbox, LocalSandbox)
    try:
        yield sandbox
    finally:
        await sandbox.destroy()


@asynccontextmanager
async def _served(
    sandbox: LocalSandbox, start: Starter, folder: Path, times: list[float]
) -> AsyncIterator[SandboxHandle]:
    """The same sandbox through a guest; `times` gets the seconds until that has greeted."""
    folder.mkdir(mode=0o700)
    socket = folder / "socket"

    async def end() -> None:
        """It ends with the sandbox."""

    began = time.perf_counter()
    await start(sandbox, socket)
    through_guest = GuestSandbox(
        sandbox.id,
        unix_socket(str(socket)),
        ProcessDefaults(sandbox.home, sandbox.workdir, sandbox.user, sandbox.default_env),
        BackendHooks(on_lost=lambda _reason: None, destroy=end),
    )
    try:
        await through_guest.open()
        times.append(time.perf_counter() - began)
        yield through_guest
    finally:
        await through_guest.destroy()


async def _starts(backend: LocalBackend, starters: Mapping[str, Starter], place: Path) -> list[Row]:
    creates: list[float] = []
    guests: dict[str, list[float]] = {name: [] for name in starters}
    for turn in range(STARTS + 1):
        for number, (name, start) in enumerate(starters.items()):
            sandbox_id = f"start-{turn}-{number}"
            async with (
                _made(backend, sandbox_id, creates) as sandbox,
                _served(sandbox, start, place / sandbox_id, guests[name]),
            ):
                pass
    # The first of each pays for what is made once.
    return [
        _row("create, with its helper", creates[2:]),
        *(_row(f"a guest until its greeting, {name}", times[1:]) for name, times in guests.items()),
    ]


async def _uses(backend: LocalBackend, start: Starter, place: Path) -> list[Row]:
    async with _made(backend, "uses", []) as sandbox, _served(sandbox, start, place / "uses", []) as through_guest:
        handles: dict[str, SandboxHandle] = {"helper": sandbox, "guest": through_guest}
        runs: dict[str, list[float]] = {name: [] for name in handles}
        files: dict[str, list[float]] = {f"{way}, {name}": [] for way in ("in", "out") for name in handles}
        for handle in handles.values():
            for _ in range(BLOCK):
                await _run(handle)
        for _ in range(RUNS // BLOCK):
            for name, handle in handles.items():
                for _ in range(BLOCK):
                    await timed(runs[name], partial(_run, handle))
        content = os.urandom(FILE_BYTES)
        for _ in range(FILE_TIMES):
            for name, handle in handles.items():
                await timed(files[f"in, {name}"], partial(_write, handle, content))
                await timed(files[f"out, {name}"], partial(_read, handle))
    rows = [_row(f"run /bin/true, {name}", times) for name, times in runs.items()]
    ratio = percentile(runs["guest"], 0.5) / percentile(runs["helper"], 0.5)
    return [
        *rows,
        Row("run /bin/true, guest beside helper", ratio, ""),
        *(_row(f"a file of {FILE_BYTES // 10**6} MB {name}", times) for name, times in files.items()),
    ]


async def _run(handle: SandboxHandle) -> None:
    seen = Collected()
    process = await handle.start(["/bin/true"], {}, "/", seen, stdin=False, pty=None, to_end=True)
    ended = await seen.ended
    if ended is None or ended.code != 0:
        raise RuntimeError(f"/bin/true ended with {ended}")
    await process.aclose()


async def _write(handle: SandboxHandle, content: bytes) -> None:
    async with handle.open_write(f"{handle.workdir}/large", 0o644) as writer:
        for start in range(0, len(content), _PIECE):
            await writer.write(content[start : start + _PIECE])
        await writer.commit()


async def _read(handle: SandboxHandle) -> None:
    async with handle.open_read(f"{handle.workdir}/large", follow_symlink=False) as (_, reader):
        offset = 0
        while data := await reader.read(offset, _PIECE):
            offset += len(data)
    if offset != FILE_BYTES:
        raise RuntimeError(f"the file came back with {offset} bytes")


def _row(name: str, seconds: list[float]) -> Row:
    return Row(f"{name}, p50", 1e3 * percentile(seconds, 0.5), "ms", also={"least": 1e3 * min(seconds)})
