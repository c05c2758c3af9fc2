"""The seccomp filter of everything in a sandbox: blocks kernel interfaces that a coding agent never needs.

Purpose: the sandbox has no capability and cannot make a user namespace; this blocks calls that work without either
(``guest.common.filters`` says which, and why), and calls that would end or starve the first process, which has the same
user as all others.

Invariants: refused calls fail with EPERM, except those that ``filters`` names, and fallocate (EOPNOTSUPP), so that
programs fall back as on file systems without it.
"""

from __future__ import annotations

import errno
import platform

from penstock_sandbox.guest.common.filters import (
    ALLOW,
    ARCHITECTURES,
    ERRNO,
    RETURN,
    by_argument,
    common,
    instruction,
)

_FIRST_PROCESS = 1
# Number, and the argument with a process id: prlimit64, sched_setparam, sched_setscheduler, sched_setaffinity,
# sched_setattr, migrate_pages, move_pages, setpriority, ioprio_set.
_ON_PROCESSES = {
    "x86_64": ((302, 0), (142, 0), (144, 0), (203, 0), (314, 0), (256, 0), (279, 0), (141, 1), (251, 1)),
    "aarch64": ((261, 0), (118, 0), (119, 0), (122, 0), (274, 0), (238, 0), (239, 0), (140, 1), (30, 1)),
}

# Number, and its mode argument; of the modes the two that punch holes and take no space.
_FALLOCATE = {"x86_64": (285, 1), "aarch64": (47, 1)}
_GIVES_BACK = (0x02 | 0x01, 0x08)


def program(*, allocates: bool) -> bytes | None:
    """Returns the filter as an array of ``struct sock_filter``, or None for a machine whose numbers are unknown.

    ``allocates``: whether disk space may be allocated without writing, as fast as the file system can record it.
    """
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        return None
    code = common(ARCHITECTURES[machine])
    for number, argument in _ON_PROCESSES[machine]:
        code += by_argument(number, argument, (_FIRST_PROCESS,), ERRNO | errno.EPERM, ALLOW)
    if not allocates:
        number, argument = _FALLOCATE[machine]
        code += by_argument(number, argument, _GIVES_BACK, ALLOW, ERRNO | errno.EOPNOTSUPP)
    code.append(instruction(RETURN, ALLOW))
    return b"".join(code)
