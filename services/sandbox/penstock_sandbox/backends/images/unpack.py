"""Unpacks one layer of an image, in a process of its own: what a layer holds is whatever its author wanted.

Purpose: a layer's tar becomes a directory that overlayfs takes as it is. Deletions (``.wh.NAME``) become whiteouts,
and directories that hide those below (``.wh..wh..opq``) become opaque. Run by ``store`` as
``python -m penstock_sandbox.backends.images.unpack``; without the rights of root, with bounded memory.

Invariants
- Nothing outside of the directory is read or written: each path is walked from there by descriptor and no link is
  followed; a path that leads through one is refused, and so is ``..``.
- Bytes and entries are counted before they are written, whatever the headers say.
- Devices are left out. No set-user-id or set-group-id bit, owner or extended attribute is taken from the layer.
- A layer is complete or refused; the caller discards what a refusal leaves.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import os
import resource
import stat
import sys
import tarfile
import zlib
from dataclasses import dataclass
from typing import IO, Any, Final

import zstandard

from penstock_sandbox.guest.common import syscalls, walk

WHITEOUT: Final = ".wh."
_OPAQUE_MARK = ".wh..wh..opq"
_OTHER_MARKS = ".wh..wh."
OPAQUE: Final = "user.overlay.opaque"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MODES = 0o1777
_CHUNK = 1024 * 1024
_LONGEST_PATH = 4000
_MEMORY = 2 * 1024**3
_GZIP, _ZSTD, _XZ = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zX"
_ZSTD_SKIPPED = b"\x2a\x4d\x18"
"""The end of a frame's magic that holds notes, not data (RFC 8878, 3.1.2); its first byte is 0x50 to 0x5f."""
_ZSTD_WINDOW = 128 * 1024**2
"""The most memory that a frame may ask for; the program `zstd` takes no more unless a flag allows it."""

UNSAFE: Final = "unsafe"
LARGE: Final = "large"
DAMAGED: Final = "damaged"


class Refused(Exception):
    """A layer that is not unpacked; ``kind`` is UNSAFE, LARGE or DAMAGED."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A layer's digest (of its uncompressed tar), the bytes that its files take, and its entries."""

    diff_id: str
    size: int
    entries: int


class _Stream:
    """The uncompressed tar: hashed and counted as it is read."""

    def __init__(self, source: IO[bytes] | gzip.GzipFile | lzma.LZMAFile, most: int) -> None:
        self._source = source
        self._left = most
        self._most = most
        self.digest = hashlib.sha256()

    def read(self, length: int) -> bytes:
        data = self._source.read(min(length, _CHUNK))
        self._left -= len(data)
        if self._left < 0:
            raise Refused(LARGE, f"a layer unpacks to more than {self._most} bytes")
        self.digest.update(data)
        return data


