"""Kills in a sandbox without missing any process: the tree of one process, or all but the first process.

Purpose: a chain of processes, each of which starts the next and ends, can escape every listing. So an empty listing
proves nothing by itself. Two things do: a listing during which the sandbox made no process, and one kill of everything,
during which the kernel makes none.

Invariants
- The helper, which no process in the sandbox can signal, kills what it sees. A process of the sandbox also has an id in
  the helper's own process namespace. So if that made no process meanwhile, which is usual where little runs on the
  machine, the helper's two listings prove the end.
- Else a *scout*, a child of the helper in the sandbox's process namespace, reads that one's last process id, or kills
  all at once. An agent may kill or stop a scout, so further ones are sent until the deadline.
- A process that cannot be inspected is killed: it is never assumed to belong to another tree.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from collections.abc import Callable, Collection

from penstock_sandbox.guest.common import files

# How long to search for a tree while processes are constantly made, before everything in the sandbox is killed.
_PATIENCE_S = 0.5
# The helper's own listings before it sends a scout, while the machine makes processes: some cost less than a scout.
_LOOKS = 3
# Limit of the helper's own pass before it sends a scout: there may be many processes that should survive.
_FIRST_LOOK_S = 0.1
_PAUSE_S = 0.0005
_SCOUT_LOOK_MS = 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FIRST = 1
_DONE, _NOT_DONE = 0, 3

_DEAD = (b"Z", b"X")

Wanted = Callable[[int], bool]


def kill_tree(proc: int, tag: str, spared: Collection[int], within: float) -> None:
    """Kills all that carry ``tag`` (what ns/uts of a process reads); on return none is left and none can appear.

    ``proc`` is the sandbox's own /proc, ``spared`` the jobs in it. If processes are constantly made, everything is
    killed. Raises files.Refused (ETIMEDOUT) if that takes longer than ``within`` seconds.
    """
    now = time.monotonic()
    deadline, patience = now + within, now + _PATIENCE_S

    def wanted(process: int) -> bool:
        return _carries(process, tag)

    def scout() -> bool:
        own, watch = {*spared, os.getpid()}, _Watch(proc)
        while not watch.nothing(wanted, own, deadline):
            if watch.made and time.monotonic() > patience:
                return _kill_all(proc, deadline)
            if time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)
        return True

    _until_done(lambda: _proved(proc, wanted, spared, now + _FIRST_LOOK_S), scout, deadline)


def kill_everything(proc: int, within: float) -> None:
    """Kills all but the first process, jobs too; on return nothing else is left. Raises as ``kill_tree`` does."""
    now = time.monotonic()
    deadline = now + within
    _until_done(lambda: _proved(proc, _lives, (), now + _FIRST_LOOK_S), lambda: _kill_all(proc, deadline), deadline)


def _until_done(proved: Callable[[], bool], scout: Callable[[], bool], deadline: float) -> None:
    while True:
        # First the helper itself: this ends processes that would end a scout, or keeps them busy forking. A scout is a
        # fork of Python, so none is sent where this is proof enough.
        if proved() or _sent(scout, deadline):
            return
        if time.monotonic() > deadline:
            raise files.Refused(errno.ETIMEDOUT, "processes survived many SIGKILLs")
        time.sleep(_PAUSE_S)


def _proved(proc: int, wanted: Wanted, spared: Collection[int], until: float) -> bool:
    """Kills all wanted processes that the helper sees; returns whether certainly none exists."""
    watch = _Watch(proc)
    for _ in range(_LOOKS):
        if watch.nothing(wanted, spared, until):
            return True
        if not watch.made:
            break  # some are still dying
    return False


def _kill_seen(proc: int, wanted: Wanted, spared: Collection[int], until: float) -> bool:
    """Kills all wanted processes; returns whether there were any, or ``until`` passed before all were examined.

    The sandbox's own /proc is used, which is as short as the sandbox is small; the host's lists every sandbox. An open
    directory in it stays with its process, like a pidfd.
    """
    found = False
    for name in os.listdir(proc):
        if not name.isdigit() or int(name) == _FIRST or int(name) in spared:
            continue
        try:
            process = os.open(name, _FOLDER, dir_fd=proc)
        except OSError:
            continue  # it ended meanwhile
        try:
            if wanted(process):
                signal.pidfd_send_signal(process, signal.SIGKILL)
                found = True
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        finally:
            os.close(process)
        if time.monotonic() > until:
            return True
    return found


# Proofs, in the helper and in the scout ------------------------------------------------------------------------------


class _Watch:
    """Listings during which no process was made, as shown by the last process id."""

    def __init__(self, proc: int) -> None:
        self._proc = proc
        self.made = False
        """Whether a process was made during the last listing."""

    def nothing(self, wanted: Wanted, spared: Collection[int], until: float) -> bool:
        """Whether certainly no wanted process exists; kills what it finds.

        A process that is still being made during the first listing is missed there, but exists when the second one
        begins, or its parent is alive throughout and seen. Both listings count only if no process was made meanwhile.
        """
        before = _last_made(self._proc)
        _kill_seen(self._proc, wanted, spared, until)
        found = _kill_seen(self._proc, wanted, spared, until)
        self.made = _last_made(self._proc) != before
        return not found and not self.made


def _last_made(proc: int) -> bytes:
    """Returns the last process id of the caller's process namespace."""
    file = os.open("loadavg", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        return os.read(file, 256).split()[-1]
    finally:
        os.close(file)


def _kill_all(proc: int, deadline: float) -> bool:
    """Kills all but the caller and the first process until nothing else exists; returns whether that was in time."""
    own = (os.getpid(),)
    while True:
        try:
            # The kernel signals all at once, and a process with a pending SIGKILL cannot fork.
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass  # there is none
        if not _kill_seen(proc, _lives, own, deadline):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)


