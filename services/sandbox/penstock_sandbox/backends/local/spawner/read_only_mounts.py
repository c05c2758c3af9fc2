"""Read-only and hiding mounts of a sandbox beside its programs, made by its helper before the agent's processes run.

Purpose: bubblewrap could do this too, but takes about ten times as long for each mount.

Invariants: a mount can neither be removed nor renamed in its own mount namespace, no matter who owns its parent
directory, and nothing in a sandbox can make another mount namespace. Called with CAP_SYS_ADMIN over the namespace's
mounts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from penstock_sandbox.guest.common import syscalls

_READ_ONLY = syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY | syscalls.MS_NOSUID
# bubblewrap's own tmpfs, with the devices bound into it, which stay unchanged; and the terminals, which are devices.
_DEVICES, _TERMINALS = "/dev", "/dev/pts"
# Each sandbox's own, with the size that bubblewrap gave them.
_IN_MEMORY = ("/tmp", "/dev/shm")
_REMOUNT = syscalls.MS_REMOUNT | syscalls.MS_NOSUID | syscalls.MS_NODEV
# As bubblewrap mounts it, but limited: the terminals of all sandboxes together are the machine's, some 3,000.
_TERMINALS_OPTIONS = "ptmxmode=0666,mode=620,max=128"
_EMPTY_FOLDER, _EMPTY_FILE = "/mnt", "/etc/machine-id"
NOTHING = "/opt/penstock/nothing"
"""An empty directory in sandboxes made from an image, whose /mnt is the image's."""
# The first process lives and dies with the sandbox: processes of the same user must not write its files, such as the
# one that would make it the OOM killer's first choice.
_HIDDEN_FOLDERS = ("/proc/1",)
# Information on the machine that no program in a sandbox needs.
_HIDDEN_FILES = (
    "/proc/cmdline",
    "/proc/config.gz",
    "/proc/iomem",
    "/proc/ioports",
    "/proc/kallsyms",
    "/proc/keys",
    "/proc/modules",
)


def make(names: Sequence[str], writable: Sequence[str], tmp_inodes: int) -> None:
    """Makes ``names`` at the top level, and the directory of the devices, read-only mounts; hides machine information.

    With ``writable``, the root itself is one, and everything in it but these directories and those in memory.
    ``tmp_inodes`` limits the files of each place in memory: empty files take the kernel's memory, too.
    """
    for path in _IN_MEMORY:
        syscalls.mount("none", path, None, _REMOUNT, f"nr_inodes={tmp_inodes}")
    for name in names:
        path = f"/{name}"
        syscalls.mount(path, path, None, syscalls.MS_BIND | syscalls.MS_REC)
        syscalls.mount("none", path, None, _READ_ONLY | syscalls.MS_NODEV)
    syscalls.mount("none", _DEVICES, None, _READ_ONLY | syscalls.MS_NODEV)
    flags = syscalls.MS_REMOUNT | syscalls.MS_NOSUID | syscalls.MS_NOEXEC
    syscalls.mount("none", _TERMINALS, None, flags, _TERMINALS_OPTIONS)
    syscalls.mount("none", _TERMINALS, None, _READ_ONLY | syscalls.MS_NOEXEC)
    for path in _HIDDEN_FOLDERS:
        syscalls.mount(NOTHING if writable else _EMPTY_FOLDER, path, None, syscalls.MS_BIND)
    for path in _HIDDEN_FILES:
        if os.path.exists(path):
            syscalls.mount(_EMPTY_FILE, path, None, syscalls.MS_BIND)
    for path in writable:
        syscalls.mount(path, path, None, syscalls.MS_BIND)
    if writable:
        syscalls.mount("none", "/", None, _READ_ONLY | syscalls.MS_NODEV)
