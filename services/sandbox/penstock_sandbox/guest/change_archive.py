"""Runs inside a job: archives the workload's changes to its files, and restores them in another job of the same image.

Purpose: a job cannot be copied there. ``remember`` records the state of all files before the workload starts;
``capture`` packs later differences and lists deletions; ``restore`` unpacks such an archive into a fresh job of the
same image. Toolboxes are unpacked in the same way.

A single file for Python 3.8, with the standard library only; it is sent to the job as text and run there as root.

Invariants
- Archived: files, directories, links and pipes with their owner, mode and time, and deletions; hard links stay links
  of each other. Not archived: sockets, devices, extended attributes, other file systems than those of the root, the
  home and the working directory, and the machine's own paths (``SKIPPED``).
- For a workload that is not root, changes of files that it may not write are ignored: they are the machine's.
- Nothing of an archive is unpacked unless all of it has the requested digest.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import shutil
import stat
import sys
import tarfile
from typing import Dict, Iterator, List, Optional, Set, Tuple, Union

TOO_MUCH = 75
"""The exit code of ``capture`` if the files are larger than allowed."""

SKIPPED = frozenset(
    (
        *(b"/proc", b"/sys", b"/dev", b"/run", b"/opt/penstock", b"/.penstock"),
        *(b"/etc/hosts", b"/etc/hostname", b"/etc/resolv.conf", b"/etc/mtab"),
    )
)
"""Paths of the machine, and ours."""

_DELETED = ".penstock/deleted"
_COMPRESSION = 1  # a fast line wants a fast compressor
_PIECE = 1024 * 1024
_ENTRY = 2048  # a member's overhead beside its content and its name
_KINDS = (stat.S_ISREG, stat.S_ISDIR, stat.S_ISLNK, stat.S_ISFIFO)

Mark = List[int]
"""Equal marks mean an unchanged file: mode with type, owner, group, size, mtime and ctime."""


class TooMuch(Exception):
    """More bytes than allowed."""


def walk(places: List[bytes]) -> Iterator[Tuple[bytes, os.stat_result]]:
    """Yields every path on the file systems of ``places`` (walking from the first), directories before their entries.

    The file system of a file that is not a directory is not compared: overlays give files a number of their own.
    """
    devices = {os.lstat(place).st_dev for place in places if os.path.lexists(place)}
    pending = [places[0]]
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(folder) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
        except FileNotFoundError:
            continue
        for entry in entries:
            if entry.path in SKIPPED:
                continue
            try:
                status = os.lstat(entry.path)
            except FileNotFoundError:
                continue
            if not stat.S_ISDIR(status.st_mode):
                yield entry.path, status
            elif status.st_dev in devices:
                yield entry.path, status
                pending.append(entry.path)


def mark(status: os.stat_result) -> Mark:
    """Returns a file's mark."""
    return [
        status.st_mode,
        status.st_uid,
        status.st_gid,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    ]


def may_write(noted: Mark, user: Optional[Tuple[int, int]]) -> bool:
    """Whether a workload (None: root) may write to a file with this mark, or owns it."""
    mode, uid, gid = noted[:3]
    if user is None or uid == user[0]:
        return True
    if stat.S_ISLNK(mode):
        return False  # its mode permits everybody, but only its owner may change it
    return bool(mode & (stat.S_IWGRP if gid == user[1] else stat.S_IWOTH))


def may_delete(noted: Mark, folder: Mark, user: Optional[Tuple[int, int]]) -> bool:
    """Whether a workload may delete such a file from a directory."""
    if user is None or folder[1] == user[0]:
        return True
    return may_write(folder, user) and (not folder[0] & stat.S_ISVTX or noted[1] == user[0])


def remember(notes: str, places: List[bytes]) -> None:
    """Records the marks of all files."""
    noted = {os.fsdecode(path): mark(status) for path, status in walk(places)}
    with open(notes, "w", encoding="ascii") as file:
        json.dump(noted, file)


