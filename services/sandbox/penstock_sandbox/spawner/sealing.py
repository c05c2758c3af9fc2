"""What is read-only or hidden in a sandbox beside its programs, mounted by its door before anything of an agent's runs.

Purpose: bubblewrap could do this, too, but takes about ten times as long for each mount.

Invariants: a mount can neither be removed nor renamed in its own mount namespace, whoever owns the directory that it is
in, and nothing in a sandbox can make another mount namespace. Called with CAP_SYS_ADMIN over the namespace's mounts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from penstock_sandbox.spawner import syscalls

_READ_ONLY = syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY | syscalls.MS_NOSUID
# bubblewrap's own tmpfs, with the devices bound into it, which stay as they are; and the terminals, which are devices.
_DEVICES, _TERMINALS = "/dev", "/dev/pts"
# Its own of each sandbox, with the size that bubblewrap gave them.
_IN_MEMORY = ("/tmp", "/dev/shm")
_REMOUNT = syscalls.MS_REMOUNT | syscalls.MS_NOSUID | syscalls.MS_NODEV
_EMPTY_FOLDER, _EMPTY_FILE = "/mnt", "/etc/machine-id"
# The first process lives and dies with the sandbox: its files, such as the one that makes it the kernel's first choice
# when memory runs out, are not for those who share its user.
_HIDDEN_FOLDERS = ("/proc/1",)
# What they tell of the machine is nothing that a program in a sandbox needs.
_HIDDEN_FILES = (
    "/proc/cmdline",
    "/proc/config.gz",
    "/proc/iomem",
    "/proc/ioports",
    "/proc/kallsyms",
    "/proc/keys",
    "/proc/modules",
)


def seal(names: Sequence[str], tmp_inodes: int) -> None:
    """Make ``names`` at the top level, and what holds the devices, read-only mounts; hide what tells of the machine.

    ``tmp_inodes`` is what each place in memory may hold: files without content take the kernel's memory, too.
    """
    for path in _IN_MEMORY:
        syscalls.mount("none", path, None, _REMOUNT, f"nr_inodes={tmp_inodes}")
    for name in names:
        path = f"/{name}"
        syscalls.mount(path, path, None, syscalls.MS_BIND | syscalls.MS_REC)
        syscalls.mount("none", path, None, _READ_ONLY | syscalls.MS_NODEV)
    syscalls.mount("none", _DEVICES, None, _READ_ONLY | syscalls.MS_NODEV)
    syscalls.mount("none", _TERMINALS, None, _READ_ONLY | syscalls.MS_NOEXEC)
    for path in _HIDDEN_FOLDERS:
        syscalls.mount(_EMPTY_FOLDER, path, None, syscalls.MS_BIND)
    for path in _HIDDEN_FILES:
        if os.path.exists(path):
            syscalls.mount(_EMPTY_FILE, path, None, syscalls.MS_BIND)
