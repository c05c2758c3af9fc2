"""The watches of processes at one address: one stream for all of them, however many there are.

A stream costs both sides some 50 KB, a watch on it less than 5. A service of an earlier version does not have such
streams: each process has one of its own there.

Invariants: a reader that is slow holds up no other, because the service sends each no more than its window. The stream
ends soon after the last watch, so that it keeps no service from stopping.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Final, TypeAlias

from penstock.sandbox.v1 import process_service_pb2 as pb
from penstock.sandbox.v1 import process_service_pb2_grpc
from penstock_chassis.channel import streaming, typed_errors
from penstock_chassis.errors import PenstockError, Unavailable, Unsupported

WINDOW_BYTES: Final = 512 << 10
"""Of one process's output: how much may be on its way or unread."""
CHUNK_COST: Final = 256
"""What a chunk takes of the window beside its bytes, by the contract."""
IDLE_S: Final = 0.5
"""How long a stream without watches stays open for the next one."""

Event: TypeAlias = pb.WatchProcessResponse | pb.WatchProcessesResponse
"""Both have `chunk`, `gap` and `exit`."""


class ProcessWatches:
    """Watches processes through one stub."""

    def __init__(self, processes: process_service_pb2_grpc.ProcessServiceAsyncStub) -> None:
        self._processes = processes
        self._stream: _Stream | None = None
        self._is_served = True

    async def watch(
        self, sandbox_id: str, process_id: str, stdout_offset: int, stderr_offset: int
    ) -> AsyncGenerator[Event, None]:
        """Yield what WatchProcess does, the exit last. Raises PenstockError as that does."""
        if self._is_served:
            stream = self._stream
            if stream is None or not stream.takes_more:
                stream = self._stream = _Stream(self._processes)
            try:
                async with aclosing(stream.watch(sandbox_id, process_id, stdout_offset, stderr_offset)) as watched:
                    async for event in watched:
                        yield event
                        if event.HasField("exit"):
                            return
            except Unsupported:
                self._is_served = False
        # Also for a watch that the service refused: this call has the reason in full.
        request = pb.WatchProcessRequest(
            sandbox_id=sandbox_id, process_id=process_id, stdout_offset=stdout_offset, stderr_offset=stderr_offset
        )
        with streaming(self._processes.WatchProcess(request)) as events:
            async for answer in events:
                yield answer


class _Watch:
    __slots__ = ("events", "failure", "waiter")

    def __init__(self) -> None:
        self.events: list[pb.WatchProcessesResponse] = []
        self.failure: PenstockError | None = None
        self.waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class _Stream:
    """One stream, which opens at once. It belongs to no rollout: its call has no ids of one."""

    def __init__(self, processes: process_service_pb2_grpc.ProcessServiceAsyncStub) -> None:
        self.takes_more = True
        self._processes = processes
        self._requests: asyncio.Queue[pb.WatchProcessesRequest | None] = asyncio.Queue()
        self._watches: dict[int, _Watch] = {}
        self._last_id = 0
        self._idle: asyncio.TimerHandle | None = None
        self._reading = asyncio.get_running_loop().create_task(self._read(), context=contextvars.Context())

    async def watch(
        self, sandbox_id: str, process_id: str, stdout_offset: int, stderr_offset: int
    ) -> AsyncGenerator[pb.WatchProcessesResponse, None]:
        """Yield chunks, gaps and the exit; end without one if the service refuses the watch.

        Raises PenstockError when the stream breaks; Unsupported if the service does not have such streams.
        """
        if self._idle is not None:
            self._idle.cancel()
        self._last_id += 1
        watch_id, watch = self._last_id, _Watch()
        self._watches[watch_id] = watch
        self._send(
            start=pb.WatchProcessesRequest.WatchStart(
                watch_id=watch_id,
                sandbox_id=sandbox_id,
                process_id=process_id,
                stdout_offset=stdout_offset,
                stderr_offset=stderr_offset,
                window_bytes=WINDOW_BYTES,
            )
        )
        is_over, processed = False, 0
        try:
            while True:
                while not watch.events:
                    if watch.failure is not None:
                        raise watch.failure
                    watch.waiter = asyncio.get_running_loop().create_future()
                    await watch.waiter
                event = watch.events.pop(0)  # few: the window bounds them
                is_over = event.HasField("exit") or event.HasField("failure")
                if event.HasField("failure"):
                    return
                yield event
                if is_over:
                    return
                if event.HasField("chunk"):
                    processed += len(event.chunk.data) + CHUNK_COST
                if processed >= WINDOW_BYTES // 2:
                    self._send(credit=pb.WatchProcessesRequest.WatchCredit(watch_id=watch_id, bytes=processed))
                    processed = 0
        finally:
            del self._watches[watch_id]
            if not is_over and watch.failure is None:
                self._send(stop=pb.WatchProcessesRequest.WatchStop(watch_id=watch_id))
            if not self._watches and self.takes_more:
                self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._end)

    def _send(self, **frame: Any) -> None:
        self._requests.put_nowait(pb.WatchProcessesRequest(**frame))

    def _end(self) -> None:
        self.takes_more = False
        self._requests.put_nowait(None)

    async def _frames(self) -> AsyncIterator[pb.WatchProcessesRequest]:
        while (frame := await self._requests.get()) is not None:
            yield frame

    async def _read(self) -> None:
        failure: PenstockError = Unavailable("the stream ended without an exit", reason="STREAM_BROKEN")
        try:
            with streaming(self._processes.WatchProcesses(self._frames())) as events, typed_errors():
                async for event in events:
                    if (watch := self._watches.get(event.watch_id)) is not None:
                        watch.events.append(event)
                        watch.wake()
        except PenstockError as error:
            failure = error
        finally:
            # Also when this task is cancelled, as it is with the channel.
            self.takes_more = False
            if self._idle is not None:
                self._idle.cancel()
            for watch in self._watches.values():
                watch.failure = failure
                watch.wake()
