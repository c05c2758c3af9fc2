"""Processes as the attendant has them: started under keepers, their input and output as streams, their exits in order.

Invariants
- A start is answered when the program runs, or with the errno of what stopped it.
- An exit is told after all that the process had written by then was said, however slow the link is; what others still
  write afterwards does not hold it up.
- A keeper that ends without having said that its tree is gone was killed from inside: that is told, not covered up.
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
import struct
import termios
from typing import Callable, Deque, Dict, List, Optional, Tuple

from penstock_sandbox.attendant import frames, system
from penstock_sandbox.attendant.keeper import STATUS_LIMIT, Keeper
from penstock_sandbox.attendant.loop import Loop, Sink, Source
from penstock_sandbox.attendant.replies import Reply

_CONTROL_LIMIT = 8192
# The one that is used, while the next one comes: more is memory for nothing.
_WAITING = 2


class Streams:
    """The streams of an attendant by number: who takes what comes, and who waits for credit."""

    def __init__(self) -> None:
        self.sources: Dict[int, Source] = {}
        self.sinks: Dict[int, Sink] = {}

    def go_on(self) -> None:
        """The link has room again."""
        for source in list(self.sources.values()):
            source.go_on()


class Keepers:
    """Keepers for processes to come. One or two wait, so that a start has no fork to wait for.

    Only where the workload is another user: it could stop what waits, and with it the one who comes after it.
    """

    def __init__(self, workload: system.Workload) -> None:
        self._workload = workload
        self._waiting: Deque[Keeper] = collections.deque()

    def take(self) -> Keeper:
        """One to use. Raises OSError when there is none and none can be forked."""
        while self._waiting:
            keeper = self._waiting.popleft()
            if keeper.alive():
                return keeper
            keeper.discard()  # the kernel may have killed it for memory
        return Keeper(self._workload)

    def give_back(self, control: socket.socket) -> None:
        """Take one whose tree is gone."""
        if len(self._waiting) >= _WAITING or not self._workload.separate:
            control.close()  # which ends it
            return
        try:
            control.setblocking(True)
            self._waiting.append(Keeper(self._workload, control))
        except OSError:
            return  # it was killed; refill forks another

    def refill(self) -> None:
        """Have one wait again."""
        if not self._waiting and self._workload.separate:
            try:
                self._waiting.append(Keeper(self._workload))
            except OSError:
                return  # the next start finds out whether it is still so, and says it


class Process:
    """One process and its keeper."""

    def __init__(
        self,
        loop: Loop,
        say: Callable[[int, int, bytes], None],
        room: Callable[[], bool],
        streams: Streams,
        workload: system.Workload,
        keepers: Keepers,
        number: int,
    ) -> None:
        self._loop = loop
        self._say = say
        self._room = room
        self._streams = streams
        self._keepers = keepers
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
        self._exit_told = False
        self._running = False
        self._empty = False
        self._on_over: Optional[Callable[[], None]] = None
        self._workload = workload
        self._oom_kills = workload.oom_kills()

    # Starting ----------------------------------------------------------------------------------------------------

    def start(self, request: frames.Message, reply: Reply) -> None:
        """Give its program to a keeper; ``reply`` is answered once it runs or cannot."""
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
                set_size(primary, size)
                standard = (secondary, secondary, secondary)
            else:
                if request.get("stdin"):
                    given, kept = os.pipe()
                    ours.append(kept)
                else:
                    # Not opened here: an agent may have put something else in its place.
                    given = os.dup(self._workload.null)
                theirs.append(given)
                for _ in range(2):
                    kept, given = os.pipe()
                    ours.append(kept)
                    theirs.append(given)
                standard = (theirs[0], theirs[1], theirs[2])
            keeper = self._keepers.take()
            try:
                keeper.execute(request["argv"], request["env"], request["cwd"], standard, size is not None)
            except BaseException:
                keeper.discard()
                raise
        except BaseException:
            for descriptor in ours:
                os.close(descriptor)
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        keeper.control.setblocking(False)
        self._control = keeper.control
        self._status = keeper.status
        self._loop.watch(keeper.control.fileno(), self._told, None)
        self._loop.watch(keeper.status, self._executed, None)
        self._carry(request, ours, size is not None)

    def _executed(self) -> None:
        """The program runs, or cannot: only its child held the other end."""
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
            # Nothing was executed, so nothing will be read.
            self.stop()
        else:
            self._running = True
            reply.answer({})
        # Not now: a program that ends at once should not wait for that.
        self._loop.when_idle(self._keepers.refill)

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
            self._tell_exit()

        source = Source(
            self._loop,
            self._say,
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

        sink = Sink(self._loop, self._say, descriptor, stream, frames.ENDPOINT_WINDOW, ended)
        self._streams.sinks[stream] = sink
        return sink

    def _close(self, descriptor: int) -> None:
        self._loop.forget(descriptor)
        os.close(descriptor)

    def _terminal_ended(self) -> None:
        assert self._terminal is not None
        descriptor, self._terminal = self._terminal, None
        if self._sink is not None and self._sink.open:
            self._say(frames.RESET, self._sink.stream, frames.pack_message({"errno": errno.EPIPE}))
            self._sink.stop()
        self._close(descriptor)

    # What the keeper tells ---------------------------------------------------------------------------------------

    def _told(self) -> None:
        assert self._control is not None
        while self._control is not None:
            try:
                text = self._control.recv(_CONTROL_LIMIT)
            except BlockingIOError:
                return
            except OSError:
                text = b""
            if not text:
                self._keeper_ended()
                return
            message = frames.parse_message(text)
            if "answer" in message:
                reply = self._orders.pop(message["answer"])
                life = self._workload.life
                if "errno" in message:
                    reply.refuse(message["errno"], message["what"])
                elif life is not None and not life.intact():
                    # It outlives every tree, so what became of it would be there when work is graded.
                    reply.refuse(errno.ECHILD, "the sandbox's first process runs another program")
                else:
                    reply.answer({})
                self._part()
            elif "exit" in message:
                # Its end was there to be read before its exit was told, but may not have been read yet.
                self._executed()
                if self._running:
                    self._exited(message["exit"], message["cpu_s"], message["peak_bytes"])
            else:
                self._empty = True
                self._part()

    def _part(self) -> None:
        """Give the keeper back, once nothing of the tree is left and every order is answered."""
        if self._empty and not self._orders and self._control is not None:
            control, self._control = self._control, None
            self._loop.forget(control.fileno())
            self._keepers.give_back(control)
            if self._on_over is not None:
                self._on_over()

    def _keeper_ended(self) -> None:
        assert self._control is not None
        self._loop.forget(self._control.fileno())
        self._control.close()
        self._control = None
        if self._status is not None and not self._empty:
            # Killed before it forked, or its child before it executed: from inside, as an ordinary user's can be.
            self._close(self._status)
            self._status = None
            assert self._reply is not None
            self._reply.refuse(errno.ECHILD, "what should have started it was killed")
            self._reply = None
            self.stop()
        self._executed()
        if self._running and self._exit is None:
            self._exited(signal.SIGKILL, None, None)
        for reply in self._orders.values():
            if self._empty:
                reply.answer({})
            else:
                reply.refuse(errno.ECHILD, "what keeps the process's tree was killed")
        self._orders.clear()
        if self._on_over is not None:
            self._on_over()

    def _exited(self, status: int, cpu_s: Optional[float], peak_bytes: Optional[int]) -> None:
        life = self._workload.life
        if status & 0x7F == signal.SIGKILL and life is not None and life.ends():
            return  # not an end of its own: it is told with the sandbox's
        killed = status & 0x7F == signal.SIGKILL or status == (128 + signal.SIGKILL) << 8
        self._exit = {
            "event": "exit",
            "process": self.number,
            "signal": status & 0x7F or None,
            "code": None if status & 0x7F else status >> 8 & 0xFF,
            "cpu_s": cpu_s,
            "peak_bytes": peak_bytes,
            "oom": killed and self._workload.oom_kills() > self._oom_kills,
        }
        for source in self._sources:
            if source.open:
                self._unread[source.stream] = _waiting(source.descriptor)
        self._tell_exit()

    def _was_read(self, stream: int, amount: int) -> None:
        if stream in self._unread:
            self._unread[stream] -= amount
            self._tell_exit()

    def _tell_exit(self) -> None:
        if self._exit is not None and not self._exit_told and all(left <= 0 for left in self._unread.values()):
            self._exit_told = True
            self._unread.clear()
            self._say(frames.EVENT, 0, frames.pack_message(self._exit))

    # What the service orders -------------------------------------------------------------------------------------

    def order(self, order: frames.Message, reply: Reply) -> None:
        """Have the keeper signal the group, or kill the tree."""
        if self._control is None:
            if self._empty or "signal" in order or not self._running:
                reply.answer({})
            else:
                reply.refuse(errno.ECHILD, "what keeps the process's tree was killed")
            return
        self._last_order += 1
        self._orders[self._last_order] = reply
        try:
            self._control.send(frames.pack_message({**order, "order": self._last_order}))
        except OSError:
            pass  # it has ended: what it said last is read next, and answers

    def resize(self, size: Tuple[int, int]) -> None:
        """Change its terminal's dimensions."""
        if self._terminal is not None:
            set_size(self._terminal, size)

    def stop(self) -> None:
        """Say nothing more of its streams and take nothing for them."""
        for source in self._sources:
            if source.open:
                source.stop()
        if self._sink is not None and self._sink.open:
            self._sink.stop()

    def forget(self, on_over: Callable[[], None]) -> None:
        """Nobody asks for it any more; ``on_over`` is called when nothing of its tree is left."""
        self.stop()
        self._on_over = on_over
        if self._control is None:
            on_over()

    def end(self) -> None:
        """Its keeper is to kill everything and end."""
        self.stop()
        if self._status is not None:
            self._close(self._status)
            self._status = None
        if self._control is not None:
            self._loop.forget(self._control.fileno())
            self._control.close()
            self._control = None


def set_size(descriptor: int, size: Tuple[int, int]) -> None:
    """Set a terminal's rows and columns."""
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", size[0], size[1], 0, 0))


def _waiting(descriptor: int) -> int:
    amount = array.array("i", [0])
    try:
        fcntl.ioctl(descriptor, termios.FIONREAD, amount)
    except OSError:
        return 0
    return amount[0]
