"""Processes in the guest agent: started under supervisors, with streams for input and output, and exits in order.

Invariants
- A start is answered when the program runs, or with the errno of its failure.
- An exit is sent after all that the process had written by then, however slow the link is; later output by other
  processes does not delay it.
- A supervisor that ends without reporting that its tree is gone was killed from inside: this is reported, not hidden.
"""

from __future__ import annotations

import array
import collections
import errno
import fcntl
import functools
import os
import signal
import socket
import termios
from typing import Callable, Deque, Dict, List, Optional, Tuple

from penstock_sandbox.guest import frames, system
from penstock_sandbox.guest.common import children
from penstock_sandbox.guest.loop import Loop, Sink, Source
from penstock_sandbox.guest.replies import Reply
from penstock_sandbox.guest.supervisor import STATUS_LIMIT, ProcessSupervisor

_CONTROL_LIMIT = 8192
# One for the next start; more would waste memory.
_WAITING = 2


class Streams:
    """The guest agent's streams by number: receivers of data, and senders that wait for credit."""

    def __init__(self) -> None:
        self.sources: Dict[int, Source] = {}
        self.sinks: Dict[int, Sink] = {}

    def go_on(self) -> None:
        """Called when the link has room again."""
        for source in list(self.sources.values()):
            source.go_on()


class Supervisors:
    """Supervisors for future processes. One or two wait, so that a start need not wait for a fork.

    Only if the workload has another user: otherwise it could stop a waiting one, and so the process started in it.
    """

    def __init__(self, workload: system.Workload) -> None:
        self._workload = workload
        self._waiting: Deque[ProcessSupervisor] = collections.deque()

    def take(self) -> ProcessSupervisor:
        """Returns a supervisor. Raises OSError when there is none and none can be forked."""
        while self._waiting:
            supervisor = self._waiting.popleft()
            if supervisor.alive():
                return supervisor
            supervisor.discard()  # the kernel may have killed it for memory
        return ProcessSupervisor(self._workload)

    def give_back(self, control: socket.socket) -> None:
        """Accepts one whose tree is gone."""
        if len(self._waiting) >= _WAITING or not self._workload.separate:
            control.close()  # which ends it
            return
        try:
            control.setblocking(True)
            self._waiting.append(ProcessSupervisor(self._workload, control))
        except OSError:
            return  # it was killed; refill forks another

    def refill(self) -> None:
        """Makes sure that one waits."""
        if not self._waiting and self._workload.separate:
            try:
                self._waiting.append(ProcessSupervisor(self._workload))
            except OSError:
                return  # the next start tries again, and reports the error


