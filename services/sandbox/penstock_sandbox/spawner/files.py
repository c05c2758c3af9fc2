"""File operations inside a sandbox's mount namespace, with the sandbox user's rights.

Purpose: doors (of local sandboxes) and attendants (of all others, where this module travels as part of a program for
Python 3.8) do them alike. Single-file operations open the file and answer its descriptor, through which its bytes go;
operations over a tree run as jobs, in a child of their own, and stream through a pipe.

Invariants
- Paths are absolute. A write goes to a fresh file in the target's directory and is renamed over the target, so nobody
  sees half a file. No directory on the way may be a symbolic link: what is written lands where it was meant to.
- Descriptors are opened without blocking and only regular files are handed out, so a planted FIFO stalls nobody.
- A tree is unpacked without following a link, and holds only directories, regular files and links that stay inside.
- No name service is asked for the names of owners: its libraries would come from a root that an agent wrote to.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import tarfile
from typing import Any, BinaryIO, Callable, Dict, Iterator, List, Tuple

Message = Dict[str, Any]
Reply = Tuple[Message, List[int]]

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_CHUNK = 256 * 1024
_SMALL_TREE = 64 * 1024
# What tarfile raises for an archive that is none: its own errors, and those of numbers and names that it cannot read.
_DAMAGED = (tarfile.TarError, ValueError, LookupError, OverflowError)


class Refused(Exception):
    """An operation that cannot be done: ``errno`` classifies it, ``what`` says it."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(what)
        self.errno = number
        self.what = what


def open_read(request: Message) -> Reply:
    """Open a regular file for reading; the last component's link is followed only when asked."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    if not request["follow"]:
        flags |= os.O_NOFOLLOW
    try:
        descriptor = os.open(request["path"], flags)
    except OSError as error:
        if error.errno == errno.ELOOP and not request["follow"]:
            raise Refused(errno.EISDIR, "a symbolic link") from error
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise Refused(errno.EISDIR, "not a regular file")
    return _describe(status), [descriptor]


def open_write(request: Message) -> Reply:
    """Open a fresh file beside ``path`` for writing; ``commit`` renames it over ``path``, ``discard`` removes it."""
    folder, name = _parent(request["path"], create=True)
    try:
        try:
            if stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
                raise Refused(errno.EISDIR, "the path is a directory")
        except FileNotFoundError:
            pass
        # By bytes: a name may be 255 of them, and the suffix needs 26.
        stem = os.fsdecode(os.fsencode(name)[:200])
        partial = f".{stem}.{os.urandom(8).hex()}.partial"
        descriptor = os.open(
            partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder
        )
        # The directory's descriptor goes along and comes back with commit: a renamed parent cannot redirect the rename.
        return {"partial": partial, "name": name}, [descriptor, os.dup(folder)]
    finally:
        os.close(folder)


def commit(request: Message, descriptors: list[int]) -> Reply:
    """Rename what ``open_write`` opened over its target: descriptors are the file's and its directory's."""
    file, folder = descriptors
    os.fchmod(file, request["mode"])
    os.rename(request["partial"], request["name"], src_dir_fd=folder, dst_dir_fd=folder)
    expected, found = os.fstat(file), os.lstat(request["name"], dir_fd=folder)
    if (expected.st_dev, expected.st_ino) != (found.st_dev, found.st_ino):
        raise Refused(errno.ESTALE, "another process replaced the file while it was being written")
    return _describe(found), []


def discard(request: Message, descriptors: list[int]) -> Reply:
    """Remove what ``open_write`` opened."""
    os.unlink(request["partial"], dir_fd=descriptors[1])
    return {}, []


def stat_path(request: Message) -> Reply:
    """Describe a path; a link is described itself."""
    path = request["path"]
    status = os.lstat(path)
    described = _describe(status)
    if stat.S_ISLNK(status.st_mode):
        described["target"] = os.readlink(path)
    return described, []


def list_directory(request: Message) -> Reply:
    """List a directory's entries by name, from after ``after``, ``limit`` at most."""
    with os.scandir(request["path"]) as scan:
        names = sorted(entry.name for entry in scan)
    after: str = request["after"]
    wanted = [name for name in names if name > after] if after else names
    page = wanted[: request["limit"]]
    entries = []
    for name in page:
        path = os.path.join(request["path"], name)
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            continue
        described = _describe(status)
        described["name"] = name
        if stat.S_ISLNK(status.st_mode):
            described["target"] = os.readlink(path)
        entries.append(described)
    return {"entries": entries, "more": len(wanted) > len(page)}, []


