"""What is E2B's own in its backend: what is asked of it, who may change what inside, and what is refused before.

Everything goes through the unmodified SDK to the stand-in (`tests/support/e2b_cloud`), whose sandboxes are real.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration
from pydantic import SecretStr
from structlog.testing import capture_logs
from tests.conformance.sandbox.conftest import Box, command, failure, one_endpoint
from tests.conformance.sandbox.services import Running, start, start_on
from tests.conformance.sandbox.test_network import TALK, upstream
from tests.conformance.sandbox.test_pause import pause, resume
from tests.conformance.sandbox.test_sandboxes import fork, prepare
from tests.conformance.sandbox.test_toolboxes import prepare as prepare_toolbox
from tests.conformance.sandbox.test_toolboxes import script
from tests.support.docker.backend import run as in_sandbox
from tests.support.e2b_cloud.running import StandIn, stand_in
from tests.support.hoppers import kill_each_chain
from tests.support.waiting import eventually_async

from penstock.sandbox.v1 import process_service_pb2 as ps
from penstock.sandbox.v1 import sandbox_pb2 as sb
from penstock.sandbox.v1 import sandbox_service_pb2 as ss
from penstock.sandbox.v1 import toolbox_service_pb2 as tb
from penstock_chassis.errors import FailedPrecondition, InvalidArgument, PenstockError
from penstock_sandbox.backends.e2b.backend import E2BBackend, E2BOptions
from penstock_sandbox.backends.e2b.cloud import Address
from penstock_sandbox.backends.e2b.sandbox import E2BSandbox
from penstock_sandbox.domain.backend import MountedToolbox
from penstock_sandbox.domain.model import FileKind, ForkKind, NetworkKind, SandboxSpec

pytestmark = pytest.mark.asyncio(loop_scope="session")

World = tuple[StandIn, Running]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def world() -> AsyncIterator[World]:
    """A stand-in and a service on it, which offers open networks too."""
    async with stand_in() as cloud, start("e2b", allow_open_network="true") as service:
        yield cloud, service


@asynccontextmanager
async def box_of(service: Running, **spec: Any) -> AsyncIterator[Box]:
    """A sandbox, deleted at the end."""
    request = ss.CreateSandboxRequest(request_id=secrets.token_hex(8), spec=sb.SandboxSpec(**spec))
    box = Box(service, (await service.sandboxes.CreateSandbox(request, timeout=60)).sandbox)
    try:
        yield box
    finally:
        await service.sandboxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=box.id), timeout=60)


async def shown(cloud: StandIn, box: Box) -> dict[str, Any]:
    """A sandbox as E2B shows it."""
    (found,) = [one for one in await cloud.sandboxes() if one["metadata"]["penstock_sandbox"] == box.id]
    return found


# What is asked of E2B ------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R1", "R50", "R51")
async def test_a_sandbox_is_asked_for_once_labelled_closed_and_with_a_deadline(world: World) -> None:
    """The label that says whose it is, a key that makes repeats one, no public port, no secret."""
    cloud, service = world
    async with box_of(service, lease=Duration(seconds=300), env={"SECRET": "sk-test '$(leak)"}) as box:
        asked = [one for one in await cloud.requests("POST /v2/sandboxes") if box.id in str(one)]
        assert len(asked) == 1
        body = asked[0]["body"]
        assert asked[0]["headers"]["Idempotency-Key".lower()] == box.id.replace(".", "-")
        assert set(body["metadata"]) == {"penstock_instance", "penstock_sandbox"}
        assert body["allow_internet_access"] is False
        assert body["network"] == {"allowPublicTraffic": False}
        assert body["timeout"] == 360
        e2b_id = (await shown(cloud, box))["sandboxID"]
        assert await deadlines(cloud, e2b_id) == [360], "counted from READY"
        assert "sk-test" not in str(body) and cloud.api_key not in str(body)
    assert box.id not in str(await cloud.sandboxes())


async def deadlines(cloud: StandIn, e2b_id: str) -> list[int]:
    """What E2B was asked for after the creation, in seconds."""
    return [one["body"]["timeout"] for one in await cloud.requests(f"POST /sandboxes/{e2b_id}/timeout")]


@pytest.mark.requirement("R50", "R61")
async def test_a_creation_uses_none_of_a_lease(world: World) -> None:
    """Toolboxes may take long to upload."""
    cloud, service = world
    spec = tb.ToolboxSpec(name=f"box-{secrets.token_hex(4)}", files=[script("#!/bin/sh\necho mine")])
    made = await prepare_toolbox(service, spec)
    async with box_of(service, lease=Duration(seconds=30), toolbox_ids=[made.toolbox_id]) as box:
        (asked,) = [one["body"] for one in await cloud.requests("POST /v2/sandboxes") if box.id in str(one)]
        assert asked["timeout"] == 600 + 600 + 60
        assert await deadlines(cloud, (await shown(cloud, box))["sandboxID"]) == [90]


@pytest.mark.requirement("R50", "R61")
async def test_a_renewed_lease_moves_e2bs_own_deadline(world: World) -> None:
    cloud, service = world
    async with box_of(service, lease=Duration(seconds=300)) as box:
        renew = ss.RenewLeaseRequest(sandbox_id=box.id, lease=Duration(seconds=1200))
        await service.sandboxes.RenewLease(renew, timeout=30)
        e2b_id = (await shown(cloud, box))["sandboxID"]
        assert await deadlines(cloud, e2b_id) == [360, 1260]


@pytest.mark.requirement("R63")
async def test_lease_not_extended_by_e2b_is_reported_and_unchanged(world: World) -> None:
    """Every accepted option takes effect or is refused."""
    cloud, service = world
    async with box_of(service, lease=Duration(seconds=300)) as box:
        e2b_id = (await shown(cloud, box))["sandboxID"]
        await cloud.fail(f"POST /sandboxes/{e2b_id}/timeout", status=400, body='{"code":400,"message":"no"}')
        renew = ss.RenewLeaseRequest(sandbox_id=box.id, lease=Duration(seconds=1200))
        error = await failure(service.sandboxes.RenewLease(renew, timeout=30))
        assert isinstance(error, FailedPrecondition) and error.reason == "LEASE_REFUSED"
        got = await service.sandboxes.GetSandbox(ss.GetSandboxRequest(sandbox_id=box.id), timeout=30)
        assert got.sandbox.expire_time == box.sandbox.expire_time


@pytest.mark.requirement("R14", "R54")
async def test_open_network_is_closed_at_e2b_when_its_policy_narrows(world: World) -> None:
    cloud, service = world
    async with upstream() as address, box_of(service, network=sb.NetworkPolicy(open=sb.OpenNetwork())) as box:
        before = await shown(cloud, box)
        assert before["allowInternetAccess"] is True and before["network"]["allowPublicTraffic"] is False
        narrow = ss.SetNetworkPolicyRequest(sandbox_id=box.id, network=one_endpoint(address))
        await service.sandboxes.SetNetworkPolicy(narrow, timeout=30)
        after = await shown(cloud, box)
        assert after["allowInternetAccess"] is False and after["network"]["allowPublicTraffic"] is False
        assert (await box.run(shell=TALK, stdin=b"hello")).stdout == b"echo:hello"


@pytest.mark.requirement("R52")
async def test_toolboxes_enter_the_prepared_state_once_and_no_fork(world: World) -> None:
    """A rollout never installs anything."""
    cloud, service = world
    name = f"box-{secrets.token_hex(4)}"
    made = await prepare_toolbox(service, tb.ToolboxSpec(name=name, files=[script("#!/bin/sh\necho mine")]))
    before = len(await _uploads(cloud))
    spec = sb.SandboxSpec(toolbox_ids=[made.toolbox_id])
    _, snapshot = await prepare(service, sandbox=spec, setup=[command(shell=f"tool; echo {name}")])
    boxes = await fork(service, snapshot.snapshot_id, 3)
    for box in boxes:
        assert await box.out("tool; command -v tool") == f"mine\n{made.mount_path}/bin/tool"
        assert (await box.run(shell=f"echo worse > {made.mount_path}/bin/tool")).exit.code != 0
        await service.sandboxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=box.id), timeout=30)
    assert len(await _uploads(cloud)) == before + 1
    (kept,) = [one for one in await cloud.snapshots() if snapshot.snapshot_id in str(one)]
    await service.sandboxes.DeleteSnapshot(ss.DeleteSnapshotRequest(snapshot_id=snapshot.snapshot_id), timeout=30)
    assert kept not in await cloud.snapshots()


@pytest.mark.requirement("R52", "R63")
async def test_a_sandbox_from_a_snapshot_has_its_own_toolboxes_too(world: World) -> None:
    """Only what the snapshot lacks is uploaded, and another one of the same name takes its place."""
    cloud, service = world

    async def toolbox(name: str, **contents: str) -> str:
        files = [tb.ToolboxFile(path=f"bin/{tool}", content=text.encode()) for tool, text in contents.items()]
        return (await prepare_toolbox(service, tb.ToolboxSpec(name=name, files=files))).toolbox_id

    name, other = f"box-{secrets.token_hex(4)}", f"box-{secrets.token_hex(4)}"
    first = await toolbox(name, tool="#!/bin/sh\necho first", stale="#!/bin/sh\n")
    newer = await toolbox(name, tool="#!/bin/sh\necho newer")
    added = await toolbox(other, added="#!/bin/sh\necho added")
    _, below = await prepare(service, sandbox=sb.SandboxSpec(toolbox_ids=[first]), setup=[command(shell="tool")])
    base = sb.Base(snapshot_id=below.snapshot_id)
    before = len(await _uploads(cloud))
    async with box_of(service, base=base, toolbox_ids=[first]) as box:
        assert await box.out("tool") == "first"
    assert len(await _uploads(cloud)) == before
    async with box_of(service, base=base, toolbox_ids=[newer]) as box:
        assert await box.out("tool; command -v stale || echo none") == "newer\nnone"
    spec = sb.SandboxSpec(base=base, toolbox_ids=[first, added])
    _, above = await prepare(service, sandbox=spec, setup=[command(shell="tool; added")])
    assert len(await _uploads(cloud)) == before + 2
    (fork_of_both,) = await fork(service, above.snapshot_id, 1)
    assert await fork_of_both.out("tool; added") == "first\nadded"
    assert len(await _uploads(cloud)) == before + 2
    await service.sandboxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=fork_of_both.id), timeout=30)


@pytest.mark.requirement("R50", "R52")
async def test_a_kept_snapshots_toolboxes_are_known_to_the_next_start(tmp_path: Path) -> None:
    async with stand_in() as cloud:
        files = [script("#!/bin/sh\necho mine")]
        for _ in range(2):
            async with start_on(tmp_path, "e2b", keep_snapshots="true") as service:
                made = await prepare_toolbox(service, tb.ToolboxSpec(name="kept", files=files))
                _, snapshot = await prepare(service, sandbox=sb.SandboxSpec(toolbox_ids=[made.toolbox_id]))
                (box,) = await fork(service, snapshot.snapshot_id, 1)
                assert await box.out("tool") == "mine"
        assert len(await _uploads(cloud)) == 1


@pytest.mark.requirement("R52")
async def test_toolboxes_of_a_snapshot_without_a_record_are_uploaded_again(tmp_path: Path) -> None:
    """As of one that an earlier version made; they are the same afterwards."""
    source = tmp_path / "content"
    source.mkdir(mode=0o755)
    (source / "file").write_text("same")
    box = MountedToolbox("old", source, "/opt/penstock/toolboxes/old", (), {})
    async with stand_in() as cloud, _backend(cloud, tmp_path / "state") as backend:
        parent = await backend.create("sb-1", SandboxSpec(lease_s=60.0), [box], lambda _: None)
        assert isinstance(parent, E2BSandbox)
        await parent.made.commands.run("rm /opt/penstock/attendant/toolboxes", user="root")
        await backend.seal(parent, "ss-1")
        spec = SandboxSpec(snapshot_id="ss-1", lease_s=60.0)
        child = await backend.create("sb-2", spec, [box], lambda _: None)
        assert len(await _uploads(cloud)) == 2
        assert await in_sandbox(child, "cat", f"{box.mount_path}/file") == (0, "same")
        await child.destroy()
        await backend.remove_layer("ss-1")


@pytest.mark.requirement("R72")
async def test_the_start_files_of_an_agents_shell_do_not_make_its_fork_run_as_root(tmp_path: Path) -> None:
    """E2B runs a command in the user's login shell, which reads them before."""
    async with stand_in() as cloud, _backend(cloud, tmp_path / "state") as backend:
        parent = await backend.create("sb-1", SandboxSpec(lease_s=60.0), [], lambda _: None)
        assert isinstance(parent, E2BSandbox)
        forged = "printf '\\npenstock:0:0:root:/root\\n'"
        for name in (".profile", ".bash_profile"):
            assert (await in_sandbox(parent, "sh", "-c", f'echo "{forged}" > ~/{name}'))[0] == 0
        await backend.seal(parent, "ss-1")
        child = await backend.create("sb-2", SandboxSpec(snapshot_id="ss-1", lease_s=60.0), [], lambda _: None)
        assert (await in_sandbox(child, "id", "-un"))[1].split() == ["user"]
        await child.destroy()
        await backend.remove_layer("ss-1")


