"""Many processes are watched over one stream, and each over its own at a service that has no such streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from penstock.sandbox.v1 import process_service_pb2 as pb
from penstock.sandbox.v1 import process_service_pb2_grpc
from penstock_chassis.aio.retry import Delays
from penstock_chassis.errors import NotFound, Unavailable
from penstock_chassis.rpc_status import to_status
from penstock_chassis.testing import serve
from penstock_driver.clients import sandboxes as sandboxes_client
from penstock_driver.clients import watches as watches_client
from penstock_driver.clients.sandboxes import GrpcSandboxes
from penstock_driver.domain.ports import Exit, Output

EXITED = pb.Exit(reason=pb.EXIT_REASON_EXITED, code=0)
REGISTER = process_service_pb2_grpc.add_ProcessServiceServicer_to_server


def output(watch_id: int, offset: int, data: bytes) -> pb.WatchProcessesResponse:
    chunk = pb.WatchProcessResponse.Chunk(stream=pb.OUTPUT_STREAM_STDOUT, offset=offset, data=data)
    return pb.WatchProcessesResponse(watch_id=watch_id, chunk=chunk)


class Older(process_service_pb2_grpc.ProcessServiceServicer):
    """Has one stream for each process."""

    def __init__(self) -> None:
        self.streams = 0

    async def WatchProcesses(self, requests: AsyncIterator[pb.WatchProcessesRequest], context: Any) -> Any:  # noqa: N802
        # What gRPC answers where no servicer has the method. Not before the client has written: grpc.aio loses the
        # status of a stream that ends while it is written to.
        await anext(aiter(requests))
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        yield pb.WatchProcessesResponse()

    async def WatchProcess(self, request: pb.WatchProcessRequest, context: Any) -> Any:  # noqa: N802
        self.streams += 1
        chunk = pb.WatchProcessResponse.Chunk(stream=pb.OUTPUT_STREAM_STDOUT, data=request.process_id.encode())
        yield pb.WatchProcessResponse(chunk=chunk)
        yield pb.WatchProcessResponse(exit=EXITED)


class Newer(process_service_pb2_grpc.ProcessServiceServicer):
    """Answers the frames of each stream with `script`; keeps them."""

    def __init__(self) -> None:
        self.streams: list[list[pb.WatchProcessesRequest]] = []
        self.ended = asyncio.Event()

    async def WatchProcesses(self, requests: AsyncIterator[pb.WatchProcessesRequest], context: Any) -> Any:  # noqa: N802
        frames: list[pb.WatchProcessesRequest] = []
        self.streams.append(frames)
        yield pb.WatchProcessesResponse(opened=pb.WatchProcessesResponse.Opened())
        async for frame in requests:
            frames.append(frame)
            async for answer in self.answers(frame, context):
                yield answer
        self.ended.set()

    async def answers(self, frame: pb.WatchProcessesRequest, context: Any) -> AsyncIterator[pb.WatchProcessesResponse]:
        if frame.HasField("start"):
            yield output(frame.start.watch_id, 0, frame.start.process_id.encode())
            yield pb.WatchProcessesResponse(watch_id=frame.start.watch_id, exit=EXITED)


async def seen(sandboxes: GrpcSandboxes, process_id: str) -> list[Output | Exit]:
    return [item async for item in sandboxes.watch("s", process_id)]


async def test_processes_at_one_address_share_one_stream_which_ends_after_them() -> None:
    servicer = Newer()  # type: ignore[abstract]
    async with serve((servicer, REGISTER)) as (_, channel):
        sandboxes = GrpcSandboxes(channel)
        found = await asyncio.gather(*(seen(sandboxes, f"p{index}") for index in range(5)))
        assert [[item.data for item in items if isinstance(item, Output)] for items in found] == [
            [f"p{index}".encode()] for index in range(5)
        ]
        assert all(isinstance(items[-1], Exit) for items in found)
        await servicer.ended.wait()
    assert [[frame.WhichOneof("frame") for frame in stream] for stream in servicer.streams] == [["start"] * 5]


async def test_at_an_older_service_each_process_has_a_stream_of_its_own() -> None:
    servicer = Older()  # type: ignore[abstract]
    async with serve((servicer, REGISTER)) as (_, channel):
        sandboxes = GrpcSandboxes(channel)
        for name in ("a", "b"):
            assert [item.data for item in await seen(sandboxes, name) if isinstance(item, Output)] == [name.encode()]
    assert servicer.streams == 2


async def test_a_reader_gives_credit_for_what_it_has_read_and_not_before() -> None:
    piece = watches_client.WINDOW_BYTES // 2

    class Flooding(Newer):
        async def answers(
            self, frame: pb.WatchProcessesRequest, context: Any
        ) -> AsyncIterator[pb.WatchProcessesResponse]:
            if frame.HasField("start"):
                yield output(frame.start.watch_id, 0, bytes(piece))
            elif frame.HasField("credit"):
                yield pb.WatchProcessesResponse(watch_id=frame.credit.watch_id, exit=EXITED)

    servicer = Flooding()  # type: ignore[abstract]
    async with serve((servicer, REGISTER)) as (_, channel):
        watching = GrpcSandboxes(channel).watch("s", "p")
        assert await anext(watching) == Output(bytes(piece), is_stderr=False)
        assert [frame.WhichOneof("frame") for frame in servicer.streams[0]] == ["start"]
        assert isinstance(await anext(watching), Exit)
        assert await anext(watching, None) is None
    credit = servicer.streams[0][1].credit
    assert (credit.watch_id, credit.bytes) == (1, piece + watches_client.CHUNK_COST)


async def test_a_reader_that_leaves_stops_its_watch_and_no_other() -> None:
    class Endless(Newer):
        async def answers(
            self, frame: pb.WatchProcessesRequest, context: Any
        ) -> AsyncIterator[pb.WatchProcessesResponse]:
            if frame.HasField("start"):
                yield output(frame.start.watch_id, 0, b"begun")
            elif frame.HasField("stop"):
                other = 3 - frame.stop.watch_id
                yield pb.WatchProcessesResponse(watch_id=other, exit=EXITED)

    servicer = Endless()  # type: ignore[abstract]
    async with serve((servicer, REGISTER)) as (_, channel):
        sandboxes = GrpcSandboxes(channel)
        left, kept = sandboxes.watch("s", "left"), sandboxes.watch("s", "kept")
        assert [await anext(left), await anext(kept)] == [Output(b"begun", is_stderr=False)] * 2
        await left.aclose()
        assert isinstance(await anext(kept), Exit)
        await kept.aclose()


@pytest.mark.requirement("R59")
async def test_a_broken_stream_is_resumed_where_each_reader_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes_client, "_WATCH_DELAYS", Delays(0.0, 0.0))

    class Breaking(Newer):
        async def answers(
            self, frame: pb.WatchProcessesRequest, context: Any
        ) -> AsyncIterator[pb.WatchProcessesResponse]:
            start = frame.start
            yield output(start.watch_id, start.stdout_offset, b"abc")
            if len(self.streams) == 1 and len(self.streams[0]) == 2:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "going away")
            if len(self.streams) == 2:
                yield pb.WatchProcessesResponse(watch_id=start.watch_id, exit=EXITED)

    servicer = Breaking()  # type: ignore[abstract]
    async with serve((servicer, REGISTER)) as (_, channel):
        sandboxes = GrpcSandboxes(channel)
        found = await asyncio.gather(seen(sandboxes, "a"), seen(sandboxes, "b"))
    for items in found:
        assert b"".join(item.data for item in items if isinstance(item, Output)) == b"abcabc"
    assert sorted(frame.start.stdout_offset for frame in servicer.streams[1]) == [3, 3]


async def test_a_refused_watch_has_the_services_whole_reason() -> None:
    class Refusing(Newer):
        async def answers(
            self, frame: pb.WatchProcessesRequest, context: Any
        ) -> AsyncIterator[pb.WatchProcessesResponse]:
            failure = pb.WatchProcessesResponse.WatchFailure(reason="PROCESS_UNKNOWN")
            yield pb.WatchProcessesResponse(watch_id=frame.start.watch_id, failure=failure)

        async def WatchProcess(self, request: pb.WatchProcessRequest, context: Any) -> Any:  # noqa: N802
            status = to_status(NotFound("no such process", reason="PROCESS_UNKNOWN", metadata={"more": "said"}))
            await context.abort(status.code, status.message, status.trailing_metadata)
            yield pb.WatchProcessResponse()

    servicer = Refusing()  # type: ignore[abstract]
    async with serve((servicer, REGISTER)) as (_, channel):
        with pytest.raises(NotFound) as refused:
            await seen(GrpcSandboxes(channel), "p")
    assert (refused.value.reason, refused.value.metadata["more"]) == ("PROCESS_UNKNOWN", "said")


async def test_the_readers_of_a_closed_channel_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes_client, "WATCH_RETRIES", 0)

    class Silent(Newer):
        async def answers(
            self, frame: pb.WatchProcessesRequest, context: Any
        ) -> AsyncIterator[pb.WatchProcessesResponse]:
            yield output(frame.start.watch_id, 0, b"begun")

    servicer = Silent()  # type: ignore[abstract]
    async with serve((servicer, REGISTER)) as (_, channel):
        watching = GrpcSandboxes(channel).watch("s", "p")
        await anext(watching)
        await channel.close()
        with pytest.raises(Unavailable):
            await anext(watching)
