"""penstock.sandbox.v1.ProcessService."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Any, cast

import grpc

from penstock.sandbox.v1 import process_service_pb2 as pb
from penstock.sandbox.v1 import process_service_pb2_grpc
from penstock_chassis.errors import PenstockError
from penstock_chassis.validation import invalid_field
from penstock_sandbox import files
from penstock_sandbox.domain.model import DEFAULT_OUTPUT_LIMIT, Chunk, Exit, Gap, ProcessSpec, PtySize, State, Stream
from penstock_sandbox.processes.process import RunningProcess
from penstock_sandbox.processes.watches import LEAST_WINDOW, MOST_WINDOW, Event, Watches
from penstock_sandbox.rpc import convert
from penstock_sandbox.rpc.convert import page
from penstock_sandbox.sandboxes.table import Table

Context = grpc.aio.ServicerContext[Any, Any]
_STREAMS = {Stream.STDOUT: pb.OUTPUT_STREAM_STDOUT, Stream.STDERR: pb.OUTPUT_STREAM_STDERR}
_RUN_LIMIT = 1024 * 1024
_RUN_LIMIT_MOST = 10 * 1024 * 1024
_RESULT_MOST = 1024 * 1024
_PART_OF_DEADLINE = 0.8


class ProcessServicer(process_service_pb2_grpc.ProcessServiceServicer):
    """See the contract."""

    def __init__(self, table: Table) -> None:
        self._table = table

    async def StartProcess(self, request: pb.StartProcessRequest, context: Context) -> pb.StartProcessResponse:  # noqa: N802
        if not request.process_id:
            raise invalid_field("process_id", "is required")
        _, _, processes = self._table.usable(request.sandbox_id)
        initial = convert.files_from(request.files)
        spec = ProcessSpec(
            id=request.process_id,
            command=convert.command_from(request.command, "command"),
            stdin=request.stdin,
            pty=_size(request.pty) if request.HasField("pty") else None,
            output_limit=request.output_limit_bytes if request.HasField("output_limit_bytes") else DEFAULT_OUTPUT_LIMIT,
            kill_all_after=request.kill_all_after,
        )
        tail = request.output_tail_bytes
        if not 0 <= tail <= _RUN_LIMIT_MOST:
            raise invalid_field("output_tail_bytes", f"must be 0 to {_RUN_LIMIT_MOST}")
        process = await processes.start(spec, tail, files=initial)
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
                yield pb.WatchProcessResponse(chunk=_chunk(event))
            elif isinstance(event, Gap):
                yield pb.WatchProcessResponse(gap=_gap(event))
            else:
                yield pb.WatchProcessResponse(heartbeat=pb.WatchProcessResponse.Heartbeat())
        assert process.exit is not None
        yield pb.WatchProcessResponse(exit=convert.exit_to(process.exit))

    async def WatchProcesses(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.WatchProcessesRequest], context: Context
    ) -> AsyncIterator[pb.WatchProcessesResponse]:
        yield pb.WatchProcessesResponse(opened=pb.WatchProcessesResponse.Opened())
        watches = Watches()
        reading = asyncio.create_task(self._read_watches(request_iterator, watches))
        try:
            async with aclosing(watches.events()) as events:
                async for event in events:
                    yield _watched(event)
        finally:
            watches.close()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read_watches(self, requests: AsyncIterator[pb.WatchProcessesRequest], watches: Watches) -> None:
        """Takes the frames of a caller; a frame that cannot be read ends the stream."""
        try:
            async for request in requests:
                match request.WhichOneof("frame"):
                    case "start":
                        self._begin_watch(request.start, watches)
                    case "credit":
                        if request.credit.bytes <= 0:
                            raise invalid_field("credit.bytes", "must be positive")
                        watches.credit(request.credit.watch_id, request.credit.bytes)
                    case "stop":
                        watches.stop(request.stop.watch_id)
                    case _:
                        raise invalid_field("frame", "start, credit or stop is expected")
        except Exception as error:  # noqa: BLE001 - raised by the stream's reader
            watches.complete(error)
        else:
            watches.complete()

    def _begin_watch(self, start: pb.WatchProcessesRequest.WatchStart, watches: Watches) -> None:
        watches.check_id(start.watch_id)
        if not LEAST_WINDOW <= start.window_bytes <= MOST_WINDOW:
            raise invalid_field("start.window_bytes", f"must be {LEAST_WINDOW} to {MOST_WINDOW}")
        if start.stdout_offset < 0 or start.stderr_offset < 0:
            raise invalid_field("start.stdout_offset", "offsets must not be negative")
        try:
            process = self._find(start)
        except PenstockError as error:
            watches.refuse(start.watch_id, error)
            return
        offsets = {Stream.STDOUT: start.stdout_offset, Stream.STDERR: start.stderr_offset}
        watches.begin(start.watch_id, process, offsets, start.window_bytes)

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
        _, handle, processes = self._table.usable(request.sandbox_id)
        limit = request.output_limit_bytes if request.HasField("output_limit_bytes") else _RUN_LIMIT
        if not 0 <= limit <= _RUN_LIMIT_MOST:
            raise invalid_field("output_limit_bytes", f"must be 0 to {_RUN_LIMIT_MOST}")
        if not 0 <= request.result_file.max_bytes <= _RESULT_MOST:
            raise invalid_field("result_file.max_bytes", f"must be 0 to {_RESULT_MOST}")
        command = convert.command_from(request.command, "command")
        result = await processes.run(
            command,
            request.stdin,
            limit,
            request.process_id,
            kill_all_after=request.kill_all_after,
            files=convert.files_from(request.files),
        )
        answer = pb.RunResponse(result=convert.run_result_to(result))
        if request.HasField("result_file"):
            wanted = request.result_file
            # One that cannot be read is left out: the caller's own read says why.
            with suppress(PenstockError):
                content, size = await files.read_first(handle, wanted.path, wanted.max_bytes)
                answer.result.result_file.content, answer.result.result_file.size_bytes = content, size
        return answer

    def _find(
        self,
        request: pb.WatchProcessRequest
        | pb.WatchProcessesRequest.WatchStart
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


def _watched(event: tuple[int, Event] | None) -> pb.WatchProcessesResponse:
    if event is None:
        return pb.WatchProcessesResponse(heartbeat=pb.WatchProcessResponse.Heartbeat())
    watch_id, what = event
    if isinstance(what, Chunk):
        return pb.WatchProcessesResponse(watch_id=watch_id, chunk=_chunk(what))
    if isinstance(what, Gap):
        return pb.WatchProcessesResponse(watch_id=watch_id, gap=_gap(what))
    if isinstance(what, Exit):
        return pb.WatchProcessesResponse(watch_id=watch_id, exit=convert.exit_to(what))
    # Without the error's text: it names the sandbox, and another team's by another id than the caller gave.
    failure = pb.WatchProcessesResponse.WatchFailure(reason=what.reason)
    return pb.WatchProcessesResponse(watch_id=watch_id, failure=failure)


def _chunk(chunk: Chunk) -> pb.WatchProcessResponse.Chunk:
    return pb.WatchProcessResponse.Chunk(stream=_STREAMS[chunk.stream], offset=chunk.offset, data=chunk.data)


def _gap(gap: Gap) -> pb.WatchProcessResponse.Gap:
    return pb.WatchProcessResponse.Gap(stream=_STREAMS[gap.stream], start=gap.start, end=gap.end)


def _size(size: pb.PtySize) -> PtySize:
    if not (1 <= size.rows <= 65535 and 1 <= size.columns <= 65535):
        raise invalid_field("pty", "rows and columns must be 1 to 65535")
    return PtySize(size.rows, size.columns)
