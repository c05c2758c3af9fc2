"""Project quotas: the kernel counts and limits all writes below a directory, no matter who makes them.

Purpose: a hard limit of bytes and inodes for each sandbox if the file system of the state directory enforces project
quotas (XFS or ext4 mounted with ``prjquota``) and this service is root. Deleted files that are still open count.

Invariants: enforcement is tested by writing. A project is assigned to an empty directory and inherited by everything
made in it, which nobody in a user namespace can change. A project number with any usage is not reused.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import struct
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Final

from penstock_sandbox.backends.host import layers
from penstock_sandbox.backends.local.disk.usage import Limit, Use

_QUOTACTL_FD: Final = 443  # the same number on every architecture, Linux 5.14
_PROJECTS: Final = 2
_GET, _SET = 0x800007, 0x800008
_LIMITS: Final = 1 | 4  # QIF_BLIMITS, QIF_ILIMITS
# struct if_dqblk: blocks' hard and soft limit (KiB), bytes, inodes' hard and soft limit, inodes, times, valid fields.
_DQBLK: Final = struct.Struct("=8QI4x")
_KIB: Final = 1024
# struct fsxattr: flags, extent size, extents, project, copy-on-write extent size.
_FSXATTR: Final = struct.Struct("=5I8x")
_FSGETXATTR, _FSSETXATTR = 0x801C581F, 0x401C5820
_INHERIT: Final = 0x200
_FIRST, _COUNT = 1 << 30, 1 << 30
_TRIAL_BYTES: Final = 1 << 20
_TRIAL_S: Final = 10

_libc = ctypes.CDLL(None, use_errno=True)


class Quotas:
    """The projects of one directory's file system, which ``place`` keeps open."""

    def __init__(self, place: int) -> None:
        self._place = place

    @classmethod
    def detect(cls, folder: Path, user: int) -> Quotas | None:
        """Returns the quotas of ``folder``'s file system if they bind an ordinary ``user``; None otherwise."""
        found = cls(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        trial = folder / "trial"
        held = False
        try:
            layers.remove(trial)
            trial.mkdir(mode=0o700)
            project = found.give(trial, Limit(_TRIAL_BYTES, 16))
            held = _is_held(trial / "file", user)
            found.release(project)
        except OSError:
            held = False
        finally:
            layers.remove(trial)
        if not held:
            found.close()
            return None
        return found

    def give(self, folder: Path, limit: Limit) -> int:
        """Limits an empty directory and all that will be made below it; returns the project's number."""
        blocks, inodes = -(-(limit.bytes or 0) // _KIB), limit.inodes or 0
        while True:
            project = _FIRST + secrets.randbelow(_COUNT)
            if self.use(project) == Use():
                break
        self._control(_SET, project, _DQBLK.pack(blocks, 0, 0, inodes, 0, 0, 0, 0, _LIMITS))
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            flags, extent, extents, _, cow = _FSXATTR.unpack(fcntl.ioctl(opened, _FSGETXATTR, bytes(_FSXATTR.size)))
            fcntl.ioctl(opened, _FSSETXATTR, _FSXATTR.pack(flags | _INHERIT, extent, extents, project, cow))
        except BaseException:
            self.release(project)
            raise
        finally:
            os.close(opened)
        return project

    def use(self, project: int) -> Use:
        """Returns a project's usage. Raises OSError."""
        try:
            quota = self._control(_GET, project, bytes(_DQBLK.size))
        except OSError as error:
            if error.errno == errno.ENOENT:  # XFS, for a project without usage
                return Use()
            raise
        _, _, taken, _, _, inodes, *_ = _DQBLK.unpack(quota)
        return Use(taken, inodes)

    def release(self, project: int) -> None:
        """Removes its limit after the last write: the kernel forgets the project with its last file."""
        self._control(_SET, project, _DQBLK.pack(0, 0, 0, 0, 0, 0, 0, 0, _LIMITS))

    def close(self) -> None:
        os.close(self._place)

    def _control(self, command: int, project: int, data: bytes) -> bytes:
        buffer = ctypes.create_string_buffer(data, len(data))
        asked = ctypes.c_uint((command << 8 | _PROJECTS) & 0xFFFFFFFF)
        if _libc.syscall(_QUOTACTL_FD, self._place, asked, ctypes.c_uint(project), buffer) < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"quotactl: {os.strerror(number)}")
        return buffer.raw


def _is_held(file: Path, user: int) -> bool:
    """Whether the kernel refuses a user more than the trial's limit."""
    with file.open("xb") as opened, suppress(subprocess.TimeoutExpired):
        subprocess.run(
            ["/bin/sh", "-c", f"head -c {4 * _TRIAL_BYTES} /dev/zero"],
            stdin=subprocess.DEVNULL,
            stdout=opened,
            stderr=subprocess.DEVNULL,
            user=user,
            group=user,
            extra_groups=[],
            cwd="/",
            timeout=_TRIAL_S,
            check=False,
        )
        return 0 < os.fstat(opened.fileno()).st_size <= _TRIAL_BYTES
    return False
