"""File operations of the guest agent: opened with the workload's rights, streamed, trees as jobs.

Purpose: ``penstock_sandbox.guest.common.files``, shared with local sandboxes, does the work; this moves the bytes.

Invariants
- Every path is resolved as the workload's user; only descriptors opened so are read and written as the guest agent.
- A job is a child with the workload's rights that the workload cannot signal; its reply is sent when it has ended.
- A reset stream leaves nothing behind: no half-written file, no job.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import signal
from typing import Callable, Dict, List, Optional

from penstock_sandbox.guest import frames, system
from penstock_sandbox.guest.common import children, files, syscalls, trees
from penstock_sandbox.guest.loop import Loop, Source
from penstock_sandbox.guest.processes import Streams
from penstock_sandbox.guest.replies import Reply

_RESULT_LIMIT = 64 * 1024


class Transfers:
    """The files of one sandbox. ``spool`` is a directory of the guest agent's own, out of the sandbox's reach."""

    def __init__(
        self,
        loop: Loop,
        send_frame: Callable[[int, int, bytes], None],
        room: Callable[[], bool],
        streams: Streams,
        workload: system.Workload,
        spool: int,
    ) -> None:
        self._loop = loop
        self._send_frame = send_frame
        self._room = room
        self._streams = streams
        self._workload = workload
        self._spool = spool
        self._reads: Dict[int, _Read] = {}
        self._writes: Dict[int, _Write] = {}
        self.jobs: Dict[int, _Job] = {}
        self.operations: Dict[str, Callable[[frames.Message, Reply], None]] = {
            "open_read": self._open_read,
            "seek": self._seek,
            "open_write": self._open_write,
            "commit": self._commit,
            "spool": self._open_spool,
            "write_tree": self._write_tree,
            "read_tree": self._read_tree,
            "remove": self._remove,
        }
        for name, operation in files.OPERATIONS.items():
            if name not in self.operations:
                self.operations[name] = functools.partial(self._simple, operation)

    def _simple(self, operation: Callable[[files.Message], files.Reply], request: files.Message, reply: Reply) -> None:
        with self._workload.acting():
            answer, _ = operation(request)
        reply.answer(answer)

    # Reading -----------------------------------------------------------------------------------------------------

    def _open_read(self, request: frames.Message, reply: Reply) -> None:
        with self._workload.acting():
            answer, (descriptor,) = files.open_read(request)
        reply.answer(answer)
        self._reads[request["stream"]] = _Read(self, request["stream"], descriptor, 0)

    def _seek(self, request: frames.Message, reply: Reply) -> None:
        """Ends a read and continues at another offset under another stream's number."""
        before = self._reads.get(request["stream"])
        if before is None:
            raise files.Refused(errno.EBADF, "the file is not open")
        descriptor = os.dup(before.descriptor)
        before.stop()
        reply.answer({})
        self._reads[request["next"]] = _Read(self, request["next"], descriptor, request["offset"])

    # Writing -----------------------------------------------------------------------------------------------------

    def _open_write(self, request: frames.Message, reply: Reply) -> None:
        with self._workload.acting():
            opened, given = files.open_write(request)
        self._writes[request["stream"]] = _Write(self, request["stream"], opened, given)
        reply.answer({})

    def _open_spool(self, request: frames.Message, reply: Reply) -> None:
        """Receives an archive, which is unpacked when it is complete."""
        name = ".spool-%d" % request["stream"]
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=self._spool)
        os.unlink(name, dir_fd=self._spool)
        self._writes[request["stream"]] = _Write(self, request["stream"], None, [descriptor])
        reply.answer({})

    def _commit(self, request: frames.Message, reply: Reply) -> None:
        write = self._take_write(request["stream"])
        try:
            assert write.opened is not None
            with self._workload.acting():
                answer, _ = files.commit({**write.opened, "mode": request["mode"]}, write.given)
        except BaseException:
            write.discard()
            raise
        write.close()
        reply.answer(answer)

    def _take_write(self, stream: int) -> _Write:
        write = self._writes.pop(stream, None)
        if write is None:
            raise files.Refused(errno.EBADF, "the file is not open")
        if write.failure is not None:
            write.discard()
            raise files.Refused(write.failure.errno or errno.EIO, write.failure.strerror or "write")
        return write

    def data(self, stream: int, data: bytes) -> bool:
        """Handles data of a file being written; returns False for a stream that is not a file's."""
        write = self._writes.get(stream)
        if write is None:
            return False
        write.data(data)
        return True

    def credit(self, stream: int, amount: int) -> None:
        """The service has consumed part of a file that it reads."""
        read = self._reads.get(stream)
        if read is not None:
            read.credit(amount)

    def reset(self, stream: int) -> None:
        """The service reset a stream."""
        if stream in self._reads:
            self._reads[stream].stop()
        if stream in self._writes:
            self._writes.pop(stream).discard()
        for job in list(self.jobs.values()):
            if job.stream == stream:
                job.kill()

    def go_on(self) -> None:
        """Called when the link has room again."""
        for read in list(self._reads.values()):
            read.go_on()

    def stop(self) -> None:
        """Cancels everything in progress."""
        for stream in [*self._reads, *self._writes]:
            self.reset(stream)
        for job in list(self.jobs.values()):
            job.kill()

    # Jobs --------------------------------------------------------------------------------------------------------

    def _write_tree(self, request: frames.Message, reply: Reply) -> None:
        write = self._take_write(request["stream"])
        try:
            job = self._start({**request, "job": "write_tree"}, write.given[0], reply)
        finally:
            write.close()
        # All has arrived, but its reset still cancels; one after the reply finds the job at its end.
        job.stream = request["stream"]

    def _read_tree(self, request: frames.Message, reply: Reply) -> None:
        kept, given = os.pipe()
        try:
            job = self._start({**request, "job": "read_tree"}, given, reply)
        except BaseException:
            os.close(kept)
            raise
        finally:
            os.close(given)
        stream = job.stream = request["stream"]

        def ended() -> None:
            del self._streams.sources[stream]
            self._loop.forget(kept)
            os.close(kept)
            job.streaming = False
            job.settle()

        job.streaming = True
        self._streams.sources[stream] = Source(
            self._loop, self._send_frame, self._room, kept, stream, frames.BULK_WINDOW, ended
        )

    def _remove(self, request: frames.Message, reply: Reply) -> None:
        self._start({**request, "job": "remove"}, None, reply)

    def _start(self, request: frames.Message, descriptor: Optional[int], reply: Reply) -> _Job:
        result, result_end = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(result)
            os.close(result_end)
            raise
        if pid == 0:
            code = 70
            try:
                given = [result_end] if descriptor is None else [result_end, descriptor]
                children.close_others({0, 1, 2, *given})
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)
                syscalls.set_name("supervisor")
                with self._workload.acting():
                    trees.run_job(request, given)
                code = 0
            finally:
                os._exit(code)
        os.close(result_end)
        job = self.jobs[pid] = _Job(self._loop, pid, result, reply)
        return job

    # For the classes below ----------------------------------------------------------------------------------------

    def forget_read(self, stream: int) -> None:
        """Drops a read that has ended."""
        self._reads.pop(stream, None)

    def send_frame(self, kind: int, stream: int, payload: bytes) -> None:
        self._send_frame(kind, stream, payload)

    def room(self) -> bool:
        """Whether more may be sent."""
        return self._room()

    def act_as_workload(self, action: Callable[[], object]) -> None:
        """Runs an action with the workload's rights."""
        with self._workload.acting():
            action()