def capture(
    notes: str, archive: str, places: List[bytes], user: Optional[Tuple[int, int]], limit: int
) -> Tuple[int, str]:
    """Packs the differences from the notes; returns size and digest. Raises TooMuch over ``limit`` bytes of files."""
    with open(notes, encoding="ascii") as file:
        before: Dict[str, Mark] = json.load(file)
    changed: List[Tuple[bytes, os.stat_result]] = []
    seen: Set[str] = set()
    total = 0
    for path, status in walk(places):
        name, now = os.fsdecode(path), mark(status)
        seen.add(name)
        if before.get(name) == now or not may_write(now, user) or not any(is_kind(now[0]) for is_kind in _KINDS):
            continue
        changed.append((path, status))
        total += _ENTRY + len(path) + (status.st_size if stat.S_ISREG(status.st_mode) else 0)
    if total > limit:
        raise TooMuch("the changed files have %d bytes, but %d are allowed" % (total, limit))
    deleted = []
    for name, noted in before.items():
        folder = before.get(os.path.dirname(name))
        if name not in seen and (user is None or (folder is not None and may_delete(noted, folder, user))):
            deleted.append(name)
    with _open(archive, "w:gz") as tar:
        gone = json.dumps(sorted(deleted)).encode("ascii")
        member = tarfile.TarInfo(_DELETED)
        member.size = len(gone)
        tar.addfile(member, io.BytesIO(gone))
        first: Dict[Tuple[int, int], str] = {}
        for path, status in changed:
            _add(tar, path, status, first)
    return os.path.getsize(archive), digest(archive)


def _open(archive: str, mode: str) -> tarfile.TarFile:
    more = {"compresslevel": _COMPRESSION} if mode.startswith("w") else {}
    return tarfile.open(  # type: ignore[call-overload, no-any-return]
        archive, mode, format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape", **more
    )


def _add(tar: tarfile.TarFile, path: bytes, status: os.stat_result, first: Dict[Tuple[int, int], str]) -> None:
    member = tarfile.TarInfo(path.decode("utf-8", "surrogateescape").lstrip("/"))
    member.mode = stat.S_IMODE(status.st_mode)
    member.uid, member.gid = status.st_uid, status.st_gid
    member.mtime = status.st_mtime
    same = (status.st_dev, status.st_ino)
    if stat.S_ISDIR(status.st_mode):
        member.type = tarfile.DIRTYPE
    elif status.st_nlink > 1 and same in first:
        member.type, member.linkname = tarfile.LNKTYPE, first[same]
    elif stat.S_ISLNK(status.st_mode):
        member.type = tarfile.SYMTYPE
        member.linkname = os.readlink(path).decode("utf-8", "surrogateescape")
    elif stat.S_ISFIFO(status.st_mode):
        member.type = tarfile.FIFOTYPE
    else:
        first[same] = member.name
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as source:
            member.size = os.fstat(source.fileno()).st_size
            tar.addfile(member, source)
        return
    tar.addfile(member)


