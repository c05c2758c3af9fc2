"""What a sandbox holds is its agent's choice, and what it costs the service to read is not."""

from __future__ import annotations

import asyncio
import io
import tarfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.conformance.sandbox.conftest import Box, MakeBox, failure
from tests.conformance.sandbox.needs import needs
from tests.conformance.sandbox.services import Running
from tests.support.loads.memory import Peak
from tests.support.waiting import eventually

from penstock.sandbox.v1 import file_service_pb2 as fs
from penstock.sandbox.v1 import sandbox_service_pb2 as ss
from penstock_chassis.errors import InvalidArgument, ResourceExhausted

pytestmark = pytest.mark.asyncio(loop_scope="session")

MIB = 1 << 20
ROOM = 64 * MIB
"""By how much the service may grow for one read."""


async def diff(box: Box, **fields: Any) -> tuple[bytes, list[str]]:
    """The tar and the deleted paths of a sandbox's diff."""
    content, deleted = bytearray(), list[str]()
    request = ss.DiffSandboxRequest(sandbox_id=box.id, **fields)
    async for event in box.service.sandboxes.DiffSandbox(request, timeout=120):
        content += event.tar_chunk
        deleted += event.end.deleted_paths
    return bytes(content), deleted


@pytest.mark.requirement("R13", "R89")
@needs("diff")
async def test_sparse_eight_terabyte_file_is_refused_unread(fresh_box: Box) -> None:
    """One line of shell, and no block on the disk."""
    # A runtime's own file system may hold less than this machine's.
    await fresh_box.out("truncate -s 8T huge || truncate -s 1T huge; test $(stat -c %s huge) -gt 1000000000000")
    peak = Peak(fresh_box.service.process.pid)
    error = await failure(diff(fresh_box))
    assert isinstance(error, ResourceExhausted) and error.reason == "TREE_TOO_LARGE"
    error = await failure(diff(fresh_box, below=["/workspace/huge"], max_bytes=1 << 40))
    assert isinstance(error, ResourceExhausted) and error.reason == "TREE_TOO_LARGE"
    call = fresh_box.service.files.ReadTree(fs.ReadTreeRequest(sandbox_id=fresh_box.id, path="."), timeout=60)
    assert (await failure(call)).reason == "TREE_TOO_LARGE"
    assert peak.grown() < ROOM
    # And all is as it was.
    await fresh_box.out("rm huge; echo x > small")
    with tarfile.open(fileobj=io.BytesIO((await diff(fresh_box))[0])) as archive:
        assert "workspace/small" in archive.getnames()


@pytest.mark.requirement("R89")
@needs("diff")
async def test_a_file_within_the_bound_comes_in_pieces(fresh_box: Box) -> None:
    """Whatever its size, the service holds a few pieces of it."""
    await fresh_box.out("truncate -s 150M sparse")
    peak = Peak(fresh_box.service.process.pid)
    size = 0
    request = ss.DiffSandboxRequest(sandbox_id=fresh_box.id)
    async for event in fresh_box.service.sandboxes.DiffSandbox(request, timeout=120):
        assert len(event.tar_chunk) <= 256 * 1024
        size += len(event.tar_chunk)
    assert size > 150 * MIB
    assert peak.grown() < ROOM


@pytest.mark.requirement("R89")
@needs("diff")
async def test_a_diff_is_bounded_by_what_its_caller_asks_for(fresh_box: Box) -> None:
    """Exactly, headers included."""
    await fresh_box.out("head -c 5000 /dev/urandom > file")
    whole, _ = await diff(fresh_box, below=["/workspace/file"])
    # 512 of the header (2 blocks more where the time has a fraction), 5120 of content, 1024 at the end.
    assert len(whole) - 1024 in (512 + 5120, 3 * 512 + 5120)
    again, _ = await diff(fresh_box, below=["/workspace/file"], max_bytes=len(whole) - 1024)
    assert again == whole
    error = await failure(diff(fresh_box, below=["/workspace/file"], max_bytes=len(whole) - 1025))
    assert error.reason == "TREE_TOO_LARGE" and "max_bytes" in error.message
    assert isinstance(await failure(diff(fresh_box, max_bytes=-1)), InvalidArgument)
    call = fresh_box.service.files.ReadTree(
        fs.ReadTreeRequest(sandbox_id=fresh_box.id, path=".", max_bytes=-1), timeout=60
    )
    assert isinstance(await failure(call), InvalidArgument)


