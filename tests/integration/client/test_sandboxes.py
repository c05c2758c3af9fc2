"""Sandboxes from Python, by themselves: what the guide `sandboxes.md` shows."""

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator

import pytest

from penstock.client import (
    AlreadyExists,
    Command,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    OneEndpoint,
    Output,
    OutputGap,
    Penstock,
    ResourceExhausted,
    Resources,
    SandboxSpec,
    SeedFile,
)
from penstock.client.transport.endpoints import Endpoints
from penstock.client.transport.rpc import Service
from penstock.local.stack import LocalStack
from penstock.sandbox.v1 import file_service_pb2, file_service_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_text_where_bytes_belong_is_refused_by_name_and_nothing_is_written(ps: Penstock) -> None:
    """A typed error that says what to give, not a cancellation that nobody asked for."""
    async with await ps.sandboxes.create() as sandbox:
        with pytest.raises(InvalidArgument, match="content: expected bytes") as caught:
            await sandbox.write_file("g.txt", "hello")  # type: ignore[arg-type]
        assert caught.value.reason == "ARGUMENT_TYPE" and caught.value.violations[0].field == "content"
        with pytest.raises(InvalidArgument, match="stdin"):
            await sandbox.run(["cat"], stdin="x")  # type: ignore[arg-type]
        with pytest.raises(NotFound):
            await sandbox.read_file("g.txt")


async def test_error_while_an_upload_is_made_reaches_the_caller_unchanged(stack: LocalStack) -> None:
    """grpc.aio would cancel the call and say nothing."""

    async def frames() -> AsyncIterator[file_service_pb2.WriteFileRequest]:
        yield file_service_pb2.WriteFileRequest(
            start=file_service_pb2.WriteFileRequest.WriteFileStart(sandbox_id="any", path="x")
        )
        raise ZeroDivisionError("made in the middle")

    endpoints = Endpoints(sandbox=stack.address("sandbox"), token=stack.operator_token)
    service = Service("sandbox", endpoints)
    try:
        write = file_service_pb2_grpc.FileServiceStub(service.channel).WriteFile
        with pytest.raises(ZeroDivisionError, match="made in the middle"):
            await service.push(write, frames)
    finally:
        await service.close()


@pytest.mark.requirement("R57")
async def test_a_snapshot_is_prepared_once_and_forked(ps: Penstock) -> None:
    """Setup runs once; every child has its files."""
    setup = [Command(shell="tr a-z A-Z <word.txt >shout.txt; echo done")]
    files = [SeedFile("word.txt", b"quiet")]
    made = await ps.sandboxes.prepare(files=files, setup=setup)
    assert [run.stdout for run in made.setup] == [b"done\n"] and made.setup[0].ok
    again = await ps.sandboxes.prepare(files=files, setup=setup)
    assert again.snapshot_id == made.snapshot_id and again.setup == ()
    assert made.snapshot_id in [item.snapshot_id async for item in ps.sandboxes.snapshots()]
    indexes = set()
    async for fork in ps.sandboxes.fork(made.snapshot_id, 2):
        async with fork.made() as child:
            assert await child.read_file("shout.txt") == b"QUIET"
            indexes.add(fork.index)
    assert indexes == {0, 1}
    await ps.sandboxes.delete_snapshot(made.snapshot_id)
    with pytest.raises(NotFound, match=made.snapshot_id):
        await ps.sandboxes.create(SandboxSpec(snapshot_id=made.snapshot_id))


async def test_failed_setup_shows_its_output(ps: Penstock) -> None:
    """The note under the error is the end of the command's output."""
    with pytest.raises(FailedPrecondition, match="setup command 0") as caught:
        await ps.sandboxes.prepare(setup=[Command(shell="echo no such luck >&2; exit 3")])
    assert caught.value.reason == "SETUP_FAILED" and "no such luck" in caught.value.__notes__[0]


@pytest.mark.requirement("R55")
async def test_own_kernel_can_be_demanded_of_a_snapshot(ps: Penstock) -> None:
    """Local sandboxes run on this machine's kernel, and both say so before anything is made."""
    demanding = SandboxSpec(own_kernel=True)
    for refused in (ps.sandboxes.create(demanding), ps.sandboxes.prepare(demanding)):
        with pytest.raises(FailedPrecondition) as caught:
            await refused
        assert (caught.value.reason, caught.value.metadata["capabilities"]) == ("CAPABILITY_MISSING", "own_kernel")


async def test_a_diff_has_what_changed_and_names_what_is_gone(ps: Penstock) -> None:
    """Against what the sandbox was made from."""
    base = await ps.sandboxes.prepare(files=[SeedFile("old.txt", b"old"), SeedFile("kept.txt", b"kept")])
    async with await ps.sandboxes.create(SandboxSpec(snapshot_id=base.snapshot_id)) as sandbox:
        await sandbox.write_file("new.txt", b"new")
        await sandbox.remove("old.txt")
        diff = await sandbox.diff()
        with tarfile.open(fileobj=io.BytesIO(diff.tar)) as archive:
            names = {name.rpartition("/")[2] for name in archive.getnames()}
        assert "new.txt" in names and "kept.txt" not in names
        assert diff.deleted_paths == (f"{sandbox.workdir}/old.txt",)


