"""What every backend owes a sandbox: limits in force, forks that share nothing, leases that end, and nothing left."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from tests.conformance.sandbox.conftest import Box, MakeBox, claimed, command, failure
from tests.conformance.sandbox.needs import declares, narrowest, needs
from tests.conformance.sandbox.services import Running
from tests.support.docker import dockerd

from penstock.sandbox.v1 import process_service_pb2 as ps
from penstock.sandbox.v1 import sandbox_pb2 as sb
from penstock.sandbox.v1 import sandbox_service_pb2 as ss
from penstock_chassis.errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def create(service: Running, request_id: str = "", **spec: Any) -> sb.Sandbox:
    spec.setdefault("network", narrowest(await claimed(service)))
    request = ss.CreateSandboxRequest(request_id=request_id or secrets.token_hex(8), spec=sb.SandboxSpec(**spec))
    return (await service.sandboxes.CreateSandbox(request, timeout=180)).sandbox


async def delete(service: Running, sandbox_id: str) -> None:
    await service.sandboxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=sandbox_id), timeout=60)


async def states_of(service: Running, sandbox_id: str) -> list[sb.Sandbox]:
    """Every state to the terminal one."""
    stream = service.sandboxes.WatchSandbox(ss.WatchSandboxRequest(sandbox_id=sandbox_id), timeout=60)
    return [event.sandbox async for event in stream]


# Creating ------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R25")
async def test_a_repeated_request_gives_the_same_sandbox_and_another_spec_is_refused(service: Running) -> None:
    first = await create(service, "again", labels={"a": "b"})
    assert (await create(service, "again", labels={"a": "b"})).sandbox_id == first.sandbox_id
    request = ss.CreateSandboxRequest(request_id="again", spec=sb.SandboxSpec(labels={"a": "c"}))
    assert isinstance(await failure(service.sandboxes.CreateSandbox(request)), AlreadyExists)
    await delete(service, first.sandbox_id)


@pytest.mark.requirement("R22")
async def test_concurrent_repeats_make_one_sandbox(service: Running) -> None:
    made = await asyncio.gather(*(create(service, "together") for _ in range(10)))
    assert len({sandbox.sandbox_id for sandbox in made}) == 1
    await delete(service, made[0].sandbox_id)


@pytest.mark.requirement("R49")
async def test_a_cancelled_creation_leaves_nothing(service: Running) -> None:
    labels = {"test": secrets.token_hex(8)}
    for steps in (1, 2, 4, 8, 16):
        request = ss.CreateSandboxRequest(request_id=secrets.token_hex(8), spec=sb.SandboxSpec(labels=labels))
        creating = asyncio.ensure_future(service.sandboxes.CreateSandbox(request))
        for _ in range(steps):
            await asyncio.sleep(0)
        creating.cancel()
        await asyncio.wait([creating])
    # A creation that was already complete when it was cancelled belongs to its labels and its lease.
    await service.sandboxes.DeleteSandboxes(ss.DeleteSandboxesRequest(labels=labels), timeout=60)
    listed = await service.sandboxes.ListSandboxes(ss.ListSandboxesRequest(labels=labels), timeout=30)
    assert not listed.sandboxes


@pytest.mark.requirement("R64")
@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"labels": {"bad key": "x"}}, "spec.labels"),
        ({"env": {"A=B": "x"}}, "spec.env"),
        ({"lease": Duration(seconds=-1)}, "spec.lease"),
        ({"lease": Duration(seconds=10**9)}, "spec.lease"),
        ({"resources": sb.Resources(pids=0)}, "spec.resources.pids"),
        ({"resources": sb.Resources(disk_bytes=1000)}, "spec.resources.disk_bytes"),
        ({"resources": sb.Resources(inodes=1)}, "spec.resources.inodes"),
        ({"resources": sb.Resources(cpu=float("nan"))}, "spec.resources.cpu"),
    ],
)
async def test_a_malformed_spec_is_refused_by_field(service: Running, spec: dict[str, Any], field: str) -> None:
    request = ss.CreateSandboxRequest(request_id=secrets.token_hex(8), spec=sb.SandboxSpec(**spec))
    error = await failure(service.sandboxes.CreateSandbox(request))
    assert isinstance(error, InvalidArgument), error
    assert field in [violation.field for violation in error.violations]


@pytest.mark.requirement("R46", "R55")
async def test_missing_capability_is_refused_before_any_work(service: Running, capabilities: sb.Capabilities) -> None:
    """A declared capability, never a silent downgrade."""
    wishes: dict[str, dict[str, Any]] = {
        "limit_cpu": {"resources": sb.Resources(cpu=1)},
        "limit_memory": {"resources": sb.Resources(memory_bytes=1 << 28)},
        "limit_pids": {"resources": sb.Resources(pids=100)},
        "limit_disk": {"resources": sb.Resources(disk_bytes=1 << 28)},
        "limit_inodes": {"resources": sb.Resources(inodes=10_000)},
        "root": {"user": "root"},
        "own_kernel": {"own_kernel": True},
        "companions": {
            # Of the one backend of the product that has them; others refuse before they look for an image.
            "companions": [sb.Companion(name="db", image=dockerd.TINY, entrypoint=["/bin/sleep", "60"], user="65534")]
        },
    }
    for capability, spec in wishes.items():
        spec["network"] = narrowest(capabilities)
        request = ss.CreateSandboxRequest(request_id=secrets.token_hex(8), spec=sb.SandboxSpec(**spec))
        if getattr(capabilities, capability):
            made = (await service.sandboxes.CreateSandbox(request, timeout=60)).sandbox
            await delete(service, made.sandbox_id)
        else:
            error = await failure(service.sandboxes.CreateSandbox(request))
            assert isinstance(error, FailedPrecondition) and error.reason == "CAPABILITY_MISSING", capability


@pytest.mark.requirement("R63", "R65")
async def test_an_unknown_backend_image_snapshot_or_toolbox_is_refused(
    service: Running, capabilities: sb.Capabilities
) -> None:
    lacking = "CAPABILITY_MISSING"
    # Of a backend with images of its own, of one with a registry that has none of this name, and of one whose registry
    # is out of reach. Docker Hub does not say whether it has a name that it does not give. On Kubernetes an image names
    # a warm pool, which the operator must allow.
    image = ("CAPABILITY_MISSING", "IMAGE_UNKNOWN", "IMAGE_UNAUTHORIZED", "IMAGE_PULL_FAILED", "IMAGE_NOT_ALLOWED")
    for spec, *reasons in (
        (sb.SandboxSpec(backend="imaginary"), "BACKEND_UNAVAILABLE"),
        (sb.SandboxSpec(base=sb.Base(image="imaginary")), *image),
        (
            sb.SandboxSpec(base=sb.Base(snapshot_id="imaginary")),
            "SNAPSHOT_UNKNOWN" if declares(capabilities, "fork") else lacking,
        ),
        (
            sb.SandboxSpec(toolbox_ids=["imaginary"]),
            "TOOLBOX_UNKNOWN" if declares(capabilities, "toolboxes") else lacking,
        ),
    ):
        spec.network.CopyFrom(narrowest(capabilities))
        request = ss.CreateSandboxRequest(request_id=secrets.token_hex(8), spec=spec)
        assert (await failure(service.sandboxes.CreateSandbox(request))).reason in reasons


@pytest.mark.requirement("R51")
async def test_fifty_sandboxes_at_once_all_work(service: Running) -> None:
    labels = {"test": secrets.token_hex(8)}
    made = await asyncio.gather(*(create(service, labels=labels) for _ in range(50)))
    outputs = await asyncio.gather(*(Box(service, one).run(shell=f"echo {index}") for index, one in enumerate(made)))
    assert [int(result.stdout) for result in outputs] == list(range(50))
    answer = await service.sandboxes.DeleteSandboxes(ss.DeleteSandboxesRequest(labels=labels), timeout=180)
    assert len(answer.sandbox_ids) == 50


# Finding and ending --------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R50")
async def test_lists_are_by_label_and_in_pages_newest_first(service: Running) -> None:
    labels = {"test": secrets.token_hex(8)}
    made = [(await create(service, labels={**labels, "n": str(index)})).sandbox_id for index in range(5)]
    found, token = [], ""
    while True:
        request = ss.ListSandboxesRequest(labels=labels, page_size=2, page_token=token)
        page = await service.sandboxes.ListSandboxes(request, timeout=30)
        found += [sandbox.sandbox_id for sandbox in page.sandboxes]
        token = page.next_page_token
        if not token:
            break
    assert found == made[::-1]
    request = ss.ListSandboxesRequest(labels={**labels, "n": "3"})
    assert [one.sandbox_id for one in (await service.sandboxes.ListSandboxes(request, timeout=30)).sandboxes] == [
        made[3]
    ]
    assert isinstance(await failure(service.sandboxes.DeleteSandboxes(ss.DeleteSandboxesRequest())), InvalidArgument)
    for request in (ss.ListSandboxesRequest(page_size=-1), ss.ListSandboxesRequest(page_token="?")):
        assert isinstance(await failure(service.sandboxes.ListSandboxes(request)), InvalidArgument)
    await service.sandboxes.DeleteSandboxes(ss.DeleteSandboxesRequest(labels=labels), timeout=60)


@pytest.mark.requirement("R43", "R70")
async def test_deleting_ends_its_processes_its_watchers_and_is_idempotent(service: Running) -> None:
    box = Box(service, await create(service))
    await box.start("p", "sleep", "4781")
    states = []
    watched = asyncio.Event()

    async def watch() -> None:
        async for event in service.sandboxes.WatchSandbox(ss.WatchSandboxRequest(sandbox_id=box.id), timeout=60):
            states.append(event.sandbox.state)
            watched.set()

    watching = asyncio.create_task(watch())
    finishing = asyncio.create_task(box.finish("p"))
    await watched.wait()
    for _ in range(2):
        await delete(service, box.id)
    await watching
    assert states == [sb.SANDBOX_STATE_READY, sb.SANDBOX_STATE_DELETED]
    assert (await finishing)[2].reason == ps.EXIT_REASON_KILLED
    error = await failure(service.sandboxes.GetSandbox(ss.GetSandboxRequest(sandbox_id=box.id)))
    assert isinstance(error, NotFound) and error.reason == "SANDBOX_UNKNOWN"
    assert (await failure(box.run("true"))).reason == "SANDBOX_UNKNOWN"
    await delete(service, "sb-unknown")


@pytest.mark.requirement("R43")
async def test_a_sandbox_that_dies_is_lost_and_nobody_waits_for_it(service: Running) -> None:
    """A watcher stops when its sandbox is gone."""
    box = Box(service, await create(service))
    # No other run on this machine sleeps as long: only this sandbox is ended.
    seconds = str(10**6 + secrets.randbelow(10**9))
    await box.start("p", "sleep", seconds)
    finishing = asyncio.create_task(box.finish("p"))
    # The first process can only be ended from outside; where it is not to be seen, as with gVisor, by the engine.
    killed = await asyncio.to_thread(_kill_first_process_of, seconds) or await asyncio.to_thread(dockerd.kill, box.id)
    assert killed
    ended = (await finishing)[2]
    assert ended.reason == ps.EXIT_REASON_SANDBOX_LOST
    last = (await states_of(service, box.id))[-1]
    assert last.state == sb.SANDBOX_STATE_LOST and last.lost_reason
    assert (await failure(box.run("true"))).reason == "SANDBOX_LOST"
    answer = await service.processes.ListProcesses(ps.ListProcessesRequest(sandbox_id=box.id), timeout=30)
    assert [process.process_id for process in answer.processes] == ["p"]
    await delete(service, box.id)


def _kill_first_process_of(argument: str) -> bool:
    for folder in Path("/proc").iterdir():
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if arguments[:2] == [b"sleep", argument.encode()]:
            inside = (folder / "ns/pid").stat().st_ino
            for other in Path("/proc").iterdir():
                try:
                    status = (other / "status").read_text()
                    if (other / "ns/pid").stat().st_ino == inside and "NSpid" in status:
                        ids = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()
                        if ids[-1] == "1":
                            os.kill(int(other.name), signal.SIGKILL)
                            return True
                except (OSError, ValueError):
                    continue
    return False


@pytest.mark.requirement("R50", "R61")
async def test_a_lease_that_nobody_renews_ends_the_sandbox(service: Running) -> None:
    kept, left = [await create(service, lease=Duration(seconds=600)) for _ in range(2)]
    renew = ss.RenewLeaseRequest(sandbox_id=kept.sandbox_id, lease=Duration(seconds=1200))
    ends = (await service.sandboxes.RenewLease(renew, timeout=30)).expire_time.seconds
    assert ends - kept.expire_time.seconds > 500
    states = []
    async for event in service.sandboxes.WatchSandbox(ss.WatchSandboxRequest(sandbox_id=left.sandbox_id), timeout=60):
        states.append(event.sandbox.state)
        if len(states) == 1:
            # Short now that it is watched, so that its end is seen and not missed.
            short = ss.RenewLeaseRequest(sandbox_id=left.sandbox_id, lease=Duration(nanos=1_000_000))
            await service.sandboxes.RenewLease(short, timeout=30)
    assert states[0] == sb.SANDBOX_STATE_READY and states[-1] == sb.SANDBOX_STATE_DELETED
    assert (await Box(service, kept).run("true")).exit.code == 0
    renew.lease.seconds = 0
    assert isinstance(await failure(service.sandboxes.RenewLease(renew)), InvalidArgument)
    await delete(service, kept.sandbox_id)


# Limits --------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("R37", "R55")
async def test_memory_over_the_limit_is_an_oom_and_the_sandbox_lives(
    make_box: MakeBox, capabilities: sb.Capabilities
) -> None:
    if not capabilities.limit_memory:
        return  # declared; that asking for it is refused is another test's business
    box = await make_box(resources=sb.Resources(memory_bytes=128 << 20))
    result = await box.run("python3", "-c", "x = bytearray(1 << 29)")
    assert (result.exit.reason, result.exit.signal) == (ps.EXIT_REASON_OOM, signal.SIGKILL)
    assert await box.out("echo alive") == "alive"
    stats = await box.service.sandboxes.GetStats(ss.GetStatsRequest(sandbox_id=box.id), timeout=30)
    if box.service.name == "podman-sidecar":
        assert not stats.HasField("memory_peak_bytes"), "Podman's API has none"
    else:
        assert 64 << 20 < stats.memory_peak_bytes <= 128 << 20


@pytest.mark.requirement("R40", "R55")
async def test_a_fork_bomb_stays_in_its_sandbox_and_can_be_killed(
    make_box: MakeBox, capabilities: sb.Capabilities
) -> None:
    if not capabilities.limit_pids:
        return  # as above; without a limit a fork bomb is the host's
    box = await make_box(resources=sb.Resources(pids=40))
    await box.start("bomb", "bash", "-c", "bomb() { bomb | bomb & }; bomb; sleep 4801")
    other = await make_box()
    async for event in box.watch("bomb"):
        if b"unavailable" in event.chunk.data:
            break
    assert await other.out("echo fine") == "fine"
    assert (await box.kill("bomb")).reason == ps.EXIT_REASON_KILLED
    assert await box.out("echo alive") == "alive"


@pytest.mark.requirement("R52")
async def test_tmp_is_bounded_and_shared_by_nobody(make_box: MakeBox) -> None:
    first, second = await make_box(), await make_box()
    # What a provider's own programs keep there is in both from the start.
    before = await second.out("ls -A /tmp /dev/shm")
    await first.out("echo x > /tmp/file; echo y > /dev/shm/file")
    assert await second.out("ls -A /tmp /dev/shm") == before and "file" not in before
    size = int(await first.out("df --output=size -B1 /tmp | tail -1"))
    assert size <= 1 << 30


# Snapshots and forks -------------------------------------------------------------------------------------------------


async def prepare(service: Running, **spec: Any) -> tuple[list[ss.PrepareSnapshotResponse], ss.Snapshot]:
    request = ss.PrepareSnapshotRequest(spec=ss.SnapshotSpec(**spec))
    events = [event async for event in service.sandboxes.PrepareSnapshot(request, timeout=120)]
    return events[:-1], events[-1].snapshot


async def fork(service: Running, snapshot_id: str, count: int, request_id: str = "", **spec: Any) -> list[Box]:
    request = ss.ForkSandboxesRequest(
        request_id=request_id or secrets.token_hex(8),
        snapshot_id=snapshot_id,
        count=count,
        spec=sb.SandboxSpec(**spec),
    )
    found: dict[int, Box] = {}
    async for event in service.sandboxes.ForkSandboxes(request, timeout=120):
        assert event.HasField("sandbox"), event.failure
        found[event.index] = Box(service, event.sandbox)
    return [found[index] for index in range(count)]


@pytest.mark.requirement("R52", "R57", "R76")
@needs("fork")
async def test_setup_runs_once_and_only_its_files_are_shared_by_forks(service: Running) -> None:
    nonce = secrets.token_hex(8)
    spec = {
        "files": [
            ss.SeedFile(path="in/note", content=b"note\n"),
            ss.SeedFile(path="/workspace/app/run", content=b"x", mode=0o755),
        ],
        "setup": [
            command(shell=f"echo {nonce}; date +%N > stamp; mkdir dir; echo a > dir/a; echo b > dir/b"),
            command(shell="cat stamp in/note >&2"),
        ],
    }
    prepared = await asyncio.gather(*(prepare(service, **spec) for _ in range(5)))
    assert len({snapshot.snapshot_id for _, snapshot in prepared}) == 1
    events, snapshot = prepared[0]
    assert [event.WhichOneof("event") for event in events] == ["command_started", "command_finished"] * 2
    assert events[1].command_finished.result.stdout == f"{nonce}\n".encode()
    assert b"note" in events[3].command_finished.result.stderr
    again, same = await prepare(service, **spec)
    assert not again and same.snapshot_id == snapshot.snapshot_id

    boxes = await fork(service, snapshot.snapshot_id, 3, env={"MORE": "yes"})
    stamps = await asyncio.gather(*(box.out("cat stamp in/note; stat -c %a app/run; echo $MORE") for box in boxes))
    assert len(set(stamps)) == 1 and stamps[0].endswith("note\n755\nyes")
    # Each may change and remove what the setup made; nobody else sees it.
    await boxes[0].out("echo changed > stamp; rm -r dir; mkdir dir; echo new > dir/new; rm in/note")
    assert await boxes[1].out("ls dir; cat in/note") == "a\nb\nnote"
    assert await boxes[0].out("cat stamp; ls dir in") == "changed\ndir:\nnew\n\nin:"
    assert await boxes[0].out("stat -c %U stamp dir /workspace $HOME | sort -u") == await boxes[0].out("id -un")
    for box in boxes:
        await delete(service, box.id)
    await service.sandboxes.DeleteSnapshot(ss.DeleteSnapshotRequest(snapshot_id=snapshot.snapshot_id), timeout=30)


@pytest.mark.requirement("R25")
@needs("fork")
async def test_a_repeated_fork_gives_the_same_children(service: Running) -> None:
    _, snapshot = await prepare(service, files=[ss.SeedFile(path="repeat", content=secrets.token_bytes(8))])
    first = await fork(service, snapshot.snapshot_id, 3, "fork-again")
    second = await fork(service, snapshot.snapshot_id, 3, "fork-again")
    assert [box.id for box in first] == [box.id for box in second]
    for box in first:
        await delete(service, box.id)


@pytest.mark.requirement("R49", "R58")
@needs("fork")
async def test_failed_setup_names_its_command_and_leaves_nothing(service: Running) -> None:
    spec = ss.SnapshotSpec(setup=[command("true"), command(shell="echo why >&2; exit 3"), command("touch", "never")])
    events: list[ss.PrepareSnapshotResponse] = []

    async def collect() -> None:
        async for event in service.sandboxes.PrepareSnapshot(ss.PrepareSnapshotRequest(spec=spec), timeout=60):
            events.append(event)  # noqa: PERF401 - what came before the failure is wanted

    error = await failure(collect())
    assert isinstance(error, FailedPrecondition) and error.reason == "SETUP_FAILED"
    assert "why" in error.message and "exit code 3" in error.message
    assert events[-1].command_finished.index == 1 and events[-1].command_finished.result.exit.code == 3
    listed = await service.sandboxes.ListSandboxes(ss.ListSandboxesRequest(), timeout=30)
    assert not [one for one in listed.sandboxes if "penstock/snapshot" in one.spec.labels]


@pytest.mark.requirement("R70")
@needs("fork")
async def test_a_deleted_snapshots_forks_live_on_and_new_ones_are_refused(service: Running) -> None:
    _, snapshot = await prepare(service, files=[ss.SeedFile(path="file", content=secrets.token_hex(8).encode())])
    (box,) = await fork(service, snapshot.snapshot_id, 1)
    request = ss.DeleteSnapshotRequest(snapshot_id=snapshot.snapshot_id)
    for _ in range(2):
        await service.sandboxes.DeleteSnapshot(request, timeout=30)
    assert await box.out("wc -c < file") == "16"
    call = service.sandboxes.ForkSandboxes(
        ss.ForkSandboxesRequest(request_id="gone", snapshot_id=snapshot.snapshot_id, count=1)
    )
    assert (await failure(call)).reason == "SNAPSHOT_UNKNOWN"
    await delete(service, box.id)


@pytest.mark.requirement("R57")
@needs("fork")
async def test_a_snapshot_can_stand_on_a_snapshot(service: Running) -> None:
    _, lower = await prepare(service, setup=[command(shell=f"echo {secrets.token_hex(4)} > lower; echo x > both")])
    _, upper = await prepare(
        service,
        sandbox=sb.SandboxSpec(base=sb.Base(snapshot_id=lower.snapshot_id)),
        setup=[command(shell="cat lower; echo y >> both")],
    )
    (box,) = await fork(service, upper.snapshot_id, 1)
    assert await box.out("cat both; test -s lower") == "x\ny"
    await delete(service, box.id)


@pytest.mark.requirement("R55")
async def test_pausing_is_declared_and_refused_where_it_is_not_there(
    box: Box, capabilities: sb.Capabilities, service: Running
) -> None:
    if not capabilities.pause:
        call = service.sandboxes.PauseSandbox(ss.PauseSandboxRequest(sandbox_id=box.id))
        assert (await failure(call)).reason == "CAPABILITY_MISSING"
    await service.sandboxes.ResumeSandbox(ss.ResumeSandboxRequest(sandbox_id=box.id), timeout=30)
