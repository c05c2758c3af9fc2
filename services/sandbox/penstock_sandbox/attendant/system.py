"""System calls that Python 3.8 has no wrapper for, and who a sandbox's programs run as.

Invariants: nothing here reads a file of the sandbox or asks its account database: an attendant may be root in a mount
namespace that an agent wrote to, where a name service's library would run with its rights. Every call raises OSError.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import struct
from typing import Iterator, List, Optional, Tuple

from penstock_sandbox.spawner import dying

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
_OOM_COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
# In the order in which they are entered: the mount namespace last, since the others are found by paths.
_NAMESPACES = (
    ("ipc", CLONE_NEWIPC),
    ("uts", CLONE_NEWUTS),
    ("net", CLONE_NEWNET),
    ("cgroup", CLONE_NEWCGROUP),
    ("pid", CLONE_NEWPID),
    ("mnt", CLONE_NEWNS),
)

_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_SECUREBITS = 28
_PR_SET_NO_NEW_PRIVS = 38
_SECBIT_NO_SETUID_FIXUP = 1 << 2
_SECCOMP_MODE_FILTER = 2
_LINUX_CAPABILITY_VERSION_3 = 0x20080522
_SYS_PIDFD_OPEN = 434  # the same on every architecture

_KILLER = 65530
_KILL_PASSES = 100

ASIDE = 65533
"""The user and group of what serves a workload that is root: nobody else's, so that no right of root's reaches it."""

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, "%s: %s" % (what, os.strerror(number)))
    return result


def _prctl(option: int, argument: int, what: str) -> None:
    _checked(_libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0), "prctl(%s)" % what)


def become_subreaper() -> bool:
    """Adopt descendants whose parent ended; answers False on a kernel that has no such thing (gVisor before 2023)."""
    try:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1, "PR_SET_CHILD_SUBREAPER")
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def hide() -> None:
    """Let no other process of this user trace the caller or read its memory."""
    _prctl(_PR_SET_DUMPABLE, 0, "PR_SET_DUMPABLE")


def set_name(name: str) -> None:
    """What the caller is called in lists of processes."""
    _checked(_libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0), "prctl(PR_SET_NAME)")


def pidfd_open(pid: int) -> Optional[int]:
    """A descriptor that becomes readable when the process ends; None on a kernel that has none (before 5.3)."""
    descriptor = int(_libc.syscall(_SYS_PIDFD_OPEN, pid, 0))
    if descriptor < 0:
        if ctypes.get_errno() == errno.ENOSYS:
            return None
        raise OSError(ctypes.get_errno(), "process %d: %s" % (pid, os.strerror(ctypes.get_errno())))
    os.set_inheritable(descriptor, False)
    return descriptor


def _setns(descriptor: int, kind: int, what: str) -> None:
    _checked(_libc.setns(descriptor, kind), "entering the %s namespace" % what)


def _is_own(descriptor: int, name: str) -> bool:
    own = os.stat("/proc/self/ns/%s" % name)
    other = os.fstat(descriptor)
    return (own.st_dev, own.st_ino) == (other.st_dev, other.st_ino)


def enter(pid: int, user_namespace: bool) -> Optional[int]:
    """Enter a process's namespaces, except its process namespace, which only the caller's children are in.

    An ordinary user enters the user namespace too, in one step with the others: it may do so where it made them, which
    shows only from outside (Linux 5.8). A root stays in its own user namespace, out of the sandbox's reach; it gets the
    sandbox's as a descriptor, for its children (None where it is the same one, or ``user_namespace`` is false).
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
        kinds = CLONE_NEWUSER
        for _, kind, _ in opened:
            kinds |= kind
        _setns(process, kinds, "sandbox's")
        os.close(process)
    else:
        for descriptor, kind, name in opened:
            _setns(descriptor, kind, name)
    for descriptor, _, _ in opened:
        os.close(descriptor)
    if foreign and os.geteuid() == 0 and user_namespace:
        return user
    os.close(user)
    return None


def outside(pid: int, kind: str, number: int) -> int:
    """The id, as the reader has it, of the user (``kind`` uid) or group (gid) that a sandbox calls ``number``."""
    with open("/proc/%d/%s_map" % (pid, kind), encoding="ascii") as file:
        for line in file:
            inside, beyond, count = map(int, line.split())
            if inside <= number < inside + count:
                return beyond + number - inside
    raise OSError(errno.EINVAL, "the sandbox has no %s %d" % (kind, number))


def drop_bounding_set() -> None:
    """Let no program that the caller executes have any capability. Harmless where the caller may not say so."""
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            # EINVAL: the kernel knows no more of them; EPERM: none is held, and no_new_privs keeps it so.
            if ctypes.get_errno() not in (errno.EINVAL, errno.EPERM):
                raise OSError(ctypes.get_errno(), "prctl(PR_CAPBSET_DROP)")
            return


def step_aside() -> None:
    """Let a root become another user and keep its capabilities, whatever user it acts as later."""
    _prctl(_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP, "PR_SET_SECUREBITS")
    os.setresgid(ASIDE, ASIDE, ASIDE)
    os.setresuid(ASIDE, ASIDE, ASIDE)


