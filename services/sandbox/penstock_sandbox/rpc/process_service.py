"""penstock.sandbox.v1.ProcessService."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc

from penstock.sandbox.v1 import process_service_pb2 as pb
from penstock.sandbox.v1 import process_service_pb2_grpc
from penstock_chassis.validation import invalid_field
from penstock_sandbox.domain.model import DEFAULT_OUTPUT_LIMIT, Chunk, Gap, ProcessSpec, PtySize, State, Stream
from penstock_sandbox.processes.process import RunningProcess
from penstock_sandbox.rpc import convert
from penstock_sandbox.rpc.convert import page
from penstock_sandbox.sandboxes.table import Table

Context = grpc.aio.ServicerContext[Any, Any]
_STREAMS = {Stream.STDOUT: pb.OUTPUT_STREAM_STDOUT, Stream.STDERR: pb.OUTPUT_STREAM_STDERR}
_RUN_LIMIT = 1024 * 1024
_RUN_LIMIT_MOST = 10 * 1024 * 1024
_PART_OF_DEADLINE = 0.8


class ProcessServicer(process_service_pb2_grpc.ProcessServiceServicer):
    """See the contract."""

    def __init__(self, table: Table) -> None:
        self._table = table

    async def StartProcess(self, request: pb.StartProcessRequest, context: Context) -> pb.StartProcessResponse:  # noqa: N802
        if not request.process_id:
            raise invalid_field("process_id", "is required")
        _, _, processes = self._table.usable(request.sandbox_id)
        spec = ProcessSpec(
            id=request.process_id,
            command=convert.command_from(request.command, "command"),
            stdin=request.stdin,
            pty=_size(request.pty) if request.HasField("pty") else None,
            output_limit=request.output_limit_bytes if request.HasField("output_limit_bytes") else DEFAULT_OUTPUT_LIMIT,
        )
        tail = request.output_tail_bytes
        if not 0 <= tail <= _RUN_LIMIT_MOST:
            raise invalid_field("output_tail_bytes", f"must be 0 to {_RUN_LIMIT_MOST}")
        process = await processes.start(spec, tail)
        return pb.StartProcessResponse(process=convert.process_to(process.view()))

    async def WatchProcess(  # noqa: N802
        self, request: pb.WatchProcessRequest, context: Context
    ) -> AsyncIterator[pb.WatchProcessResponse]:
        process = self._find(request)
        if request.stdout_offset < 0 or request.stderr_offset < 0:
            raise invalid_field("stdout_offset", "offsets must not be negative")
        yield pb.WatchProcessResponse(started=convert.process_to(process.view()))
        offsets = {Stream.STDOUT: request.stdout_offset, Stream.STDERR: request.stderr_offset}
        async for event in process.watch(offsets):
            if isinstance(event, Chunk):
                chunk = pb.WatchProcessResponse.Chunk(
                    stream=_STREAMS[event.stream], offset=event.offset, data=event.data
                )
                yield pb.WatchProcessResponse(chunk=chunk)
            elif isinstance(event, Gap):
                gap = pb.WatchProcessResponse.Gap(stream=_STREAMS[event.stream], start=event.start, end=event.end)
                yield pb.WatchProcessResponse(gap=gap)
            else:
                yield pb.WatchProcessResponse(heartbeat=pb.WatchProcessResponse.Heartbeat())
        assert process.exit is not None
        yield pb.WatchProcessResponse(exit=convert.exit_to(process.exit))

    async def WriteStdin(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.WriteStdinRequest], context: Context
    ) -> pb.WriteStdinResponse:
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("frame") != "start":
            raise invalid_field("frame", "the first frame must be start")
        process, offset = self._find_working(first.start), first.start.offset
        writer = process.take_stdin()
        async for request in request_iterator:
            match request.WhichOneof("frame"):
                case "data":
                    await process.write_stdin(writer, offset, request.data)
                    offset += len(request.data)
                case "end":
                    await process.close_stdin(writer)
                    break
                case _:
                    raise invalid_field("frame", "data or end is expected here")
        return pb.WriteStdinResponse(offset=process.stdin_offset)

    async def SignalProcess(self, request: pb.SignalProcessRequest, context: Context) -> pb.SignalProcessResponse:  # noqa: N802
        if not 1 <= request.signal <= 64:
            raise invalid_field("signal", "must be 1 to 64")
        await self._find_working(request).signal(request.signal)
        return pb.SignalProcessResponse()

    async def KillProcess(self, request: pb.KillProcessRequest, context: Context) -> pb.KillProcessResponse:  # noqa: N802
        processes = self._table.processes(request.sandbox_id)
        ended = await processes.kill(request.process_id, everything=request.everything)
        return pb.KillProcessResponse(exit=convert.exit_to(ended))

    async def ResizePty(self, request: pb.ResizePtyRequest, context: Context) -> pb.ResizePtyResponse:  # noqa: N802
        await self._find_working(request).resize(_size(request.size))
        return pb.ResizePtyResponse()

    async def GetProcess(self, request: pb.GetProcessRequest, context: Context) -> pb.GetProcessResponse:  # noqa: N802
        return pb.GetProcessResponse(process=convert.process_to(self._find(request).view()))

    async def ListProcesses(self, request: pb.ListProcessesRequest, context: Context) -> pb.ListProcessesResponse:  # noqa: N802
        views = [process.view() for process in self._table.processes(request.sandbox_id).all()]
        views.sort(key=lambda view: (view.started_at, view.spec.id), reverse=True)
        shown, token = page(views, lambda view: (view.started_at, view.spec.id), request.page_size, request.page_token)
        return pb.ListProcessesResponse(processes=map(convert.process_to, shown), next_page_token=token)

    async def WaitProcess(self, request: pb.WaitProcessRequest, context: Context) -> pb.WaitProcessResponse:  # noqa: N802
        process = self._find(request)
        left = cast("float | None", context.time_remaining())
        try:
            async with asyncio.timeout(left * _PART_OF_DEADLINE if left is not None else None):
                await process.ended.wait()
        except TimeoutError:
            pass  # the response shows that it still runs
        return pb.WaitProcessResponse(process=convert.process_to(process.view()))

    async def Run(self, request: pb.RunRequest, context: Context) -> pb.RunResponse:  # noqa: N802
        _, _, processes = self._table.usable(request.sandbox_id)
        limit = request.output_limit_bytes if request.HasField("output_limit_bytes") else _RUN_LIMIT
        if not 0 <= limit <= _RUN_LIMIT_MOST:
            raise invalid_field("output_limit_bytes", f"must be 0 to {_RUN_LIMIT_MOST}")
        result = await processes.run(
            convert.command_from(request.command, "command"), request.stdin, limit, request.process_id
        )
        return pb.RunResponse(result=convert.run_result_to(result))

    def _find(
        self,
        request: pb.WatchProcessRequest
        | pb.WriteStdinRequest.StdinStart
        | pb.SignalProcessRequest
        | pb.KillProcessRequest
        | pb.ResizePtyRequest
        | pb.GetProcessRequest
        | pb.WaitProcessRequest,
    ) -> RunningProcess:
        return self._table.processes(request.sandbox_id).get(request.process_id)

    def _find_working(
        self, request: pb.WriteStdinRequest.StdinStart | pb.SignalProcessRequest | pb.ResizePtyRequest
    ) -> RunningProcess:
        process = self._find(request)
        if self._table.get(request.sandbox_id).view.state is State.PAUSED:
            self._table.usable(request.sandbox_id)
        return process


def _size(size: pb.PtySize) -> PtySize:
    if not (1 <= size.rows <= 65535 and 1 <= size.columns <= 65535):
        raise invalid_field("pty", "rows and columns must be 1 to 65535")
    return PtySize(size.rows, size.columns)
