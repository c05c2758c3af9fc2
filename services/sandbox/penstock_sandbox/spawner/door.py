"""The door of one sandbox: starts its processes, kills their trees, opens its files and its endpoint's listener.

Purpose: a door is forked by the spawner, becomes the sandbox's user, enters the sandbox's namespaces and serves one
SOCK_SEQPACKET channel. Being inside the mount namespace with that user's rights makes every path safe by construction:
a symbolic link that an agent planted leads at most to what the agent could reach anyway.

Invariants
- The door itself stays in the host's process namespace: invisible to the sandbox, impossible to signal from it, and
  not dumpable. Only its children are inside. It holds no descriptor that a child inherits.
- It keeps two capabilities, both over the sandbox's user namespace only: CAP_SYS_ADMIN, to give each process its own
  UTS namespace, and CAP_SYS_PTRACE, to read which one a process has. Executing a file drops them, and neither is in
  effect while it works on files for a caller, who may do what the sandbox's user may.
- That UTS namespace is the process's tag: it is inherited by every descendant, the daemonised ones included, and
  nothing in the sandbox can change it. Killing a process means killing all that carry its tag.
- Requests are answered in order, one reply each. A process's exit comes after the reply that told its pid, or in it,
  when the process had already ended by then. To a caller who waits for the end that reply may come a little late, so
  that it can tell both; not later than the next request is looked at.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.machinery
import os
import resource
import select
import signal
import socket
import struct
import sys
import termios
from collections.abc import Callable, Sequence

from penstock_sandbox.spawner import dying, files, killing, sealing, syscalls, trees, wire

# Longest that the answer to a start waits for the end. Meanwhile a pipe's worth of output waits too.
_LINGER_MS = 2
_OOM_BIAS = 500
_CAPABILITIES = (syscalls.CAP_SYS_ADMIN, syscalls.CAP_SYS_PTRACE)
# More slows programs that close every number that could be open.
_OPEN_FILES = 65_536
_RESET_SIGNALS = [signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP]

Reply = tuple[wire.Message, list[int]]


class Door:
    """Serves one sandbox's channel until it closes."""

    def __init__(self, channel: socket.socket, host_proc: int, oom_score: int, first_pid: int) -> None:
        self._channel = channel
        self._first_pid = first_pid
        self._host_proc = host_proc
        self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._oom_score = oom_score
        self._oom_base = int(os.pread(oom_score, 16, 0) or b"0")
        self._tags: dict[int, int] = {}  # process id on the host -> descriptor that pins its UTS namespace
        self._next_tag: int | None = None  # made ahead, while nobody waits: the door is in it already
        self._running: set[int] = set()
        self._held: wire.Message | None = None  # the answer to a start, which waits a little for the end
        # The sandbox's own, for programs that are given no input; the host's would be shared by all.
        self._null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self._jobs: set[int] = set()
        self._operations: dict[str, Callable[[wire.Message, list[int]], Reply]] = {
            "start": self._start,
            "signal": self._signal,
            "kill": self._kill,
            "kill_all": self._kill_all,
            "listen": self._listen,
            "job": self._job,
        }

    def serve(self) -> None:
        """Answer requests and report exits until the service closes the channel."""
        ended = syscalls.signal_descriptor(signal.SIGCHLD)
        channel = self._channel.fileno()
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        poll.register(ended, select.POLLIN)
        while True:
            ready = poll.poll(None if self._held is None else _LINGER_MS)
            # Ends first: what is held back for one is told with it; whatever else woke the door ends the waiting too.
            if any(descriptor == ended for descriptor, _ in ready):
                os.read(ended, 128)
                self._reap()
            self._tell_held()
            if any(descriptor == channel for descriptor, _ in ready):
                request = wire.receive(self._channel)
                if request is None:
                    return
                self._answer(*request)

    def _tell_held(self) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            wire.send(self._channel, held)

    def _answer(self, request: wire.Message, descriptors: list[int]) -> None:
        given: list[int] = []
        try:
            operation = self._operations.get(request["op"])
            if operation is not None:
                reply, given = operation(request, descriptors)
            else:
                with syscalls.without_capabilities(_CAPABILITIES):
                    if (on_descriptors := files.OPERATIONS_ON_DESCRIPTORS.get(request["op"])) is not None:
                        reply, given = on_descriptors(request, descriptors)
                    else:
                        reply, given = files.OPERATIONS[request["op"]](request)
        except files.Refused as refusal:
            reply = {"errno": refusal.errno, "what": refusal.what}
        except OSError as error:
            reply = {"errno": error.errno or errno.EIO, "what": error.strerror or str(error)}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        reply["seq"] = request["seq"]
        if request.get("to_end") and reply.get("pid") in self._running:
            self._held = reply
        else:
            wire.send(self._channel, reply, given)
        for descriptor in given:
            os.close(descriptor)
        if self._next_tag is None:
            try:
                self._next_tag = self._new_tag()
            except OSError:
                pass  # the next start tries again, and says so

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._jobs:
                self._jobs.discard(pid)
            elif pid in self._running:
                self._running.discard(pid)
            else:
                continue
            ended = self._exit(pid, status, usage)
            if self._held is not None and self._held["pid"] == pid:
                self._held["exit"] = ended
                self._tell_held()
            elif ended is not None:
                wire.send(self._channel, ended)

    def _exit(self, pid: int, status: int, usage: resource.struct_rusage) -> wire.Message | None:
        """What a process's end was; None when it was no end of its own and is told with the sandbox's."""
        if (
            os.WIFSIGNALED(status)
            and os.WTERMSIG(status) == signal.SIGKILL
            and dying.is_dying(self._host_proc, self._first_pid)
        ):
            return None
        # posix_spawn shares the door's memory until the program runs, and that counts: at or under the door's own peak
        # the figure says nothing.
        floor = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {
            "event": "exit",
            "pid": pid,
            "status": status,
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "peak_bytes": usage.ru_maxrss * 1024 if usage.ru_maxrss > floor else None,
        }

    def _start(self, request: wire.Message, descriptors: list[int]) -> Reply:
        environment: dict[str, str] = request["env"]
        for ended in request["forget"]:
            os.close(self._tags.pop(ended))
        try:
            os.chdir(request["cwd"])
        except OSError as error:
            raise files.Refused(error.errno or errno.EIO, f"working directory: {error.strerror}") from error
        given: list[int] = []
        held: list[int] = []
        actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = []
        try:
            program = files.program(request["argv"][0], environment.get("PATH", ""))
            window: tuple[int, int] | None = request["pty"]
            if window is not None:
                primary, secondary = os.openpty()
                given.append(primary)
                held.append(secondary)
                fcntl.ioctl(primary, termios.TIOCSWINSZ, struct.pack("HHHH", window[0], window[1], 0, 0))
                # The child leads a new session, so opening a terminal makes it the controlling one.
                actions.append((os.POSIX_SPAWN_OPEN, 0, os.ttyname(secondary), os.O_RDWR, 0))
                actions += [(os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, 0, 2)]
            else:
                # Output, error and, where there is any, input: none of 0, 1 and 2, which the door has for itself.
                given_input = descriptors[2] if len(descriptors) > 2 else self._null
                actions = [
                    (os.POSIX_SPAWN_DUP2, given_input, 0),
                    (os.POSIX_SPAWN_DUP2, descriptors[0], 1),
                    (os.POSIX_SPAWN_DUP2, descriptors[1], 2),
                ]
            if self._next_tag is None:
                self._next_tag = self._new_tag()
            try:
                # An out-of-memory kill must hit what the agent runs before it hits the door or the sandbox's init.
                os.pwrite(self._oom_score, str(min(1000, self._oom_base + _OOM_BIAS)).encode(), 0)
                pid = os.posix_spawn(
                    program,
                    request["argv"],
                    environment,
                    file_actions=actions,
                    setsid=True,
                    setsigmask=[],
                    setsigdef=_RESET_SIGNALS,
                )
            finally:
                os.pwrite(self._oom_score, str(self._oom_base).encode(), 0)
        except BaseException:
            for descriptor in given:
                os.close(descriptor)
            raise
        finally:
            for descriptor in held:
                os.close(descriptor)
            os.chdir("/")
        self._tags[pid], self._next_tag = self._next_tag, None
        # The kernel often lets a short program run to its end before it comes back here; then one message tells both.
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            return {"pid": pid, "exit": self._exit(pid, status, usage)}, given
        self._running.add(pid)
        return {"pid": pid}, given

    def _new_tag(self) -> int:
        """Move the door, and so what it starts next, into a UTS namespace of its own; answers what pins it."""
        syscalls.unshare(syscalls.CLONE_NEWUTS)
        return os.open("self/ns/uts", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._host_proc)

    def _signal(self, request: wire.Message, _: list[int]) -> Reply:
        pid: int = request["pid"]
        if pid not in self._running:
            raise files.Refused(errno.ESRCH, "the process has ended")
        os.killpg(pid, request["signal"])
        return {}, []

    def _kill(self, request: wire.Message, _: list[int]) -> Reply:
        descriptor = self._tags.get(request["pid"])
        if descriptor is None:
            raise files.Refused(errno.ESRCH, "no such process")
        killing.kill_tree(self._proc, f"uts:[{os.fstat(descriptor).st_ino}]", self._jobs_inside(), request["within"])
        return {}, []

    def _kill_all(self, request: wire.Message, _: list[int]) -> Reply:
        killing.kill_everything(self._proc, request["within"])
        return {}, []

    def _jobs_inside(self) -> set[int]:
        """The numbers that the jobs have in the sandbox's process namespace."""
        found = set()
        for pid in self._jobs:
            try:
                status = os.open(f"{pid}/status", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._host_proc)
            except FileNotFoundError:
                continue
            try:
                # As seen here, and then in each namespace down to its own.
                line = os.read(status, 4096).partition(b"\nNSpid:")[2].partition(b"\n")[0]
                found.add(int(line.split()[-1]))
            finally:
                os.close(status)
        return found

    def _listen(self, request: wire.Message, _: list[int]) -> Reply:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", request["port"]))
            listener.listen(128)
        except OSError:
            listener.close()
            raise
        return {}, [listener.detach()]

    def _job(self, request: wire.Message, descriptors: list[int]) -> Reply:
        """Run a long file operation in a child of its own; its result goes to ``descriptors[0]``.

        A few small files, which every agent starts with, are written faster than a child is made.
        """
        with syscalls.without_capabilities(_CAPABILITIES):
            if trees.is_small(request, descriptors):
                trees.run_job(request, descriptors)
                return {}, []
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)
                # Not the last started process's tag: killing that process must not kill this job.
                syscalls.unshare(syscalls.CLONE_NEWUTS)
                syscalls.keep_capabilities(())
                trees.run_job(request, descriptors)
                code = 0
            finally:
                os._exit(code)
        self._jobs.add(pid)
        return {"pid": pid}, []