@pytest.mark.requirement("R49", "R63")
async def test_toolboxes_that_cannot_be_unpacked_fail_the_creation(tmp_path: Path) -> None:
    source = tmp_path / "content"
    source.mkdir(mode=0o755)
    box = MountedToolbox("bad", source, "/usr/bin/env/bad", (), {})
    async with stand_in() as cloud, _backend(cloud, tmp_path / "state") as backend:
        with pytest.raises(FailedPrecondition) as refusal:
            await backend.create("sb-1", SandboxSpec(lease_s=60.0), [box], lambda _: None)
        assert refusal.value.reason == "TEMPLATE_UNSUITABLE"
        assert await cloud.sandboxes() == []


async def _uploads(cloud: StandIn) -> list[dict[str, Any]]:
    return [one for one in await cloud.requests("POST /files") if "toolboxes" in one["query"].get("path", "")]


@pytest.mark.requirement("R60", "R76")
async def test_setup_processes_are_ended_before_the_snapshot(world: World) -> None:
    """A fork holds files, and nothing of another sandbox's processes."""
    _, service = world
    # It writes for as long as it lives; a copy that was taken meanwhile may hold half a line.
    loop = f"while :; do echo {secrets.token_hex(4)} >> ~/log; done"
    setup = command(shell=f"setsid bash -c '{loop}' >/dev/null 2>&1 & until test -s ~/log; do :; done")
    _, snapshot = await prepare(service, setup=[setup])
    (box,) = await fork(service, snapshot.snapshot_id, 1)
    size = await box.out("stat -c %s ~/log")
    assert int(size) > 0 and int(size) % 9 == 0
    assert await box.out("stat -c %s ~/log") == size
    await service.sandboxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=box.id), timeout=30)


