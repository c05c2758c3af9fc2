"""Entering a sandbox, the process whose end ends it, and the user of its programs.

Invariants: nothing here reads a file of the sandbox or its account database: a guest agent may be root in a mount
namespace that an agent wrote to, where a name service's library would run as root. Every call raises OSError.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
from typing import Iterator, List, Optional, Tuple

from penstock_sandbox.guest.common import pdeathsig, syscalls

_OOM_COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
# In the order of entering: the mount namespace last, since the others are found by paths.
_NAMESPACES = (
    ("ipc", syscalls.CLONE_NEWIPC),
    ("uts", syscalls.CLONE_NEWUTS),
    ("net", syscalls.CLONE_NEWNET),
    ("cgroup", syscalls.CLONE_NEWCGROUP),
    ("pid", syscalls.CLONE_NEWPID),
    ("mnt", syscalls.CLONE_NEWNS),
)

_PR_SET_SECUREBITS = 28
_SECBIT_NO_SETUID_FIXUP = 1 << 2
_SYS_PIDFD_OPEN = 434  # the same on every architecture

_KILLER = 65530
_KILL_PASSES = 100

ASIDE = 65533
"""User and group of a guest agent whose workload is root. No one else's, so that no right of root's reaches it."""

_MOUNT_FLAGS = {
    "ro": syscalls.MS_RDONLY,
    "nosuid": syscalls.MS_NOSUID,
    "nodev": syscalls.MS_NODEV,
    "noexec": syscalls.MS_NOEXEC,
    "noatime": syscalls.MS_NOATIME,
    "nodiratime": syscalls.MS_NODIRATIME,
    "relatime": syscalls.MS_RELATIME,
}
_TERMINALS = 128


def become_subreaper() -> bool:
    """Adopts orphaned descendants; returns False on a kernel without subreapers (gVisor before 2023)."""
    try:
        syscalls.become_subreaper()
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def pidfd_open(pid: int) -> Optional[int]:
    """Returns a descriptor that becomes readable when the process ends; None if the kernel has none (before 5.3)."""
    descriptor = int(syscalls.libc.syscall(_SYS_PIDFD_OPEN, pid, 0))
    if descriptor < 0:
        if ctypes.get_errno() == errno.ENOSYS:
            return None
        raise OSError(ctypes.get_errno(), "process %d: %s" % (pid, os.strerror(ctypes.get_errno())))
    os.set_inheritable(descriptor, False)
    return descriptor


def _is_own(descriptor: int, name: str) -> bool:
    own = os.stat("/proc/self/ns/%s" % name)
    other = os.fstat(descriptor)
    return (own.st_dev, own.st_ino) == (other.st_dev, other.st_ino)


def enter(pid: int, user_namespace: bool) -> Optional[int]:
    """Enters a process's namespaces; its process namespace applies only to the caller's children.

    An ordinary user also enters the user namespace, in one call with the others (Linux 5.8): its right to, as their
    creator, holds only from outside. Root stays in its own user namespace, out of the sandbox's reach; it gets the
    sandbox's as a descriptor, for its children (None if it is the same one, or ``user_namespace`` is false).
    """
    user = os.open("/proc/%d/ns/user" % pid, os.O_RDONLY | os.O_CLOEXEC)
    opened: List[Tuple[int, int, str]] = []
    for name, kind in _NAMESPACES:
        try:
            descriptor = os.open("/proc/%d/ns/%s" % (pid, name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # a kernel without this kind
        if _is_own(descriptor, name):
            os.close(descriptor)
        else:
            opened.append((descriptor, kind, name))
    foreign = not _is_own(user, "user")
    if foreign and os.geteuid() != 0:
        process = pidfd_open(pid)
        if process is None:
            raise OSError(errno.ENOSYS, "entering a sandbox as an ordinary user needs Linux 5.8")
        kinds = syscalls.CLONE_NEWUSER
        for _, kind, _ in opened:
            kinds |= kind
        syscalls.setns(process, kinds, "sandbox's")
        os.close(process)
    else:
        for descriptor, kind, name in opened:
            syscalls.setns(descriptor, kind, name)
    for descriptor, _, _ in opened:
        os.close(descriptor)
    if foreign and os.geteuid() == 0 and user_namespace:
        return user
    os.close(user)
    return None


def mounts_of(pid: int) -> List[List[str]]:
    """Returns a process's mounts from /proc; call it before entering its sandbox."""
    with open("/proc/%d/mounts" % pid, encoding="ascii") as file:
        return [line.split() for line in file]


