"""Copies a sandbox's writable layer while the sandbox is frozen.

Purpose: keeps everything that overlayfs uses: owners, modes, times, extended attributes (opaque directories), hard
links, holes and whiteouts. Blocks are shared if the file system can (FICLONE).

Invariants: the tree is walked by descriptor and no link is followed, since an agent made these names and the service
may be root; for any depth names stay short, and one pair of descriptors is open for each level.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SOURCE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TARGET = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FICLONE = 0x40049409  # linux/fs.h
_CANNOT = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV, errno.ENOSYS)
_CHUNK = 8 * 1024 * 1024
# Limit of remembered files that may have several names, each counted with its overhead.
_MOST_LINKED = 32 * 1024 * 1024
_LINK_COST = 256


@dataclass(slots=True)
class _Level:
    """A directory being copied: its descriptors, its path from the root, and the subdirectories still to be entered."""

    source: int
    target: int
    path: str
    folders: Iterator[str]


def copy(source: Path, target: Path, stopped: Callable[[], bool] = lambda: False) -> int:
    """Copies the tree ``source`` to ``target``, which must not exist; returns the bytes of its files.

    Raises OSError: ECANCELED soon after ``stopped`` returns true, EFBIG for more files with several names than are
    remembered.
    """
    target.mkdir(mode=0o700)
    levels: list[_Level] = []
    copier: _Copier | None = None
    try:
        opened = os.open(source, _FOLDER)
        made = os.open(target, _FOLDER)
        copier = _Copier(os.dup(made), stopped)
        levels.append(_Level(opened, made, "", iter(())))
        levels[0].folders = copier.files_of(levels[0])
        while levels:
            level = levels[-1]
            name = next(level.folders, None)
            if name is None:
                # Last, because writing into it has changed its times.
                _copy_metadata(level.source, level.target)
                _close(levels.pop())
                continue
            os.mkdir(name, 0o700, dir_fd=level.target)
            opened = os.open(name, _FOLDER, dir_fd=level.source)
            try:
                made = os.open(name, _FOLDER, dir_fd=level.target)
            except BaseException:
                os.close(opened)
                raise
            below = _Level(opened, made, f"{level.path}{name}/", iter(()))
            levels.append(below)
            below.folders = copier.files_of(below)
        return copier.bytes
    finally:
        for level in levels:
            _close(level)
        if copier is not None:
            os.close(copier.root)


def _close(level: _Level) -> None:
    os.close(level.source)
    os.close(level.target)


class _Copier:
    """Copies everything but directories; ``root`` is a descriptor of the copy's root."""

    def __init__(self, root: int, stopped: Callable[[], bool]) -> None:
        self.root = root
        self._stopped = stopped
        self.bytes = 0
        self._clones = True
        self._linked: dict[tuple[int, int], str] = {}
        self._linked_bytes = 0

    def files_of(self, level: _Level) -> Iterator[str]:
        """Copies the files of a directory; yields the names of its subdirectories."""
        with os.scandir(level.source) as names:
            return iter([entry.name for entry in names if not self._copied(level, entry.name)])

    def _copied(self, level: _Level, name: str) -> bool:
        """Copies an entry; returns False for a directory, which is not copied here."""
        self._go_on()
        status = os.stat(name, dir_fd=level.source, follow_symlinks=False)
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFDIR:
            return False
        if kind == stat.S_IFREG:
            self._file(level, name, status)
        elif kind == stat.S_IFLNK:
            os.symlink(os.readlink(name, dir_fd=level.source), name, dir_fd=level.target)
            _own(name, level.target, status)
            os.utime(name, ns=_times(status), dir_fd=level.target, follow_symlinks=False)
        elif kind in (stat.S_IFIFO, stat.S_IFSOCK) or (kind == stat.S_IFCHR and status.st_rdev == 0):
            # The last is a whiteout: a deletion in overlayfs.
            os.mknod(name, status.st_mode, 0, dir_fd=level.target)
            _own(name, level.target, status)
            os.utime(name, ns=_times(status), dir_fd=level.target, follow_symlinks=False)
        return True

    def _go_on(self) -> None:
        if self._stopped():
            raise OSError(errno.ECANCELED, "all callers of the copy have cancelled")

    def _file(self, level: _Level, name: str, status: os.stat_result) -> None:
        if status.st_nlink > 1 and self._link(level, name, status):
            return
        source = os.open(name, _SOURCE, dir_fd=level.source)
        try:
            target = os.open(name, _TARGET, 0o600, dir_fd=level.target)
            try:
                self._content(source, target, status.st_size)
                _copy_metadata(source, target)
            finally:
                os.close(target)
        finally:
            os.close(source)
        self.bytes += status.st_size

    def _link(self, level: _Level, name: str, status: os.stat_result) -> bool:
        path = level.path + name
        first = self._linked.setdefault((status.st_dev, status.st_ino), path)
        if first == path:
            self._linked_bytes += _LINK_COST + len(path)
            if self._linked_bytes > _MOST_LINKED:
                raise OSError(errno.EFBIG, "too many files have hard links")
            return False
        try:
            os.link(first, name, src_dir_fd=self.root, dst_dir_fd=level.target, follow_symlinks=False)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            return False  # at this depth it becomes a copy of its own
        return True

    def _content(self, source: int, target: int, size: int) -> None:
        if self._clones:
            try:
                fcntl.ioctl(target, _FICLONE, source)
            except OSError as error:
                if error.errno not in _CANNOT:
                    raise
                self._clones = False
            else:
                return
        os.truncate(target, size)
        position = 0
        while position < size:
            try:
                start = os.lseek(source, position, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                return  # the rest is a hole
            position = min(size, os.lseek(source, start, os.SEEK_HOLE))
            while start < position:
                self._go_on()
                moved = os.copy_file_range(source, target, min(_CHUNK, position - start), start, start)
                if not moved:
                    return
                start += moved


def _copy_metadata(source: int, target: int) -> None:
    status = os.fstat(source)
    if os.geteuid() == 0:
        os.fchown(target, status.st_uid, status.st_gid)
    for key in os.listxattr(source):
        if not key.startswith(("security.", "system.")):
            os.setxattr(target, key, os.getxattr(source, key))
    # After the owner: chown clears the set-user-id bit.
    os.fchmod(target, stat.S_IMODE(status.st_mode))
    os.utime(target, ns=_times(status))


def _own(name: str, folder: int, status: os.stat_result) -> None:
    if os.geteuid() == 0:
        os.chown(name, status.st_uid, status.st_gid, dir_fd=folder, follow_symlinks=False)


def _times(status: os.stat_result) -> tuple[int, int]:
    return status.st_atime_ns, status.st_mtime_ns