# Pauses, copies and figures ------------------------------------------------------------------------------------------


@pytest.mark.requirement("R55")
async def test_a_trial_shows_what_the_deployment_does_and_leaves_nothing(tmp_path: Path) -> None:
    """A deployment without these routes has everything else, and a refusal by name."""
    async with stand_in() as cloud:
        for missing in ({}, {"refuse_pause": True}, {"refuse_snapshots": True, "refuse_pause": False}):
            await cloud.behave(**missing)
            async with _backend(cloud, tmp_path) as backend:
                assert backend.available
                can = backend.capabilities
                assert can.pause is ("refuse_pause" not in str(missing) or not missing.get("refuse_pause"))
                assert can.live_fork is ("refuse_snapshots" not in missing)
                assert (can.fork is ForkKind.FILESYSTEM) is can.live_fork
            assert await cloud.sandboxes() == [] and await cloud.snapshots() == []


@pytest.mark.requirement("R40", "R50", "R61")
async def test_paused_sandbox_is_stopped_at_e2b_and_keeps_its_lease(world: World) -> None:
    cloud, service = world
    async with box_of(service, lease=Duration(seconds=600)) as box:
        await box.start("one", "sleep", "5301")
        await box.start("two", "sleep", "5302")
        await pause(box)
        e2b = await shown(cloud, box)
        assert e2b["state"] == "paused"
        before = len(await _switches(cloud, e2b["sandboxID"]))
        # No deadline can be moved while there is none; the next start of it gets the new one.
        renew = ss.RenewLeaseRequest(sandbox_id=box.id, lease=Duration(seconds=1200))
        await service.sandboxes.RenewLease(renew, timeout=30)
        assert await deadlines(cloud, e2b["sandboxID"]) == [660], "of the creation"
        assert (await box.kill("one")).reason == ps.EXIT_REASON_KILLED
        told = await _switches(cloud, e2b["sandboxID"])
        assert [one["path"].rpartition("/")[2] for one in told[before:]] == ["connect", "pause"]
        assert 1200 < told[before]["body"]["timeout"] <= 1260
        assert (await shown(cloud, box))["state"] == "paused"
        await resume(box)
        assert await box.out("pgrep -f 'sleep 530[12]' | wc -l; pgrep -x sleep | wc -l") == "1\n1"


