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
from typing import Callable, Generator, List, Optional, Tuple

from penstock_sandbox.spawner import files

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_GONE = (FileNotFoundError, NotADirectoryError, files.Refused)

Identity = Tuple[int, int]

MAX_KEPT = 32 * 1024 * 1024
"""Most bytes of names of directories that a bounded walk keeps, each counted with what holds it."""
_NAME_COST = 64


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


def walk(
    top: str, most: Optional[int] = None, enters: Callable[[str], bool] = lambda path: True
) -> Generator[tuple[str, str, bool, int], None, None]:
    """Every entry below ``top``: the path of its directory ("" for ``top``, else "/a/b"), its name, whether it is a
    directory, and its directory's descriptor, which is good until the next entry comes.

    The entries of a directory come as the kernel tells them, none of them kept but the names of directories, and
    before those of the directories in it, of which only those are entered that ``enters`` says of (by their path).
    What cannot be read is left out, ``top`` too if it is not there. ``most``: raises TooMuch where there are more names
    than that, a directory counted once more for every 256 characters of its path, which costs time, too; and where more
    than MAX_KEPT bytes of names wait to be entered.
    """
    budget = _Budget(most)
    try:
        descent = _Descent(os.open(top, _FOLDER))
    except _GONE:
        return
    try:
        path = ""
        while True:
            budget.folder(path)
            folders = descent.levels[-1].folders
            with os.scandir(descent.here) as entries:
                for entry in entries:
                    is_folder = entry.is_dir(follow_symlinks=False)
                    budget.entry()
                    if is_folder and enters(f"{path}/{entry.name}"):
                        budget.keep(entry.name)
                        folders.append(entry.name)
                    yield path, entry.name, is_folder, descent.here
            # Entered in the order of their names: the last is taken first.
            folders.sort(reverse=True)
            while not _enter_next(descent, budget):
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


class _Budget:
    """What a walk may still look at and keep; nothing is counted without a bound."""

    def __init__(self, most: Optional[int]) -> None:
        self._most = most
        self._kept = 0

    def folder(self, path: str) -> None:
        """A directory is looked at."""
        if self._most is not None:
            self._most = max(0, self._most - len(path) // 256)

    def entry(self) -> None:
        """An entry was found."""
        if self._most is not None:
            if self._most <= 0:
                raise TooMuch
            self._most -= 1

    def keep(self, name: str) -> None:
        """A directory's name is kept until it is entered."""
        self._kept += len(name) + _NAME_COST
        if self._most is not None and self._kept > MAX_KEPT:
            raise TooMuch

    def drop(self, name: str) -> None:
        """It was entered."""
        self._kept -= len(name) + _NAME_COST


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
    _let_in(folder, name, status)
    descent = _Descent(files.below(folder, name))
    try:
        descent.levels[-1].folders = _unlink_files(descent.here)
        while True:
            level = descent.levels[-1]
            if level.folders:
                inner = level.folders.pop()
                _let_in(descent.here, inner, os.lstat(inner, dir_fd=descent.here))
                descent.down(inner)
                descent.levels[-1].folders = _unlink_files(descent.here)
            elif len(descent.levels) == 1:
                break
            elif descent.up():
                os.rmdir(level.name, dir_fd=descent.here)
    finally:
        descent.close()
    os.rmdir(name, dir_fd=folder)


def _let_in(folder: Optional[int], name: str, status: os.stat_result) -> None:
    """Unlock a directory that is to be removed.

    An overlay goes by the mode that it saw first: where its upper directory was changed from beside, as measuring does
    with closed ones, it shows another. So what counts is whether it lets in.
    """
    files.unlock(folder, name, status)
    try:
        opened = os.open(name, _FOLDER, dir_fd=folder)
        try:
            os.stat(".", dir_fd=opened)
        finally:
            os.close(opened)
    except PermissionError:
        files.unlock(folder, name, status, always=True)


def _enter_next(descent: _Descent, budget: _Budget) -> bool:
    """Enter the next directory that can be entered; whether there was one."""
    folders = descent.levels[-1].folders
    while folders:
        name = folders.pop()
        budget.drop(name)
        try:
            descent.down(name)
        except (*_GONE, PermissionError):
            continue
        return True
    return False


def _unlink_files(folder: int) -> list[str]:
    """Remove everything in a directory but its directories, whose names it answers."""
    while True:
        # What is removed while a directory is read may hide another entry from the reader: until nothing is left.
        folders, unlinked = [], 0
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                else:
                    os.unlink(entry.name, dir_fd=folder)
                    unlinked += 1
        if not unlinked:
            return folders


def _identity(folder: int) -> Identity:
    status = os.fstat(folder)
    return status.st_dev, status.st_ino