class _Read:
    """Sends a file from an offset on, as credit allows. A file is always ready, so it is read at once."""

    def __init__(self, transfers: Transfers, stream: int, descriptor: int, offset: int) -> None:
        self._transfers = transfers
        self._stream = stream
        self.descriptor = descriptor
        self._offset = offset
        self._credit = frames.BULK_WINDOW
        self._ended = False
        self._open = True
        self.go_on()

    def credit(self, amount: int) -> None:
        self._credit += amount
        self.go_on()

    def go_on(self) -> None:
        while self._open and not self._ended and self._credit > 0 and self._transfers.room():
            try:
                data = os.pread(self.descriptor, min(4 * frames.PIECE, self._credit), self._offset)
            except OSError as error:
                self._ended = True
                self._transfers.send_frame(frames.RESET, self._stream, frames.pack_message({"errno": error.errno}))
                return
            if not data:
                # It stays open: the reader may seek back.
                self._ended = True
                self._transfers.send_frame(frames.END, self._stream, b"")
                return
            self._offset += len(data)
            self._credit -= len(data)
            self._transfers.send_frame(frames.DATA, self._stream, data)

    def stop(self) -> None:
        if self._open:
            self._open = False
            os.close(self.descriptor)
            self._transfers.forget_read(self._stream)


class _Write:
    """A file being written: ``given`` are its descriptor and its directory's. An error is reported at its end."""

    def __init__(self, transfers: Transfers, stream: int, opened: Optional[files.Message], given: List[int]) -> None:
        self._transfers = transfers
        self._stream = stream
        self.opened = opened
        self.given = given
        self.failure: Optional[OSError] = None
        self._taken = 0

    def data(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view and self.failure is None:
                view = view[os.write(self.given[0], view) :]
        except OSError as error:
            self.failure = error
            self._transfers.send_frame(frames.RESET, self._stream, frames.pack_message({"errno": error.errno}))
        self._taken += len(data)
        if self._taken >= frames.BULK_WINDOW // 4:
            self._transfers.send_frame(frames.CREDIT, self._stream, frames.pack_amount(self._taken))
            self._taken = 0

    def discard(self) -> None:
        try:
            if self.opened is not None:
                opened = self.opened
                self._transfers.act_as_workload(lambda: files.discard(opened, self.given))
        except OSError:
            pass  # the workload removed it first
        finally:
            self.close()

    def close(self) -> None:
        for descriptor in self.given:
            os.close(descriptor)


class _Job:
    """A tree operation in a child: complete when its result is read, its stream sent, and the child reaped."""

    def __init__(self, loop: Loop, pid: int, result: int, reply: Reply) -> None:
        self._loop = loop
        self._pid = pid
        self._result = result
        self._reply = reply
        self._text = b""
        self._answered = False
        self.stream = 0
        self.streaming = False
        os.set_blocking(result, False)
        loop.watch(result, self._readable, None)

    def _readable(self) -> None:
        try:
            data = os.read(self._result, _RESULT_LIMIT)
        except BlockingIOError:
            return
        self._text += data
        if not data:
            self._loop.forget(self._result)
            os.close(self._result)
            self._answered = True
            self.settle()

    def settle(self) -> None:
        if not self._answered or self.streaming:
            return
        try:
            result = json.loads(self._text)
        except ValueError:
            self._reply.refuse(errno.EINTR, "the operation was killed inside the sandbox")
            return
        if "errno" in result:
            self._reply.refuse(result["errno"], result["what"])
        else:
            self._reply.answer(result)

    def kill(self) -> None:
        try:
            os.kill(self._pid, signal.SIGKILL)
        except ProcessLookupError:
            return
