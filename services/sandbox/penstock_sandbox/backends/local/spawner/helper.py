"""The helper of one sandbox: starts processes, kills their trees, opens files and the endpoint's listener.

Purpose: the spawner forks the helper, which becomes the sandbox's user, enters the sandbox's namespaces and serves one
SOCK_SEQPACKET channel. Inside the mount namespace with that user's rights every path is safe by construction: a planted
symbolic link reaches only what the agent could reach anyway.

Invariants
- The helper stays in the host's process namespace: invisible to the sandbox, not to be signalled from it, and not
  dumpable. Only its children are inside. It holds no descriptor that a child inherits.
- It keeps two capabilities, both over the sandbox's user namespace only: CAP_SYS_ADMIN, to give each process its own
  UTS namespace, and CAP_SYS_PTRACE, to read which one a process has. Executing a file drops them, and neither is in
  effect during file work for a caller, which has the rights of the sandbox's user.
- That UTS namespace is the process's tag: every descendant inherits it, daemons included, and nothing in the sandbox
  can change it. Killing a process means killing all that carry its tag.
- A process is named by the number of its start's request, since the kernel gives the id of one that has ended again.
- Requests are answered in order, one reply each. A process's exit is sent after the reply with its pid, or in it, if
  the process had ended by then. For a caller that waits for the end that reply may be delayed a little to include the
  exit, at most until the next request is read.
"""

from __future__ import annotations

import errno
import importlib.machinery
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence

from penstock_sandbox.backends.local.spawner import killing, read_only_mounts, shares, wire
from penstock_sandbox.guest.common import children, files, loopback, pdeathsig, syscalls, trees

# Maximum delay of a start's reply to include the exit. Meanwhile a pipe's worth of output waits too.
_LINGER_MS = 2
_OOM_BIAS = 500
_CAPABILITIES = (syscalls.CAP_SYS_ADMIN, syscalls.CAP_SYS_PTRACE)
# Of the monotonic and the boot clock of a repeatable sandbox, when it is made.
_CLOCKS_BEGIN_S = 1_000
# A higher limit slows programs that close every possible descriptor.
_OPEN_FILES = 65_536

Reply = tuple[wire.Message, list[int]]


