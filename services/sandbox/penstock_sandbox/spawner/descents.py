"""Trees of any depth, walked and removed without recursion and with two descriptors.

Purpose: an agent makes trees as deep as it likes with one command; the service, which may be root, reads and removes
them on the host's disk, and a sandbox's own helper inside it. Like ``files`` it travels into sandboxes, for Python 3.8.

Invariants: no link is followed. The way up is ``..``, which leads elsewhere when somebody moves a directory meanwhile:
every step up is checked to have come back to where the walk came from, and the way is made again from the top if not;
what was moved away is left out.
"""

from __future__ import annotations

import os
import stat
from typing import Iterator, List, Optional, Tuple

from penstock_sandbox.spawner import files

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_GONE = (FileNotFoundError, NotADirectoryError, files.Refused)

Identity = Tuple[int, int]


class TooMuch(Exception):
    """A tree holds more than its walker wants to look at."""


class _Level:
    """A directory on the way from the top, and those in it that are still to be entered."""

    __slots__ = ("folders", "identity", "name")

    def __init__(self, name: str, identity: Identity, folders: List[str]) -> None:
        self.name, self.identity, self.folders = name, identity, folders


class _Descent:
    """One directory below ``top`` at a time; ``here`` is its descriptor. Owns ``top``."""

    def __init__(self, top: int) -> None:
        self._top = top
        self.here = os.dup(top)
        self.levels = [_Level("", _identity(self.here), [])]

    def close(self) -> None:
        """Give the descriptors back."""
        os.close(self.here)
        os.close(self._top)

    def down(self, name: str) -> None:
        """Enter a directory. Raises OSError, and is where it was then."""
        self._move(files.below(self.here, name))
        self.levels.append(_Level(name, _identity(self.here), []))

    def up(self) -> bool:
        """Go back to where ``down`` was called; False if that is gone, and it is further up then."""
        self.levels.pop()
        try:
            opened = os.open("..", _FOLDER, dir_fd=self.here)
        except OSError:
            pass  # the way from the top is another one
        else:
            self._move(opened)
        if _identity(self.here) == self.levels[-1].identity:
            return True
        return self._again()

    def _again(self) -> bool:
        """Come from the top to where the levels end, or as far as they are still there."""
        self._move(os.dup(self._top))
        for depth, level in enumerate(self.levels[1:], 1):
            try:
                self._move(os.open(level.name, _FOLDER, dir_fd=self.here))
            except OSError:
                del self.levels[depth:]
                return False
            if _identity(self.here) != level.identity:
                # Another one has its name: it is no part of this walk, and neither is what it holds.
                del self.levels[depth:]
                self._again()
                return False
        return True

    def _move(self, to: int) -> None:
        os.close(self.here)
        self.here = to


def walk(top: str, most: Optional[int] = None) -> Iterator[tuple[str, list[str], list[str], int]]:
    """Every directory from ``top`` down: its path ("" for ``top``, else "/a/b"), the names of its directories, of which
    the caller may take some out, the other names, and its descriptor, which is good until the next one comes.

    What cannot be read is left out, ``top`` too if it is not there. ``most``: raises TooMuch where there are more names
    than that, a directory counted once more for every 256 characters of its path, which costs time, too.
    """
    budget = most
    try:
        descent = _Descent(os.open(top, _FOLDER))
    except _GONE:
        return
    try:
        path = ""
        while True:
            if budget is not None:
                budget = max(0, budget - len(path) // 256)
            folders, others = _names(descent.here, budget)
            if budget is not None:
                budget -= len(folders) + len(others)
            descent.levels[-1].folders = folders
            yield path, folders, others, descent.here
            while not _enter_next(descent):
                if len(descent.levels) == 1:
                    return
                left = descent.levels[-1].name
                if descent.up():
                    path = path[: -len(left) - 1]
                else:
                    path = "".join(f"/{level.name}" for level in descent.levels[1:])
            path = f"{path}/{descent.levels[-1].name}"
    finally:
        descent.close()


def remove(name: str, folder: Optional[int] = None) -> None:
    """Remove a file or a tree, that of directories without permissions too; nothing there is fine.

    ``name`` is a path, or what the directory ``folder`` has by that name.
    """
    try:
        status = os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(name, dir_fd=folder)
        return
    files.unlock(folder, name, status)
    descent = _Descent(files.below(folder, name))
    try:
        descent.levels[-1].folders = _unlink_files(descent.here)
        while True:
            level = descent.levels[-1]
            if level.folders:
                inner = level.folders.pop()
                files.unlock(descent.here, inner, os.lstat(inner, dir_fd=descent.here))
                descent.down(inner)
                descent.levels[-1].folders = _unlink_files(descent.here)
            elif len(descent.levels) == 1:
                break
            elif descent.up():
                os.rmdir(level.name, dir_fd=descent.here)
    finally:
        descent.close()
    os.rmdir(name, dir_fd=folder)


def _enter_next(descent: _Descent) -> bool:
    """Enter the next directory that can be entered; whether there was one."""
    folders = descent.levels[-1].folders
    while folders:
        try:
            descent.down(folders.pop())
        except (*_GONE, PermissionError):
            continue
        return True
    return False


def _names(folder: int, most: Optional[int] = None) -> tuple[list[str], list[str]]:
    folders: list[str] = []
    others: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if most is not None and len(folders) + len(others) >= most:
                raise TooMuch
            (folders if entry.is_dir(follow_symlinks=False) else others).append(entry.name)
    return folders, others


def _unlink_files(folder: int) -> list[str]:
    """Remove everything in a directory but its directories, whose names it answers."""
    folders, others = _names(folder)
    for name in others:
        os.unlink(name, dir_fd=folder)
    return folders


def _identity(folder: int) -> Identity:
    status = os.fstat(folder)
    return status.st_dev, status.st_ino
