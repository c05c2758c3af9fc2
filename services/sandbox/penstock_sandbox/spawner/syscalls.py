"""The few system calls that Python 3.11 has no wrapper for: setns, unshare, prctl, capset and signalfd.

Invariants: every call raises ``OSError`` with the kernel's errno; nothing here keeps state.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import struct
from collections.abc import Iterator

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

CAP_SETPCAP = 8
CAP_SYS_PTRACE = 19
CAP_SYS_ADMIN = 21

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_SLAVE = 0x80000

_NS_GET_PARENT = 0xB702  # linux/nsfs.h
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_LINUX_CAPABILITY_VERSION_3 = 0x20080522
_SIGSET_BYTES = 128

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _prctl(option: int, argument: int, what: str) -> None:
    _checked(_libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0), what)


def setns(descriptor: int, kinds: int) -> None:
    """Enter namespaces: of one kind (a namespace descriptor) or several at once (a pidfd, Linux 5.8)."""
    _checked(_libc.setns(descriptor, kinds), "setns")


def parent_namespace(path: str) -> int:
    """A descriptor of the user namespace in which the one that ``path`` names was made."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return fcntl.ioctl(descriptor, _NS_GET_PARENT)
    finally:
        os.close(descriptor)


def unshare(kinds: int) -> None:
    """Move the caller into new namespaces of ``kinds``."""
    _checked(_libc.unshare(kinds), "unshare")


def signal_descriptor(number: int) -> int:
    """Block a signal, and answer a descriptor that is readable while it is pending (128 bytes for each reading)."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    # glibc's and musl's sigset_t: 1,024 bits.
    mask = ctypes.create_string_buffer((1 << (number - 1)).to_bytes(_SIGSET_BYTES, "little"), _SIGSET_BYTES)
    return _checked(_libc.signalfd(-1, mask, os.O_CLOEXEC | os.O_NONBLOCK), "signalfd")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount ``source`` on ``target``."""
    _checked(
        _libc.mount(
            os.fsencode(source),
            os.fsencode(target),
            kind.encode() if kind is not None else None,
            ctypes.c_ulong(flags),
            data.encode() if data is not None else None,
        ),
        f"mount {target}",
    )


def die_with_parent(number: int) -> None:
    """Have the kernel send signal ``number`` to the caller when the thread that made it ends."""
    _prctl(_PR_SET_PDEATHSIG, number, "prctl(PR_SET_PDEATHSIG)")


def set_dumpable(value: bool) -> None:
    """Allow or forbid other processes of this user to trace the caller or read its memory."""
    _prctl(_PR_SET_DUMPABLE, int(value), "prctl(PR_SET_DUMPABLE)")


def become_subreaper() -> None:
    """Adopt (and so be able to reap) descendants whose parent ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, "prctl(PR_SET_CHILD_SUBREAPER)")


def set_no_new_privs() -> None:
    """Give up, for good, gaining privileges by executing a file."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, "prctl(PR_SET_NO_NEW_PRIVS)")


def filter_calls(program: bytes) -> None:
    """Filter the caller's system calls, and those of all that it starts (needs no_new_privs)."""
    code = ctypes.create_string_buffer(program, len(program))
    described = ctypes.create_string_buffer(struct.pack("=H6xQ", len(program) // 8, ctypes.addressof(code)), 16)
    _checked(
        _libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), described, 0, 0), "prctl(PR_SET_SECCOMP)"
    )


def drop_bounding_set() -> None:
    """Empty the capability bounding set (needs CAP_SETPCAP)."""
    for capability in range(64):
        try:
            _prctl(_PR_CAPBSET_DROP, capability, "prctl(PR_CAPBSET_DROP)")
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return  # the kernel knows no capability of this number


def keep_capabilities(kept: tuple[int, ...]) -> None:
    """Reduce the effective and permitted sets to ``kept``; the inheritable set becomes empty."""
    _set_capabilities(kept, kept)


@contextlib.contextmanager
def without_capabilities(held: tuple[int, ...]) -> Iterator[None]:
    """Do something with none of the capabilities ``held`` in effect, which are all that the caller has."""
    _set_capabilities(held, ())
    try:
        yield
    finally:
        _set_capabilities(held, held)


def _set_capabilities(permitted: tuple[int, ...], effective: tuple[int, ...]) -> None:
    allowed, used = (sum(1 << capability for capability in each) for each in (permitted, effective))
    low, high = 0xFFFFFFFF, 32
    words = (used & low, allowed & low, 0, used >> high, allowed >> high, 0)
    header = ctypes.create_string_buffer(struct.pack("=Ii", _LINUX_CAPABILITY_VERSION_3, 0), 8)
    _checked(_libc.capset(header, ctypes.create_string_buffer(struct.pack("=6I", *words), 24)), "capset")
