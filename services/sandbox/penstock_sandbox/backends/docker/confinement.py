"""The system call filter of what runs in a container: no way to new namespaces or mounts, few families of sockets.

Purpose: what an attendant starts does not get the filter that the daemon gave the container's first process: started
from this service it would have none, and a sidecar's is wider than a sandbox's should be.

Invariants
- Refused calls answer EPERM, except those that programs must be able to do without, which answer ENOSYS (io_uring;
  clone3, whose flags a filter cannot read, so that C libraries fall back to clone).
- Sockets are of few ``families``. Calls of another architecture's convention, and so its ``socketcall``, are refused.
- Tracing is allowed: debuggers and leak checkers need it, and the kernel grants it between processes of one user only,
  of whom none holds or serves a sandbox.
"""

from __future__ import annotations

import errno

from penstock_sandbox.attendant import families
from penstock_sandbox.attendant.families import (
    ALLOW,
    ARCHITECTURE,
    ERRNO,
    FIRST_ARGUMENT,
    JUMP_ANY_BIT,
    JUMP_AT_LEAST,
    JUMP_EQUAL,
    LOAD,
    NUMBER,
    RETURN,
    instruction,
)

_IO_URING = (425, 426, 427)
_CLONE3 = 435
_MOUNTS_BY_DESCRIPTOR = (428, 429, 430, 431, 432, 433, 442)
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
_NEW_NAMESPACES = 0x7E020000

# Architecture as seccomp names it, first number of a foreign convention, clone, socket and socketpair, and what is
# refused: add_key, request_key, keyctl, perf_event_open, open_by_handle_at, kcmp, bpf, userfaultfd, unshare, setns,
# mount, umount2, pivot_root, chroot, swapon, swapoff, reboot, kexec_load, kexec_file_load, init_module, finit_module,
# delete_module, acct, syslog, settimeofday, clock_settime, quotactl.
_TABLES = {
    "amd64": (
        0xC000003E,
        0x40000000,
        56,
        (41, 53),
        (
            *(248, 249, 250, 298, 304, 312, 321, 323, 272, 308, 165, 166, 155, 161, 167, 168, 169, 246, 320),
            *(175, 313, 176, 163, 103, 164, 227, 179),
        ),
    ),
    "arm64": (
        0xC00000B7,
        None,
        220,
        (198, 199),
        (
            *(217, 218, 219, 241, 265, 272, 280, 282, 97, 268, 40, 39, 41, 51, 224, 225, 142, 104, 294),
            *(105, 273, 106, 89, 116, 170, 112, 60),
        ),
    ),
}


def program(architecture: str) -> bytes:
    """The filter as an array of ``struct sock_filter`` for an architecture that ``hold`` knows."""
    seccomp_name, foreign, clone, sockets, refused = _TABLES[architecture]
    code = [
        instruction(LOAD, ARCHITECTURE),
        instruction(JUMP_EQUAL, seccomp_name, 1, 0),
        instruction(RETURN, ERRNO | errno.EPERM),
        instruction(LOAD, NUMBER),
    ]
    if foreign is not None:
        code += [instruction(JUMP_AT_LEAST, foreign, 0, 1), instruction(RETURN, ERRNO | errno.EPERM)]
    for numbers, answer in (((*refused, *_MOUNTS_BY_DESCRIPTOR), errno.EPERM), ((*_IO_URING, _CLONE3), errno.ENOSYS)):
        for number in numbers:
            code += [instruction(JUMP_EQUAL, number, 0, 1), instruction(RETURN, ERRNO | answer)]
    code += families.judged(sockets)
    code += [
        instruction(JUMP_EQUAL, clone, 0, 3),
        instruction(LOAD, FIRST_ARGUMENT),
        instruction(JUMP_ANY_BIT, _NEW_NAMESPACES, 0, 1),
        instruction(RETURN, ERRNO | errno.EPERM),
        instruction(RETURN, ALLOW),
    ]
    return b"".join(code)
