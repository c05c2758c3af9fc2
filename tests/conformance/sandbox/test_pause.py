"""A paused sandbox stands still, refuses work by name, and can be killed, deleted and forked like any other."""

from __future__ import annotations

import asyncio
import secrets
import time
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from tests.conformance.sandbox.conftest import Box, MakeBox, failure
from tests.conformance.sandbox.needs import needs
from tests.conformance.sandbox.services import Running
from tests.support.waiting import eventually, limits

from penstock.sandbox.v1 import file_service_pb2 as fs
from penstock.sandbox.v1 import process_service_pb2 as ps
from penstock.sandbox.v1 import sandbox_pb2 as sb
from penstock.sandbox.v1 import sandbox_service_pb2 as ss
from penstock_chassis.errors import FailedPrecondition

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def pause(box: Box) -> None:
    await box.service.sandboxes.PauseSandbox(ss.PauseSandboxRequest(sandbox_id=box.id), timeout=30)


async def hold_timeouts(box: Box, capabilities: sb.Capabilities) -> None:
    request = ss.PauseSandboxRequest(sandbox_id=box.id, hold_timeouts=True)
    answer = await box.service.sandboxes.PauseSandbox(request, timeout=30)
    assert answer.timeouts_only != capabilities.pause


async def resume(box: Box) -> None:
    await box.service.sandboxes.ResumeSandbox(ss.ResumeSandboxRequest(sandbox_id=box.id), timeout=30)


async def state(box: Box) -> sb.SandboxState.ValueType:
    answer = await box.service.sandboxes.GetSandbox(ss.GetSandboxRequest(sandbox_id=box.id), timeout=30)
    found: sb.SandboxState.ValueType = answer.sandbox.state
    return found


async def refused(box: Box) -> None:
    """Pausing is refused by name, and the sandbox goes on."""
    error = await failure(box.service.sandboxes.PauseSandbox(ss.PauseSandboxRequest(sandbox_id=box.id)))
    assert isinstance(error, FailedPrecondition) and error.reason == "CAPABILITY_MISSING"
    assert error.metadata["capabilities"] == "pause"
    assert await box.out("echo on") == "on"


@pytest.mark.requirement("R55")
@needs("pause")
async def test_processes_stand_still_while_paused_and_continue_afterwards(
    make_box: MakeBox, capabilities: sb.Capabilities
) -> None:
    """A freeze is a freeze, or it is refused."""
    box: Box = await make_box()
    if not capabilities.pause:
        await refused(box)
        return
    # Its comment is this test's alone: others run it too, on this machine and at the same time.
    counting = f"i=0; while :; do i=$((i+1)); echo $i > count; done  # {secrets.token_hex(8)}"
    await box.start("p", "bash", "-c", counting)
    await box.out("until [ -s count ]; do :; done")
    for _ in range(2):
        await pause(box)
    assert await state(box) == sb.SANDBOX_STATE_PAUSED
    standing = {pid: _cpu_ticks(pid) for pid in _running(counting)} if box.service.name.startswith("local") else {}
    for _ in range(2):
        await resume(box)
        await resume(box)
        assert await state(box) == sb.SANDBOX_STATE_READY
        before = int(await box.out("cat count || echo 0") or 0)
        await box.out(f'until c=$(cat count) && [ "${{c:-0}}" -gt {before} ]; do :; done')
        await pause(box)
    for pid, ticks in standing.items():
        assert _cpu_ticks(pid) >= ticks
    frozen = {pid: _cpu_ticks(pid) for pid in standing}
    # Anything else takes time here, and none of it passes for the frozen.
    other: Box = await make_box()
    await other.out("for i in $(seq 20000); do :; done")
    assert {pid: _cpu_ticks(pid) for pid in standing} == frozen


