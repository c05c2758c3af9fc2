"""Looks into the layers of an image as overlayfs would merge them, without mounting anything.

Invariants: the layers are unpacked and do not change; no link leads out of them: each is resolved within the image.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock_sandbox.backends.images.unpack import OPAQUE

_MOST_LINKS = 40


@dataclass(frozen=True, slots=True)
class Found:
    """What a path is: its name without links, and where it is on the host: a file, or the directories that merge."""

    path: str
    folders: tuple[str, ...] = ()
    file: str = ""


class Merged:
    """An image's layers, given from the lowest up."""

    def __init__(self, layers: Sequence[Path]) -> None:
        self._roots = tuple(str(layer) for layer in reversed(layers))

    def find(self, path: str) -> Found | None:
        """Returns what is at an absolute path, links followed; None if there is nothing."""
        todo = [part for part in path.split("/") if part not in ("", ".")][::-1]
        done: list[tuple[str, tuple[str, ...]]] = []
        links = 0
        while todo:
            part = todo.pop()
            if part in ("", "."):
                continue
            if part == "..":
                if done:
                    done.pop()
                continue
            folders, file = _below(done[-1][1] if done else self._roots, part)
            here = f"{done[-1][0] if done else ''}/{part}"
            if folders:
                done.append((here, folders))
                continue
            if not file:
                return None
            if not os.path.islink(file):
                return Found(here, file=file) if not todo else None
            links += 1
            if links > _MOST_LINKS:
                return None
            target = os.readlink(file)
            if target.startswith("/"):
                done.clear()
            todo += target.split("/")[::-1]
        return Found(*done[-1]) if done else Found("/", self._roots)

    def text(self, path: str, most: int) -> str:
        """Returns a file's text; empty if there is none."""
        found = self.find(path)
        if found is None or not found.file or not stat.S_ISREG(os.lstat(found.file).st_mode):
            return ""
        with open(found.file, "rb") as file:
            return file.read(most).decode(errors="surrogateescape")


def _below(folders: Sequence[str], name: str) -> tuple[tuple[str, ...], str]:
    """Returns the directories that merge under a name, the highest first, or the file that has it."""
    merge: list[str] = []
    for folder in folders:
        path = f"{folder}/{name}"
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            continue
        if not stat.S_ISDIR(mode):
            return tuple(merge), "" if merge or stat.S_ISCHR(mode) else path
        merge.append(path)
        if _hides(path):
            break
    return tuple(merge), ""


def _hides(folder: str) -> bool:
    try:
        return os.getxattr(folder, OPAQUE) == b"y"
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.EOPNOTSUPP):
            return False
        raise


def copy(source: Found, target: Path, uid: int, gid: int) -> int:
    """Copies merged directories to ``target``, which must not exist, for a user; returns the bytes of the files.

    ``target`` then hides the original. Modes and times stay.
    """
    target.mkdir()
    os.setxattr(target, OPAQUE, b"y")
    size = 0
    levels: list[tuple[Sequence[str], str, Iterator[str]]] = [
        (source.folders, str(target), iter(_names(source.folders)))
    ]
    while levels:
        folders, made, names = levels[-1]
        name = next(names, None)
        if name is None:
            _take_over(folders[0], made, uid, gid)
            levels.pop()
            continue
        inner, file = _below(folders, name)
        path = f"{made}/{name}"
        if inner:
            os.mkdir(path)
            levels.append((inner, path, iter(_names(inner))))
        elif file:
            size += _copy_file(file, path)
            _take_over(file, path, uid, gid)
    return size


def _names(folders: Sequence[str]) -> list[str]:
    return sorted({name for folder in folders for name in os.listdir(folder)})


def _copy_file(source: str, target: str) -> int:
    status = os.lstat(source)
    if stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(source), target)
    elif stat.S_ISFIFO(status.st_mode):
        os.mkfifo(target)
    else:
        shutil.copyfile(source, target, follow_symlinks=False)
        return status.st_size
    return 0


def _take_over(source: str, target: str, uid: int, gid: int) -> None:
    status = os.lstat(source)
    os.lchown(target, uid, gid)
    if not stat.S_ISLNK(status.st_mode):
        os.chmod(target, stat.S_IMODE(status.st_mode))
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)
