"""Whole trees inside a sandbox's mount namespace, with the sandbox user's rights: read, unpacked, removed as jobs.

Purpose: what ``files`` does for one file, for many: a job runs in a child process, streams through pipes, and writes
its result as one JSON object. Like ``files`` it is sent into sandboxes, for Python 3.8.

Invariants
- A tree is unpacked without following a link, and holds only directories, regular files and links that stay inside.
- A layer is unpacked whatever was left in its way; what is removed for it is removed without following a link, at any
  depth.
- Modes and modification times come out of a tar as they went in: a program that compares times, as make does, sees the
  same order.
- No name service is used for the names of owners: its libraries would come from a root that an agent wrote to.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tarfile
from typing import Any, BinaryIO, Callable, Dict, Iterator, List, Optional, Tuple

from penstock_sandbox.guest.common import files, walk

WHITEOUT = ".wh."
"""A layer's member with this prefix removes the file named by the rest (OCI image specification)."""

_CHUNK = 256 * 1024
# All but the set-user-ID bit: no archive makes a program that gives its user's rights to others.
_MODE = 0o3777
_TIME = re.compile(r"(-?)([0-9]{1,11})(?:\.([0-9]*))?")
_SMALL_TREE = 64 * 1024
# What tarfile raises for invalid archives: its own errors, and those of unreadable numbers and names.
_DAMAGED = (tarfile.TarError, ValueError, LookupError, OverflowError, RecursionError)
# Limit of a header that describes the member after it: a path has 4,096 bytes at most, an attribute 64 KiB.
_MOST_OF_A_HEADER = 256 * 1024
_DESCRIBING = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


class _Member(tarfile.TarInfo):
    """A member of an untrusted archive: the claims of its headers are checked first.

    Python's own module would read as much as a header claims, loop forever on a negative size, or make files of many
    terabytes from an archive of one block; this refuses.
    """

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.size < 0:
            raise files.Refused(errno.EILSEQ, "%s: its size is negative" % self.name)
        if self.type in _DESCRIBING and self.size > _MOST_OF_A_HEADER:
            raise files.Refused(errno.EILSEQ, "%s: a header of %d bytes" % (self.name, self.size))
        if self.type == tarfile.GNUTYPE_SPARSE:
            self._refuse_sparse()
        try:
            return super()._proc_member(archive)  # type: ignore[misc, no-any-return]
        except tarfile.HeaderError as error:
            # Python would treat it as the end of the archive and ignore the rest.
            raise files.Refused(errno.EILSEQ, "%s: %s" % (self.name, error)) from None

    def _refuse_sparse(self, *_: object) -> None:
        raise files.Refused(errno.EILSEQ, "%s: is stored with holes: make the archive without --sparse" % self.name)

    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_sparse


def is_small(request: files.Message, descriptors: list[int]) -> bool:
    """Whether a job unpacks a small archive with small content; False for a damaged one, and for a layer for which
    directories must be removed or unlocked."""
    if request["job"] != "write_tree" or os.fstat(descriptors[1]).st_size > _SMALL_TREE:
        return False
    size = 0
    try:
        with os.fdopen(descriptors[1], "rb", closefd=False) as source:
            source.seek(0)  # its writer left it at its end
            with tarfile.open(fileobj=source, mode="r:", tarinfo=_Member) as archive:
                for member in archive:
                    size += member.size
                    if size > _SMALL_TREE or (request["layer"] and not _has_room(request["path"], member)):
                        return False
    except (*_DAMAGED, files.Refused, OSError):
        return False
    return True


def _has_room(root: str, member: tarfile.TarInfo) -> bool:
    """Whether a layer's member has only open directories on its path, and removes none."""
    folder, _, base = member.name.rpartition("/")
    removes = base.startswith(WHITEOUT)
    way = [part for part in f"{root}/{folder}".split("/") if part not in ("", ".")]
    if member.isdir() and not removes:
        way.append(base)
    path = ""
    try:
        for part in way:
            path = f"{path}/{part}"
            mode = os.lstat(path).st_mode
            if not stat.S_ISDIR(mode) or mode & 0o700 != 0o700:
                return False
        if member.isdir() and not removes:
            return True
        return not stat.S_ISDIR(os.lstat(f"{path}/{base[len(WHITEOUT) :] if removes else base}").st_mode)
    except FileNotFoundError:
        return True


def run_job(request: files.Message, descriptors: list[int]) -> None:
    """Runs a tree operation and writes its result, a JSON object, to ``descriptors[0]``."""

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
    try:
        folder, name = files.parent(request["path"], create=False)
    except FileNotFoundError:
        return {}
    try:
        status = os.lstat(name, dir_fd=folder)
        if not stat.S_ISDIR(status.st_mode):
            os.unlink(name, dir_fd=folder)
        elif not request["recursive"]:
            os.rmdir(name, dir_fd=folder)
        else:
            walk.remove(name, folder)
    except FileNotFoundError:
        return {}
    finally:
        os.close(folder)
    return {}


