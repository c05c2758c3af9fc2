"""Whole trees inside a sandbox's mount namespace, with the sandbox user's rights: read, unpacked and removed as jobs.

Purpose: what ``files`` does for one file, for many: a job runs in a child of its own, is streamed through pipes, and
tells its result as one JSON object. Like ``files`` it travels into sandboxes, for Python 3.8.

Invariants
- A tree is unpacked without following a link, and holds only directories, regular files and links that stay inside.
- A layer lands whatever somebody left in its way; what is removed for it is removed without following a link, at any
  depth.
- No name service is asked for the names of owners: its libraries would come from a root that an agent wrote to.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import tarfile
from typing import Any, BinaryIO, Callable, Dict, Iterator, List

from penstock_sandbox.spawner import descents, files

WHITEOUT = ".wh."
"""A member of a layer whose name begins with this removes what the rest of it names (OCI image specification)."""

_CHUNK = 256 * 1024
_SMALL_TREE = 64 * 1024
# What tarfile raises for an archive that is none: its own errors, and those of numbers and names that it cannot read.
_DAMAGED = (tarfile.TarError, ValueError, LookupError, OverflowError)


def is_small(request: files.Message, descriptors: list[int]) -> bool:
    """Whether a job is to unpack a small archive that grows into little; one that is damaged is not."""
    if request["job"] != "write_tree" or request["layer"] or os.fstat(descriptors[1]).st_size > _SMALL_TREE:
        return False
    try:
        with os.fdopen(descriptors[1], "rb", closefd=False) as source:
            with tarfile.open(fileobj=source, mode="r:") as archive:
                return sum(member.size for member in archive) <= _SMALL_TREE
    except (*_DAMAGED, OSError):
        return False


def run_job(request: files.Message, descriptors: list[int]) -> None:
    """Run a tree operation and write its result, a JSON object, to ``descriptors[0]``."""

    try:
        result = _JOBS[request["job"]](request, descriptors)
    except files.Refused as refusal:
        result = {"errno": refusal.errno, "what": refusal.what}
    except _DAMAGED as error:
        result = {"errno": errno.EBADMSG, "what": f"not a readable tar archive: {error}"}
    except OSError as error:
        result = {"errno": error.errno or errno.EIO, "what": f"{error.strerror}: {error.filename or ''}"}
    os.write(descriptors[0], json.dumps(result).encode())


def _remove(request: files.Message, _: list[int]) -> files.Message:
    path: str = request["path"].rstrip("/") or "/"
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return {}
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(path)
    elif not request["recursive"]:
        os.rmdir(path)
    else:
        descents.remove(path)
    return {}


def _read_tree(request: files.Message, descriptors: list[int]) -> files.Message:
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
                    raise files.Refused(errno.EFBIG, f"more than {request['max_bytes']} bytes")
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


def _write_tree(request: files.Message, descriptors: list[int]) -> files.Message:
    """Unpack the tar in the file ``descriptors[1]``: once through to check every member, then again to write."""
    force: bool = request["layer"]
    with os.fdopen(descriptors[1], "rb", closefd=False, buffering=_CHUNK) as source:
        source.seek(0)
        total, entries = 0, 0
        with tarfile.open(fileobj=source, mode="r:") as archive:
            for member in archive:
                _check_member(member)
                entries += 1
                total += member.size
        if entries > request["max_entries"] or total > request["max_bytes"]:
            raise files.Refused(
                errno.EFBIG, f"more than {request['max_entries']} entries or {request['max_bytes']} bytes"
            )
        anchor = files.open_folder(request["path"], create=True, force=force)
        try:
            source.seek(0)
            with tarfile.open(fileobj=source, mode="r:") as archive:
                _unpack_all(archive, anchor, force)
        finally:
            os.close(anchor)
    return {"entries": entries, "bytes": total}


def _unpack_all(archive: tarfile.TarFile, anchor: int, force: bool) -> None:
    modes: list[tuple[str, int]] = []
    for member in archive:
        name = _inside(member.name)
        if not name:
            continue
        if force and _is_whiteout(name):
            _apply_whiteout(name, anchor)
            continue
        if member.isdir():
            os.close(files.open_folder(name, create=True, anchor=anchor, force=force))
            modes.append((name, member.mode & 0o777))
            continue
        folder, base = files.parent(name, create=True, anchor=anchor, force=force)
        try:
            if force:
                descents.remove(base, folder)
            _unpack(archive, member, folder, base, anchor)
        finally:
            os.close(folder)
    # Last, so that a directory without write permission can still be filled.
    for name, mode in reversed(modes):
        folder = files.open_folder(name, create=False, anchor=anchor)
        try:
            if stat.S_IMODE(os.fstat(folder).st_mode) != mode:
                os.fchmod(folder, mode)
        finally:
            os.close(folder)


def _is_whiteout(name: str) -> bool:
    return name.rpartition("/")[2].startswith(WHITEOUT)


def _apply_whiteout(name: str, anchor: int) -> None:
    path, _, base = name.rpartition("/")
    try:
        folder = files.open_folder(path, create=False, anchor=anchor, force=True)
    except (files.Refused, FileNotFoundError, NotADirectoryError):
        return  # a link or nothing stands where the directory was: what it held is not there
    try:
        descents.remove(base[len(WHITEOUT) :], folder)
    finally:
        os.close(folder)


def _check_member(member: tarfile.TarInfo) -> None:
    """Refuse what has no place in a tree: other kinds of file, names and links that lead out of it."""
    name = _inside(member.name)
    if name.rpartition("/")[2] in (WHITEOUT, WHITEOUT + ".", WHITEOUT + ".."):
        raise files.Refused(errno.EILSEQ, f"{member.name}: removes nothing that has a name")
    if not (member.isdir() or member.isreg() or member.issym() or member.islnk()):
        raise files.Refused(errno.EILSEQ, f"{member.name}: neither a directory, a regular file nor a link")
    if member.issym():
        target = os.path.normpath(os.path.join(os.path.dirname(name), member.linkname))
        if member.linkname.startswith("/") or target == ".." or target.startswith("../"):
            raise files.Refused(errno.EILSEQ, f"{member.name}: the link leads out of the tree")
    if member.islnk():
        _inside(member.linkname)


def _unpack(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: int, base: str, anchor: int) -> None:
    if member.issym():
        _clear(folder, base)
        os.symlink(member.linkname, base, dir_fd=folder)
    elif member.islnk():
        origin, origin_base = files.parent(_inside(member.linkname), create=False, anchor=anchor)
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
    """The normal form of an archive's relative name; raises files.Refused for one that leads elsewhere."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts:
        raise files.Refused(errno.EILSEQ, f"{name}: leads out of the tree")
    return "/".join(parts)


_JOBS: Dict[str, Callable[[files.Message, List[int]], files.Message]] = {
    "remove": _remove,
    "read_tree": _read_tree,
    "write_tree": _write_tree,
}
