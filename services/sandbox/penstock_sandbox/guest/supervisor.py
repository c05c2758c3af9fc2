"""The supervisor of one process: its parent, the subreaper of its descendants, and what kills them.

Purpose: a process that leaves its group and its session (a daemon) is still its supervisor's descendant, because the
supervisor is a child subreaper. So the whole tree can be killed without control groups and without privileges. Where
the kernel has no subreapers (gVisor before 2023) a tree has a group of its own, which its processes cannot leave.

A process that forks and ends before it is killed escapes every listing. If a tree does not die, all processes of the
workload's user are killed: the kernel does that in one step, which no fork escapes.

Invariants
- The result of the program's execution is reported before its exit, and the exit at most once; each order is answered.
- It is forked ahead of its program, where nobody inside may touch it: an idle one has none of the workload's resources.
- When nothing of the tree is left it waits for the next program, or its end; it kills the tree when the guest agent
  ends.
- It is not part of the tree: it runs as the guest agent's user, not the workload's, and obeys every order.
"""

from __future__ import annotations

import array
import errno
import fcntl
import gc
import os
import select
import signal
import socket
import struct
import termios
import time
from typing import Dict, List, NoReturn, Optional, Sequence, Tuple

from penstock_sandbox.guest import frames, system
from penstock_sandbox.guest.common import children, files, syscalls

_KILL_DEADLINE_S = 10.0
# By then every tree is dead, unless it makes new processes faster than they are found.
_KILL_ALL_AFTER_S = 2.0
_KILL_PAUSE_MS = 2
_KILL_ALL_PAUSES = 100
_LOOK_AGAIN_MS = 1000
# Marks are from here to twice as much: ids that no account has.
_FIRST_MARK = 2**30
# The OOM killer should choose the workload before what serves it.
_OOM_SCORE = b"500"
STATUS_LIMIT = 4096
_ORDER_LIMIT = 4096
_WHAT_LIMIT = 500
_RECEIVE = 256 * 1024
_AGAIN = b"again"
_LENGTH = struct.Struct("!I")
_NOT_EXECUTED = 127