@pytest.mark.requirement("R50")
async def test_a_sandbox_that_ends_while_it_is_paused_leaves_no_process_behind(world: World) -> None:
    """What waits at the stand-in for a command that stands still goes with the sandbox."""
    cloud, service = world
    before = cloud.children()
    async with box_of(service) as box:
        await box.start("p", "sleep", "4930")
        await pause(box)
        assert not cloud.children() <= before
    assert cloud.children() <= before


@pytest.mark.requirement("R26", "R55")
async def test_pause_with_a_lost_answer_leaves_a_consistent_state(world: World) -> None:
    """It is not lost, and what was said to be paused is."""
    cloud, service = world
    async with box_of(service) as box:
        await box.start("p", "sleep", "5303")
        e2b = (await shown(cloud, box))["sandboxID"]
        # Repeated, it is answered that it is so already.
        await cloud.fail(f"POST /sandboxes/{e2b}/pause", 1, status=500, body="<html>", after=True)
        await pause(box)
        assert (await shown(cloud, box))["state"] == "paused"
        await resume(box)
        await cloud.fail(f"POST /sandboxes/{e2b}/pause", 100, status=500, body="<html>", after=True)
        error = await failure(service.sandboxes.PauseSandbox(ss.PauseSandboxRequest(sandbox_id=box.id), timeout=90))
        assert error.reason == "PAUSE_FAILED"
        await cloud.fail("nothing", 0)
        assert (await shown(cloud, box))["state"] == "running" and await box.out("echo on") == "on"
        assert not (
            await service.processes.GetProcess(ps.GetProcessRequest(sandbox_id=box.id, process_id="p"))
        ).process.HasField("exit")


