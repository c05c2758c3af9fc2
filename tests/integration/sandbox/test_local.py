"""The local backend in this process: what its door keeps of processes that ended."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from pydantic import ValidationError
from tests.conformance.sandbox.conftest import Box
from tests.conformance.sandbox.services import start
from tests.support.services.processes import argv_of, children_of
from tests.support.services.restarting import descendants

from penstock.sandbox.v1 import sandbox_service_pb2 as ss
from penstock_chassis.errors import FailedPrecondition
from penstock_sandbox.backends.local.backend import LocalBackend, LocalOptions
from penstock_sandbox.backends.local.sandbox import LocalSandbox
from penstock_sandbox.domain.backend import ProcessHandle, SandboxHandle
from penstock_sandbox.domain.model import SandboxSpec
from penstock_sandbox.processes.output import Collected
from penstock_sandbox.settings import SandboxSettings


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
    spawners = [
        child
        for child in children_of(os.getpid())
        if any(b"penstock_sandbox.backends.local.spawner" in one for one in argv_of(child))
    ]
    assert spawners
    found = 0
    for pid in [*spawners, *(below for spawner in spawners for below in descendants(spawner))]:
        with suppress(PermissionError, FileNotFoundError, ProcessLookupError):
            found += len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return found


@pytest.mark.requirement("R23")
async def test_records_of_forgotten_processes_do_not_accumulate(sandbox: SandboxHandle) -> None:
    """Each one leaves a mark by which its tree is found; the mark goes with the next one's start."""
    await _run_and_forget(sandbox)
    before = _descriptors()
    for _ in range(20):
        await _run_and_forget(sandbox)
    # What else this process opens meanwhile are a few.
    assert _descriptors() < before + 10


@pytest.mark.requirement("R23", "R39")
async def test_ends_of_file_jobs_are_not_kept_for_processes(sandbox: SandboxHandle) -> None:
    """A job's id may be a later process's, which would have ended before it began."""
    assert isinstance(sandbox, LocalSandbox)
    for _ in range(20):
        async for _chunk in sandbox.read_tree(sandbox.workdir, 1 << 20):
            pass
    await _run_and_forget(sandbox)
    assert sandbox._early_exits == {}


@pytest.mark.requirement("R40", "R55")
async def test_start_that_meets_a_pause_is_answered_and_can_be_killed(
    sandbox: SandboxHandle,
) -> None:
    """A freeze waits for what was asked before it, and what comes meanwhile is answered all the same."""
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


@pytest.mark.requirement("R49", "R52")
async def test_the_longest_stack_of_layers_is_whole_and_a_longer_one_is_refused() -> None:
    """The kernel cuts a longer one, by a byte or by its lowest layers, and may not say so."""
    with tempfile.TemporaryDirectory(prefix="penstock-local-") as folder:
        Path(folder).chmod(0o755)
        backend = LocalBackend(LocalOptions(Path(folder) / "local"))
        await backend.open()
        assert backend.available, backend.unavailable_reason
        try:
            sandbox = await backend.create("one", SandboxSpec(), (), lambda _: None)
            assert isinstance(sandbox, LocalSandbox)
            async with sandbox.open_write(f"{sandbox.workdir}/lowest", 0o644) as writer:
                await writer.write(b"content")
                await writer.commit()
            await backend.seal(sandbox, "lowest")
            known = backend._sealed_layers._layers

            def fits(*stack: str) -> bool:
                try:
                    backend._check_layers(None, stack, (), sandbox.upper)
                except FailedPrecondition:
                    return False
                return True

            def add(layer_id: str, *below: str) -> None:
                Path(folder, "local/layers", layer_id).mkdir(mode=0o755)
                known[layer_id] = replace(known["lowest"], below=below)

            stack = ["lowest"]
            while fits(*stack, f"{len(stack):040d}"):
                stack.append(f"{len(stack):040d}")
            while fits(*stack[:-1], f"{stack[-1]}x"):
                stack[-1] += "x"
            for number in range(1, len(stack)):
                add(stack[number], *stack[:number])
            made = await backend.create("two", SandboxSpec(snapshot_id=stack[-1]), (), lambda _: None)
            assert (await made.stat(f"{made.workdir}/lowest")).size == len(b"content")
            add(f"{stack[-1]}x", *stack[:-1])
            with pytest.raises(FailedPrecondition) as caught:
                await backend.create("six", SandboxSpec(snapshot_id=f"{stack[-1]}x"), (), lambda _: None)
            assert caught.value.reason == "TOO_MANY_LAYERS"
            assert caught.value.metadata == {"layers": str(len(stack) + 1)}
        finally:
            await backend.aclose()


@pytest.mark.requirement("R47")
async def test_ordinary_users_service_starts_below_an_unreadable_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Other people's directories are in many a PATH; no runtime is looked for there."""
    locked = tmp_path / "locked"
    (locked / "bin").mkdir(parents=True)
    locked.chmod(0)
    monkeypatch.setenv("PATH", f"{locked}/bin:{os.environ['PATH']}")
    async with start("local-ordinary-user") as running:
        assert running.process.poll() is None


SHOWN = """
import os, sys
shown = sys.argv[1]
assert open(shown + "/file").read() == "content"
open(os.path.expanduser("~/written"), "w").close()
for name in (shown, os.path.dirname(shown), shown + "/file"):
    for attempt in (lambda: os.rename(name, name + "-moved"), lambda: os.chmod(name, 0o777), lambda: os.rmdir(name)):
        try:
            attempt()
        except OSError:
            continue
        sys.exit(f"{name} is the agent's to change")
"""


@pytest.mark.requirement("R90")
@pytest.mark.usefixtures("root")
async def test_visible_files_below_home_are_read_only_and_home_stays_writable() -> None:
    """An operator's environment is often in a home directory, beside which sandboxes have theirs."""
    with tempfile.TemporaryDirectory(prefix="penstock-shown-", dir="/home") as home:
        Path(home).chmod(0o755)
        shown = Path(home) / "environment"
        shown.mkdir()
        (shown / "file").write_text("content")
        async with start("local", extra_read_only=json.dumps([str(shown)])) as service:
            request = ss.CreateSandboxRequest(request_id="one")
            box = Box(service, (await service.sandboxes.CreateSandbox(request, timeout=60)).sandbox)
            ran = await box.run("python3", "-I", "-c", SHOWN, str(shown))
            assert (ran.exit.code, ran.stderr) == (0, b"")


@pytest.mark.requirement("R54")
@pytest.mark.parametrize(
    "path", ["/tmp/x", "/usr/../tmp", "/dev/shm/x", "/proc/1", "/workspace", "/home", "/home/agent/x", "/opt"]
)
def test_private_directories_of_sandboxes_are_hidden_from_them(path: str) -> None:
    """Such a path was bound and then hidden by theirs, without a word."""
    with pytest.raises(ValidationError, match=r"have their own /.*: use another path"):
        SandboxSettings(extra_read_only=(Path(path),))
