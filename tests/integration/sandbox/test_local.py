"""The local backend in this process: what its door keeps of processes that ended."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest_asyncio

from penstock_sandbox.backends.base import ProcessHandle, SandboxHandle
from penstock_sandbox.backends.collected import Collected
from penstock_sandbox.backends.local.backend import LocalBackend, LocalOptions
from penstock_sandbox.model import SandboxSpec


@pytest_asyncio.fixture
async def sandbox() -> AsyncIterator[SandboxHandle]:
    """A sandbox of a backend of its own."""
    with tempfile.TemporaryDirectory(prefix="penstock-local-") as folder:
        Path(folder).chmod(0o755)
        backend = LocalBackend(LocalOptions(Path(folder) / "local"))
        await backend.open()
        assert backend.available, backend.unavailable_reason
        try:
            yield await backend.create("one", SandboxSpec(), (), lambda _: None)
        finally:
            await backend.aclose()


async def _run_and_forget(sandbox: SandboxHandle) -> None:
    sink = Collected()
    process = await sandbox.start(["/bin/true"], sandbox.default_env, sandbox.workdir, sink, stdin=False, pty=None)
    assert await sink.ended is not None
    await process.aclose()


def _descriptors_below(pid: int) -> int:
    """Open descriptors of all that descends from a process; an ordinary user may not look into a door."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    found = 0
    for child in children:
        with suppress(PermissionError):
            found += len(list(Path(f"/proc/{child}/fd").iterdir()))
        found += _descriptors_below(child)
    return found


async def test_what_is_kept_of_processes_does_not_grow_with_those_that_are_forgotten(sandbox: SandboxHandle) -> None:
    """R23: each one leaves a mark by which its tree is found; the mark goes with the next one's start."""
    await _run_and_forget(sandbox)
    before = _descriptors_below(os.getpid())
    for _ in range(20):
        await _run_and_forget(sandbox)
    assert _descriptors_below(os.getpid()) <= before


async def test_a_start_that_meets_a_pause_is_answered_and_its_process_can_be_killed_in_it(
    sandbox: SandboxHandle,
) -> None:
    """R40, R55: a freeze waits for what was asked before it, and what comes meanwhile is answered all the same."""
    sinks = [Collected() for _ in range(6)]

    def start(sink: Collected) -> asyncio.Task[ProcessHandle]:
        argv = ["/bin/sleep", "4920"]
        work = sandbox.start(argv, sandbox.default_env, sandbox.workdir, sink, stdin=False, pty=None, to_end=True)
        return asyncio.ensure_future(work)

    early = [start(sink) for sink in sinks[:3]]
    await asyncio.sleep(0)
    pausing = asyncio.create_task(sandbox.pause())
    await asyncio.sleep(0)
    late = [start(sink) for sink in sinks[3:]]
    started = await asyncio.gather(*early, *late)
    await pausing
    for process in started:
        await process.kill()
        await process.aclose()
    assert all(sink.ended.done() for sink in sinks)
    await sandbox.resume()
    await _run_and_forget(sandbox)
