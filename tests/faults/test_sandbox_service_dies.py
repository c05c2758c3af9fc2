"""A kill -9 at any moment leaves no process, mount, control group or directory once the service is back."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import tempfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.conformance.sandbox.conftest import Box, failure
from tests.conformance.sandbox.services import Running, start_on
from tests.support.services.leftovers import groups_in, groups_of, layers_of, mounts_with, processes_with, sandboxes_of
from tests.support.services.processes import argv_of, children_of
from tests.support.waiting import eventually

from penstock.sandbox.v1 import process_service_pb2 as ps
from penstock.sandbox.v1 import sandbox_pb2 as sb
from penstock.sandbox.v1 import sandbox_service_pb2 as ss
from penstock_chassis.channel import error_from_rpc
from penstock_chassis.errors import FailedPrecondition

pytestmark = pytest.mark.asyncio


async def _create(service: Running) -> Box:
    request = ss.CreateSandboxRequest(request_id=secrets.token_hex(8), spec=sb.SandboxSpec())
    return Box(service, (await service.sandboxes.CreateSandbox(request, timeout=60)).sandbox)


def _freezes_so_that_nothing_dies() -> bool:
    """Where only v1's freezer is there, a frozen process dies when the next start thaws it."""
    return "cgroup2" not in Path("/proc/self/mounts").read_text()


async def _until_gone(marker: str) -> None:
    """The kernel ends the dependants of a killed process by itself; it takes a moment."""
    await eventually(lambda: not processes_with(marker), f"processes with {marker} are gone")


async def _all(stream: Any) -> list[Any]:
    return [event async for event in stream]


@pytest.mark.requirement("R50")
@pytest.mark.parametrize("kill_after", [0, 20, 40])
async def test_a_sandbox_service_killed_in_a_burst_leaves_nothing(kill_after: int) -> None:
    """No process, mount, control group or directory of any of them, those that are being made included."""
    with tempfile.TemporaryDirectory(prefix="penstock-fault-") as folder:
        state_dir = Path(folder)
        marker = secrets.token_hex(8)
        async with start_on(state_dir, "local") as service:
            box = await _create(service)
            await box.start(
                "p", "bash", "-c", f"exec -a {marker} sleep 4900 & setsid bash -c 'exec -a {marker} sleep 4901'"
            )
            # Frozen ones do not even notice that everything around them dies.
            frozen = await _create(service)
            await frozen.start("p", "bash", "-c", f"exec -a {marker} sleep 4903")
            await service.sandboxes.PauseSandbox(ss.PauseSandboxRequest(sandbox_id=frozen.id), timeout=30)
            await box.out("dd if=/dev/urandom of=large bs=1M count=32 2>/dev/null")
            burst = [asyncio.ensure_future(_create(service)) for _ in range(50)]
            fork = ss.ForkSandboxesRequest(request_id=marker, sandbox_id=box.id, count=8)
            forking = asyncio.ensure_future(_all(service.sandboxes.ForkSandboxes(fork, timeout=60)))
            await burst[kill_after]
            service.process.send_signal(signal.SIGKILL)
            await asyncio.gather(*burst, forking, return_exceptions=True)
            lost = await asyncio.gather(box.run("true"), return_exceptions=True)
            assert isinstance(lost[0], grpc.aio.AioRpcError)
        if not _freezes_so_that_nothing_dies():
            await _until_gone(marker)
            await _until_gone(str(state_dir))
        assert mounts_with(folder) == []
        async with start_on(state_dir, "local") as service:
            # What it was making and what it had made are told as lost, with the reason.
            listed = (await service.sandboxes.ListSandboxes(ss.ListSandboxesRequest(), timeout=30)).sandboxes
            assert box.id in [one.sandbox_id for one in listed]
            assert {(one.state, one.lost_reason) for one in listed} == {(sb.SANDBOX_STATE_LOST, "SERVICE_RESTARTED")}
            call = service.processes.Run(ps.RunRequest(sandbox_id=box.id, command=ps.Command(shell="true")))
            error = await failure(call)
            assert isinstance(error, FailedPrecondition) and error.reason == "SANDBOX_LOST"
            # Nothing of them is there any more, and new ones work.
            await _until_gone(marker)
            assert sandboxes_of(state_dir) == [] and layers_of(state_dir) == []
            assert [group for group in groups_of(state_dir) if groups_in(group)] == []
            assert (await (await _create(service)).run("true")).exit.code == 0
        assert groups_of(state_dir) == []


@pytest.mark.requirement("R70")
async def test_a_stopped_service_leaves_nothing() -> None:
    with tempfile.TemporaryDirectory(prefix="penstock-fault-") as folder:
        async with start_on(Path(folder), "local") as service:
            for _ in range(3):
                await (await _create(service)).start("p", "sleep", "4902")
        assert processes_with(folder) == [] and mounts_with(folder) == []
        assert sandboxes_of(Path(folder)) == [] and groups_of(Path(folder)) == []
        assert service.process.returncode == 0


def _kill_spawner(service: Running) -> None:
    (spawner,) = [
        pid
        for pid in children_of(service.process.pid)
        if any(b"penstock_sandbox.backends.local.spawner.main" in one for one in argv_of(pid))
    ]
    os.kill(spawner, signal.SIGKILL)


@pytest.mark.requirement("R43", "R74")
async def test_setup_whose_sandbox_is_lost_has_not_failed() -> None:
    """A caller may prepare the snapshot again: the command is not at fault."""
    with tempfile.TemporaryDirectory(prefix="penstock-fault-") as folder:
        async with start_on(Path(folder), "local") as service:
            # No other run on this machine sleeps as long.
            seconds = str(10**6 + secrets.randbelow(10**9))
            spec = ss.SnapshotSpec(setup=[ps.Command(argv=ps.Argv(args=["sleep", seconds]))])
            events = service.sandboxes.PrepareSnapshot(ss.PrepareSnapshotRequest(spec=spec), timeout=60)
            reasons = []
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for event in events:
                    if event.HasField("command_started"):
                        await eventually(lambda: bool(processes_with(seconds)), "the command runs")
                        _kill_spawner(service)
                    elif event.HasField("command_finished"):
                        reasons.append(event.command_finished.result.exit.reason)
            assert reasons == [ps.EXIT_REASON_SANDBOX_LOST]
            assert error_from_rpc(caught.value).reason == "SANDBOX_LOST"


@pytest.mark.requirement("R43")
async def test_dead_spawner_loses_its_sandboxes_and_new_ones_are_made() -> None:
    with tempfile.TemporaryDirectory(prefix="penstock-fault-") as folder:
        async with start_on(Path(folder), "local") as service:
            box = await _create(service)
            await box.start("p", "sleep", "4903")
            finishing = asyncio.ensure_future(box.finish("p"))
            _kill_spawner(service)
            assert (await finishing)[2].reason == ps.EXIT_REASON_SANDBOX_LOST
            assert (await failure(box.run("true"))).reason == "SANDBOX_LOST"
            assert (await (await _create(service)).run("true")).exit.code == 0


@pytest.mark.requirement("R52")
async def test_a_second_service_on_the_same_state_is_refused() -> None:
    """It would remove the first one's sandboxes as leftovers."""
    with tempfile.TemporaryDirectory(prefix="penstock-fault-") as folder:
        async with start_on(Path(folder), "local") as service:
            box = await _create(service)
            with pytest.raises(AssertionError, match="did not start"):
                async with start_on(Path(folder), "local"):
                    pass
            assert (await box.run("true")).exit.code == 0
