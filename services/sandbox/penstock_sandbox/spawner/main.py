"""The spawner's loop: makes and ends sandboxes on the service's requests, and reports those that ended by themselves.

Purpose: one process, one thread, one SOCK_SEQPACKET channel. A create request carries bubblewrap's arguments and the
door's end of a socket pair; the answer is the sandbox's first process, once its root is complete and its door serves.

Invariants
- bubblewrap always runs as an ordinary user: the spawner, when it is root, becomes the sandbox's user first.
- When it is root it works in a mount namespace of its own, where the directories that sandboxes are made of appear
  under one traversable stage: nothing is mounted on the host, and no 0700 parent stands in an ordinary user's way.
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

from penstock_sandbox.spawner import door, seccomp, syscalls, wire

_STDERR_LIMIT = 4096
# Descriptors that bubblewrap is given beside 0, 1 and 2, and the first number that is nobody's.
_INFO, _CALLS, _FIRST_FREE = 3, 4, 5
# The sandbox's first process: it owns nothing, reaps what agents orphan (bash does) and ends when its input does.
FIRST_PROCESS = ("/bin/bash", "--norc", "--noprofile", "-c", "echo; while read -r _; do :; done")


class _Sandbox:
    """One sandbox. No dataclass: their import would double what every fork has to copy."""

    def __init__(
        self, request: wire.Message, bwrap: int, door_channel: int, info: int, life: socket.socket, errors: int
    ):
        self.id: str = request["id"]
        self.uid: int | None = request["uid"]
        self.groups: list[str] = request["groups"]
        self.sealed: list[str] = request["sealed"]
        self.tmp_inodes: int = request["tmp_inodes"]
        self.seq: int | None = request["seq"]  # the create request still to be answered
        self.bwrap = bwrap
        self.door_channel: int | None = door_channel
        self.info = info
        self.life = life  # the first process's input and output; its closing ends it
        self.errors = errors
        self.info_text = b""
        self.error_text = b""
        self.pidfd: int | None = None
        self.first_pid = 0
        self.door_pid: int | None = None
        self.door_ended_first = False
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

    def serve(self) -> None:
        """Run until the service closes its end; then kill everything."""
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
        stage: str | None = request["stage"]
        if stage is None:
            return
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_SLAVE)
        # Opened before the stage hides what may lie under it, after unshare because a bind stays within a namespace.
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

    def _spawn_bwrap(self, request: wire.Message, payload: int, info: int, errors: int) -> int:
        """Start bubblewrap as the sandbox's user, without copying this process: a fork would cost more than it does."""
        uid: int | None = request["uid"]
        opened: list[int] = []
        if self._calls is not None:
            # bubblewrap reads it to its end, so each one gets a pipe of its own; it fits a pipe's buffer.
            calls, calls_write = os.pipe()
            os.write(calls_write, self._calls)
            os.close(calls_write)
            opened.append(calls)
        filtered = ["--seccomp", str(_CALLS)] if opened else []
        if uid is not None:
            # Only the saved user stays root, which no program that is executed keeps.
            os.setresgid(uid, uid, 0)
            os.setresuid(uid, uid, 0)
        try:
            return os.posix_spawn(
                self._bwrap,
                [self._bwrap, "--info-fd", str(_INFO), *filtered, *request["argv"], "--", *FIRST_PROCESS],
                {},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, payload, 0),
                    (os.POSIX_SPAWN_DUP2, payload, 1),
                    (os.POSIX_SPAWN_DUP2, errors, 2),
                    (os.POSIX_SPAWN_DUP2, info, _INFO),
                    *((os.POSIX_SPAWN_DUP2, calls, _CALLS) for calls in opened),
                ],
                setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGXFSZ],
            )
        finally:
            if uid is not None:
                os.setresuid(0, 0, 0)
                os.setresgid(0, 0, 0)
            for descriptor in opened:
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
        elif data and sandbox.door_pid is None and sandbox.seq is not None:
            self._open_door(sandbox)
        if not data:
            self._unwatch(descriptor)

    def _open_door(self, sandbox: _Sandbox) -> None:
        """The first process answered, so the root is complete: enter the sandbox and report it ready."""
        seq = sandbox.seq
        assert seq is not None
        try:
            self._enter(sandbox)
        except ProcessLookupError:
            return  # it ended meanwhile: whoever waits is told when it is reaped
        except OSError as error:
            self._refuse(seq, error.errno or errno.EIO, str(error))
            sandbox.seq = None
            self._kill(sandbox)
            return
        wire.send(
            self._channel, {"seq": seq, "pid": sandbox.first_pid, "door": sandbox.door_pid, "bwrap": sandbox.bwrap}
        )
        sandbox.seq = None

    def _enter(self, sandbox: _Sandbox) -> None:
        while b"}" not in sandbox.info_text:
            # Written before the first process ran, so it is all there; the poll just did not reach it yet.
            sandbox.info_text += os.read(sandbox.info, 4096)
        _, _, rest = sandbox.info_text.partition(b'"child-pid":')
        sandbox.first_pid = int(rest.split(b",")[0].split(b"\n")[0].split(b"}")[0])
        sandbox.pidfd = os.pidfd_open(sandbox.first_pid)
        channel = sandbox.door_channel
        assert channel is not None
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                _close_others({0, 1, 2, channel, sandbox.pidfd})
                door.enter(
                    sandbox.pidfd,
                    sandbox.first_pid,
                    socket.socket(fileno=channel),
                    sandbox.uid,
                    sandbox.sealed,
                    sandbox.tmp_inodes,
                    self._calls,
                )
            finally:
                os._exit(71)
        os.close(channel)
        sandbox.door_channel = None
        sandbox.door_pid = pid
        # While the door finds its way in: the kernel may take its time to let processes change groups. Nothing of an
        # agent's runs yet; whatever it will start inherits these, from the first process or the door.
        for group in sandbox.groups:
            for member in (sandbox.first_pid, pid):
                with open(group, "w", encoding="utf-8") as file:
                    file.write(str(member))

    def _destroy(self, request: wire.Message) -> None:
        sandbox = self._sandboxes.get(request["id"])
        if sandbox is None:
            wire.send(self._channel, {"seq": request["seq"]})
            return
        sandbox.destroy_seqs.append(request["seq"])
        self._kill(sandbox)

    def _kill(self, sandbox: _Sandbox) -> None:
        # The first process: with it the kernel kills all of its process namespace, and bubblewrap ends after it.
        if sandbox.pidfd is not None:
            try:
                signal.pidfd_send_signal(sandbox.pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass
        else:
            os.kill(sandbox.bwrap, signal.SIGKILL)
        # The door reaps what it started; the kernel waits for that before the namespace is gone.
        if sandbox.door_pid is not None:
            os.kill(sandbox.door_pid, signal.SIGKILL)

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
                    sandbox.bwrap = 0
                    if sandbox.pidfd is None:
                        self._kill_strays()
                elif pid == sandbox.door_pid:
                    sandbox.door_pid = None
                    sandbox.door_ended_first = bool(sandbox.bwrap)
                else:
                    continue
                # Either alone is no sandbox: end the other half.
                if sandbox.bwrap:
                    self._kill(sandbox)
                elif sandbox.door_pid is not None:
                    os.kill(sandbox.door_pid, signal.SIGKILL)
                else:
                    self._gone(sandbox, status)
                break

    def _gone(self, sandbox: _Sandbox, status: int) -> None:
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
        if sandbox.door_channel is not None:
            os.close(sandbox.door_channel)
        if sandbox.seq is not None:
            what = sandbox.error_text.decode(errors="replace").strip() or f"bubblewrap ended with status {status}"
            self._refuse(sandbox.seq, errno.ECHILD, what)
        for seq in sandbox.destroy_seqs:
            wire.send(self._channel, {"seq": seq})
        if not sandbox.destroy_seqs:
            reason = "DOOR_CLOSED" if sandbox.door_ended_first else "PROCESS_ENDED"
            wire.send(self._channel, {"event": "gone", "id": sandbox.id, "reason": reason})

    def _kill_strays(self) -> None:
        """Kill what a bubblewrap that ended early left: its child waits for a word that nobody will say any more.

        It is this process's child now (it is a subreaper), so whatever is a child and no sandbox's part is one.
        """
        known = {pid for sandbox in self._sandboxes.values() for pid in (sandbox.bwrap, sandbox.door_pid)}
        with open("/proc/thread-self/children", encoding="ascii") as file:
            children = file.read().split()
        for child in map(int, children):
            if child not in known:
                os.kill(child, signal.SIGKILL)

    def _end(self) -> None:
        for sandbox in self._sandboxes.values():
            self._kill(sandbox)
        self._sandboxes.clear()
        # Not before the last is dead: what a bubblewrap leaves when it is killed early comes to this process then.
        while True:
            self._kill_strays()
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return


def _close_others(kept: set[int]) -> None:
    highest = max(map(int, os.listdir("/proc/self/fd")))
    low = 0
    for number in (*sorted(kept), highest + 1):
        if low < number:  # an empty range would mean all there are
            os.closerange(low, number)
        low = number + 1


def main() -> None:
    """Run on the channel whose descriptor is the first argument."""
    given = int(sys.argv[1])
    channel = socket.socket(fileno=fcntl.fcntl(given, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE))
    os.close(given)
    # What bubblewrap finds at these numbers is put there for each one; nothing else may have them.
    for reserved in range(3, _FIRST_FREE):
        os.dup2(0, reserved, inheritable=False)
    syscalls.die_with_parent(signal.SIGKILL)
    syscalls.become_subreaper()
    # A handful of descriptors for each sandbox.
    files_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_limit, files_limit))
    if os.geteuid() == 0:
        os.setgroups([])
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The service decides; a Ctrl-C in its terminal reaches the whole foreground group.
        signal.signal(ignored, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    gc.disable()
    Spawner(channel).serve()
