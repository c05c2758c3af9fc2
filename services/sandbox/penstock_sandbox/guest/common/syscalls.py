"""System calls that Python 3.8 does not wrap: namespaces, mounts, privileges, filters.

Used by sandbox helpers, their spawner and guest agents: this module is part of a program for Python 3.8.

Invariants: every call raises ``OSError`` with the kernel's errno; nothing here reads a file or keeps state.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import struct
from typing import Iterator, Optional, Tuple

CLONE_NEWTIME = 0x00000080
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

CAP_SYS_PTRACE = 19
CAP_SYS_ADMIN = 21

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_NOATIME = 0x400
MS_NODIRATIME = 0x800
MS_BIND = 0x1000
MS_REC = 0x4000
MS_SLAVE = 0x80000
MS_RELATIME = 0x200000

_NS_GET_PARENT = 0xB702  # linux/nsfs.h
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_LINUX_CAPABILITY_VERSION_3 = 0x20080522
_SIGSET_BYTES = 128

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> int:
    """Returns a call's result. Raises OSError, which names ``what``, if it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, "%s: %s" % (what, os.strerror(number)))
    return result


def prctl(option: int, argument: int, what: str) -> None:
    """Changes one property of the caller."""
    checked(libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0), "prctl(%s)" % what)


def setns(descriptor: int, kinds: int, what: str) -> None:
    """Enters namespaces: of one kind (a namespace descriptor) or several at once (a pidfd, Linux 5.8)."""
    checked(libc.setns(descriptor, kinds), "entering the %s namespace" % what)


def parent_namespace(path: str) -> int:
    """Returns a descriptor of the parent of the user namespace at ``path``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return fcntl.ioctl(descriptor, _NS_GET_PARENT)
    finally:
        os.close(descriptor)


def unshare(kinds: int) -> None:
    """Moves the caller into new namespaces of ``kinds``."""
    checked(libc.unshare(kinds), "unshare")


def mount(source: str, target: str, kind: Optional[str], flags: int, data: Optional[str] = None) -> None:
    """Mounts ``source`` on ``target``."""
    checked(
        libc.mount(
            os.fsencode(source),
            os.fsencode(target),
            kind.encode() if kind is not None else None,
            ctypes.c_ulong(flags),
            data.encode() if data is not None else None,
        ),
        "mount %s" % target,
    )


def signal_descriptor(number: int) -> int:
    """Blocks a signal; returns a descriptor that is readable while it is pending (128 bytes per read)."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    # glibc's and musl's sigset_t: 1,024 bits.
    mask = ctypes.create_string_buffer((1 << (number - 1)).to_bytes(_SIGSET_BYTES, "little"), _SIGSET_BYTES)
    return checked(libc.signalfd(-1, mask, os.O_CLOEXEC | os.O_NONBLOCK), "signalfd")


def die_with_parent(number: int) -> None:
    """Makes the kernel send signal ``number`` to the caller when the thread that made it ends."""
    prctl(_PR_SET_PDEATHSIG, number, "PR_SET_PDEATHSIG")


def set_name(name: str) -> None:
    """Sets the caller's name in process listings."""
    checked(libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0), "prctl(PR_SET_NAME)")


def set_dumpable(value: bool) -> None:
    """Allows or forbids other processes of this user to trace the caller or read its memory."""
    prctl(_PR_SET_DUMPABLE, int(value), "PR_SET_DUMPABLE")


def become_subreaper() -> None:
    """Adopts (and so can reap) descendants whose parent has ended."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1, "PR_SET_CHILD_SUBREAPER")


def set_no_new_privs() -> None:
    """Rules out, for good, gaining privileges by executing a file."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1, "PR_SET_NO_NEW_PRIVS")


def filter_calls(program: bytes) -> None:
    """Filters the system calls of the caller and its future children (needs no_new_privs)."""
    code = ctypes.create_string_buffer(program, len(program))
    described = ctypes.create_string_buffer(struct.pack("=H6xQ", len(program) // 8, ctypes.addressof(code)), 16)
    checked(libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), described, 0, 0), "prctl(PR_SET_SECCOMP)")


def drop_bounding_set() -> None:
    """Empties the capability bounding set (needs CAP_SETPCAP)."""
    for capability in range(64):
        try:
            prctl(_PR_CAPBSET_DROP, capability, "PR_CAPBSET_DROP")
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return  # the kernel has no capability of this number


def permitted_capabilities() -> int:
    """Returns the caller's permitted set, one bit for each capability."""
    held = ctypes.create_string_buffer(24)
    checked(libc.capget(_capability_header(), held), "capget")
    _, low, _, _, high, _ = struct.unpack("=6I", held.raw)
    return int(low | high << 32)


def set_capabilities(permitted: int, effective: int) -> None:
    """Sets the caller's permitted and effective sets, one bit for each capability; empties the inheritable set."""
    low, high = 0xFFFFFFFF, 32
    words = (effective & low, permitted & low, 0, effective >> high, permitted >> high, 0)
    held = ctypes.create_string_buffer(struct.pack("=6I", *words), 24)
    checked(libc.capset(_capability_header(), held), "capset")


def keep_capabilities(kept: Tuple[int, ...]) -> None:
    """Reduces the effective and permitted sets to ``kept``; empties the inheritable set."""
    set_capabilities(_bits(kept), _bits(kept))


@contextlib.contextmanager
def without_capabilities(held: Tuple[int, ...]) -> Iterator[None]:
    """Runs the body with none of the capabilities ``held`` in effect, which are all of the caller's."""
    bits = _bits(held)
    set_capabilities(bits, 0)
    try:
        yield
    finally:
        set_capabilities(bits, bits)


def _bits(capabilities: Tuple[int, ...]) -> int:
    return sum(1 << capability for capability in capabilities)


def _capability_header() -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(struct.pack("=Ii", _LINUX_CAPABILITY_VERSION_3, 0), 8)