def digest(path: str) -> str:
    """Returns a file's SHA-256."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while True:
            piece = file.read(_PIECE)
            if not piece:
                return found.hexdigest()
            found.update(piece)


def restore(archive: str, root: bytes = b"") -> None:
    """Applies an archive's deletions, then puts its members in place (below ``root``), directories' modes last."""
    folders: List[Tuple[bytes, tarfile.TarInfo]] = []
    times: Dict[bytes, Tuple[int, int]] = {}
    with _open(archive, "r:gz") as tar:
        for member in tar:
            if member.name == _DELETED:
                content = tar.extractfile(member)
                for name in json.load(content) if content is not None else ():
                    _delete(root, os.fsencode(name))
                continue
            path = root + b"/" + member.name.encode("utf-8", "surrogateescape")
            if member.isdir():
                _make_folder(path)
                folders.append((path, member))
            else:
                folder = os.path.dirname(path)
                if folder not in times:
                    os.makedirs(folder, 0o755, exist_ok=True)
                    status = os.stat(folder)
                    times[folder] = (status.st_atime_ns, status.st_mtime_ns)
                _put(tar, member, path, root)
    for folder, before in times.items():
        # Times of unchanged directories: unpacking a file that was rewritten in place has changed them.
        os.utime(folder, ns=before)
    for path, member in reversed(folders):
        _finish(path, member)


def _delete(root: bytes, name: bytes) -> None:
    # No link has what the archive deletes: where one is on the way, the directory there is gone already.
    folder = os.path.dirname(name)
    while folder.strip(b"/"):
        if os.path.islink(root + folder):
            return
        folder = os.path.dirname(folder)
    _clear(root + name)


def _make_folder(path: bytes) -> None:
    if os.path.islink(path) or not os.path.isdir(path):
        _clear(path)
        os.makedirs(path, 0o755)


def _put(tar: tarfile.TarFile, member: tarfile.TarInfo, path: bytes, root: bytes) -> None:
    try:
        _make(tar, member, path, root)
    except FileExistsError:
        _clear(path)
        _make(tar, member, path, root)


def _make(tar: tarfile.TarFile, member: tarfile.TarInfo, path: bytes, root: bytes) -> None:
    if member.isreg():
        content = tar.extractfile(member)
        assert content is not None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags, 0o600), "wb", buffering=0) as sink:
            while True:
                piece = content.read(_PIECE)
                if not piece:
                    break
                sink.write(piece)
            _finish(sink.fileno(), member)
    elif member.islnk():
        os.link(root + b"/" + member.linkname.encode("utf-8", "surrogateescape"), path, follow_symlinks=False)
    elif member.issym():
        os.symlink(member.linkname.encode("utf-8", "surrogateescape"), path)
        os.chown(path, member.uid, member.gid, follow_symlinks=False)
        os.utime(path, (member.mtime, member.mtime), follow_symlinks=False)
    elif member.isfifo():
        os.mkfifo(path)
        _finish(path, member)
    else:
        raise ValueError("%s: neither a file, a directory, a link nor a pipe" % member.name)


def _finish(made: Union[bytes, int], member: tarfile.TarInfo) -> None:
    # The mode after the owner: chown clears a file's setuid bits and capabilities.
    os.chown(made, member.uid, member.gid)
    os.chmod(made, stat.S_IMODE(member.mode))
    os.utime(made, (member.mtime, member.mtime))


def _clear(path: bytes) -> None:
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return  # removed together with its directory


def main() -> int:
    """``remember NOTES``, ``capture NOTES ARCHIVE`` and ``restore ARCHIVE...``; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("remember", "capture", "restore"))
    parser.add_argument("files", nargs="+")
    parser.add_argument("--place", action="append", default=[], help="a directory whose file system is included")
    parser.add_argument("--user", help="UID:GID of a workload that is not root")
    parser.add_argument("--limit", type=int, default=0, help="most bytes of files that differ")
    parser.add_argument("--digest", action="append", default=[], help="what each archive's SHA-256 must be, in order")
    given = parser.parse_args()
    places = [b"/", *map(os.fsencode, given.place)]
    if given.what == "remember":
        remember(given.files[0], places)
    elif given.what == "capture":
        uid, _, gid = (given.user or "").partition(":")
        try:
            user = (int(uid), int(gid)) if uid else None
            packed = capture(given.files[0], given.files[1], places, user, given.limit)
        except TooMuch as error:
            sys.stderr.write("%s\n" % error)
            return TOO_MUCH
        print("%d %s" % packed)
    else:
        if [digest(archive) for archive in given.files] != given.digest:
            sys.stderr.write("an archive does not match its digest\n")
            return 1
        for archive in given.files:
            restore(archive)
            os.unlink(archive)
    return 0


if __name__ == "__main__":
    sys.exit(main())