class _Tree:
    """The directory that a layer becomes; ``root`` is its descriptor. It has at most ``most`` entries: its members, and
    the directories that no member is but a path leads through."""

    def __init__(self, root: int, most: int) -> None:
        self._root = root
        self._most = most
        self.entries = 0
        self._folders: dict[tuple[str, ...], tuple[int, int]] = {}
        """Modes and times of directories: set at the end, when nothing more is written into them."""
        self._near: tuple[tuple[str, ...], int] = ((), os.dup(root))

    def close(self) -> None:
        os.close(self._near[1])

    def count(self) -> None:
        """Counts an entry before it is made. Raises Refused."""
        self.entries += 1
        if self.entries > self._most:
            raise Refused(LARGE, f"a layer has more than {self._most} entries")

    def parent(self, parts: tuple[str, ...], *, make: bool = True) -> int:
        """Returns a descriptor, valid until the next call, of the directory ``parts``; with ``make`` it is created."""
        if self._near[0] == parts:
            return self._near[1]
        here = os.dup(self._root)
        for part in parts:
            try:
                inner = self._enter(here, part, make)
            except OSError as error:
                raise Refused(UNSAFE, f"a path leads through {part!r}, which is no directory") from error
            finally:
                os.close(here)
            here = inner
        os.close(self._near[1])
        self._near = (parts, here)
        return here

    def _enter(self, here: int, part: str, make: bool) -> int:
        try:
            return os.open(part, _FOLDER, dir_fd=here)
        except FileNotFoundError:
            if not make:
                raise
            self.count()
            os.mkdir(part, 0o755, dir_fd=here)
            return os.open(part, _FOLDER, dir_fd=here)

    def forget(self) -> None:
        """Drops the descriptor of the last directory, which may be removed."""
        os.close(self._near[1])
        self._near = ((), os.dup(self._root))

    def clear(self, parent: int, name: str, *, for_folder: bool) -> bool:
        """Removes what has a name, but keeps a directory for a directory; returns whether it was deleted below."""
        try:
            found = os.lstat(name, dir_fd=parent)
        except FileNotFoundError:
            return False
        if not stat.S_ISDIR(found.st_mode):
            os.unlink(name, dir_fd=parent)
            return stat.S_ISCHR(found.st_mode)
        if not for_folder:
            walk.remove(name, parent)
        return False

    def folder(self, parts: tuple[str, ...], member: tarfile.TarInfo) -> None:
        if parts:
            parent, name = self.parent(parts[:-1]), parts[-1]
            hides = self.clear(parent, name, for_folder=True)
            try:
                os.mkdir(name, 0o755, dir_fd=parent)
            except FileExistsError:
                pass
            if hides:
                self.hide_below(parts)
        self._folders[parts] = (member.mode & _MODES, _time(member))

    def hide_below(self, parts: tuple[str, ...]) -> None:
        """Makes a directory opaque."""
        os.setxattr(self.parent(parts), OPAQUE, b"y")

    def whiteout(self, parent: int, parts: tuple[str, ...], name: str) -> None:
        """Deletes a name of the layers below. What this layer itself has there stays, whatever came first."""
        try:
            found = os.lstat(name, dir_fd=parent)
        except FileNotFoundError:
            os.mknod(name, stat.S_IFCHR | 0o600, 0, dir_fd=parent)
            return
        if stat.S_ISDIR(found.st_mode):
            self.hide_below((*parts, name))

    def finish(self) -> None:
        """Gives directories their modes and times, the inner ones first; the root is open to all."""
        self.forget()
        for parts, (mode, time) in sorted(self._folders.items(), key=lambda item: len(item[0]), reverse=True):
            if parts:
                try:
                    here = self.parent(parts, make=False)
                except Refused:
                    continue  # another entry came in its place
                os.fchmod(here, mode)
                os.utime(here, ns=(time, time))
                self.forget()
            else:
                os.utime(self._root, ns=(time, time))
        os.fchmod(self._root, 0o755)


def unpack(blob: IO[bytes], root: int, most_bytes: int, most_entries: int) -> Unpacked:
    """Unpacks a layer (gzip, xz, zstd or not compressed) into the empty directory ``root``. Raises Refused, OSError."""
    stream = _Stream(_plain(blob), most_bytes)
    tree = _Tree(root, most_entries)
    size = 0
    try:
        # The reader asks for no more than `read`.
        with tarfile.open(fileobj=stream, mode="r|", bufsize=_CHUNK, errorlevel=2) as archive:  # type: ignore[call-overload]
            for member in archive:
                tree.count()
                if member.size < 0:  # an extended header may say so
                    raise Refused(DAMAGED, f"{member.name!r} has a negative size")
                size += member.size if member.isreg() else 0
                if size > most_bytes:
                    raise Refused(LARGE, f"a layer unpacks to more than {most_bytes} bytes")
                _place(tree, archive, member)
                archive.members = []  # else it remembers each
        while stream.read(_CHUNK):
            pass  # its digest covers what follows the archive's end
        tree.finish()
    except (
        tarfile.TarError,
        EOFError,
        gzip.BadGzipFile,
        zlib.error,
        lzma.LZMAError,
        zstandard.ZstdError,
        ValueError,
    ) as error:
        raise Refused(DAMAGED, f"a layer cannot be read: {error}") from error
    except (MemoryError, RecursionError) as error:
        raise Refused(LARGE, "a layer's headers need too much memory") from error
    finally:
        tree.close()
    return Unpacked(f"sha256:{stream.digest.hexdigest()}", size, tree.entries)


def _plain(blob: IO[bytes]) -> IO[bytes] | gzip.GzipFile | lzma.LZMAFile | zstandard.ZstdDecompressionReader:
    start = blob.read(4)
    blob.seek(0)
    if start[:2] == _GZIP:
        return gzip.GzipFile(fileobj=blob)
    if start == _XZ:
        return lzma.LZMAFile(blob)
    if start == _ZSTD or (start[1:] == _ZSTD_SKIPPED and 0x50 <= start[0] <= 0x5F):
        # A layer may be many frames, as those that can be read in parts are.
        return zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).stream_reader(blob, read_across_frames=True)
    return blob


