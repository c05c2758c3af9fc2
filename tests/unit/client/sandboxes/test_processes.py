"""Processes of sandboxes, where streams break."""

from __future__ import annotations

from importlib.metadata import version

import grpc
import pytest
from tests.unit.client.conftest import Fakes, Refusal

from penstock.client import Aborted, Output, Penstock, ProcessHandle
from penstock.sandbox.v1 import process_service_pb2 as pb
from penstock.sandbox.v1 import sandbox_pb2, sandbox_service_pb2

GONE = Refusal(grpc.StatusCode.UNAVAILABLE, "DRAINING")
ENDED = pb.Process(process_id="p", exit=pb.Exit(reason=pb.EXIT_REASON_EXITED, code=0))


async def started(ps: Penstock, fakes: Fakes) -> ProcessHandle:
    """A process in a sandbox."""
    fakes.queue("CreateSandbox", sandbox_service_pb2.CreateSandboxResponse(sandbox=sandbox_pb2.Sandbox(sandbox_id="s")))
    fakes.queue("StartProcess", pb.StartProcessResponse(process=pb.Process(process_id="p")))
    sandbox = await ps.sandboxes.create()
    return await sandbox.start(["cat"], stdin=True)


def chunk(offset: int, data: bytes) -> pb.WatchProcessResponse:
    """A piece of stdout."""
    piece = pb.WatchProcessResponse.Chunk(stream=pb.OUTPUT_STREAM_STDOUT, offset=offset, data=data)
    return pb.WatchProcessResponse(chunk=piece)


async def test_output_goes_on_where_its_stream_broke(ps: Penstock, fakes: Fakes) -> None:
    """No byte is lost or comes twice."""
    process = await started(ps, fakes)
    fakes.queue(
        "WatchProcess", [chunk(0, b"abc"), GONE], [GONE], [chunk(3, b"d"), pb.WatchProcessResponse(exit=ENDED.exit)]
    )
    fakes.queue("GetProcess", pb.GetProcessResponse(process=ENDED))
    assert [piece async for piece in process.output()] == [Output("stdout", 0, b"abc"), Output("stdout", 3, b"d")]
    assert [request.stdout_offset for request in fakes.requests["WatchProcess"]] == [0, 3, 3]
    assert process.info.exit is not None and process.info.exit.ok


async def test_input_goes_on_behind_what_the_service_has(ps: Penstock, fakes: Fakes) -> None:
    """A repeat states its offset; after a failure the service is asked for it."""
    process = await started(ps, fakes)
    fakes.queue(
        "WriteStdin", GONE, pb.WriteStdinResponse(offset=3), Refusal(grpc.StatusCode.ABORTED, "STDIN_TAKEN_OVER")
    )
    await process.write(b"abc")
    with pytest.raises(Aborted):
        await process.write(b"defg")
    fakes.queue("GetProcess", pb.GetProcessResponse(process=pb.Process(process_id="p", stdin_offset=5)))
    fakes.queue("WriteStdin", pb.WriteStdinResponse(offset=6))
    await process.write(b"h")
    assert [frames[0].start.offset for frames in fakes.requests["WriteStdin"]] == [0, 0, 3, 5]


@pytest.mark.requirement("R110")
async def test_every_request_states_the_client_and_its_version(ps: Penstock, fakes: Fakes) -> None:
    """As the first word of gRPC's own."""
    await started(ps, fakes)
    clients = {metadata["user-agent"].split()[0] for metadata in fakes.metadata}
    assert clients == {f"penstock-python/{version('penstock')}"}