# The scout itself ----------------------------------------------------------------------------------------------------


def _sent(work: Callable[[], bool], deadline: float) -> bool:
    """Runs ``work`` in a child in the sandbox's process namespace; False if it was killed or could not be forked."""
    try:
        pid = os.fork()
    except BlockingIOError:
        return False  # the sandbox is at its process limit; kills make room
    if pid == 0:
        code = _NOT_DONE
        try:
            code = _DONE if work() else _NOT_DONE
        finally:
            os._exit(code)
    descriptor = os.pidfd_open(pid)
    try:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        while True:
            ended.poll(_SCOUT_LOOK_MS)
            found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if found and os.WIFSTOPPED(status):
                signal.pidfd_send_signal(descriptor, signal.SIGCONT)
            elif found:
                return os.WIFEXITED(status) and os.WEXITSTATUS(status) == _DONE
            elif time.monotonic() > deadline:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    finally:
        os.close(descriptor)


# One process, by its directory in /proc ------------------------------------------------------------------------------


def _carries(process: int, tag: str) -> bool:
    """Whether any thread carries the tag, or cannot be inspected; one that has ended carries none."""
    try:
        return os.readlink("ns/uts", dir_fd=process) == tag
    except (FileNotFoundError, ProcessLookupError):
        # Its main thread has ended: it is a zombie, unless others live on.
        return not _ended(process) and _any_thread(process, lambda thread: _thread_carries(thread, tag))
    except PermissionError:
        # Its program may be executed but not read, which hides its namespaces even from a tracer.
        return _lives(process)


def _thread_carries(thread: int, tag: str) -> bool:
    try:
        return os.readlink("ns/uts", dir_fd=thread) == tag
    except PermissionError:
        return _state(thread)[0] not in _DEAD


def _lives(process: int) -> bool:
    """Whether it has not ended, as a zombie has."""
    state, _ = _state(process)
    return state not in _DEAD or (
        not _ended(process) and _any_thread(process, lambda thread: _state(thread)[0] not in _DEAD)
    )


def _ended(process: int) -> bool:
    """Whether it is a zombie without another thread."""
    state, threads = _state(process)
    return state in _DEAD and threads <= 1


def _state(thread: int) -> tuple[bytes, int]:
    """Returns a thread's state, and the number of threads of its process."""
    stat = os.open("stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=thread)
    try:
        fields = os.read(stat, 4096).rpartition(b")")[2].split()
        return fields[0], int(fields[17])
    finally:
        os.close(stat)


def _any_thread(process: int, wanted: Wanted) -> bool:
    threads = os.open("task", _FOLDER, dir_fd=process)
    try:
        return any(_is(wanted, threads, name) for name in os.listdir(threads))
    finally:
        os.close(threads)


def _is(wanted: Wanted, threads: int, name: str) -> bool:
    try:
        thread = os.open(name, _FOLDER, dir_fd=threads)
    except FileNotFoundError:
        return False  # it ended meanwhile
    try:
        return wanted(thread)
    except (FileNotFoundError, ProcessLookupError):
        return False
    finally:
        os.close(thread)