@pytest.mark.requirement("R43")
async def test_vanished_paused_sandbox_is_lost_on_resume(world: World) -> None:
    cloud, service = world
    async with box_of(service) as box:
        await pause(box)
        await cloud.vanish(box.id)
        error = await failure(service.sandboxes.ResumeSandbox(ss.ResumeSandboxRequest(sandbox_id=box.id), timeout=60))
        assert error.reason == "SANDBOX_LOST"
        got = await service.sandboxes.GetSandbox(ss.GetSandboxRequest(sandbox_id=box.id), timeout=30)
        assert (got.sandbox.state, got.sandbox.lost_reason) == (sb.SANDBOX_STATE_LOST, "SANDBOX_VANISHED")


@pytest.mark.requirement("R32")
async def test_a_pause_or_resume_that_is_cancelled_is_taken_back(tmp_path: Path) -> None:
    """Nobody was told that it is paused, so it is not, and the other way round."""
    async with stand_in() as cloud, _backend(cloud, tmp_path) as backend:
        handle = await backend.create("sb-1", SandboxSpec(lease_s=60.0), (), lambda _: None)
        for change, state in ((handle.pause, "running"), (handle.resume, "paused")):
            changing = asyncio.create_task(change())
            # It has begun, and E2B is further away than that.
            for _ in range(5):
                await asyncio.sleep(0)
            changing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await changing
            assert [one["state"] for one in await cloud.sandboxes()] == [state]
            if state == "running":
                assert (await handle.stat("/")).kind is FileKind.DIRECTORY
                await handle.pause()
        await handle.destroy()
        assert await cloud.sandboxes() == []


@pytest.mark.requirement("R74")
async def test_statistics_are_e2bs_where_it_has_them_and_otherwise_unknown(world: World) -> None:
    """Not measured is not zero."""
    cloud, service = world
    async with box_of(service) as box:
        await box.out("dd if=/dev/urandom of=large bs=1M count=8 2>/dev/null")
        wanted = ss.GetStatsRequest(sandbox_id=box.id)
        large = 1 << 27
        before = (await service.sandboxes.GetStats(wanted, timeout=30)).memory_bytes

        await box.start("p", "python3", "-c", "x = bytearray(1 << 27); input()", stdin=True)

        async def held() -> bool:
            return (await service.sandboxes.GetStats(wanted, timeout=30)).memory_bytes > before + large // 2

        await eventually_async(held, "the memory shows")
        await box.kill("p")

        async def freed() -> bool:
            now = await service.sandboxes.GetStats(wanted, timeout=30)
            # What was held when it first showed may be only some of it: the program was still at it.
            return now.memory_bytes + large // 4 < now.memory_peak_bytes

        await eventually_async(freed, "the memory is free again, and the most that was held stays known")
        after = await service.sandboxes.GetStats(wanted, timeout=30)
        assert after.disk_bytes > 8 << 20
        assert not after.HasField("pids") and not after.HasField("cpu_time")
        await cloud.behave(refuse_metrics=True)
        none = await service.sandboxes.GetStats(wanted, timeout=30)
        await cloud.behave(refuse_metrics=False)
        assert not none.HasField("memory_bytes") and not none.HasField("disk_bytes")


