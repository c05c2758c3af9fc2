"""The guest agent: serves the service's requests as long as the sandbox lives.

Invariants
- Requests are executed in the order sent; each is answered once, some of them later.
- A failed request is refused with the kernel's errno; a defect is logged and refused with EIO: neither ends the guest
  agent.
- A new service instance (another session) starts with an empty table: the previous one's processes are killed.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
import sys
from typing import Callable, Dict, NoReturn

from penstock_sandbox.guest import frames, system
from penstock_sandbox.guest.common import files
from penstock_sandbox.guest.connections import Link
from penstock_sandbox.guest.endpoint import Endpoints
from penstock_sandbox.guest.loop import Loop
from penstock_sandbox.guest.processes import Process, Streams, Supervisors
from penstock_sandbox.guest.replies import Reply, SharedReply
from penstock_sandbox.guest.transfers import Transfers


class GuestAgent:
    """Serves on ``listener``. ``spool`` is a directory of its own."""

    def __init__(
        self,
        listener: socket.socket,
        workload: system.Workload,
        spool: int,
        greeting: frames.Message,
    ) -> None:
        self._loop = Loop()
        self._workload = workload
        self._streams = Streams()
        self._supervisors = Supervisors(workload)
        self._link = Link(self._loop, greeting, self._frame, self._fresh, self._go_on)
        self._link.listen(listener)
        send_frame, room = self._link.send_frame, self._link.room
        self._transfers = Transfers(self._loop, send_frame, room, self._streams, workload, spool)
        self._endpoints = Endpoints(self._loop, send_frame, room, self._streams)
        self._processes: Dict[int, Process] = {}
        self._has_escaped = False
        self._operations: Dict[str, Callable[[frames.Message, Reply], None]] = {
            "ping": lambda _, reply: reply.answer({}),
            "start": self._start,
            "signal": self._signal,
            "kill": self._kill,
            "kill_all": self._kill_all,
            "resize": self._resize,
            "forget": self._forget,
            "listen": self._listen,
            "unlisten": self._unlisten,
            **self._transfers.operations,
        }
        if workload.life is not None and workload.life.descriptor is not None:
            self._loop.watch(workload.life.descriptor, _leave, None)

    def serve(self) -> NoReturn:
        """Runs forever."""
        woken, wake = socket.socketpair()
        woken.setblocking(False)
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._loop.watch(woken.fileno(), lambda: self._children_ended(woken), None)
        # Freeze current objects: collecting them would only make every fork copy their pages.
        gc.collect()
        gc.freeze()
        self._supervisors.refill()
        while True:
            self._loop.run_once()

    def _children_ended(self, woken: socket.socket) -> None:
        try:
            woken.recv(4096)
        except BlockingIOError:
            pass
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._transfers.jobs.pop(pid, None)

    # The link ----------------------------------------------------------------------------------------------------

    def _fresh(self) -> None:
        for process in list(self._processes.values()):
            process.end()
        self._processes.clear()
        self._transfers.stop()
        self._endpoints.close()

    def _go_on(self) -> None:
        self._streams.go_on()
        self._transfers.go_on()

    def _frame(self, frame: frames.Frame) -> None:
        stream = frame.stream
        if frame.kind == frames.REQUEST:
            self._request(stream, frames.parse_message(frame.payload))
        elif frame.kind == frames.DATA:
            sink = self._streams.sinks.get(stream)
            if sink is not None:
                sink.data(frame.payload)
            else:
                # Dropped if the process is gone: its end is on its way to the service.
                self._transfers.data(stream, frame.payload)
        elif frame.kind == frames.END:
            if stream in self._streams.sinks:
                self._streams.sinks[stream].end()
        elif frame.kind == frames.CREDIT:
            amount = frames.parse_amount(frame.payload)
            if stream in self._streams.sources:
                self._streams.sources[stream].credit(amount)
            else:
                self._transfers.credit(stream, amount)
        elif frame.kind == frames.RESET:
            if not self._endpoints.cut(stream):
                self._transfers.reset(stream)
                if stream in self._streams.sinks:
                    self._streams.sinks[stream].stop()
                if stream in self._streams.sources:
                    self._streams.sources[stream].stop()
        else:
            raise frames.Malformed("a frame of kind %d" % frame.kind)

    def _request(self, number: int, request: frames.Message) -> None:
        reply = Reply(self._link.send_frame, number)
        try:
            self._operations[request["op"]](request, reply)
        except files.Refused as refusal:
            reply.refuse(refusal.errno, refusal.what)
        except OSError as error:
            reply.refuse(error.errno or errno.EIO, error.strerror or str(error))
        except Exception as error:  # noqa: BLE001
            # No traceback: printing one opens source files, which now would be the sandbox's.
            sys.stderr.write("attendant: %s: %r\n" % (request.get("op"), error))
            sys.stderr.flush()
            reply.refuse(errno.ENOTRECOVERABLE, "a defect of the guest: %r" % (error,))

    # Processes ---------------------------------------------------------------------------------------------------

    def _start(self, request: frames.Message, reply: Reply) -> None:
        number = request["process"]
        process = Process(
            self._loop,
            self._link.send_frame,
            self._link.room,
            self._streams,
            self._workload,
            self._supervisors,
            number,
        )
        process.start(request, reply)
        self._processes[number] = process

    def _signal(self, request: frames.Message, reply: Reply) -> None:
        self._process(request).order({"signal": request["signal"]}, reply)

    def _kill(self, request: frames.Message, reply: Reply) -> None:
        self._process(request).order({"kill": True}, reply)

    def _kill_all(self, _: frames.Message, reply: Reply) -> None:
        """Kills every tree, those of forgotten processes too."""
        if self._has_escaped:
            raise files.Refused(errno.ECHILD, "the supervisor of a forgotten process's tree was killed")
        processes = list(self._processes.values())
        if not processes:
            reply.answer({})
            return
        shared = SharedReply(reply, len(processes))
        for process in processes:
            process.order({"kill": True}, shared)

    def _resize(self, request: frames.Message, reply: Reply) -> None:
        self._process(request).resize(request["size"])
        reply.answer({})

    def _forget(self, request: frames.Message, reply: Reply) -> None:
        """Forgets a process that has ended. Its leftover processes stay, as in every sandbox."""
        number = request["process"]
        if number in self._processes:
            self._processes[number].forget(lambda: self._forgotten(number))
        reply.answer({})

    def _forgotten(self, number: int) -> None:
        process = self._processes.pop(number, None)
        if process is not None and process.escaped:
            # One flag, not the process: a workload could kill any number of supervisors.
            self._has_escaped = True

    def _process(self, request: frames.Message) -> Process:
        process = self._processes.get(request["process"])
        if process is None:
            raise files.Refused(errno.ESRCH, "no such process")
        return process

    # The endpoints -----------------------------------------------------------------------------------------------

    def _listen(self, request: frames.Message, reply: Reply) -> None:
        self._endpoints.open(request["port"])
        reply.answer({})

    def _unlisten(self, request: frames.Message, reply: Reply) -> None:
        self._endpoints.close(request["port"])
        reply.answer({})


def _leave() -> NoReturn:
    """Exits: the sandbox has ended, and with it every process in it."""
    os._exit(0)
