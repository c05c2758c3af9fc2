"""The seccomp filter of the guest agent's processes: no new namespaces or mounts, few socket families.

Purpose: these processes do not inherit the filter that a daemon gave to a container's first process, and a cloud
machine gives none: without this one they would have none, or a sidecar's, which is wider than a sandbox's.

Invariants
- To what ``filters`` says is added: new namespaces, mounts and what changes the machine fail with EPERM, clone3 with
  ENOSYS, since a filter cannot read its flags and C libraries fall back to clone.
- Tracing is allowed: debuggers and leak checkers need it, and the kernel grants it between processes of one user only,
  none of which holds or serves a sandbox.
"""

from __future__ import annotations

import errno
from typing import Dict, Tuple

from penstock_sandbox.guest.common.filters import (
    ALLOW,
    ARCHITECTURES,
    ERRNO,
    JUMP_ANY_BIT,
    JUMP_EQUAL,
    RETURN,
    common,
    instruction,
    load_argument,
    refused,
)

_CLONE3 = 435
_MOUNTS_BY_DESCRIPTOR = (428, 429, 430, 431, 432, 433, 442)
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
_NEW_NAMESPACES = 0x7E020000

# Clone, and the refused calls: unshare, setns, mount, umount2, pivot_root, chroot, swapon, swapoff, reboot, kexec_load,
# kexec_file_load, init_module, finit_module, delete_module, acct, syslog, settimeofday, clock_settime, quotactl.
_TABLES: Dict[str, Tuple[int, Tuple[int, ...]]] = {
    "x86_64": (56, (272, 308, 165, 166, 155, 161, 167, 168, 169, 246, 320, 175, 313, 176, 163, 103, 164, 227, 179)),
    "aarch64": (220, (97, 268, 40, 39, 41, 51, 224, 225, 142, 104, 294, 105, 273, 106, 89, 116, 170, 112, 60)),
}
_IMAGE_NAMES = {"amd64": "x86_64", "arm64": "aarch64"}


def program(machine: str) -> bytes:
    """Returns the filter as an array of ``struct sock_filter``; empty if ``machine`` is unknown.

    That is a name of ``uname``, or the usual name of the same architecture in container images.
    """
    machine = _IMAGE_NAMES.get(machine, machine)
    if machine not in _TABLES:
        return b""
    clone, numbers = _TABLES[machine]
    return b"".join(
        [
            *common(ARCHITECTURES[machine]),
            *refused((*numbers, *_MOUNTS_BY_DESCRIPTOR), errno.EPERM),
            *refused((_CLONE3,), errno.ENOSYS),
            instruction(JUMP_EQUAL, clone, 0, 3),
            load_argument(0),
            instruction(JUMP_ANY_BIT, _NEW_NAMESPACES, 0, 1),
            instruction(RETURN, ERRNO | errno.EPERM),
            instruction(RETURN, ALLOW),
        ]
    )
