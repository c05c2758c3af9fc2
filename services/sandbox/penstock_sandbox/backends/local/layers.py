"""The writable layers of local sandboxes on the host's disk: how they differ from their base, and how they go away.

Purpose: an overlay's upper directory is owned by the sandbox's user and may be changed by it at any moment, so it is
walked by descriptor and no link in it is ever followed: the service may be root. It may be of any depth.

Invariants: whiteouts (character devices 0:0) are deletions; a directory marked opaque is a deletion followed by what it
holds. ``remove`` first renames, so that a sandbox is gone at once whatever the size of its files.
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

from penstock_sandbox.backends.diffs import DEFAULT_BYTES, DiffWriter, too_large
from penstock_sandbox.backends.refusals import Refused, file_error
from penstock_sandbox.spawner import descents

_OPAQUE = ("user.overlay.opaque", "trusted.overlay.opaque")
# Those that are not told are looked at as well: an agent may have a million where nobody asked for them.
_MOST_LOOKED_AT = 2_000_000
_ENTRIES_A_STEP = 1_000


class Collector(io.RawIOBase):
    """A write-only file that hands out what was written."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []
        self.size = 0

    def write(self, data: Any) -> int:
        """Take bytes."""
        self._parts.append(bytes(data))
        self.size += len(self._parts[-1])
        return len(self._parts[-1])

    def take(self) -> bytes:
        """Hand out what came since the last time."""
        data = b"".join(self._parts)
        self._parts.clear()
        self.size = 0
        return data


def diff(
    upper: Path, below: Sequence[str] = (), max_bytes: int = DEFAULT_BYTES
) -> Generator[bytes | list[str], None, None]:
    """The layer as tar chunks (names relative to the root), then the deleted absolute paths.

    ``below`` and ``max_bytes``: as in ``SandboxHandle.diff``, as are the errors. An empty chunk says that it goes on.
    """
    writer = DiffWriter(max_bytes)
    roots = [posixpath.normpath(path) for path in below] or ["/"]
    entries = descents.walk(str(upper), _MOST_LOOKED_AT, lambda path: _leads_to(path, roots))
    try:
        for number, (prefix, name, _, folder) in enumerate(entries):
            if number % _ENTRIES_A_STEP == 0:
                yield b""
            path = f"{prefix}/{name}"
            try:
                yield from _tell(writer, folder, name, path, roots)
            except FileNotFoundError:
                continue  # removed meanwhile
            except OSError as error:
                raise file_error(Refused(error.errno or errno.EIO, error.strerror or "cannot be read"), path) from error
    except descents.TooMuch as error:
        raise too_large(
            f"more than {_MOST_LOOKED_AT} entries, or too many directories, were to be looked at"
        ) from error
    finally:
        entries.close()
    yield from writer.end()


def _tell(writer: DiffWriter, folder: int, name: str, path: str, roots: Sequence[str]) -> Iterator[bytes]:
    status = os.lstat(name, dir_fd=folder)
    if not any(is_below(path, root) for root in roots):
        # A link or a file in a directory's place is one deletion of what was there, too.
        hit = [root for root in roots if is_below(root, path)]
        if hit and (not stat.S_ISDIR(status.st_mode) or _opaque(folder, name, status)):
            for root in hit:
                writer.delete(root)
    elif stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
        writer.delete(path)
    else:
        yield from _add(writer, folder, name, path, status)


def is_below(path: str, root: str) -> bool:
    """Whether an absolute path is another one or below it; both in their normal form."""
    return path == root or path.startswith(f"{root.rstrip('/')}/")


def _leads_to(path: str, roots: Sequence[str]) -> bool:
    return any(is_below(path, root) or is_below(root, path) for root in roots)


def _add(writer: DiffWriter, folder: int, name: str, path: str, status: os.stat_result) -> Iterator[bytes]:
    member = tarfile.TarInfo(path[1:])
    member.mode = stat.S_IMODE(status.st_mode)
    member.mtime = int(status.st_mtime)
    if stat.S_ISDIR(status.st_mode):
        member.type = tarfile.DIRTYPE
        if _opaque(folder, name, status):
            writer.delete(path)
        yield from writer.add(member)
    elif stat.S_ISLNK(status.st_mode):
        member.type = tarfile.SYMTYPE
        member.linkname = os.readlink(name, dir_fd=folder)
        yield from writer.add(member)
    elif stat.S_ISREG(status.st_mode):
        opened = _open(folder, name, os.O_NONBLOCK, status)
        try:
            found = os.fstat(opened)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.ESTALE, "another kind of file took its place")
            member.size = found.st_size
            yield from writer.add(member, lambda most: os.read(opened, most))
        finally:
            os.close(opened)


def _open(folder: int, name: str, flags: int, status: os.stat_result) -> int:
    """Open for reading, its owner's permission or not: a service that is not root is that owner."""
    flags |= os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=folder)
    except PermissionError:
        found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            # By descriptor: whoever puts a link in its place meanwhile changes nothing else's mode.
            os.chmod(f"/proc/self/fd/{found}", stat.S_IMODE(status.st_mode) | stat.S_IRUSR | stat.S_IXUSR)
        finally:
            os.close(found)
        return os.open(name, flags, dir_fd=folder)


def _opaque(folder: int, name: str, status: os.stat_result) -> bool:
    opened = _open(folder, name, os.O_DIRECTORY, status)
    try:
        return any(key in _OPAQUE and os.getxattr(opened, key) == b"y" for key in os.listxattr(opened))
    finally:
        os.close(opened)


def size(folder: Path, most: int | None = None) -> int:
    """Bytes of the regular files below ``folder``; links are not followed. ``most``: as in ``descents.walk``."""
    total = 0
    for _, name, is_folder, descriptor in descents.walk(str(folder), most):
        if not is_folder:
            try:
                total += os.lstat(name, dir_fd=descriptor).st_size
            except FileNotFoundError:
                continue
    return total


def to_trash(folder: Path, trash: Path) -> Path | None:
    """Rename a directory out of the way; None when it does not exist."""
    target = trash / f"{folder.name}.{secrets.token_hex(4)}"
    try:
        folder.rename(target)
    except FileNotFoundError:
        return None
    return target


def remove(folder: Path) -> None:
    """Remove a tree that may hold directories without permissions (overlay's own work directory has none), or a file;
    nothing there is fine."""
    descents.remove(str(folder))