def make_directory(request: Message) -> Reply:
    """Make a directory and its parents; one that exists is fine."""
    folder, name = _parent(request["path"], create=True)
    try:
        try:
            os.mkdir(name, 0o700, dir_fd=folder)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
                raise
            return {}, []
        made = _below(folder, name)
        try:
            os.fchmod(made, request["mode"])
        finally:
            os.close(made)
    finally:
        os.close(folder)
    return {}, []


OPERATIONS: dict[str, Callable[[Message], Reply]] = {
    "open_read": open_read,
    "open_write": open_write,
    "stat": stat_path,
    "list": list_directory,
    "mkdir": make_directory,
}
OPERATIONS_ON_DESCRIPTORS: dict[str, Callable[[Message, list[int]], Reply]] = {
    "commit": commit,
    "discard": discard,
}


def is_small(request: Message, descriptors: list[int]) -> bool:
    """Whether a job is to unpack a small archive that grows into little; one that is damaged is not."""
    if request["job"] != "write_tree" or os.fstat(descriptors[1]).st_size > _SMALL_TREE:
        return False
    try:
        with os.fdopen(descriptors[1], "rb", closefd=False) as source:
            with tarfile.open(fileobj=source, mode="r:") as archive:
                return sum(member.size for member in archive) <= _SMALL_TREE
    except (*_DAMAGED, OSError):
        return False


def run_job(request: Message, descriptors: list[int]) -> None:
    """Run a tree operation and write its result, a JSON object, to ``descriptors[0]``."""

    try:
        result = _JOBS[request["job"]](request, descriptors)
    except Refused as refusal:
        result = {"errno": refusal.errno, "what": refusal.what}
    except _DAMAGED as error:
        result = {"errno": errno.EBADMSG, "what": f"not a readable tar archive: {error}"}
    except OSError as error:
        result = {"errno": error.errno or errno.EIO, "what": f"{error.strerror}: {error.filename or ''}"}
    os.write(descriptors[0], json.dumps(result).encode())


def _remove(request: Message, _: list[int]) -> Message:
    path = request["path"]
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return {}
    if stat.S_ISDIR(status.st_mode):
        if request["recursive"]:
            shutil.rmtree(path)
        else:
            os.rmdir(path)
    else:
        os.unlink(path)
    return {}


def _read_tree(request: Message, descriptors: list[int]) -> Message:
    root: str = request["path"]
    entries, skipped = 0, 0
    room: int = request["max_bytes"]
    with os.fdopen(descriptors[1], "wb", closefd=False, buffering=_CHUNK) as sink:
        with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_CHUNK) as archive:
            for path, name in _walk(root):
                status = os.lstat(path)
                if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) or stat.S_ISLNK(status.st_mode)):
                    skipped += 1
                    continue
                room -= status.st_size
                if room < 0:
                    raise Refused(errno.EFBIG, f"more than {request['max_bytes']} bytes")
                _add(archive, path, name, status)
                entries += 1
    return {"entries": entries, "skipped": skipped}


def _add(archive: tarfile.TarFile, path: str, name: str, status: os.stat_result) -> None:
    member = tarfile.TarInfo(name)
    member.mode = stat.S_IMODE(status.st_mode)
    member.uid, member.gid = status.st_uid, status.st_gid
    member.mtime = status.st_mtime
    if stat.S_ISDIR(status.st_mode):
        member.type = tarfile.DIRTYPE
        archive.addfile(member)
    elif stat.S_ISLNK(status.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)
        archive.addfile(member)
    else:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as source:
            member.size = os.fstat(source.fileno()).st_size
            archive.addfile(member, source)


def _walk(root: str) -> Iterator[tuple[str, str]]:
    if not stat.S_ISDIR(os.lstat(root).st_mode):
        yield root, os.path.basename(root)
        return
    pending = [(root, "")]
    while pending:
        folder, prefix = pending.pop()
        with os.scandir(folder) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
        for entry in entries:
            name = f"{prefix}{entry.name}"
            yield entry.path, name
            if entry.is_dir(follow_symlinks=False):
                pending.append((entry.path, f"{name}/"))


def _write_tree(request: Message, descriptors: list[int]) -> Message:
    """Unpack the tar in the file ``descriptors[1]``: once through to check every member, then again to write."""
    with os.fdopen(descriptors[1], "rb", closefd=False, buffering=_CHUNK) as source:
        source.seek(0)
        total, entries = 0, 0
        with tarfile.open(fileobj=source, mode="r:") as archive:
            for member in archive:
                _check_member(member)
                entries += 1
                total += member.size
        if entries > request["max_entries"] or total > request["max_bytes"]:
            raise Refused(errno.EFBIG, f"more than {request['max_entries']} entries or {request['max_bytes']} bytes")
        anchor = _open_folder(request["path"], create=True)
        modes: list[tuple[str, int]] = []
        source.seek(0)
        with tarfile.open(fileobj=source, mode="r:") as archive:
            for member in archive:
                name = _inside(member.name)
                if not name:
                    continue
                if member.isdir():
                    os.close(_open_folder(name, create=True, anchor=anchor))
                    modes.append((name, member.mode & 0o777))
                    continue
                folder, base = _parent(name, create=True, anchor=anchor)
                try:
                    _unpack(archive, member, folder, base, anchor)
                finally:
                    os.close(folder)
    # Last, so that a directory without write permission can still be filled.
    for name, mode in reversed(modes):
        folder = _open_folder(name, create=False, anchor=anchor)
        try:
            os.fchmod(folder, mode)
        finally:
            os.close(folder)
    return {"entries": entries, "bytes": total}


