"""Faults between the service and E2B: it dies, E2B errs, streams are cut, sandboxes vanish. Nothing leaks or hangs."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pydantic import SecretStr
from tests.conformance.sandbox.conftest import Box, command, failure, one_endpoint
from tests.conformance.sandbox.services import Running, start, start_on
from tests.conformance.sandbox.test_network import upstream
from tests.conformance.sandbox.test_sandboxes import fork, prepare
from tests.support.e2b_cloud.running import StandIn, stand_in
from tests.support.waiting import eventually_async

from penstock.sandbox.v1 import process_service_pb2 as ps
from penstock.sandbox.v1 import sandbox_pb2 as sb
from penstock.sandbox.v1 import sandbox_service_pb2 as ss
from penstock_chassis.errors import ResourceExhausted, Unavailable
from penstock_sandbox.backends.e2b.cloud import Address, Cloud

pytestmark = pytest.mark.asyncio(loop_scope="session")

_HTML = "<html><body>upstream connect error</body></html>"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def world() -> AsyncIterator[tuple[StandIn, Running]]:
    """A stand-in and a service on it."""
    async with stand_in() as cloud, start("e2b") as service:
        yield cloud, service


async def _create(service: Running, **spec: Any) -> Box:
    request = ss.CreateSandboxRequest(request_id=secrets.token_hex(8), spec=sb.SandboxSpec(**spec))
    return Box(service, (await service.sandboxes.CreateSandbox(request, timeout=90)).sandbox)


async def _delete(box: Box) -> None:
    await box.service.sandboxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=box.id), timeout=60)


async def _none_left(cloud: StandIn) -> None:
    async def none() -> bool:
        return await cloud.sandboxes() == []

    await eventually_async(none, "every sandbox is removed")


@pytest.mark.requirement("R50")
async def test_a_killed_e2b_service_leaves_nothing_at_e2b_once_back(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    async with stand_in() as cloud:
        async with start_on(tmp_path, "e2b") as service:
            box = await _create(service)
            await box.start("p", "sleep", "5100")
            setup = [command(shell=f"echo {secrets.token_hex(4)} > ~/mark")]
            _, snapshot = await prepare(service, setup=setup)
            asked = len(await cloud.requests("POST /v2/sandboxes"))
            burst = [asyncio.ensure_future(_create(service)) for _ in range(12)]

            async def begun() -> bool:
                return len(await cloud.requests("POST /v2/sandboxes")) >= asked + 6

            await eventually_async(begun, "the burst is under way")
            service.process.send_signal(signal.SIGKILL)
            await asyncio.gather(*burst, return_exceptions=True)
        assert len(await cloud.sandboxes()) > 0 and len(await cloud.snapshots()) == 1
        await _orphan(cloud, tmp_path)
        assert len(await cloud.snapshots()) == 2
        async with start_on(tmp_path, "e2b") as service:
            await _none_left(cloud)
            # What it had prepared is there still, without a second setup; what nobody remembers is not.
            (kept,) = await cloud.snapshots()
            assert snapshot.snapshot_id in str(kept)
            assert await prepare(service, setup=setup) == ([], snapshot)
            listed = (await service.sandboxes.ListSandboxes(ss.ListSandboxesRequest(), timeout=30)).sandboxes
            assert box.id in [one.sandbox_id for one in listed]
            assert {(one.state, one.lost_reason) for one in listed} == {(sb.SANDBOX_STATE_LOST, "SERVICE_RESTARTED")}
            (fresh,) = await fork(service, snapshot.snapshot_id, 1)
            assert (await fresh.run("test", "-s", "/home/user/mark")).exit.code == 0
            # One that was deleted is deleted for the next start too.
            await service.sandboxes.DeleteSnapshot(
                ss.DeleteSnapshotRequest(snapshot_id=snapshot.snapshot_id), timeout=30
            )
            service.process.send_signal(signal.SIGKILL)
        async with start_on(tmp_path, "e2b") as service:
            await _none_left(cloud)
            assert await cloud.snapshots() == []
            assert not (await service.sandboxes.ListSnapshots(ss.ListSnapshotsRequest(), timeout=30)).snapshots


async def _orphan(cloud: StandIn, state_dir: Path) -> None:
    """A snapshot that a killed service had asked for, and that E2B made after its death."""
    instance = (state_dir / "state/e2b/instance").read_text()
    (first, *_) = await cloud.sandboxes()
    address = Address(SecretStr(cloud.api_key), api_url=cloud.address, sandbox_url=cloud.address)
    await Cloud(address, instance).create_snapshot(first["sandboxID"], "ss-nobodys")


@pytest.mark.requirement("R50")
async def test_somebody_elses_sandboxes_are_never_touched(tmp_path: Path) -> None:
    """Only our own are reaped."""
    async with stand_in() as cloud:
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        async with start_on(tmp_path / "a", "e2b") as first:
            box = await _create(first)
            async with start_on(tmp_path / "b", "e2b") as second:
                assert (await (await _create(second)).run("true")).exit.code == 0
            assert (await box.run("true")).exit.code == 0
        assert await cloud.sandboxes() == []


@pytest.mark.requirement("R51")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("status", [429, 500, 502, 503])
async def test_errors_that_pass_are_ridden_out_and_make_one_sandbox(
    world: tuple[StandIn, Running], status: int, after: bool
) -> None:
    """Also where the sandbox was made and only the answer was lost, and where the answer is no JSON."""
    cloud, service = world
    await cloud.fail("POST /v2/sandboxes", 2, status=status, body=_HTML, headers={"Retry-After": "0"}, after=after)
    box = await _create(service)
    assert (await box.run("echo", "made")).stdout == b"made\n"
    assert len(await cloud.sandboxes()) == 1
    await _delete(box)
    assert await cloud.sandboxes() == []


@pytest.mark.requirement("R49", "R51")
@pytest.mark.parametrize(
    ("how", "kind", "reason"),
    [
        ({"status": 429, "body": '{"code":429,"message":"slow down"}'}, ResourceExhausted, "PROVIDER_LIMIT"),
        ({"status": 500, "body": _HTML}, Unavailable, "PROVIDER_FAILED"),
        ({"drop": True}, Unavailable, "PROVIDER_FAILED"),
    ],
    ids=["429", "500", "cut"],
)
async def test_permanent_errors_keep_their_type_and_leave_nothing(
    world: tuple[StandIn, Running], how: dict[str, Any], kind: type[Exception], reason: str
) -> None:
    """With the delay after which to try again."""
    cloud, service = world
    await cloud.fail("POST /v2/sandboxes", 100, headers={"Retry-After": "0"}, after=True, **how)
    request = ss.CreateSandboxRequest(request_id=secrets.token_hex(8), spec=sb.SandboxSpec())
    error = await failure(service.sandboxes.CreateSandbox(request, timeout=90))
    assert isinstance(error, kind) and error.reason == reason and error.retry_after_s
    await cloud.fail("nothing", 0)
    await _none_left(cloud)


@pytest.mark.requirement("R50", "R70")
async def test_a_removal_that_fails_is_tried_until_it_succeeds(world: tuple[StandIn, Running]) -> None:
    """Whoever deletes is not kept waiting for that."""
    cloud, service = world
    box = await _create(service)
    await cloud.fail("DELETE /sandboxes/", 3, status=500, body=_HTML)
    await _delete(box)
    await _none_left(cloud)


@pytest.mark.requirement("R50")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_failed_snapshot_is_not_repeated_and_its_sandbox_is_removed(
    world: tuple[StandIn, Running], after: bool
) -> None:
    """What cannot be kept keeps no sandbox, also where the snapshot was made and only the answer was lost."""
    cloud, service = world
    setup = [command(shell=f"echo {secrets.token_hex(4)} > ~/mark")]
    await cloud.fail("POST /sandboxes/", 100, status=500, body=_HTML, after=after)
    assert isinstance(await failure(prepare(service, setup=setup)), Unavailable)

    async def forgotten() -> bool:
        return not (await service.sandboxes.ListSandboxes(ss.ListSandboxesRequest(), timeout=30)).sandboxes

    await eventually_async(forgotten, "the sandbox is deleted while E2B still makes no snapshots")
    await _none_left(cloud)

    async def none_kept() -> bool:
        return await cloud.snapshots() == []

    await eventually_async(none_kept, "what was made is removed")
    await cloud.fail("nothing", 0)
    _, snapshot = await prepare(service, setup=setup)
    assert [snapshot.snapshot_id in str(one) for one in await cloud.snapshots()] == [True]
    await service.sandboxes.DeleteSnapshot(ss.DeleteSnapshotRequest(snapshot_id=snapshot.snapshot_id), timeout=30)


@pytest.mark.requirement("R26", "R59")
async def test_cut_streams_lose_and_double_no_byte_of_output(world: tuple[StandIn, Running]) -> None:
    cloud, service = world
    box = await _create(service)
    lines = 60_000
    await box.start("out", "bash", "-c", f"read; seq 1 {lines}; exit 7", stdin=True)
    watching = asyncio.create_task(box.finish("out"))
    assert await cloud.drop_streams() >= 1
    await box.write_stdin("out", b"go\n")
    for _ in range(3):
        await cloud.drop_streams()
        assert (await box.run("echo", "between")).stdout == b"between\n"
    stdout, _, ended = await watching
    assert stdout == "".join(f"{number}\n" for number in range(1, lines + 1)).encode()
    assert ended.code == 7
    await _delete(box)


@pytest.mark.requirement("R28", "R34")
async def test_a_model_call_survives_a_cut_stream(world: tuple[StandIn, Running]) -> None:
    """The connection inside does not notice."""
    cloud, service = world
    asked = asyncio.Event()
    answer = asyncio.Event()

    async def model(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        asked.set()
        await answer.wait()
        writer.write(b"an answer\n")
        await writer.drain()
        writer.close()

    async with upstream(model) as address:
        box = await _create(service, network=one_endpoint(address))
        talk = "exec 3<>/dev/tcp/127.0.0.1/4000; echo question >&3; cat <&3"
        await box.start("agent", "bash", "-c", talk)
        await asked.wait()
        assert await cloud.drop_streams() >= 1
        answer.set()
        assert (await box.finish("agent"))[0] == b"an answer\n"
        await _delete(box)


@pytest.mark.requirement("R28", "R43")
async def test_a_sandbox_that_vanishes_is_lost_at_once_for_everybody(world: tuple[StandIn, Running]) -> None:
    """No hang, and the next call says so too."""
    cloud, service = world
    box = await _create(service)
    await box.start("p", "sleep", "5200")
    finishing = asyncio.create_task(box.finish("p"))
    running = asyncio.create_task(failure(box.run("sleep", "5201")))
    states = service.sandboxes.WatchSandbox(ss.WatchSandboxRequest(sandbox_id=box.id), timeout=60)
    await cloud.vanish(box.id)
    assert (await finishing)[2].reason == ps.EXIT_REASON_SANDBOX_LOST
    last = [event.sandbox async for event in states][-1]
    assert (last.state, last.lost_reason) == (sb.SANDBOX_STATE_LOST, "SANDBOX_VANISHED")
    assert (await failure(box.run("true"))).reason == "SANDBOX_LOST"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await _delete(box)


@pytest.mark.requirement("R27", "R55")
async def test_unreachable_e2b_is_reported_and_the_backend_recovers(tmp_path: Path) -> None:
    async with stand_in() as cloud:
        await cloud.fail("GET /v2/sandboxes", 4, status=500, body=_HTML)
        async with start_on(tmp_path, "e2b") as service:
            error = await failure(
                service.sandboxes.CreateSandbox(ss.CreateSandboxRequest(request_id="early"), timeout=60)
            )
            assert error.reason == "BACKEND_UNAVAILABLE"

            async def there() -> bool:
                answer = await service.sandboxes.ListBackends(ss.ListBackendsRequest(), timeout=30)
                return any(backend.name == "e2b" and backend.available for backend in answer.backends)

            await eventually_async(there, "the backend comes back")
            assert (await (await _create(service)).run("true")).exit.code == 0
