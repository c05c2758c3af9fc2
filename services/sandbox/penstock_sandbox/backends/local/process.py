"""A process in a local sandbox: its pipes or terminal on the event loop, its end from the door.

Invariants: output is read as it comes and given to the sink, so a program never stalls on a full pipe; descriptors are
closed exactly once; nothing is delivered after ``lost``.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import signal
import struct
import termios
from typing import TYPE_CHECKING

from penstock_chassis.errors import Internal
from penstock_sandbox.backends.base import ProcessHandle, ProcessSink, RawExit
from penstock_sandbox.backends.local.channel import ChannelClosed
from penstock_sandbox.backends.refusals import Refused
from penstock_sandbox.model import PtySize, Stream
from penstock_sandbox.spawner import wire

if TYPE_CHECKING:
    from penstock_sandbox.backends.local.sandbox import LocalSandbox

_READ = 64 * 1024


class LocalProcess(ProcessHandle):
    """One process; the sandbox feeds it the door's exit event."""

    def __init__(
        self,
        sandbox: LocalSandbox,
        pid: int,
        sink: ProcessSink,
        stdin: int | None,
        outputs: dict[int, Stream],
        terminal: int | None,
        oom_kills: int,
    ) -> None:
        self._sandbox = sandbox
        self.pid = pid
        self._sink = sink
        self._stdin = stdin
        self._terminal = terminal
        self._outputs = outputs
        self._loop = asyncio.get_running_loop()
        self._oom_kills = oom_kills
        self._reaped = asyncio.Event()
        if stdin is not None:
            os.set_blocking(stdin, False)

    def attend(self, exited: wire.Message | None) -> None:
        """Deliver its output from here on; ``exited`` is the door's word when it has ended already."""
        for descriptor in [*self._outputs]:
            os.set_blocking(descriptor, False)
            if exited is not None:
                # What it wrote is there, and so is the end unless something else holds it open: twice reads both, and
                # costs a fraction of watching.
                for _ in range(2):
                    if descriptor in self._outputs:
                        self._readable(descriptor)
            if descriptor in self._outputs:
                self._loop.add_reader(descriptor, self._readable, descriptor)
        if exited is not None:
            self.door_exited(exited)

    def _readable(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, _READ)
        except BlockingIOError:
            return
        except OSError as error:
            # A terminal whose last user is gone says EIO where a pipe says end of file.
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
            self._terminal = self._stdin = None
        os.close(descriptor)

    def door_exited(self, event: wire.Message) -> None:
        """The door reaped it."""
        self._reaped.set()
        status: int = event["status"]
        by_signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        killed = by_signal == signal.SIGKILL or code == 128 + signal.SIGKILL
        self._sink.exited(
            RawExit(
                code=code,
                signal=by_signal,
                oom=killed and self._sandbox.oom_kills() > self._oom_kills,
                cpu_s=event["cpu_s"],
                peak_bytes=event["peak_bytes"],
            )
        )

    def lose(self, reason: str) -> None:
        """The sandbox is gone."""
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
        ready = asyncio.Event()
        self._loop.add_writer(descriptor, ready.set)
        try:
            await ready.wait()
        finally:
            if self._stdin == descriptor:
                self._loop.remove_writer(descriptor)

    async def close_stdin(self) -> None:
        if self._stdin is None:
            return
        if self._terminal is not None:
            # A terminal has no half-close: what a person types is the end-of-file character.
            await self.write_stdin(b"\x04")
        else:
            self._close_stdin()

    def _close_stdin(self) -> None:
        if self._stdin is not None and self._stdin != self._terminal:
            self._loop.remove_writer(self._stdin)
            os.close(self._stdin)
        self._stdin = None

    async def resize(self, size: PtySize) -> None:
        if self._terminal is not None:
            fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size.rows, size.columns, 0, 0))

    async def signal(self, number: int) -> None:
        try:
            async with self._sandbox.freezing.awake():
                await self._sandbox.door({"op": "signal", "pid": self.pid, "signal": int(number)})
        except Refused as refusal:
            if refusal.errno != errno.ESRCH:
                raise Internal(f"the signal was not sent: {refusal.what}", reason="SIGNAL_FAILED") from refusal

    async def kill(self) -> None:
        try:
            await self._sandbox.kill({"op": "kill", "pid": self.pid})
            # The door tells the exit after it answered: it must not be frozen in between.
            async with self._sandbox.freezing.awake():
                await self._reaped.wait()
        except ChannelClosed:
            return  # with the sandbox everything in it died
        except Refused as refusal:
            raise Internal(f"the process tree was not killed: {refusal.what}", reason="KILL_FAILED") from refusal

    async def aclose(self) -> None:
        self._release()
        self._sandbox.forget(self)

    def _release(self) -> None:
        self._close_stdin()
        for descriptor in [*self._outputs]:
            self._close_output(descriptor)
