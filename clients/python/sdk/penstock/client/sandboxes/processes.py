"""A process in a sandbox: its output as it comes, its input, its signals, its terminal."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any, Final, Self

from penstock.client.errors import DeadlineExceeded, PenstockError, Unavailable, is_broken, wrong_type
from penstock.client.transport.patience import LONG_POLL_S, Patience
from penstock.client.transport.rpc import Service
from penstock.client.types.processes import Output, OutputGap, Process
from penstock.client.types.results import Exit
from penstock.client.wire import chat, sandboxes
from penstock.client.wire.results import exit_from
from penstock.sandbox.v1 import process_service_pb2 as pb
from penstock.sandbox.v1 import process_service_pb2_grpc as pb_grpc

_CHUNK_BYTES: Final = 256 * 1024


class ProcessHandle:
    """One process: `output`, `write`, `close_stdin`, `signal`, `resize`, `wait`, `kill`. `async with` kills it at the
    end; otherwise it runs until it exits or its sandbox ends.
    """

    def __init__(self, service: Service, sandbox_id: str, info: Process) -> None:
        self._service = service
        self._stub = pb_grpc.ProcessServiceStub(service.channel)
        self._sandbox_id = sandbox_id
        self.info: Process = info
        """The process as last reported."""
        self._written: int | None = info.stdin_offset
        self._input = asyncio.Lock()

    def __repr__(self) -> str:
        return f"ProcessHandle({self.process_id}, {self.info.exit or 'running'})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    @property
    def process_id(self) -> str:
        """The process's id, unique in its sandbox."""
        return self.info.process_id

    async def refresh(self) -> Process:
        """Fetches its current state. Raises NotFound `PROCESS_UNKNOWN`."""
        request = pb.GetProcessRequest(sandbox_id=self._sandbox_id, process_id=self.process_id)
        answer = await self._service.call(self._stub.GetProcess, request, repeatable=True)
        self.info = sandboxes.process(answer.process)
        return self.info

    async def output(
        self, *, stdout_offset: int = 0, stderr_offset: int = 0
    ) -> AsyncGenerator[Output | OutputGap, None]:
        """Yields its output, the past first, until it has ended; `info.exit` is set then. A broken stream is resumed.

        Args:
            stdout_offset: of the first byte of stdout, from 0. A process with a terminal has stdout only.
            stderr_offset: of the first byte of stderr, from 0.

        Raises:
            NotFound: `PROCESS_UNKNOWN`, `SANDBOX_UNKNOWN`.
            FailedPrecondition: `SANDBOX_LOST`.
        """
        at = {"stdout": stdout_offset, "stderr": stderr_offset}
        patience = Patience()
        while True:
            request = pb.WatchProcessRequest(
                sandbox_id=self._sandbox_id,
                process_id=self.process_id,
                stdout_offset=at["stdout"],
                stderr_offset=at["stderr"],
            )
            error: PenstockError = Unavailable("The service ended the stream", reason="STREAM_ENDED")
            try:
                async with aclosing(self._service.stream(self._stub.WatchProcess, request)) as messages:
                    async for message in messages:
                        patience.sign()
                        match message.WhichOneof("event"):
                            case "started":
                                self.info = sandboxes.process(message.started)
                            case "chunk":
                                name = _stream(message.chunk.stream)
                                at[name] = message.chunk.offset + len(message.chunk.data)
                                yield Output(name, message.chunk.offset, message.chunk.data)
                            case "gap":
                                name = _stream(message.gap.stream)
                                at[name] = message.gap.end
                                yield OutputGap(name, message.gap.start, message.gap.end)
                            case "exit":
                                await self.refresh()
                                return
                            case _:
                                pass
            except PenstockError as broken:
                if not is_broken(broken):
                    raise
                error = broken
            await patience.pause(error)

    async def write(self, data: bytes) -> None:
        """Writes to its standard input, or its terminal; returns when it was accepted, which waits for a full pipe.

        Start the process with `stdin=True` or `pty`. Concurrent writes of one handle are made one after the other; one
        handle of a process writes at a time, and a later one takes over.

        Raises:
            FailedPrecondition: `STDIN_CLOSED`, `STDIN_NOT_OPEN`.
            Aborted: `STDIN_TAKEN_OVER`, another client writes.
            InvalidArgument: `ARGUMENT_TYPE`, the data is no bytes: text has to be encoded.
        """
        if not isinstance(data, bytes):
            raise wrong_type("data", "bytes (text.encode())", data)
        await self._write(data, end=False)

    async def close_stdin(self) -> None:
        """Closes its standard input: it reads the end of the input after what was written."""
        await self._write(b"", end=True)

    async def _write(self, data: bytes, *, end: bool) -> None:
        async with self._input:
            offset = (await self.refresh()).stdin_offset if self._written is None else self._written
            self._written = None  # unknown, where this fails
            frames = partial(self._frames, offset, data, end)
            # The offset makes a repeat harmless: bytes already written are skipped.
            answer = await self._service.repeat(lambda: self._service.push(self._stub.WriteStdin, frames))
            self._written = answer.offset

    async def _frames(self, offset: int, data: bytes, end: bool) -> AsyncIterator[pb.WriteStdinRequest]:
        frame = pb.WriteStdinRequest
        start = frame.StdinStart(sandbox_id=self._sandbox_id, process_id=self.process_id, offset=offset)
        yield frame(start=start)
        for first in range(0, len(data), _CHUNK_BYTES):
            yield frame(data=data[first : first + _CHUNK_BYTES])
        if end:
            yield frame(end=frame.StdinEnd())

    async def signal(self, number: int) -> None:
        """Sends a signal (1 to 64, such as `signal.SIGINT`) to its process group. One that has ended is a success."""
        request = pb.SignalProcessRequest(sandbox_id=self._sandbox_id, process_id=self.process_id, signal=int(number))
        await self._service.call(self._stub.SignalProcess, request)

    async def resize(self, rows: int, columns: int) -> None:
        """Sets the size of its terminal in characters. Raises FailedPrecondition `NOT_A_PTY`."""
        request = pb.ResizePtyRequest(
            sandbox_id=self._sandbox_id, process_id=self.process_id, size=pb.PtySize(rows=rows, columns=columns)
        )
        await self._service.call(self._stub.ResizePty, request, repeatable=True)

    async def wait(self) -> Exit:
        """Waits until it has ended; returns its exit. A program that could not be started exits as `start_failed`."""
        patience = Patience()
        request = pb.WaitProcessRequest(sandbox_id=self._sandbox_id, process_id=self.process_id)
        while True:
            asked = asyncio.get_running_loop().time()
            try:
                answer = await self._service.call(self._stub.WaitProcess, request, timeout=LONG_POLL_S)
            except (Unavailable, DeadlineExceeded) as error:
                await patience.pause(error)
                continue
            patience.sign()
            self.info = sandboxes.process(answer.process)
            if self.info.exit is not None:
                return self.info.exit
            await patience.ask_again(asked)

    async def kill(self, *, everything: bool = False) -> Exit:
        """Kills it and its descendants, daemons included; returns when they are dead. Idempotent.

        Args:
            everything: kill every other process in the sandbox too.

        Raises:
            Internal: `KILL_FAILED`, a descendant could not be killed.
        """
        request = pb.KillProcessRequest(sandbox_id=self._sandbox_id, process_id=self.process_id, everything=everything)
        answer = await self._service.call(self._stub.KillProcess, request, timeout=60.0, repeatable=True)
        return exit_from(answer.exit)


def _stream(number: Any) -> str:
    return chat.word(pb.OutputStream, number, "OUTPUT_STREAM_")