@pytest.mark.requirement("R55")
async def test_stats_and_reprs_show_what_one_looks_for(ps: Penstock) -> None:
    """A figure that the backend cannot tell is None, never zero by convention."""
    async with await ps.sandboxes.create() as sandbox:
        ran = await sandbox.run(["sh", "-c", "echo hello; exit 3"])
        assert repr(ran) == "RunResult(exit 3, stdout=b'hello\\n', stderr=b'')" and not ran.ok
        long = await sandbox.run(["sh", "-c", "head -c 1000 /dev/zero"])
        assert repr(long).endswith("and 800 bytes more, stderr=b'')")
        assert sandbox.sandbox_id in repr(sandbox) and "backend=local" in repr(sandbox)
        stats = await sandbox.stats()
        assert stats.disk_bytes is None or stats.disk_bytes >= 0


@pytest.mark.requirement("R40")
async def test_a_network_is_narrowed_and_never_widened(ps: Penstock, stack: LocalStack) -> None:
    """From one endpoint to nothing, and not back."""
    gate = OneEndpoint(local_port=8080, upstream=stack.ingress_address)
    async with await ps.sandboxes.create(SandboxSpec(network=gate)) as sandbox:
        await sandbox.narrow_network(None)
        with pytest.raises(FailedPrecondition) as caught:
            await sandbox.narrow_network(gate)
        assert caught.value.reason == "POLICY_WIDER"


@pytest.mark.requirement("R55")
async def test_a_refusal_names_the_sandbox_and_the_limit_that_cannot_hold(ps: Penstock) -> None:
    """A limit that would be none is refused, not accepted."""
    with pytest.raises(NotFound, match="nobody-made-this"):
        await ps.sandboxes.attach("nobody-made-this")
    with pytest.raises((InvalidArgument, FailedPrecondition)) as caught:
        await ps.sandboxes.create(SandboxSpec(resources=Resources(memory_bytes=10**15)))
    assert caught.value.reason in ("FIELD_INVALID", "CAPABILITY_MISSING")  # the latter where no limit can be held


async def test_input_of_a_process_arrives_whole_and_its_output_is_read_from_any_offset(ps: Penstock) -> None:
    """Pieces larger than a frame, one after the other, and none of them twice."""
    text = bytes(range(256)) * 3000
    async with await ps.sandboxes.create() as sandbox, await sandbox.start(["cat"], stdin=True) as process:
        await asyncio.gather(process.write(text), process.write(text))
        await process.close_stdin()
        pieces = [piece async for piece in process.output() if isinstance(piece, Output)]
        assert b"".join(piece.data for piece in pieces) == text * 2
        assert [piece.offset for piece in pieces] == sorted({piece.offset for piece in pieces})
        again = await sandbox.process(process.process_id)
        tail = [
            piece.data async for piece in again.output(stdout_offset=2 * len(text) - 3) if isinstance(piece, Output)
        ]
        assert b"".join(tail) == text[-3:]
        assert again.info.exit is not None and again.info.stdin_closed and again.info.stdin_offset == 2 * len(text)


async def test_output_beyond_the_limit_is_a_gap(ps: Penstock) -> None:
    """Its bytes are counted; the last ones can be kept too."""
    async with await ps.sandboxes.create() as sandbox:
        command = ["sh", "-c", "head -c 1000 /dev/zero; printf end"]
        async with await sandbox.start(command, output_limit_bytes=100, output_tail_bytes=3) as process:
            pieces = [piece async for piece in process.output()]
        assert OutputGap("stdout", 100, 1000) in pieces
        kept = b"".join(piece.data for piece in pieces if isinstance(piece, Output))
        assert kept == bytes(100) + b"end"


async def test_misuse_of_a_process_is_a_typed_error(ps: Penstock) -> None:
    """And a program that does not exist is an exit, not an error."""
    async with await ps.sandboxes.create() as sandbox:
        gone = await sandbox.start(["no-such-program"])
        assert (await gone.wait()).reason == "start_failed"
        async with await sandbox.start(["sleep", "600"], process_id="mine") as process:
            assert (await sandbox.start(["sleep", "600"], process_id="mine")).info == process.info
            with pytest.raises(AlreadyExists) as reused:
                await sandbox.start(["sleep", "5"], process_id="mine")
            assert reused.value.reason == "PROCESS_ID_REUSED"
            with pytest.raises(InvalidArgument, match="data: expected bytes"):
                await process.write("text")  # type: ignore[arg-type]
            for attempt, reason in ((process.write(b"x"), "STDIN_NOT_OPEN"), (process.resize(1, 1), "NOT_A_PTY")):
                with pytest.raises(FailedPrecondition) as refused:
                    await attempt
                assert refused.value.reason == reason
        assert process.process_id in repr(process)
        with pytest.raises(NotFound) as unknown:
            await sandbox.process("nobody-started-this")
        assert unknown.value.reason == "PROCESS_UNKNOWN"


async def test_archive_that_leads_out_of_its_directory_is_refused(ps: Penstock) -> None:
    """Before anything of it is unpacked."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("fine"))
        archive.addfile(tarfile.TarInfo("../out"))
    async with await ps.sandboxes.create() as sandbox:
        with pytest.raises(InvalidArgument) as refused:
            await sandbox.write_tree("tree", packed.getvalue())
        assert refused.value.reason == "TAR_MEMBER_REFUSED"
        with pytest.raises(NotFound):
            await sandbox.stat("tree/fine")
        await sandbox.write_file("big/file", bytes(1000))
        with pytest.raises(ResourceExhausted) as large:
            await sandbox.read_tree("big", max_bytes=999)
        assert large.value.reason == "TREE_TOO_LARGE"