async def _switches(cloud: StandIn, e2b_id: str) -> list[dict[str, Any]]:
    told = await cloud.requests("POST ")
    ends = (f"/sandboxes/{e2b_id}/pause", f"/sandboxes/{e2b_id}/connect")
    return [one for one in told if one["path"].endswith(ends)]


# Who may do what inside ----------------------------------------------------------------------------------------------


@pytest.mark.requirement("R14", "R72")
async def test_the_workload_can_neither_end_nor_read_nor_change_what_serves_it(world: World) -> None:
    _, service = world
    async with box_of(service) as box:
        assert await box.out("id -un") == "user"
        assert await box.out("grep NoNewPrivs /proc/self/status") == "NoNewPrivs:\t1"
        held = await box.out("sed -n 's/^Cap.*\\t//p' /proc/self/status")
        assert set(held.split()) == {"0" * 16}, "none, and none to be gained"
        find = "for p in /proc/[0-9]*; do grep -qa attendant/program.py $p/cmdline && echo ${p#/proc/}; done"
        serving = (await box.out(find)).split()
        assert serving
        for pid in serving:
            for attempt in (f"kill -9 {pid}", f"cat /proc/{pid}/environ", f"ls /proc/{pid}/fd", f": > /proc/{pid}/mem"):
                assert (await box.run(shell=attempt)).exit.code != 0, attempt
        for path in ("/opt/penstock/attendant/program.py", "/opt/penstock/attendant/x", "/opt/penstock/x"):
            assert (await box.run(shell=f": >> {path}")).exit.code != 0, path
        assert (await box.run(shell="ls /opt/penstock/attendant/*/")).exit.code != 0
        assert await box.out("echo still served") == "still served"