@pytest.mark.requirement("R89")
@needs("diff")
async def test_thousands_of_entries_cost_no_memory_of_the_services(fresh_box: Box) -> None:
    """In one directory and in many."""
    make = (
        "import os\n"
        "os.mkdir('many')\n"
        "content = bytes(12_000)\n"
        "for i in range(3_000):\n"
        "    file = os.open(f'many/{i:0100}', os.O_CREAT | os.O_WRONLY)\n"
        "    os.write(file, content)\n"
        "    os.close(file)\n"
        "for i in range(500): os.mkdir(f'many/d{i}')\n"
    )
    made = await fresh_box.run("python3", "-c", make)
    assert made.exit.code == 0, made
    peak = Peak(fresh_box.service.process.pid)
    names = 0
    request = ss.DiffSandboxRequest(sandbox_id=fresh_box.id)
    async for event in fresh_box.service.sandboxes.DiffSandbox(request, timeout=300):
        names += event.tar_chunk.count(b"ustar")
    # A name of 100 characters and a directory needs no header but its own.
    assert names >= 3_501
    # Less than half of what the entries take in the archive.
    assert peak.grown() < 16 * MIB


@pytest.mark.requirement("R89")
@needs("diff")
async def test_a_file_that_grows_while_it_is_read_comes_as_it_was(fresh_box: Box) -> None:
    """A reader that follows it would never end."""
    await fresh_box.out("mkdir d; truncate -s 4M d/grows")
    await fresh_box.start("grow", shell="while :; do head -c 1M /dev/zero >> d/grows; done", output_limit_bytes=1)
    try:
        whole, _ = await diff(fresh_box, below=["/workspace/d"], max_bytes=128 * MIB)
        with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
            (one,) = [member for member in archive if member.isreg()]
            assert one.size >= 4 * MIB
    except grpc.aio.AioRpcError as error:
        # It was larger than all of that already.
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    finally:
        await fresh_box.kill("grow")


@pytest.mark.requirement("R13", "R89")
@needs("diff")
async def test_abandoned_diff_stops_its_work(fresh_box: Box) -> None:
    """A caller that is cancelled leaves no thread behind, and the service nothing open."""
    await fresh_box.out("truncate -s 200M sparse")
    before = descriptors(fresh_box.service)
    for _ in range(8):
        call: Any = fresh_box.service.sandboxes.DiffSandbox(ss.DiffSandboxRequest(sandbox_id=fresh_box.id), timeout=60)
        assert (await call.read()).tar_chunk
        call.cancel()
    await eventually(lambda: descriptors(fresh_box.service) < before + 8, "the work of the callers that left ends")


@pytest.mark.requirement("R4", "R89")
@needs("diff")
async def test_many_diffs_of_one_sandbox_hold_nobody_up(fresh_box: Box) -> None:
    """One whose caller reads nothing included."""
    await fresh_box.out("truncate -s 200M idle; mkdir d; echo x > d/x")
    idle: Any = fresh_box.service.sandboxes.DiffSandbox(ss.DiffSandboxRequest(sandbox_id=fresh_box.id), timeout=300)
    assert (await idle.read()).tar_chunk
    others = [asyncio.create_task(diff(fresh_box, below=["/workspace/d"])) for _ in range(20)]
    other = await fresh_box.out("echo here")
    assert other == "here"
    assert (
        await fresh_box.service.sandboxes.GetStats(ss.GetStatsRequest(sandbox_id=fresh_box.id), timeout=60)
    ) is not None
    idle.cancel()
    assert len({whole for whole, _ in await asyncio.gather(*others)}) == 1


def descriptors(service: Running) -> int:
    """How many descriptors the service has."""
    return sum(1 for _ in Path(f"/proc/{service.process.pid}/fd").iterdir())


@pytest.mark.requirement("R89")
@needs("diff")
async def test_sandbox_deleted_during_a_read_is_reported_gone(make_box: MakeBox, service: Running) -> None:
    """Never as a diff that looks whole."""
    box = await make_box()
    await box.out("truncate -s 200M sparse")
    events = aiter(service.sandboxes.DiffSandbox(ss.DiffSandboxRequest(sandbox_id=box.id), timeout=60))
    assert (await anext(events)).tar_chunk
    await service.sandboxes.DeleteSandbox(ss.DeleteSandboxRequest(sandbox_id=box.id), timeout=60)
    assert (await failure(events)).reason == "SANDBOX_LOST"
