"""One process for its callers: output by offset, input with an offset, a typed exit, a timeout that kills.

Invariants
- The exit is decided once, after the process was reaped and both outputs were closed, or 2 s after the reaping if
  something else still holds them open (``pipes_open``); never while its tree is still being killed. With
  ``kill_all_after`` it is decided when the sandbox's other processes are dead too.
- A timeout sends SIGTERM to the group and kills the whole tree after a grace period, even if the process has ended
  meanwhile (R37).
- Any number of watchers read from any offset; none can slow down the process or other watchers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import structlog

from penstock_chassis.aio.broadcast import Signal
from penstock_chassis.aio.moment import Moment
from penstock_chassis.errors import Aborted, FailedPrecondition, InvalidArgument
from penstock_sandbox.domain.backend import ProcessHandle, ProcessSink, RawExit
from penstock_sandbox.domain.model import (
    ENDED_INSIDE,
    Chunk,
    Exit,
    ExitReason,
    Gap,
    Heartbeat,
    Process,
    ProcessSpec,
    PtySize,
    Stream,
)
from penstock_sandbox.processes.output import Output

MOST_CHUNK = 256 * 1024
HEARTBEAT_S = 10.0
_DRAIN_S = 2.0
_TERM_GRACE_S = 2.0

_log = structlog.get_logger(__name__)

Event = Chunk | Gap | Heartbeat


class Cursor:
    """Reads one process's outputs from offsets on: first what was kept, then what was discarded, then the tail."""

    __slots__ = ("_positions", "process")

    def __init__(self, process: RunningProcess, offsets: Mapping[Stream, int]) -> None:
        self.process = process
        self._positions = dict(offsets)

    def next(self, most: int = MOST_CHUNK) -> Chunk | Gap | None:
        """The next piece, of at most `most` bytes; None if there is none now, and once the process has ended, ever."""
        end = self.process.exit
        for stream, output in self.process.outputs.items():
            start = self._positions[stream]
            total = output.total if end is None else _total(end, stream)
            if start >= total:
                continue
            if start < output.kept:
                data = output.read(start, min(most, total - start))
                if not data:  # its file was cut: an empty chunk would be followed by others for ever
                    self._positions[stream] = min(output.kept, total)
                    return Gap(stream, start, self._positions[stream])
                self._positions[stream] += len(data)
                return Chunk(stream, start, data)
            if output.has_tail and end is None:
                continue  # not before its end is it known what the last bytes are
            tail = output.tail()
            first = output.total - len(tail) if tail else total
            if start < first:
                self._positions[stream] = min(first, total)
                return Gap(stream, start, min(first, total))
            data = tail[start - first :][: min(most, total - start)]
            self._positions[stream] += len(data)
            return Chunk(stream, start, data)
        return None


def _total(end: Exit, stream: Stream) -> int:
    return end.stdout_bytes if stream is Stream.STDOUT else end.stderr_bytes


