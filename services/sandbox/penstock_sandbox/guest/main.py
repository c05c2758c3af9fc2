"""The guest agent's command line: ``serve``, ``attach`` and ``forkserver``; ``deliver`` is a module itself.

Purpose: ``serve`` enters a sandbox if it is not in one already, and becomes a daemon that outlives its parent;
``attach`` connects its standard input and output with the daemon's socket, so that any way to run a program in the
sandbox is a way to reach it. ``serve ... --and attach ...`` does both in one process, where many are started.

Invariants
- ``serve`` exits with 0 once the daemon listens, and otherwise prints the cause on standard error.
- Everything that the daemon needs is imported before it enters anything; its socket, log and spool stay outside the
  sandbox.
- Nothing secret is in an argument or the environment.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import socket
import sys
from typing import Any, List, NoReturn, Optional, Tuple

from penstock_sandbox.guest import confinement, frames, system
from penstock_sandbox.guest.common import children, syscalls
from penstock_sandbox.guest.handshake import ATTACH, NO_GUEST, OUTPUT

_READ = 64 * 1024
_BACKLOG = 16
_OPEN_FILES = 65536


def main(arguments: Optional[List[str]] = None) -> int:
    """Runs a command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="attendant", description="Serves one sandbox for the sandbox service.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="become the daemon")
    attach = commands.add_parser("attach", help="use standard input and output")
    for command in (serve, attach):
        command.add_argument(
            "--socket", required=True, help="the daemon's socket, in a directory that only its user can write"
        )
    attach.add_argument("--armour", action="store_true", help="lines of base64 instead of bytes")
    attach.add_argument("--aside", action="store_true", help="as root: forward as a user without other processes")
    attach.add_argument("--last", default="", help="with --then: text for standard error when forwarding has ended")
    attach.add_argument("--then", default="", help="forward in a child process, then exec this program")
    attach.add_argument("--first", action="store_true", help="with --then: exec it at once, as a first process should")
    attach.add_argument("--output-only", action="store_true", help="receive only; another command sends")
    serve.add_argument("--user", type=_ids, help="UID:GID of the workload, as the sandbox numbers them")
    serve.add_argument("--enter", type=int, help="enter this process's namespaces first, and end with it")
    serve.add_argument(
        "--expect", default="", help="the program that this process must run; otherwise nothing is entered"
    )
    serve.add_argument("--cgroup", action="append", default=[], help="a cgroup.procs file that the workload joins")
    serve.add_argument("--seccomp", help="a file with a filter (BPF) for the workload's system calls")
    serve.add_argument(
        "--confine",
        action="store_true",
        help="the workload gains no privileges and may open few kinds of sockets (implied by --enter)",
    )
    serve.add_argument("--root-mode", type=_octal, help="the mode that the sandbox's root directory gets first")
    serve.add_argument("--most-processes", type=int, default=0, help="that the workload may have; 0 = no limit")
    serve.add_argument("--home", default="", help="part of the greeting")
    serve.add_argument("--workdir", default="", help="part of the greeting")
    serve.add_argument(
        "--and", dest="also", nargs=argparse.REMAINDER, help="the command to run when the daemon listens"
    )
    commands.add_parser("forkserver", help="fork a guest for each request on standard input")
    given = parser.parse_args(arguments)
    try:
        if given.command == "serve":
            code = _serve(given)
            return main(given.also) if code == 0 and given.also else code
        if given.command == "forkserver":
            return _forkserver()
        return _attach(given)
    except (ConnectionRefusedError, FileNotFoundError) as error:
        sys.stderr.write("attendant: %s\n" % error)
        return NO_GUEST if given.command == "attach" else 1
    except OSError as error:
        sys.stderr.write("attendant: %s\n" % error)
        return 1


def _ids(text: str) -> Tuple[int, int]:
    uid, _, gid = text.partition(":")
    return int(uid), int(gid or uid)


def _octal(text: str) -> int:
    return int(text, 8)


def _forkserver() -> int:
    import resource  # noqa: F401 - what the children need is imported here

    from penstock_sandbox.guest import forkserver, server, supervisor  # noqa: F401

    return forkserver.serve_requests(lambda arguments: main(["serve", *arguments]))