@pytest.mark.requirement("R1", "R12")
async def test_services_environment_is_not_inside(world: World) -> None:
    """Not in the environment of any process, nor in any argument."""
    cloud, service = world
    async with box_of(service) as box:
        seen = await box.out("env; cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert cloud.api_key not in seen and "PENSTOCK" not in seen and "sk-host-secret" not in seen


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R46", "R55")
@pytest.mark.parametrize(
    "spec",
    [
        {"user": "root"},
        {"user": "somebody"},
        {"resources": sb.Resources(cpu=1)},
        {"resources": sb.Resources(memory_bytes=1 << 30)},
        {"resources": sb.Resources(pids=100)},
        {"resources": sb.Resources(disk_bytes=1 << 30)},
        {"network": sb.NetworkPolicy(allowlist=sb.Allowlist(hosts=["example.com"]))},
    ],
    ids=str,
)
async def test_unsupported_features_are_refused_before_e2b_is_asked(world: World, spec: dict[str, Any]) -> None:
    cloud, service = world
    before = len(await cloud.requests("POST /v2/sandboxes"))
    request = ss.CreateSandboxRequest(request_id=secrets.token_hex(8), spec=sb.SandboxSpec(**spec))
    error = await failure(service.sandboxes.CreateSandbox(request, timeout=30))
    assert isinstance(error, FailedPrecondition) and error.reason == "CAPABILITY_MISSING"
    assert len(await cloud.requests("POST /v2/sandboxes")) == before


@pytest.mark.requirement("R61", "R64")
async def test_a_lease_that_the_account_cannot_have_is_refused_by_field() -> None:
    async with stand_in(), start("e2b", e2b_max_lifetime_s="3600") as service:
        request = ss.CreateSandboxRequest(request_id="long", spec=sb.SandboxSpec(lease=Duration(seconds=3601)))
        error = await failure(service.sandboxes.CreateSandbox(request, timeout=30))
        assert isinstance(error, InvalidArgument) and error.violations[0].field == "spec.lease"
        async with box_of(service, lease=Duration(seconds=3600)) as box:
            assert (await box.run("true")).exit.code == 0


@pytest.mark.requirement("R61", "R63")
async def test_no_lease_is_renewed_beyond_what_the_account_can_have() -> None:
    """The account's time began before the lease's, and begins anew after a pause."""
    async with (
        stand_in(),
        start("e2b", e2b_max_lifetime_s="3600") as service,
        box_of(service, lease=Duration(seconds=600)) as box,
    ):

        async def renew(seconds: int) -> None:
            lease = ss.RenewLeaseRequest(sandbox_id=box.id, lease=Duration(seconds=seconds))
            await service.sandboxes.RenewLease(lease, timeout=30)

        for longer in (7200, 3600):
            error = await failure(renew(longer))
            assert isinstance(error, FailedPrecondition) and error.reason == "LEASE_REFUSED"
        got = await service.sandboxes.GetSandbox(ss.GetSandboxRequest(sandbox_id=box.id), timeout=30)
        assert got.sandbox.expire_time == box.sandbox.expire_time
        await renew(1800)
        await pause(box)
        await renew(3600)
        assert isinstance(await failure(renew(3601)), FailedPrecondition)
        await resume(box)
        assert await box.out("echo on") == "on"


@pytest.mark.requirement("R55")
@pytest.mark.parametrize("behaviour", ["refuse_network", "ignore_network"])
async def test_a_deployment_that_closes_no_sandbox_offers_none_that_are_closed(behaviour: str, tmp_path: Path) -> None:
    """Refused, or taken and not fulfilled, it is no claim; it fails closed."""
    async with stand_in() as cloud:
        await cloud.behave(**{behaviour: True})
        async with _backend(cloud, tmp_path / "closed") as backend:
            assert not backend.available and "network" in backend.unavailable_reason + " network"
            with pytest.raises(FailedPrecondition) as refusal:
                backend.refuse_unsupported(SandboxSpec())
            assert refusal.value.reason == "BACKEND_UNAVAILABLE"
        assert await cloud.sandboxes() == []
        await cloud.behave(refuse_network=False)
        async with _backend(cloud, tmp_path / "open", allow_open_network=True) as backend:
            wanted = {NetworkKind.OPEN} if behaviour == "ignore_network" else set(NetworkKind) - {NetworkKind.ALLOWLIST}
            assert backend.capabilities.networks == wanted
        assert await cloud.sandboxes() == []


@asynccontextmanager
async def _backend(cloud: StandIn, state: Path, key: str = "", **more: Any) -> AsyncIterator[E2BBackend]:
    address = Address(SecretStr(key or cloud.api_key), api_url=cloud.address, sandbox_url=cloud.address)
    backend = E2BBackend(E2BOptions(state, address, **more))
    await backend.open()
    try:
        yield backend
    finally:
        await backend.aclose()


@pytest.mark.requirement("R91", "R92")
async def test_neither_forks_outlive_a_kill_nor_sockets_leave_the_machine_by_vsock(tmp_path: Path) -> None:
    """Chains of every kind; vsock refused as the socket is asked for."""
    async with stand_in() as cloud, _backend(cloud, tmp_path) as backend:
        handle = await backend.create(f"sb-{secrets.token_hex(16)}", SandboxSpec(), (), lambda _: None)
        try:
            await kill_each_chain(handle, (1,))
            vsock = "import socket\ntry: socket.socket(40)\nexcept OSError as error: print(error.errno)"
            assert await in_sandbox(handle, "python3", "-c", vsock) == (0, f"{errno.EAFNOSUPPORT}\n")
        finally:
            await handle.destroy()


@pytest.mark.requirement("R48")
async def test_the_e2b_backend_says_which_sdk_or_key_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keyless = E2BBackend(E2BOptions(tmp_path, None))
    await keyless.open()
    assert "E2B_API_KEY" in keyless.unavailable_reason
    monkeypatch.setitem(sys.modules, "e2b", None)
    without = E2BBackend(E2BOptions(tmp_path, Address(SecretStr("e2b_key"))))
    await without.open()
    assert "pip install 'penstock-sandbox[e2b]'" in without.unavailable_reason
    for backend in (keyless, without):
        with pytest.raises(FailedPrecondition):
            backend.refuse_unsupported(SandboxSpec())
        await backend.aclose()


@pytest.mark.requirement("R8", "R27")
async def test_unknown_key_is_refused_without_being_shown(tmp_path: Path) -> None:
    key = "e2b_wrong" + secrets.token_hex(8)
    async with stand_in() as cloud:
        with capture_logs() as logs:
            async with _backend(cloud, tmp_path, key) as backend:
                assert "API key" in backend.unavailable_reason and key not in backend.unavailable_reason
        assert key not in str(logs)


@pytest.mark.requirement("R8")
async def test_no_error_repeats_what_a_proxys_page_repeated(tmp_path: Path) -> None:
    """A page that shows the request's headers shows the key."""
    async with stand_in() as cloud:
        with capture_logs() as logs:
            async with _backend(cloud, tmp_path) as backend:
                page = f"<html>X-API-KEY: {cloud.api_key}</html>"
                for status in (400, 403, 409, 429, 500, 502, 503):
                    await cloud.fail(
                        "POST /v2/sandboxes", 20, status=status, body=page, headers={"Should-Retry": "false"}
                    )
                    with pytest.raises(PenstockError) as raised:
                        await backend.create(f"sb-{status}", SandboxSpec(lease_s=60.0), (), lambda _: None)
                    told = raised.value
                    assert cloud.api_key not in f"{told!r} {told.metadata} {told.__cause__!r}", status
        assert cloud.api_key not in str(logs)
        assert await cloud.sandboxes() == []


@pytest.mark.requirement("R50")
async def test_snapshots_of_a_stopped_service_are_removed_unless_kept(tmp_path: Path) -> None:
    """What is kept is known to the next start, and forked without a setup."""
    async with stand_in() as cloud:
        setup = [command(shell="echo prepared > ~/mark")]
        for keep in ("true", "false"):
            async with start_on(tmp_path, "e2b", keep_snapshots=keep) as service:
                told, snapshot = await prepare(service, setup=setup)
                assert bool(told) is (keep == "true"), "prepared once"
                (box,) = await fork(service, snapshot.snapshot_id, 1)
                assert await box.out("cat ~/mark") == "prepared"
            assert len(await cloud.snapshots()) == (1 if keep == "true" else 0)
            assert await cloud.sandboxes() == []


@pytest.mark.requirement("R26")
async def test_snapshot_lost_by_e2b_is_reported_and_prepared_again(world: World) -> None:
    """What is cached is believed no longer than it is there."""
    cloud, service = world
    setup = [command(shell=f"echo {secrets.token_hex(4)}")]
    _, lost = await prepare(service, setup=setup)
    (kept,) = [one for one in await cloud.snapshots() if lost.snapshot_id in str(one)]
    async with cloud.http.delete(
        f"{cloud.address}/templates/{kept['id']}", headers={"X-API-KEY": cloud.api_key}
    ) as answer:
        answer.raise_for_status()
    request = ss.ForkSandboxesRequest(request_id=secrets.token_hex(8), snapshot_id=lost.snapshot_id, count=1)
    (child,) = [event async for event in service.sandboxes.ForkSandboxes(request, timeout=60)]
    assert child.failure.reason == "SNAPSHOT_LOST"
    told, again = await prepare(service, setup=setup)
    assert told and again.snapshot_id != lost.snapshot_id
    await service.sandboxes.DeleteSnapshot(ss.DeleteSnapshotRequest(snapshot_id=again.snapshot_id), timeout=30)


@pytest.mark.requirement("R49")
async def test_a_creation_that_is_given_up_leaves_nothing_at_e2b(world: World) -> None:
    """The request cannot be taken back, so what it makes is removed."""
    cloud, service = world
    before = {one["sandboxID"] for one in await cloud.sandboxes()}
    asked = len(await cloud.requests("POST /v2/sandboxes"))
    request = ss.CreateSandboxRequest(request_id=secrets.token_hex(8), spec=sb.SandboxSpec())
    creating = asyncio.ensure_future(service.sandboxes.CreateSandbox(request))

    async def begun() -> bool:
        return len(await cloud.requests("POST /v2/sandboxes")) > asked

    await eventually_async(begun, "the creation reaches E2B")
    creating.cancel()

    async def gone() -> bool:
        return {one["sandboxID"] for one in await cloud.sandboxes()} <= before

    await eventually_async(gone, "what was made is removed")