def _set_effective(wanted: bool) -> None:
    """Put the caller's capabilities to effect, or none of them."""
    header = ctypes.create_string_buffer(struct.pack("=Ii", _LINUX_CAPABILITY_VERSION_3, 0), 8)
    held = ctypes.create_string_buffer(24)
    _checked(_libc.capget(header, held), "capget")
    sets = list(struct.unpack("=6I", held.raw))
    for word in (0, 3):
        sets[word] = sets[word + 1] if wanted else 0
    _checked(_libc.capset(header, ctypes.create_string_buffer(struct.pack("=6I", *sets), 24)), "capset")


def shed_privileges(seccomp: bytes = b"") -> None:
    """Give up every capability, the right to gain any, and the calls that ``seccomp`` refuses (empty: none)."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, "PR_SET_NO_NEW_PRIVS")
    header = ctypes.create_string_buffer(struct.pack("=Ii", _LINUX_CAPABILITY_VERSION_3, 0), 8)
    nothing = ctypes.create_string_buffer(struct.pack("=6I", 0, 0, 0, 0, 0, 0), 24)
    _checked(_libc.capset(header, nothing), "capset")
    if seccomp:
        code = ctypes.create_string_buffer(seccomp, len(seccomp))
        described = ctypes.create_string_buffer(struct.pack("=H6xQ", len(seccomp) // 8, ctypes.addressof(code)), 16)
        _checked(
            _libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), described, 0, 0),
            "prctl(PR_SET_SECCOMP)",
        )


class Life:
    """The process that a sandbox lives and dies with, watched from outside; made before anything is entered."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._program = self._runs()
        self.descriptor = pidfd_open(pid)
        """Readable when it has ended; None where the kernel has no such thing."""

    def ends(self) -> bool:
        """Whether it is dying, which kills all others."""
        return dying.is_dying(self._proc, self._pid)

    def settle(self) -> None:
        """To be called with the rights that the caller keeps: what it may not see with these is no sign of a change."""
        if self._runs() is None:
            self._program = None

    def intact(self) -> bool:
        """Whether it runs the program that it ran when this was made, as far as the caller may know."""
        return self._program is None or self._runs() == self._program

    def _runs(self) -> Optional[Tuple[int, int]]:
        try:
            program = os.stat("%d/exe" % self._pid, dir_fd=self._proc)
        except OSError:
            return None  # it has ended, or only its own user may know
        return program.st_dev, program.st_ino


class Workload:
    """Who the sandbox's programs run as, and what each of them gives up before it starts.

    ``ids`` are the user and group inside (None: the attendant's own), ``outer`` the same two as the attendant sees
    them; ``namespace`` is a user namespace to enter, ``groups`` the ``cgroup.procs`` descriptors to join. The attendant
    is root when it makes this, or ``ASIDE`` where the workload is root itself, or the workload's own user.
    ``most_processes`` is how many processes and threads the workload may have (0: no limit of the attendant's), for
    kernels on which no group can hold it to that.
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
        """/dev/null, opened before anybody could put something else in its place."""
        self._oom_counter = oom_counter
        self._most_processes = most_processes
        self.held = [*groups, *([namespace] if namespace is not None else [])]
        """Descriptors that a child needs to become the workload."""

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """Do file work with the workload's rights. The real user stays: nobody inside may signal or trace it."""
        if self._outer is None:
            yield
            return
        # No groups are given up or taken: the attendant of a root has none.
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
        """Whether the workload is another user than the attendant, which it then can neither signal nor trace."""
        return self.ids is not None and (self._outer or self.ids)[0] != os.geteuid()

    def kill_all(self) -> None:
        """Kill every process that the workload's user may signal; for a child that ends then, where ``separate``.

        One pass is one step of the kernel's, which no fork escapes; where the kernel is another (gVisor), many are
        made. The caller signals with the workload's right and has another user by itself, whom nobody can signal.
        """
        assert self.ids is not None
        uid, gid = self._outer or self.ids
        try:
            os.setgroups([])
        except PermissionError:
            pass  # a user namespace that has no right to groups
        try:
            os.setresgid(_KILLER, gid, _KILLER)
            os.setresuid(_KILLER, uid, _KILLER)
        except OSError:
            # A user namespace of few users. Then it can be signalled, and its parent makes another one.
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        shed_privileges()
        for _ in range(_KILL_PASSES):
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                return

    def oom_kills(self) -> int:
        """How often the kernel killed for memory in this sandbox, where it shows its own control group; else 0."""
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
            _setns(self._namespace, CLONE_NEWUSER, "user")
        if self._confined:
            drop_bounding_set()

    def become(self, mark: Optional[int] = None) -> None:
        """Become the workload for good, after ``approach``: for a fresh child that will execute a program.

        ``mark`` is a group that it and all that descends from it have beside their own, and cannot leave.
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
                    pass  # a user namespace of one user, which has no right to groups; the attendant has none either
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        if self._confined:
            shed_privileges(self._seccomp)


def open_oom_counter() -> Optional[int]:
    """The file that counts the kernel's kills for memory in the caller's own control group, where it is to be seen."""
    for path in _OOM_COUNTERS:
        try:
            return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
    return None
