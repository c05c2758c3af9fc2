"""The spawner's loop: makes and ends sandboxes on request, and reports those that ended by themselves.

Purpose: one process, one thread, one SOCK_SEQPACKET channel. A create request carries bubblewrap's arguments and the
helper's end of a socket pair; the reply is the sandbox's first process, once its root is complete and its helper may
enter. The helper is forked while bubblewrap works, because its own setup takes about as long as the root does.

Invariants
- bubblewrap always runs as an ordinary user: the spawner, when it is root, becomes the sandbox's user first.
- When it is root it works in a mount namespace of its own, where the directories of sandboxes appear under one
  traversable stage: nothing is mounted on the host, and no 0700 parent blocks an ordinary user.
- When the service's end closes, everything is killed and the spawner exits.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import resource
import select
import signal
import socket
import sys

from penstock_sandbox.backends.local.spawner import helper, seccomp, wire
from penstock_sandbox.guest.common import children, syscalls

_STDERR_LIMIT = 4096
# Descriptors passed to bubblewrap beside 0, 1 and 2, and the first unused number.
_INFO, _CALLS, _FIRST_FREE = 3, 4, wire.FIRST_PROGRAM + 1
# The sandbox's first process where there is no program of ours for the machine: it owns nothing, reaps orphans of the
# agent (bash does) and ends with its input.
FIRST_PROCESS = ("/bin/bash", "--norc", "--noprofile", "-c", "echo; while read -r _; do :; done")


class _Sandbox:
    """One sandbox. Not a dataclass: their import would double what every fork has to copy."""

    def __init__(
        self, request: wire.Message, bwrap: int, helper_channel: int, info: int, life: socket.socket, errors: int
    ):
        self.id: str = request["id"]
        self.uid: int | None = request["uid"]
        self.groups: list[str] = request["groups"]
        self.read_only: list[str] = request["read_only"]
        self.writable: list[str] = request["writable"]
        self.tmp_inodes: int = request["tmp_inodes"]
        self.fixed_clocks: bool = request["fixed_clocks"]
        self.seq: int | None = request["seq"]  # the create request that is not answered yet
        self.bwrap = bwrap
        self.helper_channel = helper_channel
        self.entry: socket.socket | None = None  # lets in its helper, which waits for it
        self.info = info
        self.life = life  # the first process's input and output; closing it ends the process
        self.errors = errors
        self.info_text = b""
        self.error_text = b""
        self.pidfd: int | None = None
        self.first_pid = 0
        self.helper_pid: int | None = None
        self.helper_ended_first = False
        self.entered = False
        self.status = 0  # bubblewrap's, once it has ended
        self.destroy_seqs: list[int] = []


class Spawner:
    """Serves the service's channel until it closes."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._poll = select.poll()
        self._sandboxes: dict[str, _Sandbox] = {}
        self._watched: dict[int, tuple[str, _Sandbox]] = {}
        self._bwrap = ""
        self._calls: bytes | None = None
        self._first_program: bytes | None = None

    def serve(self) -> None:
        """Runs until the service closes its end; then kills everything."""
        woken, wake = socket.socketpair()
        for end in (woken, wake):
            end.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poll.register(self._channel, select.POLLIN)
        self._poll.register(woken, select.POLLIN)
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == woken.fileno():
                    try:
                        woken.recv(4096)
                    except BlockingIOError:
                        pass
                    self._reap()
                elif descriptor == self._channel.fileno():
                    received = wire.receive(self._channel)
                    if received is None:
                        self._end()
                        return
                    self._answer(*received)
                else:
                    watched = self._watched.get(descriptor)
                    if watched is not None:
                        self._progress(descriptor, *watched)

    def _answer(self, request: wire.Message, descriptors: list[int]) -> None:
        try:
            match request["op"]:
                case "configure":
                    self._configure(request)
                    wire.send(self._channel, {"seq": request["seq"]})
                case "create":
                    self._create(request, descriptors)
                case "destroy":
                    self._destroy(request)
        except OSError as error:
            for descriptor in descriptors:
                os.close(descriptor)
            self._refuse(request["seq"], error.errno or errno.EIO, str(error))

    def _refuse(self, seq: int, number: int, what: str) -> None:
        wire.send(self._channel, {"seq": seq, "errno": number, "what": what})

    def _configure(self, request: wire.Message) -> None:
        self._bwrap = request["bwrap"]
        self._calls = seccomp.program(allocates=request["allocates"])
        self._first_program = request["first_program"]
        stage: str | None = request["stage"]
        if stage is None:
            return
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_SLAVE)
        # Opened before the stage hides paths below it, and after unshare because a bind stays within a namespace.
        sources = {name: os.open(path, os.O_PATH | os.O_CLOEXEC) for name, path in request["sources"].items()}
        syscalls.mount("penstock", stage, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=755,size=1m")
        for name, descriptor in sources.items():
            target = os.path.join(stage, name)
            os.mkdir(target, 0o755)
            syscalls.mount(f"/proc/self/fd/{descriptor}", target, None, syscalls.MS_BIND | syscalls.MS_REC)
            os.close(descriptor)

    def _create(self, request: wire.Message, descriptors: list[int]) -> None:
        life, payload = socket.socketpair()
        info, info_write = os.pipe()
        errors, errors_write = os.pipe()
        try:
            pid = self._spawn_bwrap(request, payload.fileno(), info_write, errors_write)
        except OSError:
            for descriptor in (info, info_write, errors, errors_write):
                os.close(descriptor)
            life.close()
            payload.close()
            raise
        payload.close()
        os.close(info_write)
        os.close(errors_write)
        for descriptor in (info, errors):
            os.set_blocking(descriptor, False)
        life.setblocking(False)
        sandbox = _Sandbox(request, pid, descriptors[0], info, life, errors)
        self._sandboxes[sandbox.id] = sandbox
        self._watch(info, "info", sandbox)
        self._watch(errors, "errors", sandbox)
        self._watch(life.fileno(), "life", sandbox)
        try:
            self._fork_helper(sandbox)
        except OSError as error:
            self._give_up(sandbox, error)
        finally:
            os.close(sandbox.helper_channel)

    def _spawn_bwrap(self, request: wire.Message, payload: int, info: int, errors: int) -> int:
        """Starts bubblewrap as the sandbox's user, without forking this process, which would cost more."""
        uid: int | None = request["uid"]
        # bubblewrap reads each to its end, so each one gets its own pipes.
        given = {
            number: _pipe_with(content)
            for number, content in ((_CALLS, self._calls), (wire.FIRST_PROGRAM, self._first_program))
            if content is not None
        }
        filtered = ["--seccomp", str(_CALLS)] if _CALLS in given else []
        if uid is not None:
            # Only the saved user stays root, which executing a program drops.
            os.setresgid(uid, uid, 0)
            os.setresuid(uid, uid, 0)
        try:
            return os.posix_spawn(
                self._bwrap,
                [
                    self._bwrap,
                    "--info-fd",
                    str(_INFO),
                    *filtered,
                    *request["argv"],
                    "--",
                    *(request["first"] or FIRST_PROCESS),
                ],
                {},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, payload, 0),
                    (os.POSIX_SPAWN_DUP2, payload, 1),
                    (os.POSIX_SPAWN_DUP2, errors, 2),
                    (os.POSIX_SPAWN_DUP2, info, _INFO),
                    *((os.POSIX_SPAWN_DUP2, content, number) for number, content in given.items()),
                ],
                setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGXFSZ],
            )
        finally:
            if uid is not None:
                os.setresuid(0, 0, 0)
                os.setresgid(0, 0, 0)
            for descriptor in given.values():
                os.close(descriptor)

    def _watch(self, descriptor: int, kind: str, sandbox: _Sandbox) -> None:
        self._watched[descriptor] = (kind, sandbox)
        self._poll.register(descriptor, select.POLLIN)

    def _unwatch(self, descriptor: int) -> None:
        if self._watched.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def _progress(self, descriptor: int, kind: str, sandbox: _Sandbox) -> None:
        try:
            data = os.read(descriptor, 4096)
        except BlockingIOError:
            return
        if kind == "info":
            sandbox.info_text += data
        elif kind == "errors":
            sandbox.error_text = (sandbox.error_text + data)[:_STDERR_LIMIT]
        elif data and not sandbox.entered and sandbox.seq is not None:
            self._open_helper(sandbox)
        if not data:
            self._unwatch(descriptor)

    def _fork_helper(self, sandbox: _Sandbox) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            sandbox.entry = ours
            pid = os.fork()
            if pid == 0:
                try:
                    signal.set_wakeup_fd(-1)
                    children.close_others({0, 1, 2, sandbox.helper_channel, theirs.fileno()})
                    helper.enter(
                        theirs,
                        socket.socket(fileno=sandbox.helper_channel),
                        sandbox.uid,
                        sandbox.read_only,
                        sandbox.writable,
                        sandbox.tmp_inodes,
                        self._calls,
                        fixed_clocks=sandbox.fixed_clocks,
                    )
                finally:
                    os._exit(71)
            sandbox.helper_pid = pid

    def _open_helper(self, sandbox: _Sandbox) -> None:
        """Lets the helper in after the first process has answered, which shows a complete root; reports the sandbox."""
        sandbox.entered = True
        try:
            self._enter(sandbox)
        except ProcessLookupError:
            return  # it ended meanwhile: the waiting request is answered when it is reaped
        except OSError as error:
            self._give_up(sandbox, error)
            return
        wire.send(
            self._channel,
            {"seq": sandbox.seq, "pid": sandbox.first_pid, "helper": sandbox.helper_pid, "bwrap": sandbox.bwrap},
        )
        sandbox.seq = None

    def _give_up(self, sandbox: _Sandbox, error: OSError) -> None:
        assert sandbox.seq is not None
        self._refuse(sandbox.seq, error.errno or errno.EIO, str(error))
        sandbox.seq = None
        self._kill(sandbox)

    def _enter(self, sandbox: _Sandbox) -> None:
        while b"}" not in sandbox.info_text:
            # Written before the first process ran, so it is complete; the poll just has not reached it yet.
            sandbox.info_text += os.read(sandbox.info, 4096)
        _, _, rest = sandbox.info_text.partition(b'"child-pid":')
        sandbox.first_pid = int(rest.split(b",")[0].split(b"\n")[0].split(b"}")[0])
        sandbox.pidfd = os.pidfd_open(sandbox.first_pid)
        # The mounts belong to the user namespace in which bubblewrap made them; the sandbox's own is below that.
        owner = syscalls.parent_namespace(f"/proc/{sandbox.first_pid}/ns/user")
        entry = sandbox.entry
        assert entry is not None
        try:
            wire.send(entry, {"pid": sandbox.first_pid}, [sandbox.pidfd, owner])
        finally:
            os.close(owner)
        # While the helper enters, since the kernel may be slow to move processes between groups. Nothing of an agent's
        # runs yet; whatever it starts later inherits these groups from the first process or the helper.
        for group in sandbox.groups:
            members = os.open(group, os.O_WRONLY | os.O_CLOEXEC)
            try:
                for member in (sandbox.first_pid, sandbox.helper_pid):
                    os.write(members, str(member).encode())
            finally:
                os.close(members)

    def _destroy(self, request: wire.Message) -> None:
        sandbox = self._sandboxes.get(request["id"])
        if sandbox is None:
            wire.send(self._channel, {"seq": request["seq"]})
            return
        sandbox.destroy_seqs.append(request["seq"])
        self._kill(sandbox)

    def _kill(self, sandbox: _Sandbox) -> None:
        # The first process: with it the kernel kills its whole process namespace, and bubblewrap ends after it.
        if sandbox.pidfd is not None:
            try:
                signal.pidfd_send_signal(sandbox.pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass
        elif sandbox.bwrap:
            os.kill(sandbox.bwrap, signal.SIGKILL)
        # The helper reaps its children; the namespace ends only after that.
        if sandbox.helper_pid is not None:
            os.kill(sandbox.helper_pid, signal.SIGKILL)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for sandbox in list(self._sandboxes.values()):
                if pid == sandbox.bwrap:
                    sandbox.bwrap, sandbox.status = 0, status
                    if sandbox.pidfd is None:
                        self._kill_strays()
                elif pid == sandbox.helper_pid:
                    sandbox.helper_pid = None
                    sandbox.helper_ended_first = bool(sandbox.bwrap)
                else:
                    continue
                # One half alone is not a sandbox: end the other.
                if sandbox.bwrap:
                    self._kill(sandbox)
                elif sandbox.helper_pid is not None:
                    os.kill(sandbox.helper_pid, signal.SIGKILL)
                else:
                    self._gone(sandbox)
                break

    def _gone(self, sandbox: _Sandbox) -> None:
        del self._sandboxes[sandbox.id]
        try:
            while data := os.read(sandbox.errors, 4096):
                sandbox.error_text = (sandbox.error_text + data)[:_STDERR_LIMIT]
        except BlockingIOError:
            pass
        for descriptor in (sandbox.info, sandbox.errors, sandbox.life.fileno()):
            self._unwatch(descriptor)
        os.close(sandbox.info)
        os.close(sandbox.errors)
        sandbox.life.close()
        if sandbox.pidfd is not None:
            os.close(sandbox.pidfd)
        if sandbox.entry is not None:
            sandbox.entry.close()
        if sandbox.seq is not None:
            error_text = sandbox.error_text.decode(errors="replace").strip()
            what = error_text or f"bubblewrap ended with status {sandbox.status}"
            self._refuse(sandbox.seq, errno.ECHILD, what)
        for seq in sandbox.destroy_seqs:
            wire.send(self._channel, {"seq": seq})
        if not sandbox.destroy_seqs:
            reason = "DOOR_CLOSED" if sandbox.helper_ended_first else "PROCESS_ENDED"
            wire.send(self._channel, {"event": "gone", "id": sandbox.id, "reason": reason})

    def _kill_strays(self) -> None:
        """Kills what a bubblewrap that ended early left: its child waits for a message that will not come.

        It is now a child of this process (a subreaper), so any child that belongs to no sandbox is such a stray.
        """
        known = {pid for sandbox in self._sandboxes.values() for pid in (sandbox.bwrap, sandbox.helper_pid)}
        with open("/proc/thread-self/children", "rb") as file:  # a text's encoding would be imported
            children = file.read().split()
        for child in map(int, children):
            if child not in known:
                os.kill(child, signal.SIGKILL)

    def _end(self) -> None:
        for sandbox in self._sandboxes.values():
            self._kill(sandbox)
        self._sandboxes.clear()
        # Only after the last is dead: leftovers of an early killed bubblewrap become this process's children then.
        while True:
            self._kill_strays()
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return


def _pipe_with(content: bytes) -> int:
    """Returns a descriptor to read ``content`` from, which fits a pipe's buffer."""
    content_end, write_end = os.pipe()
    os.write(write_end, content)
    os.close(write_end)
    return content_end


def main() -> None:
    """Runs on the channel whose descriptor is the first argument."""
    given = int(sys.argv[1])
    channel = socket.socket(fileno=fcntl.fcntl(given, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE))
    os.close(given)
    # These numbers are filled for each bubblewrap; nothing else may use them.
    for reserved in range(3, _FIRST_FREE):
        os.dup2(0, reserved, inheritable=False)
    syscalls.die_with_parent(signal.SIGKILL)
    syscalls.become_subreaper()
    # A few descriptors for each sandbox.
    files_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_limit, files_limit))
    if os.geteuid() == 0:
        os.setgroups([])
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The service decides; a Ctrl-C in its terminal reaches the whole foreground group.
        signal.signal(ignored, signal.SIG_IGN)
    helper.forbid_imports()
    gc.collect()
    gc.freeze()
    gc.disable()
    Spawner(channel).serve()