def enter(
    sandbox: int,
    first_pid: int,
    channel: socket.socket,
    uid: int | None,
    sealed: Sequence[str],
    tmp_inodes: int,
    calls: bytes | None,
) -> None:
    """Become the door: never returns.

    ``sandbox`` is a pidfd of the sandbox's first process, whose id on the host is ``first_pid``; ``uid`` is the host
    user to become (None: stay), ``sealed`` are the names at the top level that are nobody's to change, ``tmp_inodes``
    is how many files each place in memory may hold, ``calls`` is the filter for system calls (None: there is none for
    this machine). The spawner puts it into the sandbox's control groups meanwhile.
    """
    code = 71
    try:
        syscalls.die_with_parent(signal.SIGKILL)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        oom_score = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        host_proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        owner = syscalls.parent_namespace(f"/proc/{first_pid}/ns/user")
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            # Changing the user clears the death signal.
            syscalls.die_with_parent(signal.SIGKILL)
        syscalls.set_dumpable(False)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        files_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(files_limit, _OPEN_FILES), files_limit))
        # The mounts belong to the user namespace in which bubblewrap made them; the sandbox's own is one further in.
        syscalls.setns(owner, syscalls.CLONE_NEWUSER)
        syscalls.setns(sandbox, syscalls.CLONE_NEWNS)
        sealing.seal(sealed, tmp_inodes)
        syscalls.setns(
            sandbox,
            syscalls.CLONE_NEWUSER
            | syscalls.CLONE_NEWNET
            | syscalls.CLONE_NEWIPC
            | syscalls.CLONE_NEWUTS
            | syscalls.CLONE_NEWPID
            | syscalls.CLONE_NEWCGROUP,
        )
        # Paths mean the sandbox's root from here on: an import would run what an agent planted.
        sys.path.clear()
        sys.path_importer_cache.clear()
        sys.meta_path[:] = [importlib.machinery.BuiltinImporter, importlib.machinery.FrozenImporter]
        os.close(sandbox)
        os.close(owner)
        os.chdir("/")
        os.umask(0o022)
        syscalls.drop_bounding_set()
        syscalls.keep_capabilities(_CAPABILITIES)
        syscalls.set_no_new_privs()
        if calls is not None:
            syscalls.filter_calls(calls)
        syscalls.set_dumpable(False)
        wire.send(channel, {"event": "ready"})
        Door(channel, host_proc, oom_score, first_pid).serve()
        code = 0
    except OSError as error:
        wire.send(channel, {"event": "failed", "errno": error.errno or errno.EIO, "what": str(error)})
    except BaseException as error:  # noqa: BLE001
        # A defect, not a condition. Standard error is the service's own; the service sees the door close. No traceback:
        # printing one opens source files, by now in the sandbox's root.
        os.write(2, f"penstock door: {error!r}\n".encode())
    finally:
        os._exit(code)