def _read_tree(request: files.Message, descriptors: list[int]) -> files.Message:
    root: str = request["path"]
    entries, skipped = 0, 0
    room: int = request["max_bytes"]
    with os.fdopen(descriptors[1], "wb", closefd=False, buffering=_CHUNK) as sink:
        with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_CHUNK) as archive:
            for path, name, status in _walk(root, request["max_entries"]):
                if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) or stat.S_ISLNK(status.st_mode)):
                    skipped += 1
                    continue
                room -= _add(archive, path, name, status, room)
                if room < 0:
                    raise files.Refused(errno.EFBIG, f"more than {request['max_bytes']} bytes")
                _forget_members(archive)
                entries += 1
    return {"entries": entries, "skipped": skipped}


def _forget_members(archive: tarfile.TarFile) -> None:
    """Makes an archive drop the entries already written or returned, which it would otherwise keep."""
    archive.members.clear()  # type: ignore[attr-defined]


def _add(archive: tarfile.TarFile, path: str, name: str, status: os.stat_result, room: int) -> int:
    """Adds the file at a path; returns its size; adds nothing if that is more than ``room``."""
    member = tarfile.TarInfo(name)
    member.mode = stat.S_IMODE(status.st_mode)
    member.uid, member.gid = status.st_uid, status.st_gid
    set_time(member, status.st_mtime_ns)
    if stat.S_ISDIR(status.st_mode):
        member.type = tarfile.DIRTYPE
        archive.addfile(member)
    elif stat.S_ISLNK(status.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)
        archive.addfile(member)
    else:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as source:
            member.size = os.fstat(source.fileno()).st_size
            if member.size <= room:
                archive.addfile(member, _Exactly(source))
            return member.size
    return status.st_size


def set_time(member: tarfile.TarInfo, mtime_ns: int) -> None:
    """Sets a member's modification time, exactly: a pax header has what the plain one cannot hold.

    Those are parts of a second, times before 1970, and 0, which in the plain header means that there is no time.
    """
    member.mtime, rest = divmod(mtime_ns, 10**9)
    if rest or member.mtime <= 0:
        seconds, rest = divmod(abs(mtime_ns), 10**9)
        member.pax_headers = {"mtime": "%s%d.%09d" % ("-" if mtime_ns < 0 else "", seconds, rest)}


def _time(member: tarfile.TarInfo) -> Optional[int]:
    """Returns a member's modification time in nanoseconds, or None if it has none that a file can have."""
    text = member.pax_headers.get("mtime", str(member.mtime or ""))
    found = _TIME.fullmatch(text)
    if found is None:
        return None
    sign, seconds, rest = found.groups(default="")
    size = int(seconds) * 10**9 + int(rest[:9].ljust(9, "0"))
    return -size if sign else size


class _Exactly:
    """A file with exactly the size of its entry: one that shrank is refused, of one that grew the rest is ignored."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source

    def read(self, size: int = -1, /) -> bytes:
        """Returns all of ``size`` bytes. Raises files.Refused."""
        data = self._source.read(size)
        if len(data) < size:
            raise files.Refused(
                errno.ESTALE, "a file became shorter while it was read: pause the sandbox, or try again"
            )
        return data


def _walk(root: str, most: int) -> Iterator[tuple[str, str, os.stat_result]]:
    """Yields a tree's entries: path, name in it, and status; leaves out what disappears. Raises files.Refused."""
    status = os.lstat(root)
    if not stat.S_ISDIR(status.st_mode):
        yield root, os.path.basename(root), status
        return
    pending = [(root, "")]
    while pending:
        folder, prefix = pending.pop()
        names = []
        with os.scandir(folder) as scan:
            for entry in scan:
                most -= 1
                if most < 0:
                    raise files.Refused(errno.EFBIG, "too many entries")
                names.append(entry.name)
        for base in sorted(names):
            path, name = os.path.join(folder, base), f"{prefix}{base}"
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                continue
            yield path, name, status
            if stat.S_ISDIR(status.st_mode):
                pending.append((path, f"{name}/"))


def _write_tree(request: files.Message, descriptors: list[int]) -> files.Message:
    """Unpacks the tar in the file ``descriptors[1]``: one pass to check every member, then one to write."""
    force: bool = request["layer"]
    with os.fdopen(descriptors[1], "rb", closefd=False, buffering=_CHUNK) as source:
        source.seek(0)
        total, entries = 0, 0
        with tarfile.open(fileobj=source, mode="r:", tarinfo=_Member) as archive:
            for member in archive:
                _forget_members(archive)
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
            with tarfile.open(fileobj=source, mode="r:", tarinfo=_Member) as archive:
                way, origins = walk.Way(os.dup(anchor)), walk.Way(os.dup(anchor))
                try:
                    _unpack_all(archive, way, origins, force)
                finally:
                    way.close()
                    origins.close()
        finally:
            os.close(anchor)
    return {"entries": entries, "bytes": total}


