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

NEW_NAMESPACES = 0x7E020000
"""Flags of clone: CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""

REFUSED: Dict[str, Tuple[int, int]] = {
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "acct": (163, 89),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "quotactl": (179, 60),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
}
"""Calls that fail with EPERM beside those of ``filters``, by name: their numbers on x86-64 and arm64."""
ABSENT: Dict[str, Tuple[int, int]] = {"clone3": (435, 435)}
"""Calls that fail with ENOSYS beside those of ``filters``."""
_CLONE = {"x86_64": 56, "aarch64": 220}
_IMAGE_NAMES = {"amd64": "x86_64", "arm64": "aarch64"}


def program(machine: str) -> bytes:
    """Returns the filter as an array of ``struct sock_filter``; empty if ``machine`` is unknown.

    That is a name of ``uname``, or the usual name of the same architecture in container images.
    """
    machine = _IMAGE_NAMES.get(machine, machine)
    if machine not in ARCHITECTURES:
        return b""
    architecture = ARCHITECTURES[machine]
    return b"".join(
        [
            *common(architecture),
            *refused(architecture.numbers(REFUSED), errno.EPERM),
            *refused(architecture.numbers(ABSENT), errno.ENOSYS),
            instruction(JUMP_EQUAL, _CLONE[machine], 0, 3),
            load_argument(0),
            instruction(JUMP_ANY_BIT, NEW_NAMESPACES, 0, 1),
            instruction(RETURN, ERRNO | errno.EPERM),
            instruction(RETURN, ALLOW),
        ]
    )