@pytest.mark.requirement("R43", "R55")
@needs("pause")
async def test_paused_sandbox_refuses_work_and_its_output_is_readable(
    make_box: MakeBox, capabilities: sb.Capabilities
) -> None:
    """Nothing hangs on a frozen program."""
    box: Box = await make_box()
    if not capabilities.pause:
        await refused(box)
        return
    await box.start("p", "bash", "-c", "echo before; read -r x; echo $x", stdin=True)
    await box.out("true")
    await pause(box)
    service = box.service
    stat = fs.StatRequest(sandbox_id=box.id, path="x")
    signal = ps.SignalProcessRequest(sandbox_id=box.id, process_id="p", signal=15)
    narrow = ss.SetNetworkPolicyRequest(sandbox_id=box.id, network=sb.NetworkPolicy(none=sb.NoNetwork()))
    diff = ss.DiffSandboxRequest(sandbox_id=box.id)
    for work in (
        box.run("true"),
        box.start("q", "true"),
        box.read("x"),
        box.write("x", b""),
        service.files.Stat(stat, timeout=30),
        service.processes.SignalProcess(signal, timeout=30),
        box.write_stdin("p", b"after\n"),
        service.sandboxes.SetNetworkPolicy(narrow, timeout=30),
        service.sandboxes.DiffSandbox(diff, timeout=30),
    ):
        error = await failure(work)
        assert isinstance(error, FailedPrecondition) and error.reason == "SANDBOX_PAUSED"
    shown = (await service.processes.GetProcess(ps.GetProcessRequest(sandbox_id=box.id, process_id="p"))).process
    assert not shown.HasField("exit")
    await resume(box)
    await box.write_stdin("p", b"after\n", None)
    assert (await box.finish("p"))[0] == b"before\nafter\n"


@pytest.mark.requirement("R37", "R40")
@needs("pause")
async def test_process_of_a_paused_sandbox_is_killed_while_others_stay_frozen(
    make_box: MakeBox, capabilities: sb.Capabilities
) -> None:
    """The whole tree is dead when the answer comes, and a timeout is told in time."""
    box: Box = await make_box()
    if not capabilities.pause:
        await refused(box)
        return
    await box.start("tree", "bash", "-c", "sleep 4910 & (setsid sleep 4911 &) ; wait")
    await box.start("timed", "sleep", "4912", timeout_s=0.3)
    await box.start("other", "sleep", "4913")
    await pause(box)
    assert (await box.kill("tree")).reason == ps.EXIT_REASON_KILLED
    assert (await box.finish("timed"))[2].reason == ps.EXIT_REASON_TIMED_OUT
    assert await state(box) == sb.SANDBOX_STATE_PAUSED
    await resume(box)
    left = await box.out("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert "4910" not in left and "4911" not in left and "4912" not in left and "4913" in left


@pytest.mark.requirement("R37", "R131")
async def test_held_timeouts_stand_still_on_every_backend(make_box: MakeBox, capabilities: sb.Capabilities) -> None:
    """Also those of what is started meanwhile, where nothing can be frozen; their rest runs afterwards."""
    for limit in limits(0.5):
        box: Box = await make_box()
        began = time.monotonic()
        await box.start("timed", "sleep", "4914", timeout_s=limit)
        await hold_timeouts(box, capabilities)
        if time.monotonic() - began < limit:
            break  # held before it was over
    else:
        raise AssertionError("no limit was long enough")
    await hold_timeouts(box, capabilities)
    if not capabilities.pause:
        await box.start("later", "sleep", "4915", timeout_s=0.2)
    other: Box = await make_box()
    await other.out(f"sleep {2 * limit}")
    listed = await box.service.processes.ListProcesses(ps.ListProcessesRequest(sandbox_id=box.id), timeout=30)
    assert not any(process.HasField("exit") for process in listed.processes if process.process_id in ("timed", "later"))
    await resume(box)
    assert (await box.finish("timed"))[2].reason == ps.EXIT_REASON_TIMED_OUT
    if not capabilities.pause:
        assert (await box.finish("later"))[2].reason == ps.EXIT_REASON_TIMED_OUT


@pytest.mark.requirement("R50", "R61")
@needs("pause")
async def test_a_paused_sandbox_is_deleted_and_ends_with_its_lease(
    service: Running, capabilities: sb.Capabilities, make_box: MakeBox
) -> None:
    """Pausing does not stop the lease, and a frozen process does not outlive its sandbox."""
    boxes: list[Box] = [await make_box() for _ in range(2)]
    if not capabilities.pause:
        await refused(boxes[0])
        return
    # No other test on this machine sleeps as long.
    asleep = [str(10**6 + secrets.randbelow(10**9)) for _ in boxes]
    for box, seconds in zip(boxes, asleep, strict=True):
        await box.start("p", "sleep", seconds)
        await pause(box)
    states: list[sb.SandboxState.ValueType] = []
    async for event in service.sandboxes.WatchSandbox(ss.WatchSandboxRequest(sandbox_id=boxes[0].id), timeout=60):
        states.append(event.sandbox.state)
        if len(states) == 1:
            short = ss.RenewLeaseRequest(sandbox_id=boxes[0].id, lease=Duration(nanos=1_000_000))
            await service.sandboxes.RenewLease(short, timeout=30)
    assert states[0] == sb.SANDBOX_STATE_PAUSED and states[-1] == sb.SANDBOX_STATE_DELETED
    finishing = asyncio.create_task(boxes[1].finish("p"))
    await service.sandboxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=boxes[1].id), timeout=30)
    assert (await finishing)[2].reason == ps.EXIT_REASON_KILLED
    if service.name.startswith("local"):
        assert not any(map(_running, asleep))


