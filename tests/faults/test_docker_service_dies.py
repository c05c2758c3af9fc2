"""A kill -9 of the service leaves nothing with the Docker daemon once it is back, whatever it was doing."""

from __future__ import annotations

import asyncio
import secrets
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from tests.conformance.sandbox.conftest import Box, command
from tests.conformance.sandbox.services import Running, start_on
from tests.conformance.sandbox.test_sandboxes import fork, prepare
from tests.support.docker import dockerd
from tests.support.waiting import eventually_async

from penstock.sandbox.v1 import process_service_pb2 as ps
from penstock.sandbox.v1 import sandbox_pb2 as sb
from penstock.sandbox.v1 import sandbox_service_pb2 as ss

pytestmark = pytest.mark.asyncio


VARIANTS = pytest.mark.parametrize(
    "variant",
    [
        "docker",
        "docker-sidecar",
        pytest.param(
            "docker-gvisor",
            marks=pytest.mark.on_demand(
                "gVisor's containers at the death of their service, beside a second instance and killed: the same"
                " labels and the same daemon as of other containers of Docker's, which run"
            ),
        ),
    ],
    indirect=True,
)


@pytest_asyncio.fixture
async def variant(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """Each way into containers; what another test left with the engine would be told as this one's."""
    engine = await asyncio.to_thread(dockerd.gvisor if request.param == "docker-gvisor" else dockerd.engine)
    assert engine.remains() == []
    yield str(request.param)
    assert engine.remains() == []


async def _create(service: Running, *companions: sb.Companion) -> Box:
    request = ss.CreateSandboxRequest(request_id=secrets.token_hex(8), spec=sb.SandboxSpec(companions=companions))
    return Box(service, (await service.sandboxes.CreateSandbox(request, timeout=120)).sandbox)


async def _until(holds: Callable[[], bool], what: Callable[[], object]) -> None:
    """Wait for what the daemon still has to carry out, for as long as a busy machine may need."""

    async def held() -> bool:
        return await asyncio.to_thread(holds)

    try:
        await eventually_async(held, "the daemon is done")
    except AssertionError as late:
        raise AssertionError(what()) from late


def _attendants(folder: str) -> set[str]:
    """Processes of this machine that serve sandboxes for the service whose state is in `folder`."""
    found = set()
    for process in Path("/proc").iterdir():
        try:
            arguments = (process / "cmdline").read_bytes() if process.name.isdigit() else b""
        except OSError:
            continue
        if folder.encode() in arguments and b"attendant.py" in arguments:
            found.add(process.name)
    return found


@pytest.mark.requirement("R49", "R50")
@VARIANTS
async def test_a_killed_docker_service_leaves_nothing_with_the_daemon(variant: str) -> None:
    """Neither containers, images, volumes and networks, nor control groups, supervisors and mounts.

    Of twenty creates, which are more than the service has the daemon do at once; of twelve with gVisor, each of which
    takes this machine a second and is the same.
    """
    engine = dockerd.engine()
    with tempfile.TemporaryDirectory(prefix="penstock-fault-") as folder, engine.watched() as made:
        async with start_on(Path(folder), variant) as service:
            setup = [command(shell=f"echo {secrets.token_hex(8)} > kept")]
            forgotten = [command(shell=f"echo {secrets.token_hex(8)} > forgotten")]
            _, snapshot = await prepare(service, setup=setup)
            _, deleted = await prepare(service, setup=forgotten)
            _, above = await prepare(
                service, sandbox=sb.SandboxSpec(base=sb.Base(snapshot_id=deleted.snapshot_id)), setup=setup
            )
            # It stays for as long as the one above stands on it, and is unknown all the same.
            await service.sandboxes.DeleteSnapshot(ss.DeleteSnapshotRequest(snapshot_id=deleted.snapshot_id))
            # With gVisor there are none.
            beside = sb.Companion(name="beside", image=dockerd.TINY, entrypoint=["/bin/sleep", "4907"], user="65534")
            first = await _create(service, *([] if variant == "docker-gvisor" else [beside]))
            await first.start("p", "sleep", "4905")
            burst = [asyncio.ensure_future(_create(service)) for _ in range(12 if variant == "docker-gvisor" else 20)]
            await burst[0]
            attendants = _attendants(folder)
            assert engine.traces(made) != []
            service.process.send_signal(signal.SIGKILL)
            await asyncio.gather(*burst, return_exceptions=True)
        assert engine.remains() != []
        async with start_on(Path(folder), variant) as service:
            # The attendants of the dead service end with their containers.
            await _until(lambda: not attendants & _attendants(folder), lambda: attendants & _attendants(folder))
            # What the daemon was still told by the dead service comes to light only when it has done it.
            kept = {f"image ['penstock-snapshot:{one.snapshot_id}']" for one in (snapshot, above)}
            own = 1 if variant == "docker-gvisor" else 0  # what it is served from: this run's, no more the dead one's

            def only_what_counts() -> bool:
                left = engine.remains()
                return kept <= set(left) and len([one for one in left if "-inside-" in one]) == own == len(left) - 2

            await _until(only_what_counts, engine.remains)
            await _until(lambda: engine.traces(made) == [], lambda: engine.traces(made))
            assert await prepare(service, setup=setup) == ([], snapshot), "without a second setup"
            (child,) = await fork(service, above.snapshot_id, 1)
            assert (await child.out("cat forgotten kept")).count("\n") == 1
            await service.sandboxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=child.id), timeout=60)
            listed = await service.sandboxes.ListSnapshots(ss.ListSnapshotsRequest(), timeout=30)
            assert {one.snapshot_id for one in listed.snapshots} == {snapshot.snapshot_id, above.snapshot_id}
            assert await (await _create(service)).out("echo works") == "works"
            assert len([one for one in engine.remains() if one.startswith("container")]) == (
                2 if variant == "docker-sidecar" else 1
            )


@pytest.mark.requirement("R50")
@VARIANTS
async def test_other_instances_containers_are_left_alone(variant: str) -> None:
    """Only our own sandboxes."""
    with tempfile.TemporaryDirectory(prefix="penstock-fault-") as one, tempfile.TemporaryDirectory() as other:
        async with start_on(Path(one), variant) as mine:
            box = await _create(mine)
            async with start_on(Path(other), variant) as service:
                assert await (await _create(service)).out("echo works") == "works"
            assert await box.out("echo alive") == "alive"


@pytest.mark.requirement("R28", "R43")
@VARIANTS
async def test_externally_killed_container_is_lost_at_once(variant: str) -> None:
    engine = dockerd.engine()
    with tempfile.TemporaryDirectory(prefix="penstock-fault-") as folder:
        async with start_on(Path(folder), variant) as service:
            box = await _create(service)
            await box.start("p", "sleep", "4906")
            finishing = asyncio.ensure_future(box.finish("p"))
            watching = asyncio.ensure_future(_states(service, box.id))
            await asyncio.to_thread(engine.api.kill, f"penstock-{box.id}")
            assert (await finishing)[2].reason == ps.EXIT_REASON_SANDBOX_LOST
            assert (await watching)[-1].lost_reason


async def _states(service: Running, sandbox_id: str) -> list[sb.Sandbox]:
    stream = service.sandboxes.WatchSandbox(ss.WatchSandboxRequest(sandbox_id=sandbox_id), timeout=60)
    return [event.sandbox async for event in stream]
