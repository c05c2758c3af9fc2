"""A process in a sandbox with a guest agent: its streams are the link's, its exit comes from the agent.

Invariants: nothing is delivered after ``lost``; the exit is delivered at most once, after the output written before it;
in a paused sandbox, a signal or a kill thaws it temporarily. A tree that cannot be killed, or whose supervisor obeys no
order, ends its sandbox, which is attributed to that sandbox's workload.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import structlog

from penstock_chassis.errors import Internal
from penstock_sandbox.backends.guest_client.link import Link
from penstock_sandbox.backends.guest_client.messages import Exited
from penstock_sandbox.backends.guest_client.stream import LinkLost, Stream, StreamReset
from penstock_sandbox.domain.backend import ProcessHandle, ProcessSink, RawExit
from penstock_sandbox.domain.errno import Refused
from penstock_sandbox.domain.model import PtySize
from penstock_sandbox.domain.model import Stream as Output
from penstock_sandbox.guest import frames
from penstock_sandbox.guest.common import children

_log = structlog.get_logger(__name__)

ORDER_ANSWER_S = 60.0
"""Maximum wait for a supervisor's answer: its deadline for a kill, a broken pipe (``LOST_AFTER_S``), and a margin."""

_END_OF_TYPING = b"\x04"
_EXIT_REPORT_S = 5.0

Woken = Callable[[], AbstractAsyncContextManager[bool]]
"""Keeps a sandbox awake inside the context; yields whether it was paused and will be again afterwards."""


class AttendedProcess(ProcessHandle):
    """One process. ``oom_kills`` counts kills for memory if the backend can; otherwise the guest agent does."""

    def __init__(
        self,
        link: Link,
        sink: ProcessSink,
        forget: Callable[[int], None],
        oom_kills: Callable[[], int] | None,
        woken: Woken,
        *,
        stdin: bool,
        pty: bool,
        order_answer_s: float = ORDER_ANSWER_S,
    ) -> None:
        self._order_answer_s = order_answer_s
        self.number = link.next_number()
        self._link = link
        self._sink = sink
        self._forget = forget
        self._oom_kills = oom_kills
        self._woken = woken
        self._ended = asyncio.Event()
        self._oom_kills_before = oom_kills() if oom_kills is not None else 0
        self._pty = pty
        self._over = False
        self._stdin: Stream | None = None
        if stdin or pty:
            self._stdin = link.stream(window=0, credit=frames.ENDPOINT_WINDOW)
        self._outputs = {output: self._output(output) for output in (Output.STDOUT, *(() if pty else (Output.STDERR,)))}

    def _output(self, output: Output) -> Stream:
        stream = self._link.stream(window=frames.BULK_WINDOW, credit=0)

        def receive(data: bytes) -> None:
            if self._over:
                return
            if data:
                self._sink.output(output, data)
            else:
                self._sink.closed(output)

        stream.receiver = receive
        return stream

    def streams(self) -> frames.Message:
        """Returns the streams' numbers for a start request."""
        return {
            "process": self.number,
            "stdin": self._stdin.number if self._stdin is not None else 0,
            **{output.name.lower(): stream.number for output, stream in self._outputs.items()},
        }

    def exited(self, ended: Exited) -> None:
        """Handles the guest agent's exit event."""
        self._ended.set()
        if self._over:
            return
        oom = ended.oom
        if self._oom_kills is not None:
            oom = children.was_killed(ended.code, ended.signal) and self._oom_kills() > self._oom_kills_before
        if self._stdin is not None:
            # Nothing reads the input any more, even if another process still holds the pipe.
            self._stdin.close()
        self._sink.exited(RawExit(ended.code, ended.signal, oom, ended.cpu_s, ended.peak_bytes))

    def lose(self, reason: str) -> None:
        """The sandbox is gone; ``reason`` is empty if it was destroyed on request."""
        self._ended.set()
        if not self._over:
            self._over = True
            self._sink.lost(reason)

    def drop(self) -> None:
        """Discards its streams: the process never ran, or is forgotten."""
        self._over = True
        for stream in (*self._outputs.values(), *([self._stdin] if self._stdin is not None else [])):
            stream.close()

    async def give_up(self) -> None:
        """Kills and forgets it, after a start without an answer: a program that is stopped dies of that too."""
        self.drop()
        try:
            await self.kill()
        finally:
            self._forget(self.number)
            if self._link.lost is None:
                self._link.ask("forget", process=self.number)

    async def write_stdin(self, data: bytes) -> None:
        if self._stdin is None:
            raise BrokenPipeError
        try:
            await self._stdin.write(data)
        except (StreamReset, LinkLost) as error:
            raise BrokenPipeError from error

    async def close_stdin(self) -> None:
        if self._stdin is None:
            return
        if self._pty:
            # A terminal has no half-close: send the end-of-file character, as a user would type.
            await self.write_stdin(_END_OF_TYPING)
        else:
            self._stdin.end()

    async def resize(self, size: PtySize) -> None:
        await self._ask("resize", size=(size.rows, size.columns))

    async def signal(self, number: int) -> None:
        try:
            async with self._woken():
                await self._order("signal", signal=int(number))
        except Refused as refusal:
            raise Internal(f"the signal was not sent: {refusal.what}", reason="SIGNAL_FAILED") from refusal

    async def kill(self) -> None:
        try:
            async with self._woken() as was_paused:
                await self._order("kill")
                if was_paused:
                    # No events arrive once it is paused again.
                    await self._exit_received()
        except Refused as refusal:
            # Some of its processes may survive until grading: nothing may go on in this sandbox.
            _log.warning("a process tree was not killed, so its sandbox ends", reason=refusal.what)
            self._link.lose("TREE_SURVIVED")

    async def _exit_received(self) -> None:
        try:
            async with asyncio.timeout(_EXIT_REPORT_S):
                await self._ended.wait()
        except TimeoutError:
            return  # the exit arrives once the sandbox is resumed

    async def aclose(self) -> None:
        self.drop()
        self._forget(self.number)
        try:
            await self._ask("forget")
        except Refused as refusal:
            raise Internal(
                f"the process's record was not deleted: {refusal.what}", reason="FILE_OPERATION_FAILED"
            ) from refusal

    async def _order(self, op: str, **fields: object) -> None:
        """Has its supervisor do something. Where the agent can stop that one, nothing may go on beside the tree."""
        try:
            await self._ask(op, within_s=self._order_answer_s, **fields)
        except TimeoutError:
            _log.warning("a process's supervisor does not answer, so its sandbox ends", order=op)
            self._link.lose("TREE_SURVIVED")

    async def _ask(self, op: str, *, within_s: float | None = None, **fields: object) -> None:
        try:
            await self._link.request(op, within_s=within_s, process=self.number, **fields)
        except LinkLost:
            return  # everything ended with the sandbox, and the process is reported as lost