# Forks of a live sandbox ---------------------------------------------------------------------------------------------


async def fork(box: Box, count: int, request_id: str = "", **spec: Any) -> list[Box]:
    """Children by index."""
    request = ss.ForkSandboxesRequest(
        request_id=request_id or secrets.token_hex(8), sandbox_id=box.id, count=count, spec=sb.SandboxSpec(**spec)
    )
    found = {}
    async for event in box.service.sandboxes.ForkSandboxes(request, timeout=120):
        assert event.HasField("sandbox"), event.failure
        found[event.index] = Box(box.service, event.sandbox)
    return [found[index] for index in range(count)]


async def delete(*boxes: Box) -> None:
    for box in boxes:
        await box.service.sandboxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=box.id), timeout=60)


async def refused_fork(box: Box) -> None:
    request = ss.ForkSandboxesRequest(request_id=secrets.token_hex(8), sandbox_id=box.id, count=1)
    error = await failure(box.service.sandboxes.ForkSandboxes(request))
    assert isinstance(error, FailedPrecondition) and error.reason == "CAPABILITY_MISSING"
    assert error.metadata["capabilities"] == "live_fork"


@pytest.mark.requirement("R52", "R76")
@needs("pause")
async def test_forks_of_a_live_sandbox_have_its_files_and_share_nothing_more(
    make_box: MakeBox, capabilities: sb.Capabilities
) -> None:
    """Files as they were at one moment, identifiers of their own, no processes."""
    box: Box = await make_box(env={"MADE": "once"}, labels={"test": "source"})
    if not capabilities.live_fork:
        await refused_fork(box)
        return
    await box.out(
        "mkdir -p deep/er; echo one > deep/er/file; ln deep/er/file hard; ln -s deep/er soft; mkfifo pipe;"
        "truncate -s 100M holes; echo tail >> holes; echo mode > mode; chmod 4750 mode; touch -d @1000000000 deep;"
        "echo home > ~/home; for i in 1 2 3; do echo $i > n$i; done"
    )
    await box.start("p", "bash", "-c", "while :; do date +%N > now; done")
    await box.out("until [ -s now ]; do :; done")
    first, second = await fork(box, 2, labels={"test": "child"}, env={"MORE": "yes"})
    assert len({box.id, first.id, second.id}) == 3
    look = (
        "cat deep/er/file soft/file ~/home; stat -c '%h' hard; stat -c %a mode; stat -c %Y deep;"
        "test -p pipe && tail -c5 holes; stat -c '%s' holes; [ $(stat -c %b holes) -lt 1000 ] && echo sparse;"
        "echo $MADE $MORE; stat -c %U hard; test -e now"
    )
    user = await box.out("id -un")
    for child in (first, second):
        assert (await child.out(look)).split("\n") == [
            *("one", "one", "home", "2", "4750", "1000000000", "tail", "104857605", "sparse", "once yes", user)
        ]
        assert "date" not in await child.out("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -v cmdline || true")
    # Each may change and remove what the source made; nobody else sees it, the source neither.
    await first.out("echo changed > deep/er/file; rm n1; rm -r soft")
    await second.out("rm -r deep; echo second > n2")
    await box.out("echo source > n3")
    assert await first.out("cat n2 n3; cat deep/er/file; ls n1 2>&1 | wc -l") == "2\n3\nchanged\n1"
    assert await second.out("cat n1 n2 n3; ls -d deep 2>/dev/null || echo none") == "1\nsecond\n3\nnone"
    assert await box.out("cat n1 n2 n3 deep/er/file") == "1\n2\nsource\none"
    # It runs on as before.
    await box.out('before=$(cat now); until [ "$(cat now)" != "$before" ]; do :; done')
    await delete(first, second)