def bound_terminals(mounts: List[List[str]]) -> None:
    """Limits the terminals of the entered sandbox where it may: all sandboxes share the machine's, some 3,000."""
    for _, path, kind, options, *_ in mounts:
        if kind == "devpts":
            flags, kept = syscalls.MS_REMOUNT, ["max=%d" % _TERMINALS]
            for option in options.split(","):
                if option in _MOUNT_FLAGS:
                    flags |= _MOUNT_FLAGS[option]
                elif option.partition("=")[0] in ("gid", "mode", "ptmxmode"):
                    kept.append(option)
            try:
                syscalls.mount("none", path, None, flags, ",".join(kept))
            except OSError:
                continue  # an engine's AppArmor profile forbids it to a sidecar


def outside(pid: int, kind: str, number: int) -> int:
    """Returns the caller's id for the user (``kind`` uid) or group (gid) that a sandbox calls ``number``."""
    with open("/proc/%d/%s_map" % (pid, kind), encoding="ascii") as file:
        for line in file:
            inside, beyond, count = map(int, line.split())
            if inside <= number < inside + count:
                return beyond + number - inside
    raise OSError(errno.EINVAL, "the sandbox has no %s %d" % (kind, number))


def drop_bounding_set() -> None:
    """Prevents programs that the caller executes from having any capability. Harmless where the caller may not."""
    try:
        syscalls.drop_bounding_set()
    except PermissionError:
        pass  # the caller has none, and no_new_privs keeps it so


def step_aside() -> None:
    """Lets root become another user and keep its capabilities, whatever user it acts as later."""
    syscalls.prctl(_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP, "PR_SET_SECUREBITS")
    os.setresgid(ASIDE, ASIDE, ASIDE)
    os.setresuid(ASIDE, ASIDE, ASIDE)


def _set_effective(wanted: bool) -> None:
    """Makes the caller's capabilities effective, or none of them."""
    held = syscalls.permitted_capabilities()
    syscalls.set_capabilities(held, held if wanted else 0)


def shed_privileges(seccomp: bytes = b"") -> None:
    """Drops every capability, the right to gain any, and the calls that ``seccomp`` refuses (empty: none)."""
    syscalls.set_no_new_privs()
    syscalls.set_capabilities(0, 0)
    if seccomp:
        syscalls.filter_calls(seccomp)


