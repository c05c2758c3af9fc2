"""The local backend in this process: what its door keeps of processes that ended."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio
from tests.conformance.sandbox.services import start
from tests.support.restarting import descendants

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


def _descriptors() -> int:
    """Open descriptors of this process's own spawners and all below them.

    Services that other tests started are children of this process too, and open and close what they like. An ordinary
    user may not look into a door.
    """
    spawners = [child for child in _children(os.getpid()) if b"penstock_sandbox.spawner" in _command(child)]
    assert spawners
    found = 0
    for pid in [*spawners, *(below for spawner in spawners for below in descendants(spawner))]:
        with suppress(PermissionError):
            found += len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return found


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


async def test_what_is_kept_of_processes_does_not_grow_with_those_that_are_forgotten(sandbox: SandboxHandle) -> None:
    """R23: each one leaves a mark by which its tree is found; the mark goes with the next one's start."""
    await _run_and_forget(sandbox)
    before = _descriptors()
    for _ in range(20):
        await _run_and_forget(sandbox)
    # What else this process opens meanwhile are a few.
    assert _descriptors() < before + 10


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


async def test_a_service_of_an_ordinary_user_starts_where_its_path_leads_through_what_it_may_not_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """R47: other people's directories are in many a PATH; no runtime is looked for there."""
    locked = tmp_path / "locked"
    (locked / "bin").mkdir(parents=True)
    locked.chmod(0)
    monkeypatch.setenv("PATH", f"{locked}/bin:{os.environ['PATH']}")
    async with start("local-ordinary-user") as running:
        assert running.process.poll() is None
