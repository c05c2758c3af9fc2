"""Copies a sandbox's writable layer while the sandbox is frozen.

Purpose: keeps everything that overlayfs uses: owners, modes, times, extended attributes (opaque directories), hard
links, holes and whiteouts. Blocks are shared if the file system can (FICLONE).

Invariants: the tree is walked by descriptor and no link is followed, since an agent made these names and the service
may be root; for any depth names stay short, and few descriptors are open. A service that is not root owns all files,
and opens what is closed to their owner while it copies it, as others may that measure or read the tree meanwhile.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path

from penstock_sandbox.guest.common import files
from penstock_sandbox.guest.common.walk import Descent

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SOURCE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TARGET = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FICLONE = 0x40049409  # linux/fs.h
_CANNOT = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV, errno.ENOSYS)
_CHUNK = 8 * 1024 * 1024
# Limit of remembered files that may have several names, each counted with its overhead.
_MOST_LINKED = 32 * 1024 * 1024
_LINK_COST = 256
# Of a path that the kernel takes, in bytes.
_LONGEST_PATH = 4095


def copy(
    source: Path, target: Path, stopped: Callable[[], bool] = lambda: False, left_out: Collection[str] = ()
) -> int:
    """Copies the tree ``source`` to ``target``, which must not exist; returns the bytes of its files.

    Files with a name of ``left_out`` are not copied, whatever their directory. The owner may enter and change
    ``target`` itself, also if ``source`` is closed to it.

    Raises OSError: ECANCELED soon after ``stopped`` returns true, EFBIG for more files with several names than are
    remembered.
    """
    target.mkdir(mode=0o700)
    with ExitStack() as stack:
        if os.geteuid() != 0 and (unlocked := files.unlocked(None, str(source))) is not None:
            stack.callback(unlocked.lock, None, str(source))
        opened = Descent(os.open(source, _FOLDER))
        stack.callback(opened.close)
        made = Descent(os.open(target, _FOLDER))
        stack.callback(made.close)
        root = os.open(target, _FOLDER)
        stack.callback(os.close, root)
        copier = _Copier(opened, made, root, stopped, left_out)
        try:
            copier.copy()
        except files.Refused as refusal:
            raise OSError(refusal.errno, refusal.what) from refusal
        return copier.bytes


class _Copier:
    """Copies from ``source`` to ``target``, both at their top; ``root`` is a descriptor of the copy's root."""

    def __init__(
        self, source: Descent, target: Descent, root: int, stopped: Callable[[], bool], left_out: Collection[str]
    ) -> None:
        self._source = source
        self._target = target
        self._root = root
        self._stopped = stopped
        self._left_out = left_out
        self._unlocks = os.geteuid() != 0
        self.bytes = 0
        self._clones = True
        self._linked: dict[tuple[int, int], str] = {}
        self._linked_bytes = 0
        self._links_before: list[int] = []
        """For each directory on the path, how many files were remembered when it was entered."""
        self._path_bytes = 0
        self._path: str | None = None
        """Of the current directory, with a slash at its end; None if nobody has asked yet."""
        self._closed: list[tuple[str, int]] = []
        """Finished directories that get their mode last: their owner could not link what is in them."""

    def copy(self) -> None:
        """Copies the whole tree."""
        self._files()
        while True:
            folders = self._source.levels[-1].folders
            if folders:
                self._enter(folders.pop())
                self._files()
            elif len(self._source.levels) > 1:
                self._leave()
            else:
                break
        # Those inside others come first, while the others are open.
        for path, mode in self._closed:
            os.chmod(path, mode, dir_fd=self._root)
        status = os.fstat(self._source.here)
        _copy_all_but_mode(self._source.here, self._target.here, status)
        os.fchmod(self._target.here, stat.S_IMODE(status.st_mode) | 0o700)

    def _enter(self, name: str) -> None:
        self._source.enter(name, unlocks=self._unlocks)
        os.mkdir(name, 0o700, dir_fd=self._target.here)
        self._target.down(name)
        self._links_before.append(len(self._linked))
        self._path_bytes += len(os.fsencode(name)) + 1
        self._path = None

    def _leave(self) -> None:
        level, status = self._source.levels[-1], os.fstat(self._source.here)
        mode = level.unlocked.mode if level.unlocked is not None else stat.S_IMODE(status.st_mode)
        # Last, because writing into it has changed its times.
        _copy_all_but_mode(self._source.here, self._target.here, status)
        within = self._links_before.pop() < len(self._linked)
        late = self._unlocks and within and not mode & stat.S_IXUSR
        if late:
            self._closed.append((self._here(), mode))
            self._remember(self._path_bytes)
        if not (self._source.leave() and self._target.up()):
            raise OSError(errno.ESTALE, "a directory was moved while it was copied")
        if not late:
            os.chmod(level.name, mode, dir_fd=self._target.here)
        self._path_bytes -= len(os.fsencode(level.name)) + 1
        self._path = None

    def _here(self) -> str:
        if self._path is None:
            self._path = "".join(f"{level.name}/" for level in self._target.levels[1:])
        return self._path

    def _files(self) -> None:
        """Copies the files of the current directory, and notes its subdirectories."""
        folders = self._source.levels[-1].folders
        with os.scandir(self._source.here) as entries:
            for entry in entries:
                if not self._copied(entry.name):
                    folders.append(entry.name)

    def _copied(self, name: str) -> bool:
        """Copies an entry; returns False for a directory, which is not copied here."""
        self._go_on()
        source, target = self._source.here, self._target.here
        status = os.stat(name, dir_fd=source, follow_symlinks=False)
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFDIR:
            return False
        if kind == stat.S_IFREG:
            if name not in self._left_out:
                self._file(name, status)
        elif kind == stat.S_IFLNK:
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
            _own(name, target, status)
            os.utime(name, ns=_times(status), dir_fd=target, follow_symlinks=False)
        elif kind in (stat.S_IFIFO, stat.S_IFSOCK) or (kind == stat.S_IFCHR and status.st_rdev == 0):
            # The last is a whiteout: a deletion in overlayfs.
            os.mknod(name, status.st_mode, 0, dir_fd=target)
            _own(name, target, status)
            os.utime(name, ns=_times(status), dir_fd=target, follow_symlinks=False)
        return True

    def _go_on(self) -> None:
        if self._stopped():
            raise OSError(errno.ECANCELED, "all callers of the copy have cancelled")

    def _file(self, name: str, status: os.stat_result) -> None:
        if status.st_nlink > 1 and self._link(name, status):
            return
        with ExitStack() as stack:
            folder = self._source.here
            mode = stat.S_IMODE(status.st_mode)
            # Closed to its owner, or as what another thread has opened for a while.
            closed = self._unlocks and (not mode & stat.S_IRUSR or mode & stat.S_IRWXU == stat.S_IRWXU)
            if closed and (unlocked := files.unlocked(folder, name)) is not None:
                stack.callback(unlocked.lock, folder, name)
                mode = unlocked.mode
            source = os.open(name, _SOURCE, dir_fd=folder)
            stack.callback(os.close, source)
            target = os.open(name, _TARGET, 0o600, dir_fd=self._target.here)
            stack.callback(os.close, target)
            self._content(source, target, status.st_size)
            _copy_all_but_mode(source, target, status)
            os.fchmod(target, mode)
        self.bytes += status.st_size

    def _link(self, name: str, status: os.stat_result) -> bool:
        key = (status.st_dev, status.st_ino)
        first = self._linked.get(key)
        if first is None:
            # At a depth that no path can say, each name becomes a file of its own.
            if self._path_bytes + len(os.fsencode(name)) <= _LONGEST_PATH:
                self._linked[key] = self._here() + name
                self._remember(len(self._linked[key]))
            return False
        os.link(first, name, src_dir_fd=self._root, dst_dir_fd=self._target.here, follow_symlinks=False)
        return True

    def _remember(self, size: int) -> None:
        """Counts what is kept to the end. Raises OSError (EFBIG)."""
        self._linked_bytes += _LINK_COST + size
        if self._linked_bytes > _MOST_LINKED:
            raise OSError(errno.EFBIG, "too many files have hard links")

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


def _copy_all_but_mode(source: int, target: int, status: os.stat_result) -> None:
    """The mode is set after this: chown clears the set-user-id bit, and a closed target takes no attributes."""
    if os.geteuid() == 0:
        os.fchown(target, status.st_uid, status.st_gid)
    for key in os.listxattr(source):
        if not key.startswith(("security.", "system.")):
            os.setxattr(target, key, os.getxattr(source, key))
    os.utime(target, ns=_times(status))


def _own(name: str, folder: int, status: os.stat_result) -> None:
    if os.geteuid() == 0:
        os.chown(name, status.st_uid, status.st_gid, dir_fd=folder, follow_symlinks=False)


def _times(status: os.stat_result) -> tuple[int, int]:
    return status.st_atime_ns, status.st_mtime_ns