def _unpack_all(archive: tarfile.TarFile, way: walk.Way, origins: walk.Way, force: bool) -> None:
    directories: List[Tuple[str, int, Optional[int]]] = []
    for member in archive:
        _forget_members(archive)
        name = _inside(member.name)
        if not name:
            continue
        *folders, base = name.split("/")
        if force and base.startswith(WHITEOUT):
            origins.to([], create=False, force=False)  # it may be in what is removed
            _apply_whiteout(folders, base, way)
        elif member.isdir():
            way.to([*folders, base], create=True, force=force)
            directories.append((name, member.mode & _MODE, _time(member)))
        else:
            folder = way.to(folders, create=True, force=force)
            if force:
                walk.remove(base, folder)
            _unpack(archive, member, folder, base, origins)
    # Last, so that a directory without write permission can still be filled, and has its time afterwards.
    for name, mode, mtime_ns in reversed(directories):
        folder = way.to(name.split("/"), create=False, force=False)
        if stat.S_IMODE(os.fstat(folder).st_mode) != mode:
            os.fchmod(folder, mode)
        if mtime_ns is not None:
            os.utime(folder, ns=(mtime_ns, mtime_ns))


def _apply_whiteout(folders: List[str], base: str, way: walk.Way) -> None:
    try:
        folder = way.to(folders, create=False, force=True)
    except (files.Refused, FileNotFoundError, NotADirectoryError):
        return  # the directory was replaced by a link or is gone, and its content with it
    walk.remove(base[len(WHITEOUT) :], folder)


def _check_member(member: tarfile.TarInfo) -> None:
    """Refuses members that a tree may not have: other kinds of file, names and links that lead out of it."""
    name = _inside(member.name)
    if member.size < 0:
        raise files.Refused(errno.EILSEQ, f"{member.name}: its size is negative")
    if "\0" in member.linkname or (member.issym() and not member.linkname):
        raise files.Refused(errno.EILSEQ, f"{member.name}: the link's target is invalid")
    if name.rpartition("/")[2] in (WHITEOUT, WHITEOUT + ".", WHITEOUT + ".."):
        raise files.Refused(errno.EILSEQ, f"{member.name}: removes a file without a name")
    if not (member.isdir() or member.isreg() or member.issym() or member.islnk()):
        raise files.Refused(errno.EILSEQ, f"{member.name}: neither a directory, a regular file nor a link")
    if member.issym():
        target = os.path.normpath(os.path.join(os.path.dirname(name), member.linkname))
        if member.linkname.startswith("/") or target == ".." or target.startswith("../"):
            raise files.Refused(errno.EILSEQ, f"{member.name}: the link leads out of the tree")
    if member.islnk():
        _inside(member.linkname)


def _unpack(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: int, base: str, origins: walk.Way) -> None:
    mtime_ns = _time(member)
    if member.issym():
        _clear(folder, base)
        os.symlink(member.linkname, base, dir_fd=folder)
        if mtime_ns is not None:
            os.utime(base, ns=(mtime_ns, mtime_ns), dir_fd=folder, follow_symlinks=False)
    elif member.islnk():
        *above, origin_base = _inside(member.linkname).split("/")
        origin = origins.to(above, create=False, force=False)
        _clear(folder, base)
        os.link(origin_base, base, src_dir_fd=origin, dst_dir_fd=folder, follow_symlinks=False)
    else:
        _clear(folder, base)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(base, flags, 0o600, dir_fd=folder), "wb") as sink:
            content: Any = archive.extractfile(member)
            _copy(content, sink)
            sink.flush()  # a write would change the time, and for a user that is not root the mode
            os.fchmod(sink.fileno(), member.mode & _MODE)
            if mtime_ns is not None:
                os.utime(sink.fileno(), ns=(mtime_ns, mtime_ns))


def _copy(source: BinaryIO, sink: BinaryIO) -> None:
    while chunk := source.read(_CHUNK):
        sink.write(chunk)


def _clear(folder: int, base: str) -> None:
    try:
        os.unlink(base, dir_fd=folder)
    except FileNotFoundError:
        pass


def _inside(name: str) -> str:
    """Returns the normal form of an archive's relative name; raises files.Refused for one that leads elsewhere."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts:
        raise files.Refused(errno.EILSEQ, f"{name}: leads out of the tree")
    if "\0" in name:
        raise files.Refused(errno.EILSEQ, f"{name}: has a NUL byte")
    return "/".join(parts)


_JOBS: Dict[str, Callable[[files.Message, List[int]], files.Message]] = {
    "remove": _remove,
    "read_tree": _read_tree,
    "write_tree": _write_tree,
}