def _check_member(member: tarfile.TarInfo) -> None:
    """Refuse what has no place in a tree: other kinds of file, names and links that lead out of it."""
    name = _inside(member.name)
    if not (member.isdir() or member.isreg() or member.issym() or member.islnk()):
        raise Refused(errno.EILSEQ, f"{member.name}: neither a directory, a regular file nor a link")
    if member.issym():
        target = os.path.normpath(os.path.join(os.path.dirname(name), member.linkname))
        if member.linkname.startswith("/") or target == ".." or target.startswith("../"):
            raise Refused(errno.EILSEQ, f"{member.name}: the link leads out of the tree")
    if member.islnk():
        _inside(member.linkname)


def _unpack(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: int, base: str, anchor: int) -> None:
    if member.issym():
        _clear(folder, base)
        os.symlink(member.linkname, base, dir_fd=folder)
    elif member.islnk():
        origin, origin_base = _parent(_inside(member.linkname), create=False, anchor=anchor)
        try:
            _clear(folder, base)
            os.link(origin_base, base, src_dir_fd=origin, dst_dir_fd=folder, follow_symlinks=False)
        finally:
            os.close(origin)
    else:
        _clear(folder, base)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(base, flags, 0o600, dir_fd=folder), "wb") as sink:
            content: Any = archive.extractfile(member)
            _copy(content, sink)
            os.fchmod(sink.fileno(), member.mode & 0o777)


def _copy(source: BinaryIO, sink: BinaryIO) -> None:
    while chunk := source.read(_CHUNK):
        sink.write(chunk)


def _clear(folder: int, base: str) -> None:
    try:
        os.unlink(base, dir_fd=folder)
    except FileNotFoundError:
        pass


def _inside(name: str) -> str:
    """The normal form of an archive's relative name; raises Refused for one that leads elsewhere."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts:
        raise Refused(errno.EILSEQ, f"{name}: leads out of the tree")
    return "/".join(parts)


def _parent(path: str, *, create: bool, anchor: int | None = None) -> tuple[int, str]:
    """Open the directory that holds ``path``; answers its descriptor (the caller's to close) and the last name."""
    folder, _, name = path.rstrip("/").rpartition("/")
    if name in ("", ".", ".."):
        raise Refused(errno.EINVAL, "the path does not end in a name")
    return _open_folder(folder, create=create, anchor=anchor), name


def _open_folder(path: str, *, create: bool, anchor: int | None = None) -> int:
    """Open a directory component by component from the root (or ``anchor``); none may be a symbolic link."""
    here = os.dup(anchor) if anchor is not None else os.open("/", _FOLDER)
    try:
        for part in path.split("/"):
            if part in ("", "."):
                continue
            if part == "..":
                raise Refused(errno.EINVAL, "the path contains '..'")
            if create:
                try:
                    os.mkdir(part, 0o755, dir_fd=here)
                except FileExistsError:
                    pass
            below = _below(here, part)
            os.close(here)
            here = below
        return here
    except BaseException:
        os.close(here)
        raise


def _below(folder: int, name: str) -> int:
    """Open a directory in another one; it may not be a symbolic link."""
    try:
        opened = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ENOTDIR and stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode):
            raise Refused(errno.ELOOP, f"{name} is a symbolic link") from error
        raise
    try:
        # gVisor (of 2022) follows the link all the same when a directory is asked for.
        if not os.path.samestat(os.fstat(opened), os.lstat(name, dir_fd=folder)):
            raise Refused(errno.ELOOP, f"{name} is a symbolic link")
    except BaseException:
        os.close(opened)
        raise
    return opened


def _describe(status: os.stat_result) -> Message:
    return {
        "kind": _KINDS.get(stat.S_IFMT(status.st_mode), "other"),
        "size": status.st_size,
        "mode": stat.S_IMODE(status.st_mode),
        "mtime_ns": status.st_mtime_ns,
    }


_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}
_JOBS: dict[str, Callable[[Message, list[int]], Message]] = {
    "remove": _remove,
    "read_tree": _read_tree,
    "write_tree": _write_tree,
}