# Serving -------------------------------------------------------------------------------------------------------------


def _serve(given: argparse.Namespace) -> int:
    # Imported here, before entering anything: attach and deliver need none of it.
    from penstock_sandbox.guest.server import GuestAgent

    folder = os.path.dirname(os.path.abspath(given.socket))
    os.makedirs(folder, 0o700, exist_ok=True)
    owner = os.stat(folder)
    if owner.st_uid != os.geteuid() or owner.st_mode & 0o022:
        raise OSError(errno.EPERM, "%s: other users may write there" % folder)
    if given.enter is not None and os.geteuid() == 0 and given.user is None:
        raise OSError(errno.EINVAL, "--enter as root needs --user")
    if given.user is not None and os.geteuid() != 0 and given.enter is None:
        raise OSError(errno.EPERM, "only root can change the workload's user")
    if given.enter is None and given.root_mode is not None:
        os.chmod("/", given.root_mode)
    listener = _listen(given.socket)
    if listener is None:
        return 0
    log = os.open(given.socket + ".log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    ready_read, ready_write = os.pipe()
    between = os.fork()
    if between == 0:
        # The parent owns the other inherited descriptors, and waits for their end.
        children.close_others({0, 1, 2, listener.fileno(), log, ready_write})
        os.setsid()
        if os.fork() != 0:
            os._exit(0)
        try:
            _daemon(given, listener, log, ready_write, folder, GuestAgent)
        except BaseException as error:  # noqa: BLE001
            # No traceback: printing one opens source files, which now would be the sandbox's.
            text = ("%s" % error if isinstance(error, OSError) else repr(error)).encode()
            for descriptor in (ready_write, log):
                try:
                    os.write(descriptor, text + b"\n")
                except OSError:
                    continue
        finally:
            os._exit(1)
    os.close(ready_write)
    os.waitpid(between, 0)
    failure = b""
    while True:
        part = os.read(ready_read, _READ)
        failure += part
        if not part:
            break
    if failure != b"serving":
        os.unlink(given.socket)
        sys.stderr.write("attendant: %s\n" % (failure.decode(errors="replace").strip() or "it ended as it started"))
        return 1
    if given.enter is not None and given.root_mode is not None:
        # Only now, when the owner is known; through /proc, since this process has another root.
        os.chmod("/proc/%d/root/." % given.enter, given.root_mode)
    return 0


def _listen(path: str) -> Optional[socket.socket]:
    """Returns a listener at ``path``, or None if a daemon serves it already."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        try:
            listener.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(path)
                except ConnectionRefusedError:
                    os.unlink(path)
                else:
                    listener.close()
                    return None
            listener.bind(path)
    finally:
        os.umask(before)
    listener.listen(_BACKLOG)
    return listener


def _daemon(
    given: argparse.Namespace, listener: socket.socket, log: int, ready_write: int, folder: str, kind: Any
) -> NoReturn:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    spool = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for standard, descriptor in enumerate((null, null, log)):
        os.dup2(descriptor, standard, inheritable=False)
    if os.geteuid() == 0:
        try:
            os.setgroups([])
        except PermissionError:
            pass  # a user namespace of one user, which may not set groups
    _raise_limits()
    # Modules imported from here on would come from the agent's files.
    sys.path.clear()
    sys.path_importer_cache.clear()
    workload = _enter(given, null)
    syscalls.set_dumpable(False)
    syscalls.set_name("attendant")
    os.chdir("/")
    os.umask(0o022)
    greeting = {
        "version": frames.VERSION,
        "instance": os.urandom(8).hex(),
        "python": "%d.%d.%d" % sys.version_info[:3],
        "user_switch": workload.separate,
        "pty": _has_terminals(),
        "home": given.home,
        "workdir": given.workdir,
    }
    attendant = kind(listener, workload, spool, greeting)
    os.write(ready_write, b"serving")
    os.close(ready_write)
    attendant.serve()
    os._exit(0)


def _raise_limits() -> None:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _enter(given: argparse.Namespace, null: int) -> system.Workload:
    groups = [os.open(path, os.O_WRONLY | os.O_CLOEXEC) for path in given.cgroup]
    # Before entering anything: children stay in this process's group, unless they get one to join, whose kills the
    # service then counts itself.
    oom_counter = None if groups else system.open_oom_counter()
    # A filter given by the service includes this one.
    seccomp = confinement.program(os.uname().machine) if given.confine or given.enter is not None else b""
    if given.seccomp:
        with open(given.seccomp, "rb") as file:
            seccomp = file.read()
    outer = given.user
    namespace, life = None, None
    confined = given.confine
    root = os.geteuid() == 0
    ids = given.user
    if given.enter is not None:
        confined = True
        life = system.Life(given.enter)
        if given.expect:
            _check_program(given.enter, given.expect)
        if root and given.user is not None:
            outer = tuple(system.outside(given.enter, kind, number) for kind, number in zip(("uid", "gid"), given.user))
        mounts = system.mounts_of(given.enter)
        namespace = system.enter(given.enter, root)
        system.bound_terminals(mounts)
        if root and outer is not None and outer[0] == 0:
            system.step_aside()
    if not root:
        # It entered its own sandbox, where it has one user and, until here, every capability.
        ids = outer = None
        if given.enter is not None:
            system.drop_bounding_set()
            system.shed_privileges()
    if life is not None:
        life.settle()
    return system.Workload(
        ids,
        outer if root else None,
        namespace,
        groups,
        confined,
        seccomp,
        null,
        life,
        oom_counter,
        given.most_processes,
    )


def _check_program(pid: int, expected: str) -> None:
    """Fails if the process is not the sandbox's: another's namespaces would put the workload outside the sandbox."""
    if os.readlink("/proc/%d/exe" % pid) != expected:
        what = "process %d is not the sandbox's first one: its runtime keeps its processes elsewhere" % pid
        raise OSError(errno.ESRCH, what)


def _has_terminals() -> bool:
    try:
        primary, secondary = os.openpty()
    except OSError:
        return False
    os.close(primary)
    os.close(secondary)
    return True


# Attaching -----------------------------------------------------------------------------------------------------------


def _connect(path: str, role: bytes) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(path)
    sock.sendall(role)
    return sock


def _attach(given: argparse.Namespace) -> int:
    import threading

    syscalls.set_name("attach")
    sock = _connect(given.socket, OUTPUT if given.output_only else ATTACH)
    if given.aside:
        os.setgroups([])
        os.setresgid(system.ASIDE, system.ASIDE, system.ASIDE)
        os.setresuid(system.ASIDE, system.ASIDE, system.ASIDE)
    if given.then:
        # A first process must reap orphans, so it becomes a reaper at once; a child attaches in its place.
        if given.first and os.fork() != 0:
            os.execv(given.then, [given.then])
        carrier = os.fork()
        if carrier != 0:
            sock.close()
            os.waitpid(carrier, 0)
            sys.stderr.write(given.last + "\n")
            sys.stderr.flush()
            if given.first:
                os._exit(0)
            os.execv(given.then, [given.then])
    if given.output_only:
        threading.Thread(target=_leave_with_reader, daemon=True).start()
    else:
        threading.Thread(target=_copy_input, args=(sock, given.armour), daemon=True).start()
    while True:
        data = sock.recv(_READ)
        if not data:
            return 0
        if given.armour:
            data = frames.armour(data)
        view = memoryview(data)
        while view:
            view = view[os.write(1, view) :]


def _copy_input(sock: socket.socket, armoured: bool) -> None:
    """Copies standard input to the socket; its end ends the program."""
    clear = frames.Unarmour()
    try:
        while True:
            data = os.read(0, _READ)
            if not data:
                break
            sock.sendall(clear.feed(data) if armoured else data)
    except (OSError, frames.Malformed):
        pass  # either end is gone, or this one sends garbage: the service reconnects
    os._exit(0)


def _leave_with_reader() -> None:
    """Exits when nothing reads the output any more; a write would fail, but there may be nothing to write."""
    import select

    poll = select.poll()
    poll.register(1, 0)
    poll.poll()
    os._exit(0)
