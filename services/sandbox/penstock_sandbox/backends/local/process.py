"""A process in a local sandbox: its pipes or terminal on the event loop, its exit from the sandbox helper.

Invariants: output is read as it arrives and given to the sink, so a program never blocks on a full pipe; descriptors
are closed exactly once; nothing is delivered after ``lost``.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence
from typing import Protocol

from penstock_chassis.errors import Internal
from penstock_sandbox.backends.local.channel import ChannelClosed, Reply
from penstock_sandbox.backends.local.freezing import Freezing
from penstock_sandbox.backends.local.spawner import wire
from penstock_sandbox.domain.backend import ProcessHandle, ProcessSink, RawExit
from penstock_sandbox.domain.errno import Refused
from penstock_sandbox.domain.model import PtySize, Stream
from penstock_sandbox.guest.common import children

_READ = 64 * 1024


class SandboxAccess(Protocol):
    """What a process needs of its sandbox."""

    freezing: Freezing

    async def ask_helper(self, request: wire.Message, descriptors: Sequence[int] = ()) -> Reply:
        """Sends the sandbox helper a request. Raises channel.Refused or channel.ChannelClosed."""

    async def kill(self, request: wire.Message) -> None:
        """Makes the sandbox helper kill a tree. Raises channel.Refused or channel.ChannelClosed."""

    def oom_kills(self) -> int:
        """Returns how often the kernel killed in this sandbox for memory."""

    def forget(self, process: LocalProcess) -> None:
        """Drops an ended process."""


class LocalProcess(ProcessHandle):
    """One process; the sandbox passes it the helper's exit event.

    ``number`` names it to the helper, for ever; ``pid`` is the host's id of it, and another one's once it has ended.
    """

    def __init__(
        self,
        sandbox: SandboxAccess,
        number: int,
        pid: int,
        sink: ProcessSink,
        stdin: int | None,
        outputs: dict[int, Stream],
        terminal: int | None,
        oom_kills: int,
    ) -> None:
        self._sandbox = sandbox
        self.number = number
        self.pid = pid
        self._sink = sink
        self._stdin = stdin
        self._terminal = terminal
        self._outputs = outputs
        self._loop = asyncio.get_running_loop()
        self._oom_kills = oom_kills
        self._reaped = asyncio.Event()
        self._room: asyncio.Event | None = None
        """What a writer waits for while the input is full: room, or the input's end."""
        if stdin is not None:
            os.set_blocking(stdin, False)

    def attend(self, exited: wire.Message | None) -> None:
        """Starts to deliver its output; ``exited`` is the helper's exit event if it has ended already."""
        for descriptor in [*self._outputs]:
            os.set_blocking(descriptor, False)
            if exited is not None:
                # Its output is there, and so is the end unless something else holds it open: two reads get both, at a
                # fraction of the cost of watching.
                for _ in range(2):
                    if descriptor in self._outputs:
                        self._readable(descriptor)
            if descriptor in self._outputs:
                self._loop.add_reader(descriptor, self._readable, descriptor)
        if exited is not None:
            self.helper_exited(exited)

    def _readable(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, _READ)
        except BlockingIOError:
            return
        except OSError as error:
            # A terminal whose last user is gone returns EIO where a pipe returns end of file.
            if error.errno != errno.EIO:
                raise
            data = b""
        stream = self._outputs[descriptor]
        if data:
            self._sink.output(stream, data)
        else:
            self._close_output(descriptor)
            self._sink.closed(stream)

    def _close_output(self, descriptor: int) -> None:
        del self._outputs[descriptor]
        self._loop.remove_reader(descriptor)
        if descriptor == self._terminal:
            self._end_input()
            self._terminal = None
        os.close(descriptor)

    def helper_exited(self, event: wire.Message) -> None:
        self._reaped.set()
        status: int = event["status"]
        code, by_signal = children.ended(status)
        self._sink.exited(
            RawExit(
                code=code,
                signal=by_signal,
                oom=children.was_killed(code, by_signal) and self._sandbox.oom_kills() > self._oom_kills,
                cpu_s=event["cpu_s"],
                peak_bytes=event["peak_bytes"],
            )
        )

    def lose(self, reason: str) -> None:
        """Ends it: the sandbox is gone."""
        self._reaped.set()
        self._release()
        self._sink.lost(reason)

    async def write_stdin(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            if self._stdin is None:
                raise BrokenPipeError
            try:
                view = view[os.write(self._stdin, view) :]
            except BlockingIOError:
                await self._writable(self._stdin)

    async def _writable(self, descriptor: int) -> None:
        room = self._room = asyncio.Event()
        self._loop.add_writer(descriptor, room.set)
        try:
            await room.wait()
        finally:
            # At the input's end it is removed already, and the descriptor's number may be another one's.
            if self._room is room:
                self._room = None
                self._loop.remove_writer(descriptor)

    async def close_stdin(self) -> None:
        if self._stdin is None:
            return
        if self._terminal is not None:
            # A terminal has no half-close: send the end-of-file character, as a user would type.
            await self.write_stdin(b"\x04")
        else:
            self._close_stdin()

    def _close_stdin(self) -> None:
        descriptor = self._end_input()
        if descriptor is not None and descriptor != self._terminal:
            os.close(descriptor)

    def _end_input(self) -> int | None:
        """Takes no more input, and wakes a writer that waits, which must be done before the descriptor is closed.

        Returns the input's descriptor, which is still open.
        """
        descriptor, self._stdin = self._stdin, None
        room, self._room = self._room, None
        if descriptor is not None and room is not None:
            self._loop.remove_writer(descriptor)
            room.set()
        return descriptor

    async def resize(self, size: PtySize) -> None:
        if self._terminal is not None:
            children.set_window(self._terminal, size.rows, size.columns)

    async def signal(self, number: int) -> None:
        try:
            async with self._sandbox.freezing.awake():
                request = {"op": "signal", "process": self.number, "pid": self.pid, "signal": int(number)}
                await self._sandbox.ask_helper(request)
        except Refused as refusal:
            if refusal.errno != errno.ESRCH:
                raise Internal(f"the signal was not sent: {refusal.what}", reason="SIGNAL_FAILED") from refusal

    async def kill(self) -> None:
        try:
            await self._sandbox.kill({"op": "kill", "process": self.number})
            # The helper sends the exit after its reply: it must not be frozen in between.
            async with self._sandbox.freezing.awake():
                await self._reaped.wait()
        except ChannelClosed:
            return  # everything died with the sandbox
        except Refused as refusal:
            raise Internal(f"the process tree was not killed: {refusal.what}", reason="KILL_FAILED") from refusal

    async def aclose(self) -> None:
        self._release()
        self._sandbox.forget(self)

    def _release(self) -> None:
        self._close_stdin()
        for descriptor in [*self._outputs]:
            self._close_output(descriptor)