def _place(tree: _Tree, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    parts = _parts(member.name)
    if not parts:
        if member.isdir():
            tree.folder(parts, member)
        return
    name = parts[-1]
    if any(part.startswith(WHITEOUT) for part in parts[:-1]) or name.startswith(WHITEOUT):
        _mark(tree, parts)
        return
    if member.isdir():
        tree.folder(parts, member)
        return
    if not (member.isreg() or member.issym() or member.islnk() or member.isfifo()):
        return  # a device
    source = _linked(tree, member) if member.islnk() else None
    parent = tree.parent(parts[:-1])
    try:
        if source is not None:
            _link(tree, source, parent, name)
            return
        tree.clear(parent, name, for_folder=False)
        if member.isreg():
            _write(archive, member, parent, name)
        elif member.issym():
            os.symlink(member.linkname, name, dir_fd=parent)
        else:
            os.mkfifo(name, member.mode & _MODES, dir_fd=parent)
        os.utime(name, ns=(_time(member),) * 2, dir_fd=parent, follow_symlinks=False)
    finally:
        if source is not None:
            os.close(source[0])


def _mark(tree: _Tree, parts: tuple[str, ...]) -> None:
    if any(part.startswith(_OTHER_MARKS) for part in parts[:-1]):
        return  # a storage driver's own notes
    if any(part.startswith(WHITEOUT) for part in parts[:-1]):
        raise Refused(UNSAFE, f"a path leads through the deletion {'/'.join(parts)!r}")
    name = parts[-1]
    if name == _OPAQUE_MARK:
        tree.hide_below(parts[:-1])
    elif not name.startswith(_OTHER_MARKS):
        deleted = name.removeprefix(WHITEOUT)
        if deleted in ("", ".", ".."):
            raise Refused(UNSAFE, f"{name!r} deletes no name")
        tree.whiteout(tree.parent(parts[:-1]), parts[:-1], deleted)


def _linked(tree: _Tree, member: tarfile.TarInfo) -> tuple[int, str]:
    """Returns the directory, as a descriptor of the caller's, and the name that a hard link leads to."""
    target = _parts(member.linkname)
    if not target:
        raise Refused(UNSAFE, f"{member.name!r} is a hard link to a directory")
    return os.dup(tree.parent(target[:-1], make=False)), target[-1]


def _link(tree: _Tree, source: tuple[int, str], parent: int, name: str) -> None:
    folder, target = source
    try:
        found = os.lstat(target, dir_fd=folder)
    except FileNotFoundError as error:
        raise Refused(DAMAGED, f"{name!r} is a hard link to {target!r}, which is not there") from error
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)):
        raise Refused(UNSAFE, f"{name!r} is a hard link to {target!r}, which is no file")
    try:
        there = os.lstat(name, dir_fd=parent)
    except FileNotFoundError:
        pass
    else:
        if (there.st_dev, there.st_ino) == (found.st_dev, found.st_ino):
            return
        tree.clear(parent, name, for_folder=False)
    os.link(target, name, src_dir_fd=folder, dst_dir_fd=parent, follow_symlinks=False)


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, parent: int, name: str) -> None:
    content = archive.extractfile(member)
    assert content is not None
    left = member.size
    with open(os.open(name, _FILE, 0o600, dir_fd=parent), "wb", buffering=0) as file:
        while piece := content.read(_CHUNK):
            left -= len(piece)
            if left < 0:  # the holes of a sparse file are in no header that was counted
                raise Refused(DAMAGED, f"{member.name!r} is longer than its size")
            written = file.write(piece)
            while written < len(piece):
                written += file.write(piece[written:])
        os.fchmod(file.fileno(), member.mode & _MODES)


def _parts(name: str) -> tuple[str, ...]:
    if len(os.fsencode(name)) > _LONGEST_PATH:
        raise Refused(UNSAFE, "a path is longer than 4,000 bytes")
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts:
        raise Refused(UNSAFE, f"the path {name!r} leads out of the layer")
    return parts


def _time(member: tarfile.TarInfo) -> int:
    # What the kernel takes for each file system.
    return int(max(0.0, min(float(member.mtime), 2.0**33)) * 1e9)


def main() -> None:
    """Unpacks standard input into the directory whose descriptor is the first argument; prints the result as JSON.

    Arguments: descriptor, user to become (or -1), most bytes, most entries.
    """
    root, user, most_bytes, most_entries = map(int, sys.argv[1:5])
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if user >= 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    syscalls.die_with_parent(9)
    syscalls.set_no_new_privs()
    os.umask(0)
    answer: dict[str, Any]
    try:
        done = unpack(sys.stdin.buffer, root, most_bytes, most_entries)
        answer = {"diff_id": done.diff_id, "size": done.size, "entries": done.entries}
    except Refused as error:
        answer = {"kind": error.kind, "what": str(error)}
    except OSError as error:
        answer = {"errno": error.errno, "what": str(error)}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