class ProcessSupervisor:
    """A forked supervisor, as seen by the guest agent: it waits for its program until ``execute``.

    ``control`` carries orders and answers; ``status`` carries the error of the program's execution, or just its end.
    """

    def __init__(self, workload: system.Workload, control: Optional[socket.socket] = None) -> None:
        """Forks; or, given the ``control`` of a supervisor whose tree is gone, makes that one wait again.

        Raises OSError if that fails.
        """
        control_end: Optional[socket.socket] = None
        if control is None:
            control, control_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control = control
        self._feed, feed_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.status, report = os.pipe()
        try:
            if control_end is None:
                rights = array.array("i", (feed_end.fileno(), report))
                control.sendmsg([_AGAIN], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            elif os.fork() == 0:
                _supervise(control_end, feed_end, report, workload)
        except OSError:
            self.discard()
            raise
        finally:
            if control_end is not None:
                control_end.close()
            feed_end.close()
            os.close(report)

    def alive(self) -> bool:
        """Whether it still waits."""
        try:
            self.control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # it wrote without an order, or has ended

    def discard(self) -> None:
        """Releases an unused supervisor, which then ends."""
        self.control.close()
        self._feed.close()
        os.close(self.status)

    def execute(
        self, argv: Sequence[str], env: Dict[str, str], cwd: str, descriptors: Tuple[int, int, int], terminal: bool
    ) -> None:
        """Sends its program, once; ``descriptors`` are the three standard ones. Raises OSError if it has ended."""
        text = frames.pack_message({"argv": argv, "env": env, "cwd": cwd, "terminal": terminal})
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        try:
            self._feed.sendmsg([_LENGTH.pack(len(text))], rights)
            self._feed.sendall(text)
        finally:
            self._feed.close()


def _supervise(control: socket.socket, feed: socket.socket, report: int, workload: system.Workload) -> NoReturn:
    code = 71
    try:
        gc.disable()
        children.close_others({0, 1, 2, control.fileno(), feed.fileno(), report, *workload.held})
        syscalls.set_name("supervisor")
        _Supervision(control, workload).run(feed, report)
        code = 0
    except OSError as error:
        _write(report, {"errno": error.errno or errno.EIO, "what": str(error)})
    finally:
        os._exit(code)


class _Supervision:
    def __init__(self, control: socket.socket, workload: system.Workload) -> None:
        self._control = control
        self._workload = workload
        self._first = 0
        self._first_runs = False
        self._empty = False
        self._adopts = True
        self._mark: Optional[int] = None

    def run(self, feed: socket.socket, report: int) -> None:
        self._adopts = system.become_subreaper()
        woken, wake = socket.socketpair()
        woken.setblocking(False)
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._start(feed, report)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(woken, select.POLLIN)
        while True:
            if not self._reap() and not self._empty:
                self._empty = True
                _send(self._control, {"empty": True})
            # Without a subreaper no event reports the end of the last process that is not a child.
            unseen = not self._adopts and not self._first_runs and not self._empty
            for descriptor, _ in poll.poll(_LOOK_AGAIN_MS if unseen else None):
                if descriptor == woken.fileno():
                    _drain(woken)
                    continue
                order, descriptors = _receive_with_rights(self._control, _ORDER_LIMIT, 2)
                if not order:
                    self._kill_tree()
                    return
                if order == _AGAIN:
                    self._start(socket.socket(fileno=descriptors[0]), descriptors[1])
                else:
                    self._obey(frames.parse_message(order))

    def _start(self, feed: socket.socket, report: int) -> None:
        """Forks the child that waits for the program."""
        if not self._adopts:
            # Random, not counted: no two trees of a sandbox may ever share one.
            self._mark = _FIRST_MARK + int.from_bytes(os.urandom(4), "big") % _FIRST_MARK
        self._first = os.fork()
        if self._first == 0:
            _execute(feed, report, self._workload, self._mark)
        # Only the child holds it now, until it executes the program.
        os.close(report)
        feed.close()
        self._first_runs, self._empty = True, False

    def _obey(self, order: frames.Message) -> None:
        answer: frames.Message = {"answer": order["order"]}
        if "signal" in order:
            try:
                if self._first_runs:
                    os.killpg(self._first, order["signal"])
            except OSError as error:
                answer.update(errno=error.errno, what=str(error))
        else:
            left = self._kill_tree()
            if left:
                what = "%d processes survived %d s of SIGKILL" % (left, _KILL_DEADLINE_S)
                answer.update(errno=errno.ETIMEDOUT, what=what)
        _send(self._control, answer)

    def _reap(self) -> bool:
        """Reaps ended processes; returns whether anything of the tree is left."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                if self._mark is None:
                    return False
                found, certain = _marked(self._mark)
                return bool(found) or not certain
            if pid == 0:
                return True
            if pid == self._first:
                self._first_runs = False
                _send(self._control, {"exit": status, **children.used(usage)})

    def _kill_tree(self) -> int:
        """Kills until nothing is left; returns a minimum of how many survived the deadline."""
        began = time.monotonic()
        pause = select.poll()
        while self._reap():
            found = _descendants(os.getpid())
            if self._mark is not None:
                found = sorted({*found, *_marked(self._mark)[0]})
            for pid in found:
                try:
                    os.kill(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    continue  # it ended meanwhile, or has another user's rights: then the deadline passes
            taken_s = time.monotonic() - began
            if taken_s > _KILL_DEADLINE_S:
                # Survivors may be missing from the listing.
                return max(1, len(found))
            if taken_s > _KILL_ALL_AFTER_S and self._workload.separate:
                self._kill_all(pause)
            pause.poll(_KILL_PAUSE_MS)
        return 0

    def _kill_all(self, pause: select.poll) -> None:
        """Kills all processes of the workload's user in this sandbox but the first process: other trees as well."""
        try:
            killer = os.fork()
        except OSError:
            return  # the workload has used up all processes: the next pass kills some
        if killer == 0:
            try:
                self._workload.kill_all()
            finally:
                os._exit(0)
        # Limited: it may have been stopped, and is then killed like the rest.
        for _ in range(_KILL_ALL_PAUSES):
            if os.waitpid(killer, os.WNOHANG)[0]:
                return
            pause.poll(_KILL_PAUSE_MS)


def _descendants(root: int) -> List[int]:
    """Returns every process below ``root``, dead ones included: a dead main thread may leave others running."""
    children: Dict[int, List[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/%s/stat" % name, "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue  # it ended meanwhile
            children.setdefault(parent, []).append(int(name))
    found: List[int] = []
    pending = [root]
    while pending:
        below = children.pop(pending.pop(), [])
        found += below
        pending += below
    return found


def _marked(mark: int) -> Tuple[List[int], bool]:
    """Returns every process that has a group, except zombies, and whether that is certainly all.

    It is not if one of them is a zombie, or a listed one could not be read: it may have forked after the listing, and
    the child is in no listing yet.
    """
    wanted = b"%d" % mark
    found: List[int] = []
    certain = True
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/%s/status" % name, "rb") as file:
                    lines = file.read().splitlines()
            except OSError:
                lines = []
            fields = {line.partition(b":")[0]: line.partition(b":")[2].split() for line in lines}
            if b"State" not in fields:
                certain = False  # it ended meanwhile
            elif wanted in fields.get(b"Groups", ()):
                if _runs(fields):
                    found.append(int(name))
                else:
                    certain = False
    return found, certain


def _runs(status: Dict[bytes, List[bytes]]) -> bool:
    """Whether a process is alive; a zombie may be a dead main thread whose other threads run."""
    threads = status.get(b"Threads", [b"1"])[0]
    return status.get(b"State", [b"Z"])[0] not in (b"Z", b"X") or threads not in (b"0", b"1")


def _execute(feed: socket.socket, report: int, workload: system.Workload, mark: Optional[int]) -> NoReturn:
    try:
        for number in children.RESET_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        os.setsid()
        _prefer_for_oom()
        workload.approach()
        _rehearse(feed)
        program, descriptors = _receive(feed)
        for standard, descriptor in enumerate(descriptors):
            # None of them is 0, 1 or 2: those were open all the time.
            os.dup2(descriptor, standard)
        if program["terminal"]:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        workload.become(mark)
        argv, env = program["argv"], program["env"]
        try:
            os.chdir(program["cwd"])
        except OSError as error:
            raise files.Refused(error.errno or errno.EIO, "working directory: %s" % error.strerror) from error
        os.execve(files.program(argv[0], env.get("PATH", "")), argv, env)
    except files.Refused as failure:
        _write(report, {"errno": failure.errno, "what": failure.what, "failed": True})
    except OSError as error:
        _write(report, {"errno": error.errno or errno.EIO, "what": error.strerror or str(error), "failed": True})
    except ValueError as error:
        _write(report, {"errno": errno.EINVAL, "what": str(error), "failed": True})
    finally:
        os._exit(_NOT_EXECUTED)


def _rehearse(feed: socket.socket) -> None:
    """Touches the pages that executing will use, so that they are copied ahead of time."""
    try:
        feed.recvmsg(1, socket.CMSG_LEN(1), socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        pass
    array.array("i").frombytes(_LENGTH.pack(0))
    frames.parse_message(frames.pack_message({"argv": ["sh"], "env": {"PATH": ""}, "cwd": "/", "terminal": False}))
    os.dup2(0, 0)
    os.getgroups()
    os.chdir("/")
    try:
        os.execve(files.program("true", "/nowhere:/usr/bin:/bin") + "/", ["true"], {"PATH": ""})
    except (OSError, files.Refused):
        pass  # no program is a directory


def _receive(feed: socket.socket) -> Tuple[frames.Message, List[int]]:
    """Waits for the program; the end of the guest agent ends the wait."""
    head, descriptors = _receive_with_rights(feed, _LENGTH.size, 3)
    if len(head) < _LENGTH.size:
        os._exit(0)
    (length,) = _LENGTH.unpack(head)
    text = bytearray()
    while len(text) < length:
        part = feed.recv(min(_RECEIVE, length - len(text)))
        if not part:
            os._exit(0)
        text += part
    return frames.parse_message(bytes(text)), descriptors


def _receive_with_rights(sock: socket.socket, limit: int, count: int) -> Tuple[bytes, List[int]]:
    descriptors = array.array("i")
    data, ancillary, _, _ = sock.recvmsg(limit, socket.CMSG_LEN(count * descriptors.itemsize), socket.MSG_CMSG_CLOEXEC)
    for _, _, rights in ancillary:
        descriptors.frombytes(rights)
    return data, list(descriptors)


def _prefer_for_oom() -> None:
    try:
        descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    except OSError:
        return  # no /proc, or a reduced one: the kernel then chooses freely
    try:
        os.write(descriptor, _OOM_SCORE)
    except OSError:
        pass  # its score is higher already
    finally:
        os.close(descriptor)


def _drain(woken: socket.socket) -> None:
    try:
        woken.recv(4096)
    except BlockingIOError:
        return


def _send(control: socket.socket, message: frames.Message) -> None:
    try:
        control.send(frames.pack_message(message))
    except OSError:
        return  # the guest agent has ended; the tree is killed next


def _write(report: int, message: frames.Message) -> None:
    message["what"] = message["what"][:_WHAT_LIMIT]
    os.write(report, frames.pack_message(message))
