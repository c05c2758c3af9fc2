"""What a sandbox changed, on every backend that reports it: files, deletions, names of any bytes."""

from __future__ import annotations

import io
import secrets
import tarfile

import grpc
import pytest
from tests.conformance.sandbox.conftest import command
from tests.conformance.sandbox.needs import needs
from tests.conformance.sandbox.services import Running
from tests.conformance.sandbox.test_sandboxes import delete, fork, prepare

from penstock.sandbox.v1 import sandbox_service_pb2 as ss
from penstock_chassis.channel import error_from_rpc

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.requirement("R76")
@needs("fork", "diff")
async def test_the_diff_is_what_the_sandbox_changed_and_nothing_else(service: Running) -> None:
    _, snapshot = await prepare(
        service, setup=[command(shell=f"mkdir d e; echo {secrets.token_hex(4)} > d/a; echo b > d/b; echo c > e/c")]
    )
    (box,) = await fork(service, snapshot.snapshot_id, 1)
    await box.out(
        "echo more >> d/a; rm d/b; rm -r e; mkdir e; echo n > e/n; ln -s /etc/passwd l; mkfifo f; echo h > ~/h"
    )
    content, end = bytearray(), None
    async for event in service.sandboxes.DiffSandbox(ss.DiffSandboxRequest(sandbox_id=box.id), timeout=60):
        content += event.tar_chunk
        if event.HasField("end"):
            end = event.end
    assert end is not None
    with tarfile.open(fileobj=io.BytesIO(bytes(content))) as archive:
        files = {one.name for one in archive.getmembers() if not one.isdir()}
        # The pipes and sockets of gVisor are its own kernel's, and on no disk.
        assert files - {"workspace/f"} == {"workspace/d/a", "workspace/e/n", "workspace/l", f"{box.sandbox.home[1:]}/h"}
    # A directory that was removed and made again is a new one, or one whose old content was deleted: the same files.
    assert sorted(end.deleted_paths) in (
        ["/workspace/d/b", "/workspace/e"],
        ["/workspace/d/b", "/workspace/e/c"],
    )
    await delete(service, box.id)


@pytest.mark.requirement("R76", "R89")
@needs("fork", "diff")
async def test_a_diff_has_files_whose_names_are_no_text(service: Running) -> None:
    """Names are bytes to Linux."""
    _, snapshot = await prepare(
        service, setup=[command(shell=f"mkdir d; echo {secrets.token_hex(4)} > d/a; echo b > d/$(printf 'b\\377')")]
    )
    (box,) = await fork(service, snapshot.snapshot_id, 1)
    await box.out(
        r"cd d; echo n > $(printf 'n\377'); echo m > $(printf 'm\303\050'); ln -s a $(printf 'l\377'); "
        r"mkdir -p $(printf 'e\376')/in; echo c > $(printf 'e\376')/in/$(printf 'c\377')"
    )
    changes = service.sandboxes.DiffSandbox(ss.DiffSandboxRequest(sandbox_id=box.id), timeout=60)
    content = b"".join([event.tar_chunk async for event in changes])
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        files = {one.name.encode("utf-8", "surrogateescape") for one in archive.getmembers() if not one.isdir()}
    assert files == {
        b"workspace/d/n\xff",
        b"workspace/d/m\xc3(",
        b"workspace/d/l\xff",
        b"workspace/d/e\xfe/in/c\xff",
    }
    await delete(service, box.id)


@pytest.mark.requirement("R76", "R89")
@needs("fork", "diff")
async def test_deletion_of_a_name_that_is_no_text_is_exact_or_refused(service: Running) -> None:
    """Docker's list of changes cannot tell it from others."""
    _, snapshot = await prepare(
        service, setup=[command(shell=f"echo {secrets.token_hex(4)} | tee gone $(printf 'gone\\377')")]
    )
    (box,) = await fork(service, snapshot.snapshot_id, 1)
    await box.out(r"rm gone $(printf 'gone\377')")
    deleted = set[bytes]()
    try:
        async for event in service.sandboxes.DiffSandbox(ss.DiffSandboxRequest(sandbox_id=box.id), timeout=60):
            deleted |= {path.encode() for path in event.end.deleted_paths} | set(event.end.raw_deleted_paths)
    except grpc.aio.AioRpcError as error:
        assert error_from_rpc(error).reason == "PATH_NOT_TEXT"
    else:
        assert deleted == {b"/workspace/gone", b"/workspace/gone\xff"}
    await delete(service, box.id)


@pytest.mark.requirement("R76")
@needs("fork", "diff")
async def test_the_diff_of_directories_is_that_of_them_alone(service: Running) -> None:
    """One whose parent was removed is listed as deleted."""
    _, snapshot = await prepare(
        service, setup=[command(shell=f"mkdir -p d/in e/in f; echo {secrets.token_hex(4)} | tee d/in/a e/in/a f/a")]
    )
    (box,) = await fork(service, snapshot.snapshot_id, 1)
    await box.out("echo n | tee d/in/n d/n dd f/n; rm d/in/a f/a; rm -r e; mkdir d2; echo n > d2/n; echo h > ~/h")
    content, deleted = bytearray(), list[str]()
    request = ss.DiffSandboxRequest(sandbox_id=box.id, below=["/workspace/d/in", "/workspace/e/in", "/workspace/d2"])
    async for event in service.sandboxes.DiffSandbox(request, timeout=60):
        content += event.tar_chunk
        deleted += event.end.deleted_paths
    with tarfile.open(fileobj=io.BytesIO(bytes(content))) as archive:
        assert {one.name for one in archive.getmembers() if not one.isdir()} == {"workspace/d/in/n", "workspace/d2/n"}
    assert sorted(deleted) == ["/workspace/d/in/a", "/workspace/e/in"]
    await delete(service, box.id)
