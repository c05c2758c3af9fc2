"""The system call filter of what runs in a container: the local backend's, and no way to new namespaces or mounts.

Purpose: what an attendant starts does not get the filter that the daemon gave the container's first process: started
from this service it would have none, and a sidecar's is wider than a sandbox's should be.

Invariants: refused calls answer EPERM, except those that programs must be able to do without, which answer ENOSYS
(io_uring; clone3, whose flags a filter cannot read, so that C libraries fall back to clone).
"""

from __future__ import annotations

import errno
import struct

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_IO_URING = (425, 426, 427)
_CLONE3 = 435
_MOUNTS_BY_DESCRIPTOR = (428, 429, 430, 431, 432, 433, 442)
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
_NEW_NAMESPACES = 0x7E020000

# Architecture as seccomp names it, first number of a foreign convention, clone, and what is refused: add_key,
# request_key, keyctl, perf_event_open, open_by_handle_at, kcmp, bpf, userfaultfd, unshare, setns, mount, umount2,
# pivot_root, chroot, swapon, swapoff, reboot, kexec_load, kexec_file_load, init_module, finit_module, delete_module,
# acct, syslog, settimeofday, clock_settime, quotactl.
_TABLES = {
    "amd64": (
        0xC000003E,
        0x40000000,
        56,
        (
            *(248, 249, 250, 298, 304, 312, 321, 323, 272, 308, 165, 166, 155, 161, 167, 168, 169, 246, 320),
            *(175, 313, 176, 163, 103, 164, 227, 179),
        ),
    ),
    "arm64": (
        0xC00000B7,
        None,
        220,
        (
            *(217, 218, 219, 241, 265, 272, 280, 282, 97, 268, 40, 39, 41, 51, 224, 225, 142, 104, 294),
            *(105, 273, 106, 89, 116, 170, 112, 60),
        ),
    ),
}


def program(architecture: str) -> bytes:
    """The filter as an array of ``struct sock_filter`` for an architecture that ``hold`` knows."""
    seccomp_name, foreign, clone, refused = _TABLES[architecture]
    code = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_JUMP_EQUAL, seccomp_name, 1, 0),
        _instruction(_RETURN, _ERRNO | errno.EPERM),
        _instruction(_LOAD, _NUMBER),
    ]
    if foreign is not None:
        code += [_instruction(_JUMP_AT_LEAST, foreign, 0, 1), _instruction(_RETURN, _ERRNO | errno.EPERM)]
    for numbers, answer in (((*refused, *_MOUNTS_BY_DESCRIPTOR), errno.EPERM), ((*_IO_URING, _CLONE3), errno.ENOSYS)):
        for number in numbers:
            code += [_instruction(_JUMP_EQUAL, number, 0, 1), _instruction(_RETURN, _ERRNO | answer)]
    code += [
        _instruction(_JUMP_EQUAL, clone, 0, 3),
        _instruction(_LOAD, _FIRST_ARGUMENT),
        _instruction(_JUMP_ANY_BIT, _NEW_NAMESPACES, 0, 1),
        _instruction(_RETURN, _ERRNO | errno.EPERM),
        _instruction(_RETURN, _ALLOW),
    ]
    return b"".join(code)


def _instruction(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)