class RunningProcess(ProcessSink):
    """One process: receives the backend's events, decides the exit, serves watchers."""

    def __init__(
        self,
        spec: ProcessSpec,
        given_digest: bytes | None,
        spool: Path,
        tail: int = 0,
        kill_others: Callable[[RunningProcess], Awaitable[None]] | None = None,
    ) -> None:
        self.spec = spec
        self.given_digest = given_digest
        """Digest of the input given at the start; None if the input is streamed."""
        self.started_at = time.time()
        self.exit: Exit | None = None
        self.outputs = {stream: Output(spool, spec.output_limit, tail) for stream in Stream}
        self.stdin_offset = 0
        self.stdin_open = spec.stdin or spec.pty is not None
        self.stdin_lock = asyncio.Lock()
        self.callers = 0
        self.feeding: asyncio.Task[None] | None = None
        """Writes the input of a run. It is the process's, since the caller that began it may leave before others."""
        self._stdin_writer: object = None
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended = Moment()
        self._handle: ProcessHandle | None = None
        self._began = time.monotonic()
        self._open = {Stream.STDOUT} if spec.pty is not None else set(Stream)
        self._raw: RawExit | None = None
        self._drain: asyncio.TimerHandle | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._left_s: float | None = None
        """While its timeout is held: what is left of it."""
        self._expiring: asyncio.Task[None] | None = None
        self._kill_reason: ExitReason | None = None
        self._reaped = Moment()
        self._drained = False
        self._killing = 0
        self._kill_others = kill_others
        """Of a process with `kill_all_after`, until that has begun."""
        self._clearing: asyncio.Task[None] | None = None
        self._over: float | None = None
        self._all_killed = False
        self.is_tree_dead = False
        """Whether it and all its descendants were killed: nothing is left that could make another."""
        self.changed = Signal()
        """Notified when there is more output, and at the end."""

    # Events from the backend -------------------------------------------------------------------------------------

    def output(self, stream: Stream, data: bytes) -> None:
        self.outputs[stream].append(data)
        self.changed.notify()

    def closed(self, stream: Stream) -> None:
        self._open.discard(stream)
        self._settle()

    def exited(self, exit: RawExit) -> None:  # noqa: A002
        self._raw = exit
        self._reaped.set()
        if self._open:
            self._drain = asyncio.get_running_loop().call_later(_DRAIN_S, self._drain_over)
        self._settle()

    def _drain_over(self) -> None:
        self._drained = True
        self._settle()

    def lost(self, reason: str = "") -> None:
        if self._raw is not None:
            self._finish()
            return
        # Deleting a sandbox is a requested kill; any other end was not observed.
        exit_reason = self._kill_reason or ExitReason.SANDBOX_LOST
        if exit_reason is ExitReason.KILLED:
            self._decide(exit_reason, signal_number=signal.SIGKILL)
        else:
            message = f"sandbox lost: {reason}" if reason else "sandbox lost"
            self._decide(exit_reason, message=message, ended_inside=reason in ENDED_INSIDE)

    def _settle(self) -> None:
        # While its tree is being killed the exit waits: TIMED_OUT and KILLED promise that the whole tree is dead.
        if self._raw is None or not (self._drained or not self._open) or self._killing or self.is_clearing:
            return
        if self._kill_others is None:
            self._finish()
            return
        self._over = time.monotonic()
        self._clearing = asyncio.create_task(self._clear(self._kill_others))
        self._kill_others = None

    @property
    def is_clearing(self) -> bool:
        """Whether it has ended, and the sandbox's other processes are being killed."""
        return self._clearing is not None and self.exit is None

    async def _clear(self, kill_others: Callable[[RunningProcess], Awaitable[None]]) -> None:
        try:
            await kill_others(self)
            self._all_killed = True
        except Exception:  # noqa: BLE001
            # No task awaits this one: the exit does not have `all_killed`, and the caller's own kill gets the error.
            _log.exception("what a process left running was not killed", process=self.spec.id)
        finally:
            self._finish()

    def _finish(self) -> None:
        raw = self._raw
        assert raw is not None
        if self._kill_reason is ExitReason.TIMED_OUT:
            reason = ExitReason.TIMED_OUT
        elif self._kill_reason is ExitReason.KILLED and raw.signal is not None:
            reason = ExitReason.KILLED
        elif raw.oom:
            reason = ExitReason.OOM
        else:
            reason = ExitReason.SIGNALED if raw.signal is not None else ExitReason.EXITED
        self._decide(reason, code=raw.code, signal_number=raw.signal, raw=raw)

    def _decide(
        self,
        reason: ExitReason,
        *,
        code: int | None = None,
        signal_number: int | None = None,
        message: str = "",
        raw: RawExit | None = None,
        ended_inside: bool = False,
    ) -> None:
        if self.exit is not None:
            return
        if self._drain is not None:
            self._drain.cancel()
        if self._limit is not None:
            self._limit.cancel()
        out, err = self.outputs[Stream.STDOUT], self.outputs[Stream.STDERR]
        self.exit = Exit(
            reason=reason,
            ended_at=time.time(),
            duration_s=(self._over or time.monotonic()) - self._began,
            code=code,
            signal=signal_number,
            message=message,
            cpu_s=raw.cpu_s if raw is not None else None,
            peak_bytes=raw.peak_bytes if raw is not None else None,
            stdout_truncated=out.truncated,
            stderr_truncated=err.truncated,
            pipes_open=bool(self._open) and raw is not None,
            stdout_bytes=out.total,
            stderr_bytes=err.total,
            ended_inside=ended_inside,
            all_killed=self._all_killed,
        )
        self.stdin_open = False
        self.ended.set()
        self.changed.notify()

    # Operations of the service -----------------------------------------------------------------------------------

    def began(self, handle: ProcessHandle) -> None:
        """Called when the backend has started it."""
        self._handle = handle
        if self.spec.command.timeout_s is not None and self.exit is None:
            # No task until the time is over: most processes end before, and thousands may wait.
            loop = asyncio.get_running_loop()
            self._limit = loop.call_later(self.spec.command.timeout_s, self._begin_to_expire)
        self.started.set_result(None)

    def hold_timeout(self) -> None:
        """Lets the timeout stand still; succeeds if it does, and for a process without one or that ends already."""
        if self._limit is not None and self._left_s is None and self.exit is None and self._expiring is None:
            self._left_s = max(0.0, self._limit.when() - asyncio.get_running_loop().time())
            self._limit.cancel()

    def release_timeout(self) -> None:
        """Lets the rest of a held timeout run."""
        if self._left_s is not None and self.exit is None:
            self._limit = asyncio.get_running_loop().call_later(self._left_s, self._begin_to_expire)
        self._left_s = None

    def start_failed(self, message: str) -> None:
        """Called when the program cannot be executed."""
        self._decide(ExitReason.START_FAILED, message=message)
        self.started.set_result(None)

    def _begin_to_expire(self) -> None:
        if self._raw is None and self.exit is None:  # else it ended in time, and at most its pipes are still open
            self._expiring = asyncio.create_task(self._expire())

    async def _expire(self) -> None:
        self._kill_reason = ExitReason.TIMED_OUT
        handle = self._running()
        self._killing += 1
        try:
            await handle.signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(_TERM_GRACE_S):
                    await self._reaped.wait()
            except TimeoutError:
                pass
            await handle.kill()
            self.is_tree_dead = True
        except Exception:  # noqa: BLE001
            # No task awaits this one: log the error and still report the process's own end.
            _log.exception("a timed-out process was not killed", process=self.spec.id)
        finally:
            self._killing -= 1
            self._settle()

    async def kill(self) -> Exit:
        """Kills the process and all its descendants; returns once all are dead."""
        await self._begun()
        if self._handle is not None:
            if self._raw is None:
                self._kill_reason = self._kill_reason or ExitReason.KILLED
            self._killing += 1
            try:
                # Also if it has ended: its leftover processes carry its mark.
                await self._handle.kill()
                self.is_tree_dead = True
            finally:
                self._killing -= 1
                self._settle()
        await self.ended.wait()
        assert self.exit is not None
        return self.exit

    async def kill_leftovers(self) -> None:
        """Kills the descendants of a process that has ended."""
        if self._handle is not None:
            await self._handle.kill()
            self.is_tree_dead = True

    async def signal(self, number: int) -> None:
        """Sends a signal to its group; succeeds if it has ended."""
        await self._begun()
        if self._raw is None and self._handle is not None:
            await self._handle.signal(number)

    def condemn(self) -> None:
        """Marks its sandbox as about to be deleted: its end is then a kill, not a loss."""
        if self.exit is None and self._raw is None:
            self._kill_reason = self._kill_reason or ExitReason.KILLED

    async def resize(self, size: PtySize) -> None:
        """Changes its terminal's dimensions."""
        if self.spec.pty is None:
            raise FailedPrecondition("the process has no terminal", reason="NOT_A_PTY")
        await self._begun()
        if self.exit is None:
            await self._running().resize(size)

    def take_stdin(self) -> object:
        """Takes over as the only writer of its input; returns the writer's key for ``write_stdin``."""
        if not (self.spec.stdin or self.spec.pty is not None):
            raise FailedPrecondition("the process was started without stdin", reason="STDIN_NOT_OPEN")
        self._stdin_writer = object()
        return self._stdin_writer

    async def write_stdin(self, writer: object, offset: int, data: bytes) -> None:
        """Writes input whose first byte is at ``offset``; skips bytes that were already written.

        Raises Aborted (STDIN_TAKEN_OVER), FailedPrecondition (STDIN_CLOSED), InvalidArgument (OFFSET_GAP).
        """
        await self._begun()
        async with self.stdin_lock:
            self._check_writer(writer)
            if offset > self.stdin_offset:
                raise InvalidArgument(
                    f"input continues at {offset}, but {self.stdin_offset} bytes were written",
                    reason="OFFSET_GAP",
                    metadata={"offset": str(self.stdin_offset)},
                )
            rest = data[self.stdin_offset - offset :]
            if not rest:
                return
            if not self.stdin_open:
                raise FailedPrecondition("standard input is closed", reason="STDIN_CLOSED")
            # Counted piece by piece, so that a cancelled writer leaves a correct offset.
            for start in range(0, len(rest), 4096):
                self._check_writer(writer)
                piece = rest[start : start + 4096]
                try:
                    await self._running().write_stdin(piece)
                except BrokenPipeError:
                    self.stdin_open = False
                    raise FailedPrecondition("the process reads no more input", reason="STDIN_CLOSED") from None
                self.stdin_offset += len(piece)

    async def _begun(self) -> None:
        """Waits until it has started. Raises the error of the start."""
        # Shielded: one waiter's cancellation must not cancel the start or the other waiters.
        await asyncio.shield(self.started)

    def _check_writer(self, writer: object) -> None:
        if writer is not self._stdin_writer:
            raise Aborted("another stream took over this process's input", reason="STDIN_TAKEN_OVER")

    async def close_stdin(self, writer: object) -> None:
        """Closes its input; succeeds if it is closed already."""
        await self._begun()
        async with self.stdin_lock:
            self._check_writer(writer)
            if self.stdin_open:
                self.stdin_open = False
                await self._running().close_stdin()

    async def stop_feeding(self) -> None:
        """Stops what writes the input of a run; succeeds if nothing does."""
        feeding, self.feeding = self.feeding, None
        if feeding is not None:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)

    async def watch(self, offsets: Mapping[Stream, int]) -> AsyncIterator[Event]:
        """Yields output from the offsets on, as it comes; ends after the process's end and the last output."""
        cursor = Cursor(self, offsets)
        while True:
            number = self.changed.number
            ended = self.exit is not None
            while (piece := cursor.next()) is not None:
                yield piece
            if ended:
                return
            if not await self.changed.wait(number, HEARTBEAT_S):
                yield Heartbeat()

    def _running(self) -> ProcessHandle:
        if self._handle is None:
            raise FailedPrecondition("the process never ran", reason="STDIN_CLOSED")
        return self._handle

    def view(self) -> Process:
        """Returns the process as shown to callers, without the values of its secret environment."""
        command = dataclasses.replace(self.spec.command, secret_env={})
        return Process(
            dataclasses.replace(self.spec, command=command),
            self.started_at,
            self.exit,
            self.stdin_offset,
            not self.stdin_open,
        )

    async def aclose(self) -> None:
        """Forgets the process, which must have ended."""
        if self._limit is not None:
            self._limit.cancel()
        for task in filter(None, (self._expiring, self._clearing)):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self._handle is not None:
            await self._handle.aclose()
        for output in self.outputs.values():
            output.close()
