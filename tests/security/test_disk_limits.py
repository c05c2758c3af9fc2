"""Agents that fill the disk, in every way in which bytes and files can be taken, and others that only seem to."""

from __future__ import annotations

import secrets
import textwrap
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.conformance.sandbox.conftest import Box, MakeBox, capabilities, failure, make_box
from tests.conformance.sandbox.services import Running, start

from penstock.sandbox.v1 import process_service_pb2 as ps
from penstock.sandbox.v1 import sandbox_pb2 as sb
from penstock.sandbox.v1 import sandbox_service_pb2 as ss
from penstock_chassis.errors import InvalidArgument

pytestmark = pytest.mark.asyncio(loop_scope="session")
__all__ = ["capabilities", "make_box"]

MIB = 1 << 20
LIMIT = sb.Resources(disk_bytes=24 * MIB, inodes=1500)


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["local", "local-ordinary-user"])
async def service(request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    """With little in memory."""
    async with start(request.param, tmp_bytes=str(8 * MIB), tmp_inodes="300") as running:
        yield running


BEGIN = """
import ctypes, errno, mmap, os, sys, time
FULL = (errno.ENOSPC, errno.EDQUOT)
def fill(descriptor, mebibytes):
    for _ in range(mebibytes):
        rest = memoryview(bytes(1 << 20))
        while rest:
            rest = rest[os.write(descriptor, rest):]
def opened(name):
    return os.open(name, os.O_RDWR | os.O_CREAT)
try:
"""
END = """
except OSError as error:
    sys.exit(9 if error.errno in FULL else repr(error))
print("took it", flush=True)
time.sleep(10000)
"""
TOO_MUCH = {
    "one file": "fill(opened('big'), 80)",
    "many files": "for n in range(80): fill(opened('f%d' % n), 1)",
    "at home": "fill(opened(os.path.expanduser('~/big')), 80)",
    "at the top": "fill(opened('/big'), 80)",
    "inodes": "for n in range(6000): os.close(opened('f%d' % n))",
    "directories": "for n in range(6000): os.mkdir('d%d' % n)",
    "symbolic links": "for n in range(6000): os.symlink('x' * 100, 'l%d' % n)",
    "deleted but open": "d = opened('gone'); os.unlink('gone'); fill(d, 80)",
    "many deleted but open": """
        for n in range(80):
            d = opened('gone')
            os.unlink('gone')
            fill(d, 1)
        """,
    "open through two names that went": """
        d = opened('a'); os.link('a', 'b'); os.unlink('a'); os.unlink('b')
        fill(d, 80)
        """,
    "a closed directory": """
        os.mkdir('closed'); os.chdir('closed'); d = opened('big'); os.chdir('..'); os.chmod('closed', 0)
        fill(d, 80)
        """,
    "a deep tree": """
        for n in range(700):
            os.mkdir('d'); os.chdir('d')
        fill(opened('big'), 80)
        """,
    "a sparse file that is written": """
        d = opened('sparse'); os.ftruncate(d, 1 << 40)
        for n in range(80):
            os.lseek(d, n << 30, 0)
            fill(d, 1)
        """,
    "through memory": """
        d = opened('mapped'); os.ftruncate(d, 80 << 20)
        try:
            view = mmap.mmap(d, 80 << 20)
            for n in range(0, 80 << 20, 4096): view[n] = 1
        except ValueError: pass
        """,
}
"""Each takes more than the limit; a bus error is how a quota answers what is written through memory."""
NOTHING = {
    "a sparse file": "d = opened('sparse'); os.ftruncate(d, 1 << 40); os.lseek(d, 1 << 39, 0); fill(d, 1)",
    "hard links": """
        d = opened('one'); fill(d, 4)
        for n in range(1000): os.link('one', 'l%d' % n)
        """,
    "memory": "d = os.memfd_create('m'); fill(d, 40)",
    "what was deleted": "for n in range(30): d = opened('big'); fill(d, 4); os.close(d); os.unlink('big')",
    "what was truncated": """
        d = opened('big')
        for n in range(30): fill(d, 4); os.ftruncate(d, 0); os.lseek(d, 0, 0)
        """,
}
"""Each takes less than the limit, however much it seems."""


def program(what: str) -> str:
    return BEGIN + textwrap.indent(textwrap.dedent(what).strip(), "    ") + END


async def ending(box: Box, what: str) -> ps.Exit:
    await box.start("agent", "python3", "-c", program(what))
    _, said, ended = await box.finish("agent")
    assert b"Error" not in said, said
    return ended


async def assert_stopped(
    service: Running, box: Box, ended: ps.Exit, kind: sb.DiskLimit.ValueType, *, mapped: bool
) -> None:
    """By the kernel, or by the end of its sandbox, which is its own doing."""
    if kind == sb.DISK_LIMIT_HARD:
        assert ended.signal == 7 if mapped else ended.code == 9, ended
        return
    assert kind == sb.DISK_LIMIT_WATCHED
    assert (ended.reason, ended.ended_inside) == (ps.EXIT_REASON_SANDBOX_LOST, True), ended
    view = (await service.sandboxes.GetSandbox(ss.GetSandboxRequest(sandbox_id=box.id), timeout=30)).sandbox
    assert (view.state, view.lost_reason) == (sb.SANDBOX_STATE_LOST, "DISK_EXHAUSTED")
    assert view.ended_inside


@pytest.mark.requirement("R95")
@pytest.mark.parametrize("way", TOO_MUCH)
async def test_sandbox_over_its_disk_limit_is_stopped_and_its_neighbour_continues(
    make_box: MakeBox, service: Running, capabilities: sb.Capabilities, way: str
) -> None:
    """Bytes and inodes, wherever they are, whatever they are called or are not."""
    neighbour: Box = await make_box(resources=LIMIT)
    box: Box = await make_box(resources=LIMIT)
    ended = await ending(box, TOO_MUCH[way])
    await assert_stopped(service, box, ended, capabilities.disk_limit, mapped=way == "through memory")
    assert await neighbour.out("head -c 8M /dev/zero > mine && wc -c < mine") == str(8 * MIB)


@pytest.mark.requirement("R95")
@pytest.mark.parametrize("way", NOTHING)
async def test_apparent_disk_use_does_not_stop_a_sandbox(make_box: MakeBox, service: Running, way: str) -> None:
    """Blocks count, not lengths, and a file once, whatever its names."""
    box: Box = await make_box(resources=LIMIT)
    await box.start("agent", "python3", "-c", program(NOTHING[way]))
    async for event in box.watch("agent"):
        assert not event.HasField("exit"), event
        if event.HasField("chunk"):
            assert event.chunk.data == b"took it\n", event
            break
    # Everything is measured for this answer, as it is for the limit.
    stats = await service.sandboxes.GetStats(ss.GetStatsRequest(sandbox_id=box.id), timeout=30)
    assert 0 < stats.disk_bytes < LIMIT.disk_bytes and 0 < stats.inodes < LIMIT.inodes
    assert await box.out("echo works") == "works"


@pytest.mark.requirement("R95")
@pytest.mark.parametrize("place", ["/tmp", "/dev/shm", "/var/tmp"])
async def test_places_in_memory_have_their_own_size_and_number_of_files(make_box: MakeBox, place: str) -> None:
    """/tmp and /dev/shm included."""
    box: Box = await make_box(resources=LIMIT)
    inside = f"os.chdir({place!r}); "
    for what in ("fill(opened('big'), 16)", "for n in range(1000): os.close(opened('f%d' % n))"):
        result = await box.run("python3", "-c", program(inside + what if "for" not in what else inside + "\n" + what))
        assert result.exit.code == 9, result
        await box.out(f"rm -rf {place}/*")
    assert await box.out("echo works") == "works"


@pytest.mark.requirement("R95")
async def test_no_other_place_can_be_written(make_box: MakeBox) -> None:
    """What is not the layer on disk, /tmp or /dev/shm is read-only or full."""
    box: Box = await make_box(resources=LIMIT)
    mounts = await box.out("cat /proc/self/mounts")
    writable = set()
    for line in mounts.splitlines():
        _, place, kind, options, *_ = line.split(" ")
        if "rw" in options.split(",") and kind not in ("proc", "devpts", "devtmpfs", "mqueue"):
            writable.add(place)
    assert writable >= {"/", "/tmp", "/dev/shm"}
    for place in sorted(writable - {"/", "/tmp", "/dev/shm"}):
        made = await box.run(shell=f"[ -d {place} ] && : > {place}/file")
        assert made.exit.code != 0, place


@pytest.mark.requirement("R95")
async def test_space_is_not_taken_without_writing_where_it_is_watched(
    make_box: MakeBox, capabilities: sb.Capabilities
) -> None:
    """An allocation would take the whole disk before anybody looks; programs write instead."""
    box: Box = await make_box(resources=LIMIT)
    result = await box.run("fallocate", "-l", "1M", "file")
    if capabilities.disk_limit == sb.DISK_LIMIT_HARD:
        assert result.exit.code == 0
    else:
        assert result.exit.code != 0 and b"not supported" in result.stderr
    assert await box.out(
        "python3 -c 'import os; os.posix_fallocate(os.open(\"f\", 66), 0, 1 << 20)'; wc -c < f"
    ) == str(MIB)
    assert await box.out("fallocate -p -o 0 -l 512K f && wc -c < f") == str(MIB)


async def snapshot_of(service: Running, shell: str) -> ss.Snapshot:
    spec = ss.SnapshotSpec(
        sandbox=sb.SandboxSpec(resources=LIMIT), setup=[ps.Command(shell=shell, env={"R": secrets.token_hex(8)})]
    )
    async for step in service.sandboxes.PrepareSnapshot(ss.PrepareSnapshotRequest(spec=spec), timeout=120):
        if step.WhichOneof("event") == "snapshot":
            return step.snapshot
    raise AssertionError("no snapshot")


@pytest.mark.requirement("R95")
async def test_snapshots_files_count_for_its_forks(
    make_box: MakeBox, service: Running, capabilities: sb.Capabilities
) -> None:
    """Its snapshot's files and its own are together what a machine's disk of that size would hold."""
    snapshot = await snapshot_of(service, "head -c 16M /dev/zero > base")
    base = sb.Base(snapshot_id=snapshot.snapshot_id)
    fork: Box = await make_box(base=base, resources=LIMIT)
    assert await fork.out("head -c 4M /dev/zero > mine; wc -c < base") == str(16 * MIB)
    ended = await ending(fork, "fill(opened('more'), 60)")
    await assert_stopped(service, fork, ended, capabilities.disk_limit, mapped=False)
    # Copied up, it would be there twice.
    fork = await make_box(base=base, resources=LIMIT)
    ended = await ending(fork, "os.utime('base'); fill(os.open('base', os.O_WRONLY | os.O_APPEND), 12)")
    await assert_stopped(service, fork, ended, capabilities.disk_limit, mapped=False)
    spec = sb.SandboxSpec(base=base, resources=sb.Resources(disk_bytes=16 * MIB))
    request = ss.CreateSandboxRequest(request_id=secrets.token_hex(8), spec=spec)
    error = await failure(service.sandboxes.CreateSandbox(request, timeout=60))
    assert isinstance(error, InvalidArgument), error
    assert [violation.field for violation in error.violations] == ["spec.resources.disk_bytes"]


@pytest.mark.requirement("R95")
async def test_a_live_fork_counts_what_it_got(
    make_box: MakeBox, service: Running, capabilities: sb.Capabilities
) -> None:
    """An agent's copies do not begin with an empty disk."""
    if not capabilities.live_fork:
        assert service.name == "local-ordinary-user", "only where nothing can be frozen"
        return
    box: Box = await make_box(resources=LIMIT)
    await box.out("head -c 16M /dev/zero > mine")
    request = ss.ForkSandboxesRequest(request_id=secrets.token_hex(8), sandbox_id=box.id, count=1)
    [child] = [
        one.sandbox async for one in service.sandboxes.ForkSandboxes(request, timeout=60) if one.HasField("sandbox")
    ]
    fork = Box(service, child)
    ended = await ending(fork, "fill(opened('more'), 40)")
    await assert_stopped(service, fork, ended, capabilities.disk_limit, mapped=False)
    assert await box.out("wc -c < mine") == str(16 * MIB)
