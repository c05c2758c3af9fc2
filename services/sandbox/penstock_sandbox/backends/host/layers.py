"""The writable layers of local sandboxes on the host's disk: their difference from the base, and their removal.

Purpose: an overlay's upper directory is owned by the sandbox's user, which may change it at any moment, so it is walked
by descriptor and no link in it is followed: the service may be root. It may be of any depth.

Invariants: whiteouts (character devices 0:0) are deletions; a directory marked opaque is a deletion followed by its
content. Further names of a file are links to its first, as far as MAX_KEPT allows to remember those. ``remove`` first
renames, so that a sandbox is gone at once whatever the size of its files.
"""

from __future__ import annotations

import errno
import io
import os
import posixpath
import secrets
import stat
import tarfile
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock_sandbox.domain.diffs import DEFAULT_BYTES, MAX_KEPT, NAME_COST, DiffWriter, too_large
from penstock_sandbox.domain.errno import Refused, file_error
from penstock_sandbox.guest.common import files, trees, walk

_OPAQUE = ("user.overlay.opaque", "trusted.overlay.opaque")
# Entries outside the requested paths count as well: an agent may have a million of them there.
_MOST_LOOKED_AT = 2_000_000
_ENTRIES_A_STEP = 1_000


class Collector(io.RawIOBase):
    """A write-only file whose content is taken out in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []
        self.size = 0

    def write(self, data: Any) -> int:
        """Accepts bytes."""
        self._parts.append(bytes(data))
        self.size += len(self._parts[-1])
        return len(self._parts[-1])

    def take(self) -> bytes:
        """Returns the bytes written since the last call."""
        data = b"".join(self._parts)
        self._parts.clear()
        self.size = 0
        return data


def diff(
    upper: Path, below: Sequence[str] = (), max_bytes: int = DEFAULT_BYTES
) -> Generator[bytes | list[str], None, None]:
    """Yields the layer as tar chunks (names relative to the root), then the deleted absolute paths.

    ``below``, ``max_bytes`` and errors are those of ``SandboxHandle.diff``. An empty chunk means that work goes on.
    """
    writer, links = DiffWriter(max_bytes), _Links()
    roots = [posixpath.normpath(path) for path in below] or ["/"]
    entries = walk.walk(str(upper), _MOST_LOOKED_AT, lambda path: _leads_to(path, roots), unlocks=os.geteuid() != 0)
    try:
        for number, (prefix, name, _, folder) in enumerate(entries):
            if number % _ENTRIES_A_STEP == 0:
                yield b""
            path = f"{prefix}/{name}"
            try:
                yield from _entry(writer, links, folder, name, path, roots)
            except FileNotFoundError:
                continue  # removed meanwhile
            except OSError as error:
                raise file_error(Refused(error.errno or errno.EIO, error.strerror or "cannot be read"), path) from error
    except walk.TooMuch as error:
        raise too_large(f"more than {_MOST_LOOKED_AT} entries, or too many directories, to search") from error
    finally:
        entries.close()
    yield from writer.end()


class _Links:
    """The first names of files that have several."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, int, int], str] = {}
        self._kept = 0

    def first(self, status: os.stat_result, name: str) -> str:
        """Returns the first name that was given for a file, empty if that is this one, or too many are kept."""
        if status.st_nlink == 1:
            return ""
        # With the time of its last change: a removed file's number may be another's by now.
        key = (status.st_dev, status.st_ino, status.st_ctime_ns)
        if key not in self._names and self._kept < MAX_KEPT:
            self._names[key] = name
            self._kept += len(name) + 4 * NAME_COST
            return ""
        return self._names.get(key, "")


def _entry(
    writer: DiffWriter, links: _Links, folder: int, name: str, path: str, roots: Sequence[str]
) -> Iterator[bytes]:
    status = os.lstat(name, dir_fd=folder)
    if not any(is_below(path, root) for root in roots):
        # A link or a file in a directory's place also deletes what was there.
        hit = [root for root in roots if is_below(root, path)]
        if hit and (not stat.S_ISDIR(status.st_mode) or _opaque(folder, name)):
            for root in hit:
                writer.delete(root)
    elif stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
        writer.delete(path)
    else:
        yield from _add(writer, links, folder, name, path, status)


def is_below(path: str, root: str) -> bool:
    """Whether an absolute path is ``root`` or below it; both in normal form."""
    return path == root or path.startswith(f"{root.rstrip('/')}/")


def _leads_to(path: str, roots: Sequence[str]) -> bool:
    return any(is_below(path, root) or is_below(root, path) for root in roots)


def _add(
    writer: DiffWriter, links: _Links, folder: int, name: str, path: str, status: os.stat_result
) -> Iterator[bytes]:
    member = tarfile.TarInfo(path[1:])
    member.mode = files.own_mode(folder, name, status)
    trees.set_time(member, status.st_mtime_ns)
    if stat.S_ISDIR(status.st_mode):
        member.type = tarfile.DIRTYPE
        if _opaque(folder, name):
            writer.delete(path)
        yield from writer.add(member)
    elif stat.S_ISLNK(status.st_mode):
        member.type = tarfile.SYMTYPE
        member.linkname = os.readlink(name, dir_fd=folder)
        yield from writer.add(member)
    elif not stat.S_ISREG(status.st_mode):
        yield from writer.add_other(path[1:])
    elif first := links.first(status, path[1:]):
        member.type, member.linkname = tarfile.LNKTYPE, first
        yield from writer.add(member)
    else:
        opened = _open(folder, name, os.O_NONBLOCK)
        try:
            found = os.fstat(opened)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.ESTALE, "it was replaced by another kind of file")
            member.size = found.st_size
            yield from writer.add(member, lambda most: os.read(opened, most))
        finally:
            os.close(opened)


def _open(folder: int, name: str, flags: int) -> int:
    """Opens for reading even without the owner's permission: a service that is not root is the owner."""
    flags |= os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=folder)
    except PermissionError:
        unlocked = files.unlocked(folder, name)
        if unlocked is None:
            raise
        try:
            return os.open(name, flags, dir_fd=folder)
        finally:
            unlocked.lock(folder, name)


def _opaque(folder: int, name: str) -> bool:
    opened = _open(folder, name, os.O_DIRECTORY)
    try:
        return any(key in _OPAQUE and os.getxattr(opened, key) == b"y" for key in os.listxattr(opened))
    finally:
        os.close(opened)


def size(folder: Path, most: int | None = None) -> int:
    """Returns the bytes of regular files below ``folder``; follows no links. ``most`` is that of ``walk.walk``."""
    total = 0
    for _, name, is_folder, descriptor in walk.walk(str(folder), most):
        if not is_folder:
            try:
                total += os.lstat(name, dir_fd=descriptor).st_size
            except FileNotFoundError:
                continue
    return total


def to_trash(folder: Path, trash: Path) -> Path | None:
    """Renames a directory out of the way; returns None if it does not exist."""
    target = trash / f"{folder.name}.{secrets.token_hex(4)}"
    try:
        folder.rename(target)
    except FileNotFoundError:
        return None
    return target


def remove(folder: Path) -> None:
    """Removes a tree, including directories without permissions (as overlay's own work directory), or a file; succeeds
    if it does not exist."""
    walk.remove(str(folder))