class Life:
    """The process whose end ends the sandbox, watched from outside; constructed before entering anything."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._program = self._runs()
        self.descriptor = pidfd_open(pid)
        """Readable when it has ended; None if the kernel has no pidfds."""

    def ends(self) -> bool:
        """Whether it is dying, which kills all others."""
        return pdeathsig.is_dying(self._proc, self._pid)

    def settle(self) -> None:
        """Called after dropping privileges: what is not visible with the remaining ones is not a sign of a change."""
        if self._runs() is None:
            self._program = None

    def intact(self) -> bool:
        """Whether it still runs the program that it ran at construction, as far as the caller may know."""
        return self._program is None or self._runs() == self._program

    def _runs(self) -> Optional[Tuple[int, int]]:
        try:
            program = os.stat("%d/exe" % self._pid, dir_fd=self._proc)
        except OSError:
            return None  # it has ended, or only its own user may know
        return program.st_dev, program.st_ino


class Workload:
    """The user of the sandbox's programs, and what each of them drops before it starts.

    ``ids`` are the user and group inside (None: the guest agent's own), ``outer`` the same two as the guest agent sees
    them; ``namespace`` is a user namespace to enter, ``groups`` the ``cgroup.procs`` descriptors to join. At
    construction the guest agent is root, or ``ASIDE`` if the workload is root itself, or the workload's own user.
    ``most_processes`` limits the workload's processes and threads (0: no limit by the guest agent), for kernels on
    which no control group can.
    """

    def __init__(
        self,
        ids: Optional[Tuple[int, int]],
        outer: Optional[Tuple[int, int]],
        namespace: Optional[int],
        groups: List[int],
        confined: bool,
        seccomp: bytes,
        null: int,
        life: Optional[Life],
        oom_counter: Optional[int],
        most_processes: int = 0,
    ) -> None:
        self.ids = ids
        self._outer = outer
        self._own = (os.geteuid(), os.getegid())
        self._namespace = namespace
        self._groups = groups
        self._confined = confined
        self._seccomp = seccomp
        self.life = life
        self.null = null
        """/dev/null, opened before the workload could replace it."""
        self._oom_counter = oom_counter
        self._most_processes = most_processes
        self.held = [*groups, *([namespace] if namespace is not None else [])]
        """Descriptors that a child needs to become the workload."""

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """Does file work with the workload's rights. The real user stays: nobody inside may signal or trace it."""
        if self._outer is None:
            yield
            return
        # Groups are left alone: the guest agent of a root workload has none.
        uid, gid = self._outer
        os.setegid(gid)
        os.seteuid(uid)
        if uid == 0:
            _set_effective(False)  # which the kernel does for every other user
        try:
            yield
        finally:
            if uid == 0:
                _set_effective(True)
            os.seteuid(self._own[0])
            os.setegid(self._own[1])

    @property
    def separate(self) -> bool:
        """Whether the workload has another user than the guest agent, which it then can neither signal nor trace."""
        return self.ids is not None and (self._outer or self.ids)[0] != os.geteuid()

    def kill_all(self) -> None:
        """Kills every process that the workload's user may signal; runs in a child of its own, where ``separate``.

        Linux does one pass in one step, which no fork escapes; other kernels (gVisor) get several passes. The caller
        signals with the workload's rights and has a user of its own, which nobody can signal.
        """
        assert self.ids is not None
        uid, gid = self._outer or self.ids
        try:
            os.setgroups([])
        except PermissionError:
            pass  # a user namespace that may not set groups
        try:
            os.setresgid(_KILLER, gid, _KILLER)
            os.setresuid(_KILLER, uid, _KILLER)
        except OSError:
            # A user namespace of few users. Then it can be killed itself, and its parent makes another one.
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        shed_privileges()
        for _ in range(_KILL_PASSES):
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                return

    def oom_kills(self) -> int:
        """Returns how often the kernel killed for memory here, if the sandbox shows its own control group; else 0."""
        if self._oom_counter is None:
            return 0
        for line in os.pread(self._oom_counter, 4096, 0).splitlines():
            name, _, value = line.partition(b" ")
            if name == b"oom_kill" and value.isdigit():
                return int(value)
        return 0

    def approach(self) -> None:
        """The slow half of becoming the workload: all but its user, so nobody inside may touch the caller yet."""
        for group in self._groups:
            os.write(group, b"0")
        if self._namespace is not None:
            syscalls.setns(self._namespace, syscalls.CLONE_NEWUSER, "user")
        if self._confined:
            drop_bounding_set()

    def become(self, mark: Optional[int] = None) -> None:
        """Becomes the workload for good, after ``approach``: for a new child that will execute a program.

        ``mark`` is an additional group of it and all its descendants, which they cannot leave.
        """
        if self._most_processes:
            resource.setrlimit(resource.RLIMIT_NPROC, (self._most_processes, self._most_processes))
        if mark is not None:
            if self.ids is None:
                raise OSError(errno.ENOTSUP, "this kernel has no subreapers, and without root no tree can be marked")
            os.setgroups([self.ids[1], mark])
        if self.ids is not None:
            uid, gid = self.ids
            if mark is None and os.getgroups() != [gid]:
                try:
                    os.setgroups([gid])
                except PermissionError:
                    pass  # a user namespace of one user, which may not set groups; the guest agent has none either
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        if self._confined:
            shed_privileges(self._seccomp)


def open_oom_counter() -> Optional[int]:
    """Opens the counter of kills for memory in the caller's own control group, if it is visible."""
    for path in _OOM_COUNTERS:
        try:
            return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
    return None