class Process:
    def __init__(
        self,
        loop: Loop,
        send_frame: Callable[[int, int, bytes], None],
        room: Callable[[], bool],
        streams: Streams,
        workload: system.Workload,
        supervisors: Supervisors,
        number: int,
    ) -> None:
        self._loop = loop
        self._send_frame = send_frame
        self._room = room
        self._streams = streams
        self._supervisors = supervisors
        self.number = number
        self._status: Optional[int] = None
        self._control: Optional[socket.socket] = None
        self._reply: Optional[Reply] = None
        self._orders: Dict[int, Reply] = {}
        self._last_order = 0
        self._sources: List[Source] = []
        self._sink: Optional[Sink] = None
        self._terminal: Optional[int] = None
        self._unread: Dict[int, int] = {}
        self._exit: Optional[frames.Message] = None
        self._exit_sent = False
        self._running = False
        self._empty = False
        self._on_over: Optional[Callable[[], None]] = None
        self._workload = workload
        self._oom_kills = workload.oom_kills()

    # Starting ----------------------------------------------------------------------------------------------------

    def start(self, request: frames.Message, reply: Reply) -> None:
        """Hands its program to a supervisor; ``reply`` is answered once it runs or has failed to."""
        self._reply = reply
        size = request.get("pty")
        ours: List[int] = []
        theirs: List[int] = []
        try:
            if size is not None:
                with self._workload.acting():
                    primary, secondary = os.openpty()
                ours.append(primary)
                theirs.append(secondary)
                children.set_window(primary, *size)
                standard = (secondary, secondary, secondary)
            else:
                if request.get("stdin"):
                    given, kept = os.pipe()
                    ours.append(kept)
                else:
                    # Not opened here: the workload may have replaced it.
                    given = os.dup(self._workload.null)
                theirs.append(given)
                for _ in range(2):
                    kept, given = os.pipe()
                    ours.append(kept)
                    theirs.append(given)
                standard = (theirs[0], theirs[1], theirs[2])
            supervisor = self._supervisors.take()
            try:
                supervisor.execute(request["argv"], request["env"], request["cwd"], standard, size is not None)
            except BaseException:
                supervisor.discard()
                raise
        except BaseException:
            for descriptor in ours:
                os.close(descriptor)
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        supervisor.control.setblocking(False)
        self._control = supervisor.control
        self._status = supervisor.status
        self._loop.watch(supervisor.control.fileno(), self._report_readable, None)
        self._loop.watch(supervisor.status, self._executed, None)
        self._carry(request, ours, size is not None)

    def _executed(self) -> None:
        """Handles the pipe's end: the program runs, or has failed to; only its child held the other end."""
        if self._status is None:
            return
        text = os.read(self._status, STATUS_LIMIT)
        self._close(self._status)
        self._status = None
        assert self._reply is not None
        reply, self._reply = self._reply, None
        if text:
            failure = frames.parse_message(text)
            reply.refuse(failure["errno"], failure["what"], failed=bool(failure.get("failed")))
            # Nothing was executed, so there is nothing to read.
            self.stop()
        else:
            self._running = True
            reply.answer({})
        # Later: a program that ends at once should not wait for this.
        self._loop.when_idle(self._supervisors.refill)

    def _carry(self, request: frames.Message, ours: List[int], terminal: bool) -> None:
        if terminal:
            self._terminal = ours[0]
            self._sources.append(self._source(ours[0], request["stdout"], self._terminal_ended))
            self._sink = self._sink_of(ours[0], request["stdin"], close=False)
            return
        if request.get("stdin"):
            self._sink = self._sink_of(ours[0], request["stdin"], close=True)
        for descriptor, name in zip(ours[-2:], ("stdout", "stderr")):
            self._sources.append(self._source(descriptor, request[name], functools.partial(self._close, descriptor)))

    def _source(self, descriptor: int, stream: int, on_end: Callable[[], None]) -> Source:
        def ended() -> None:
            self._streams.sources.pop(stream, None)
            self._unread.pop(stream, None)
            on_end()
            self._send_exit()

        source = Source(
            self._loop,
            self._send_frame,
            self._room,
            descriptor,
            stream,
            frames.BULK_WINDOW,
            ended,
            lambda amount: self._was_read(stream, amount),
        )
        self._streams.sources[stream] = source
        return source

    def _sink_of(self, descriptor: int, stream: int, *, close: bool) -> Sink:
        def ended(broken: bool) -> None:
            self._streams.sinks.pop(stream, None)
            if close:
                self._close(descriptor)

        sink = Sink(self._loop, self._send_frame, descriptor, stream, frames.ENDPOINT_WINDOW, ended)
        self._streams.sinks[stream] = sink
        return sink

    def _close(self, descriptor: int) -> None:
        self._loop.forget(descriptor)
        os.close(descriptor)

    def _terminal_ended(self) -> None:
        assert self._terminal is not None
        descriptor, self._terminal = self._terminal, None
        if self._sink is not None and self._sink.open:
            self._send_frame(frames.RESET, self._sink.stream, frames.pack_message({"errno": errno.EPIPE}))
            self._sink.stop()
        self._close(descriptor)

    # Messages from the supervisor ---------------------------------------------------------------------------------

    def _report_readable(self) -> None:
        assert self._control is not None
        while self._control is not None:
            try:
                text = self._control.recv(_CONTROL_LIMIT)
            except BlockingIOError:
                return
            except OSError:
                text = b""
            if not text:
                self._supervisor_ended()
                return
            message = frames.parse_message(text)
            if "answer" in message:
                reply = self._orders.pop(message["answer"])
                life = self._workload.life
                if "errno" in message:
                    reply.refuse(message["errno"], message["what"])
                elif life is not None and not life.intact():
                    # It survived the kill, so its effects could be there at grading.
                    reply.refuse(errno.ECHILD, "the sandbox's first process runs another program")
                else:
                    reply.answer({})
                self._part()
            elif "exit" in message:
                # The end of its output was readable before its exit was sent, but may not have been read yet.
                self._executed()
                if self._running:
                    self._exited(message["exit"], message["cpu_s"], message["peak_bytes"])
            else:
                self._empty = True
                self._part()

    def _part(self) -> None:
        """Returns the supervisor to the pool once nothing of the tree is left and every order is answered."""
        if self._empty and not self._orders and self._control is not None:
            control, self._control = self._control, None
            self._loop.forget(control.fileno())
            self._supervisors.give_back(control)
            if self._on_over is not None:
                self._on_over()

    def _supervisor_ended(self) -> None:
        assert self._control is not None
        self._loop.forget(self._control.fileno())
        self._control.close()
        self._control = None
        if self._status is not None and not self._empty:
            # Killed before it forked, or its child before it executed: from inside, as an ordinary user can.
            self._close(self._status)
            self._status = None
            assert self._reply is not None
            self._reply.refuse(errno.ECHILD, "the process that starts it was killed")
            self._reply = None
            self.stop()
        self._executed()
        if self._running and self._exit is None:
            self._exited(signal.SIGKILL, None, None)
        for reply in self._orders.values():
            if self._empty:
                reply.answer({})
            else:
                reply.refuse(errno.ECHILD, "the supervisor of the process's tree was killed")
        self._orders.clear()
        if self._on_over is not None:
            self._on_over()

    def _exited(self, status: int, cpu_s: Optional[float], peak_bytes: Optional[int]) -> None:
        life = self._workload.life
        code, number = children.ended(status)
        if number == signal.SIGKILL and life is not None and life.ends():
            return  # not an end of its own: it ends with the sandbox
        self._exit = {
            "event": "exit",
            "process": self.number,
            "signal": number,
            "code": code,
            "cpu_s": cpu_s,
            "peak_bytes": peak_bytes,
            "oom": children.was_killed(code, number) and self._workload.oom_kills() > self._oom_kills,
        }
        for source in self._sources:
            if source.open:
                self._unread[source.stream] = _waiting(source.descriptor)
        self._send_exit()

    def _was_read(self, stream: int, amount: int) -> None:
        if stream in self._unread:
            self._unread[stream] -= amount
            self._send_exit()

    def _send_exit(self) -> None:
        if self._exit is not None and not self._exit_sent and all(left <= 0 for left in self._unread.values()):
            self._exit_sent = True
            self._unread.clear()
            self._send_frame(frames.EVENT, 0, frames.pack_message(self._exit))

    # Orders from the service --------------------------------------------------------------------------------------

    @property
    def escaped(self) -> bool:
        """Whether its supervisor was killed while some of its tree may have been left, which nothing kills now."""
        return self._control is None and self._running and not self._empty

    def order(self, order: frames.Message, reply: Reply) -> None:
        """Makes the supervisor signal the group, or kill the tree."""
        if self._control is None:
            if "signal" in order or not self.escaped:
                reply.answer({})
            else:
                reply.refuse(errno.ECHILD, "the supervisor of the process's tree was killed")
            return
        self._last_order += 1
        self._orders[self._last_order] = reply
        try:
            self._control.send(frames.pack_message({**order, "order": self._last_order}))
        except OSError:
            pass  # it has ended: its last message, read next, is the answer

    def resize(self, size: Tuple[int, int]) -> None:
        """Changes its terminal's dimensions."""
        if self._terminal is not None:
            children.set_window(self._terminal, *size)

    def stop(self) -> None:
        """Stops its streams in both directions."""
        for source in self._sources:
            if source.open:
                source.stop()
        if self._sink is not None and self._sink.open:
            self._sink.stop()

    def forget(self, on_over: Callable[[], None]) -> None:
        """Drops the process; ``on_over`` is called when nothing of its tree is left, or once it has ``escaped``."""
        self.stop()
        self._on_over = on_over
        if self._control is None:
            on_over()

    def end(self) -> None:
        """Makes its supervisor kill everything and end."""
        self.stop()
        if self._status is not None:
            self._close(self._status)
            self._status = None
        if self._control is not None:
            self._loop.forget(self._control.fileno())
            self._control.close()
            self._control = None


def _waiting(descriptor: int) -> int:
    amount = array.array("i", [0])
    try:
        fcntl.ioctl(descriptor, termios.FIONREAD, amount)
    except OSError:
        return 0
    return amount[0]
