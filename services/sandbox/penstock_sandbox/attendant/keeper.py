"""The keeper of one process: its parent, the adopter of all that descends from it, and what kills them.

Purpose: a process that leaves its group and its session (a daemon) is still its keeper's descendant, because the keeper
is a child subreaper. So the whole tree can be killed without control groups and without privileges.

Invariants
- The keeper says what became of the program's execution first, then at most one exit, then an answer for each order.
- It ends by itself when nothing of the tree is left, and kills the tree when its attendant ends.
- It is told apart from the tree: it runs as the attendant's user, not the workload's, and ignores no order.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import select
import signal
import socket
import termios
import time
from typing import Dict, List, NoReturn, Sequence, Set, Tuple

from penstock_sandbox.attendant import frames, system

_KILL_DEADLINE_S = 10.0
_KILL_PAUSE_MS = 2
# An out-of-memory kill should hit what an agent runs before it hits what serves it.
_OOM_SCORE = b"500"
_STARTED_LIMIT = 4096
_NOT_EXECUTED = 127
_RESET_SIGNALS = (
    signal.SIGPIPE,
    signal.SIGXFSZ,
    signal.SIGCHLD,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
)


class Program:
    """What to execute: ``descriptors`` are its three standard ones, or the terminal's three times."""

    def __init__(
        self, argv: Sequence[str], env: Dict[str, str], cwd: str, descriptors: Tuple[int, int, int], terminal: bool
    ) -> None:
        self.argv = list(argv)
        self.env = env
        self.cwd = cwd
        self.descriptors = descriptors
        self.terminal = terminal


class _NotExecuted(Exception):
    def __init__(self, number: int, what: str) -> None:
        super().__init__(what)
        self.errno = number
        self.what = what


def keep(control: socket.socket, program: Program, workload: system.Workload) -> NoReturn:
    """Be the keeper: for a fresh child of the attendant. Never returns."""
    code = 71
    try:
        close_others({0, 1, 2, control.fileno(), *program.descriptors, *workload.held})
        system.set_name("keeper")
        _Keeper(control, program, workload).run()
        code = 0
    except OSError as error:
        _tell(control, {"errno": error.errno or errno.EIO, "what": str(error)})
    finally:
        os._exit(code)


class _Keeper:
    def __init__(self, control: socket.socket, program: Program, workload: system.Workload) -> None:
        self._control = control
        self._program = program
        self._workload = workload
        self._first = 0
        self._first_runs = True

    def run(self) -> None:
        system.become_subreaper()
        woken, wake = socket.socketpair()
        woken.setblocking(False)
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        failed, told = os.pipe()
        self._first = os.fork()
        if self._first == 0:
            _execute(self._program, self._workload, told)
        os.close(told)
        for descriptor in {*self._program.descriptors, *self._workload.held}:
            os.close(descriptor)
        # Ends when the program runs: the other end is closed by executing it.
        failure = os.read(failed, _STARTED_LIMIT)
        os.close(failed)
        if failure:
            os.waitpid(self._first, 0)
            self._control.send(failure)
            return
        _tell(self._control, {"started": self._first})
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(woken, select.POLLIN)
        while self._reap():
            for descriptor, _ in poll.poll():
                if descriptor == woken.fileno():
                    _empty(woken)
                else:
                    order = self._control.recv(_STARTED_LIMIT)
                    if not order:
                        self._kill_tree()
                        return
                    self._obey(frames.parse_message(order))
        _tell(self._control, {"empty": True})

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
                what = "%d processes outlived %d s of SIGKILL" % (left, _KILL_DEADLINE_S)
                answer.update(errno=errno.ETIMEDOUT, what=what)
        _tell(self._control, answer)

    def _reap(self) -> bool:
        """Take in what has ended; answers whether anything of the tree is left."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._first:
                self._first_runs = False
                # Until it ran its program it was a copy of this process, and that counts: at or under this process's
                # own peak the figure says nothing.
                floor = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                ended = {
                    "exit": status,
                    "cpu_s": usage.ru_utime + usage.ru_stime,
                    "peak_bytes": usage.ru_maxrss * 1024 if usage.ru_maxrss > floor else None,
                }
                _tell(self._control, ended)

    def _kill_tree(self) -> int:
        """Kill until nothing is left; answers how many were, after the deadline."""
        deadline = time.monotonic() + _KILL_DEADLINE_S
        pause = select.poll()
        while self._reap():
            found = _descendants(os.getpid())
            for pid in found:
                try:
                    os.kill(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    continue  # it ended meanwhile, or has another user's rights: the deadline tells
            if time.monotonic() > deadline:
                return len(found)
            pause.poll(_KILL_PAUSE_MS)
        return 0


def _descendants(root: int) -> List[int]:
    """Every process below ``root``, dead ones included: a dead first thread may leave others running."""
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


def _execute(program: Program, workload: system.Workload, told: int) -> NoReturn:
    try:
        for number in _RESET_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        os.setsid()
        for standard, descriptor in enumerate(program.descriptors):
            # None of them is 0, 1 or 2: the attendant keeps those open.
            os.dup2(descriptor, standard)
        if program.terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        _prefer_for_oom()
        workload.become()
        try:
            os.chdir(program.cwd)
        except OSError as error:
            raise _NotExecuted(error.errno or errno.EIO, "working directory: %s" % error.strerror) from error
        found = _find(program.argv[0], program.env.get("PATH", ""))
        os.execve(found, program.argv, program.env)
    except _NotExecuted as failure:
        _write(told, {"errno": failure.errno, "what": failure.what, "failed": True})
    except OSError as error:
        _write(told, {"errno": error.errno or errno.EIO, "what": error.strerror or str(error), "failed": True})
    except ValueError as error:
        _write(told, {"errno": errno.EINVAL, "what": str(error), "failed": True})
    finally:
        os._exit(_NOT_EXECUTED)


def _prefer_for_oom() -> None:
    try:
        descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    except OSError:
        return  # no /proc, or a reduced one: the kernel then chooses as it likes
    try:
        os.write(descriptor, _OOM_SCORE)
    except OSError:
        pass  # it stands higher already
    finally:
        os.close(descriptor)


def _find(program: str, path: str) -> str:
    if "/" in program:
        return program
    denied = False
    for folder in path.split(":"):
        candidate = os.path.join(folder or ".", program)
        if os.access(candidate, os.X_OK):
            if not os.path.isdir(candidate):
                return candidate
        elif os.path.exists(candidate):
            denied = True
    if denied:
        raise _NotExecuted(errno.EACCES, "%s: not executable" % program)
    raise _NotExecuted(errno.ENOENT, "%s: not found in PATH" % program)


def close_others(kept: Set[int]) -> None:
    """Close every descriptor but ``kept``: a copy in here would keep another process's pipe open."""
    try:
        held = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        held = list(range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    for descriptor in held:
        if descriptor not in kept:
            try:
                os.close(descriptor)
            except OSError:
                continue  # the listing's own


def _empty(woken: socket.socket) -> None:
    try:
        woken.recv(4096)
    except BlockingIOError:
        return


def _tell(control: socket.socket, message: frames.Message) -> None:
    try:
        control.send(frames.pack_message(message))
    except OSError:
        return  # the attendant has ended; the tree is killed next


def _write(told: int, message: frames.Message) -> None:
    os.write(told, frames.pack_message(message)[:_STARTED_LIMIT])