class SandboxHelper:
    """Serves one sandbox's channel until it closes."""

    def __init__(self, channel: socket.socket, host_proc: int, oom_score: int, first_pid: int) -> None:
        self._channel = channel
        self._first_pid = first_pid
        self._host_proc = host_proc
        self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._oom_score = oom_score
        self._oom_base = int(os.pread(oom_score, 16, 0) or b"0")
        self._tags: dict[int, int] = {}  # process -> descriptor that pins its UTS namespace
        self._next_tag: int | None = None  # made ahead, while idle: the helper is in it already
        self._running: dict[int, int] = {}  # process id on the host -> process
        self._held: wire.Message | None = None  # a start's reply, delayed a little to include the exit
        # The sandbox's own, for programs without input; all would share the host's.
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
        """Answers requests and reports exits until the service closes the channel."""
        ended = syscalls.signal_descriptor(signal.SIGCHLD)
        channel = self._channel.fileno()
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        poll.register(ended, select.POLLIN)
        while True:
            ready = poll.poll(None if self._held is None else _LINGER_MS)
            # Exits first: they go into the delayed reply; any other event ends the delay too.
            if any(descriptor == ended for descriptor, _ in ready):
                os.read(ended, 128)
                self._reap()
            self._send_held()
            if any(descriptor == channel for descriptor, _ in ready):
                request = wire.receive(self._channel)
                if request is None:
                    return
                self._answer(*request)

    def _send_held(self) -> None:
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
                pass  # the next start tries again, and reports the error

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            # The end of a job is that of its pipe.
            self._jobs.discard(pid)
            process = self._running.pop(pid, None)
            if process is None:
                continue
            ended = self._exit(process, status, usage)
            if self._held is not None and self._held["seq"] == process:
                self._held["exit"] = ended
                self._send_held()
            elif ended is not None:
                wire.send(self._channel, ended)

    def _exit(self, process: int, status: int, usage: resource.struct_rusage) -> wire.Message | None:
        """Returns a process's exit event; None if it ended with the sandbox, which reports it."""
        if (
            os.WIFSIGNALED(status)
            and os.WTERMSIG(status) == signal.SIGKILL
            and pdeathsig.is_dying(self._host_proc, self._first_pid)
        ):
            return None
        return {"event": "exit", "process": process, "status": status, **children.used(usage)}

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
                children.set_window(primary, *window)
                # The child leads a new session, so opening a terminal makes it the controlling one.
                actions.append((os.POSIX_SPAWN_OPEN, 0, os.ttyname(secondary), os.O_RDWR, 0))
                actions += [(os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, 0, 2)]
            else:
                # Output, error and, if any, input: never 0, 1 or 2, which are the helper's own.
                given_input = descriptors[2] if len(descriptors) > 2 else self._null
                actions = [
                    (os.POSIX_SPAWN_DUP2, given_input, 0),
                    (os.POSIX_SPAWN_DUP2, descriptors[0], 1),
                    (os.POSIX_SPAWN_DUP2, descriptors[1], 2),
                ]
            if self._next_tag is None:
                self._next_tag = self._new_tag()
            try:
                # The OOM killer must choose what the agent runs before the helper or the sandbox's init.
                os.pwrite(self._oom_score, str(min(1000, self._oom_base + _OOM_BIAS)).encode(), 0)
                pid = os.posix_spawn(
                    program,
                    request["argv"],
                    environment,
                    file_actions=actions,
                    setsid=True,
                    setsigmask=[],
                    setsigdef=children.RESET_SIGNALS,
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
        process: int = request["seq"]
        self._tags[process], self._next_tag = self._next_tag, None
        # The kernel often runs a short program to its end before it returns here; then one message has both.
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            return {"pid": pid, "exit": self._exit(process, status, usage)}, given
        self._running[pid] = process
        return {"pid": pid}, given

    def _new_tag(self) -> int:
        """Moves the helper, and so its next child, into a new UTS namespace; returns a descriptor that pins it."""
        syscalls.unshare(syscalls.CLONE_NEWUTS)
        return os.open("self/ns/uts", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._host_proc)

    def _signal(self, request: wire.Message, _: list[int]) -> Reply:
        pid: int = request["pid"]
        if self._running.get(pid) != request["process"]:
            raise files.Refused(errno.ESRCH, "the process has ended")
        os.killpg(pid, request["signal"])
        return {}, []

    def _kill(self, request: wire.Message, _: list[int]) -> Reply:
        descriptor = self._tags.get(request["process"])
        if descriptor is None:
            raise files.Refused(errno.ESRCH, "no such process")
        killing.kill_tree(self._proc, f"uts:[{os.fstat(descriptor).st_ino}]", self._jobs_inside(), request["within"])
        return {}, []

    def _kill_all(self, request: wire.Message, _: list[int]) -> Reply:
        killing.kill_everything(self._proc, request["within"])
        return {}, []

    def _jobs_inside(self) -> set[int]:
        """Returns the jobs' process ids in the sandbox's process namespace."""
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
        return {}, [loopback.listen(request["port"]).detach()]

    def _job(self, request: wire.Message, descriptors: list[int]) -> Reply:
        """Runs a long file operation in a child of its own; its result goes to ``descriptors[0]``.

        Few small files, which every agent starts with, are written here: that is faster than a fork.
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


def _fix_clocks(offsets: int, host_proc: int) -> None:
    """Enters a time namespace whose clocks begin now at a fixed time; the helper's children are in it too.

    It enters it itself, because until a process does, the kernel makes no child that shares its memory, as of a spawn.
    """
    syscalls.unshare(syscalls.CLONE_NEWTIME)
    # Those of the namespace that it comes from, which the new one begins with.
    before = dict(line.split(maxsplit=1) for line in os.pread(offsets, 256, 0).decode().splitlines())
    lines = []
    for name, clock in (("monotonic", time.CLOCK_MONOTONIC), ("boottime", time.CLOCK_BOOTTIME)):
        seconds, nanoseconds = map(int, before[name].split())
        offset = seconds * 10**9 + nanoseconds + _CLOCKS_BEGIN_S * 10**9 - time.clock_gettime_ns(clock)
        lines.append(f"{name} {offset // 10**9} {offset % 10**9}\n")
    os.write(offsets, "".join(lines).encode())
    os.close(offsets)
    made = os.open("self/ns/time_for_children", os.O_RDONLY | os.O_CLOEXEC, dir_fd=host_proc)
    syscalls.setns(made, syscalls.CLONE_NEWTIME, "time")
    os.close(made)


def forbid_imports() -> None:
    """Forbids further imports to the spawner and its helpers, whose paths refer to a sandbox's root later.

    An import there would run what an agent planted. Called once, before the first helper: what each of them clears,
    it copies first.
    """
    sys.path.clear()
    sys.path_importer_cache.clear()
    sys.meta_path[:] = [importlib.machinery.BuiltinImporter, importlib.machinery.FrozenImporter]


def enter(
    entry: socket.socket,
    channel: socket.socket,
    uid: int | None,
    read_only: Sequence[str],
    writable: Sequence[str],
    tmp_inodes: int,
    calls: bytes | None,
    *,
    fixed_clocks: bool,
) -> None:
    """Becomes the helper: never returns. Imports are forbidden by then.

    ``entry`` receives one message when the sandbox's root is complete: its first process's id on the host, a pidfd of
    that process, and the user namespace of its mounts. ``uid`` is the host user to become (None: stay), ``read_only``
    are the names at the top level that become read-only (with ``writable``: all but those directories), ``tmp_inodes``
    limits the files of each place in memory,
    ``calls`` is the seccomp filter (None: there is none for this machine), ``fixed_clocks`` whether its clocks begin at
    a fixed time. The spawner moves it into the sandbox's
    control groups meanwhile.
    """
    code = 71
    try:
        syscalls.die_with_parent(signal.SIGKILL)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        oom_score = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        host_proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # Now: later this process is not dumpable, and the file then belongs to root.
        offsets = os.open("self/timens_offsets", os.O_RDWR | os.O_CLOEXEC, dir_fd=host_proc) if fixed_clocks else None
        if uid is not None:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            # Changing the user clears the parent-death signal.
            syscalls.die_with_parent(signal.SIGKILL)
        syscalls.set_dumpable(False)
        shares.lower_limits(_OPEN_FILES)
        received = wire.receive(entry)
        if received is None:
            raise OSError(errno.ECHILD, "the sandbox ended before it was complete")
        first, (sandbox_pidfd, owner) = received
        entry.close()
        # The mounts belong to the user namespace in which bubblewrap made them; the sandbox's own is below that.
        syscalls.setns(owner, syscalls.CLONE_NEWUSER, "outer user")
        syscalls.setns(sandbox_pidfd, syscalls.CLONE_NEWNS, "mount")
        read_only_mounts.make(read_only, writable, tmp_inodes)
        syscalls.setns(
            sandbox_pidfd,
            syscalls.CLONE_NEWUSER
            | syscalls.CLONE_NEWNET
            | syscalls.CLONE_NEWIPC
            | syscalls.CLONE_NEWUTS
            | syscalls.CLONE_NEWPID
            | syscalls.CLONE_NEWCGROUP,
            "sandbox's",
        )
        if offsets is not None:
            _fix_clocks(offsets, host_proc)
        shares.limit_watches(host_proc)
        os.close(sandbox_pidfd)
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
        SandboxHelper(channel, host_proc, oom_score, first["pid"]).serve()
        code = 0
    except OSError as error:
        wire.send(channel, {"event": "failed", "errno": error.errno or errno.EIO, "what": str(error)})
    except BaseException as error:  # noqa: BLE001
        # A defect, not a condition. Standard error is the service's own; the service sees the channel close. No
        # traceback: printing one opens source files, which now would be the sandbox's.
        os.write(2, f"penstock helper: {error!r}\n".encode())
    finally:
        os._exit(code)