@pytest.mark.requirement("R52")
@needs("pause")
async def test_a_live_forks_deletions_and_replaced_directories_are_the_sources(
    service: Running, make_box: MakeBox, capabilities: sb.Capabilities
) -> None:
    """What the source removed from its own base is not there in a child, nor in a child's child."""
    if not capabilities.live_fork:
        await refused_fork(await make_box())
        return
    spec = ss.SnapshotSpec(
        setup=[ps.Command(shell=f"mkdir d e; echo {secrets.token_hex(4)} > d/a; echo b > d/b; echo c > e/c")]
    )
    snapshot = None
    async for event in service.sandboxes.PrepareSnapshot(ss.PrepareSnapshotRequest(spec=spec), timeout=60):
        snapshot = event.snapshot
    assert snapshot is not None
    source: Box = await make_box(base=sb.Base(snapshot_id=snapshot.snapshot_id))
    await source.out("rm d/b; rm -r e; mkdir e; echo n > e/n")
    # The snapshot goes; what stands on it does not mind.
    await service.sandboxes.DeleteSnapshot(ss.DeleteSnapshotRequest(snapshot_id=snapshot.snapshot_id), timeout=30)
    (child,) = await fork(source, 1)
    await delete(source)
    await child.out("echo more > d/more")
    (grandchild,) = await fork(child, 1)
    await delete(child)
    assert await grandchild.out("ls d e") == "d:\na\nmore\n\ne:\nn"
    await delete(grandchild)


@pytest.mark.requirement("R25", "R50")
@needs("pause")
async def test_live_fork_is_idempotent_and_its_copy_ends_with_the_last_child(
    make_box: MakeBox, capabilities: sb.Capabilities
) -> None:
    box: Box = await make_box()
    if not capabilities.live_fork:
        await refused_fork(box)
        return
    request_id = secrets.token_hex(8)
    before = _layers(box.service)
    again = await asyncio.gather(*(fork(box, 3, request_id) for _ in range(3)))
    children = again[0]
    assert {tuple(child.id for child in one) for one in again} == {tuple(child.id for child in children)}
    assert [child.id for child in await fork(box, 3, request_id)] == [child.id for child in children]
    if box.service.name.startswith("local"):
        assert len(_layers(box.service) - before) == 1, "copied once, however often it was asked for"
    other: Box = await make_box()
    request = ss.ForkSandboxesRequest(request_id=request_id, sandbox_id=other.id, count=3)
    assert (await failure(box.service.sandboxes.ForkSandboxes(request))).reason == "REQUEST_ID_REUSED"
    await delete(*children[:2])
    assert await children[2].out("echo alive") == "alive"
    await delete(children[2])
    await _until_gone(box.service, before)
    # Asked again, it is made again.
    (fresh, *more) = await fork(box, 3, request_id)
    assert await fresh.out("echo again") == "again"
    await delete(fresh, *more)
    await _until_gone(box.service, before)


@pytest.mark.requirement("R52")
@needs("pause")
async def test_a_paused_sandbox_can_be_forked_and_stays_paused(
    make_box: MakeBox, capabilities: sb.Capabilities
) -> None:
    box: Box = await make_box()
    if not (capabilities.live_fork and capabilities.pause):
        await refused_fork(box)
        return
    await box.out("echo kept > file")
    await pause(box)
    (child,) = await fork(box, 1)
    assert await child.out("cat file") == "kept"
    assert await state(box) == sb.SANDBOX_STATE_PAUSED
    await delete(child)


@pytest.mark.requirement("R49")
@needs("pause")
async def test_live_fork_reports_a_refused_child_and_a_failed_one(
    make_box: MakeBox, capabilities: sb.Capabilities
) -> None:
    """Nothing is left of either."""
    box: Box = await make_box()
    if not capabilities.live_fork:
        await refused_fork(box)
        return
    before = _layers(box.service)
    call = box.service.sandboxes.ForkSandboxes(
        ss.ForkSandboxesRequest(
            request_id=secrets.token_hex(8), sandbox_id=box.id, count=2, spec=sb.SandboxSpec(env={"A=": ""})
        )
    )
    assert (await failure(call)).reason == "FIELD_INVALID"
    await _until_gone(box.service, before)


def _layers(service: Running) -> set[str]:
    folder = service.state_dir / "state/local/layers"
    return {layer.name for layer in folder.iterdir()} if folder.is_dir() else set()


async def _until_gone(service: Running, before: set[str]) -> None:
    """The copy's removal follows its last holder's end; it takes a moment."""
    await eventually(lambda: _layers(service) <= before, "the copy is removed")


def _running(argument: str) -> list[int]:
    """Processes of this machine with this argument."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and argument.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
