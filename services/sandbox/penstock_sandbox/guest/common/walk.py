"""Walks and removes trees of any depth, without recursion and with two descriptors.

Purpose: one command of an agent can make a tree of any depth; the service, which may be root, reads and removes it on
the host's disk, and a sandbox's own helper inside it. Like ``files`` it is sent into sandboxes, for Python 3.8.

Invariants: no link is followed. The way up is ``..``, which leads elsewhere if a directory is moved meanwhile: every
step up checks that it returned to the directory the walk came from, and otherwise walks again from the top; moved
directories are left out.
"""

from __future__ import annotations

import os
import stat
from typing import Callable, Generator, List, Optional, Tuple

from penstock_sandbox.guest.common import files

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_GONE = (FileNotFoundError, NotADirectoryError, files.Refused)

Identity = Tuple[int, int]

MAX_KEPT = 32 * 1024 * 1024
"""Maximum bytes of directory names that a bounded walk keeps, each counted with its overhead."""
_NAME_COST = 64


class TooMuch(Exception):
    """A tree exceeds its walker's limit."""


class _Level:
    """A directory on the path from the top, and its subdirectories still to be entered."""

    __slots__ = ("folders", "identity", "name", "unlocked")

    def __init__(self, name: str, identity: Identity, folders: List[str]) -> None:
        self.name, self.identity, self.folders = name, identity, folders
        self.unlocked: Optional[files.Unlocked] = None


class Descent:
    """A current directory below ``top``, with the descriptor ``here``. Owns ``top``.

    ``levels`` are the directories from ``top`` to it, both included.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        try:
            self.here = os.dup(top)
        except OSError:
            os.close(top)
            raise
        self.levels = [_Level("", _identity(self.here), [])]

    def close(self) -> None:
        """Closes both descriptors, and leaves every directory that is still unlocked."""
        try:
            while any(level.unlocked is not None for level in self.levels):
                self.leave()
        finally:
            os.close(self.here)
            os.close(self._top)

    def down(self, name: str) -> None:
        """Enters a directory. Raises OSError and files.Refused (a link), and then stays where it was."""
        self._move(files.below(self.here, name))
        self.levels.append(_Level(name, _identity(self.here), []))

    def up(self) -> bool:
        """Returns to the directory in which ``down`` was called; False if that is gone, and it is then further up."""
        self.levels.pop()
        try:
            opened = os.open("..", _FOLDER, dir_fd=self.here)
        except OSError:
            pass  # the path from the top has changed
        else:
            self._move(opened)
        if _identity(self.here) == self.levels[-1].identity:
            return True
        return self._again()

    def enter(self, name: str, *, unlocks: bool) -> None:
        """As ``down``; with ``unlocks``, a directory that its owner, the caller, closed to itself is open until
        ``leave``."""
        unlocked = files.unlocked(self.here, name) if unlocks else None
        try:
            self.down(name)
        except BaseException:
            if unlocked is not None:
                unlocked.lock(self.here, name)
            raise
        self.levels[-1].unlocked = unlocked

    def leave(self) -> bool:
        """As ``up``; locks again what ``enter`` unlocked."""
        left = self.levels[-1]
        found = self.up()
        if left.unlocked is not None:
            if found:
                left.unlocked.lock(self.here, left.name)
            else:
                left.unlocked.abandon()
        return found

    def _again(self) -> bool:
        """Walks from the top along the levels, as far as they still exist."""
        self._move(os.dup(self._top))
        for depth, level in enumerate(self.levels[1:], 1):
            try:
                self._move(os.open(level.name, _FOLDER, dir_fd=self.here))
            except OSError:
                self._cut(depth)
                return False
            if _identity(self.here) != level.identity:
                # Another directory has its name: it and its content are not part of this walk.
                self._cut(depth)
                self._again()
                return False
        return True

    def _cut(self, depth: int) -> None:
        """Forgets the levels from this depth on, which are gone."""
        for level in self.levels[depth:]:
            if level.unlocked is not None:
                level.unlocked.abandon()
        del self.levels[depth:]

    def _move(self, to: int) -> None:
        os.close(self.here)
        self.here = to


class Way(Descent):
    """Moves between directories of a tree: up only as far as necessary, then down.

    So a tree costs as many steps as it has directories, at any depth. Owns ``top``; ``here`` is the current directory.
    """

    def to(self, parts: List[str], *, create: bool, force: bool) -> int:
        """Goes to a directory, given its path of names from the top; returns ``here``.

        ``create``, ``force`` and errors are those of ``files.open_folder``; after an error it is on the way there.
        """
        shared = 0
        for level, part in zip(self.levels[1:], parts):
            if level.name != part:
                break
            shared += 1
        while len(self.levels) - 1 > shared:
            self.up()
        for part in parts[len(self.levels) - 1 :]:
            self._move(files.enter(self.here, part, create=create, force=force))
            self.levels.append(_Level(part, _identity(self.here), []))
        return self.here


def walk(
    top: str,
    most: Optional[int] = None,
    enters: Callable[[str], bool] = lambda path: True,
    *,
    unlocks: bool = False,
) -> Generator[tuple[str, str, bool, int], None, None]:
    """Yields every entry below ``top``: the path of its directory ("" for ``top``, else "/a/b"), its name, whether it
    is a directory, and its directory's descriptor, valid until the next entry.

    A directory's entries come in the kernel's order, before those of its subdirectories; only names of directories are
    kept, and only directories are entered for whose path ``enters`` returns true. Unreadable ones are left out, also
    ``top`` if it does not exist. ``most``: raises TooMuch over that many names (a directory counts once more per 256
    characters of its path, which costs time, too), and over MAX_KEPT bytes of names of directories still to be entered.
    ``unlocks``: a directory that its owner, the caller, closed to itself is open while the walk is in it.
    """
    budget = _Budget(most)
    try:
        descent = Descent(os.open(top, _FOLDER))
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
            # To be entered in the order of names: the last is taken first.
            folders.sort(reverse=True)
            while not _enter_next(descent, budget, unlocks):
                if len(descent.levels) == 1:
                    return
                left = descent.levels[-1].name
                if descent.leave():
                    path = path[: -len(left) - 1]
                else:
                    path = "".join(f"/{level.name}" for level in descent.levels[1:])
            path = f"{path}/{descent.levels[-1].name}"
    finally:
        descent.close()


class _Budget:
    """What a walk may still look at and keep; no count is unlimited."""

    def __init__(self, most: Optional[int]) -> None:
        self._most = most
        self._kept = 0

    def folder(self, path: str) -> None:
        """Counts a directory that is entered."""
        if self._most is not None:
            self._most = max(0, self._most - len(path) // 256)

    def entry(self) -> None:
        """Counts an entry."""
        if self._most is not None:
            if self._most <= 0:
                raise TooMuch
            self._most -= 1

    def keep(self, name: str) -> None:
        """Counts a directory's name, kept until it is entered."""
        self._kept += len(name) + _NAME_COST
        if self._most is not None and self._kept > MAX_KEPT:
            raise TooMuch

    def drop(self, name: str) -> None:
        """Releases the name."""
        self._kept -= len(name) + _NAME_COST


def remove(name: str, folder: Optional[int] = None) -> None:
    """Removes a file or a tree, including directories without permissions; succeeds if it does not exist.

    ``name`` is a path, or a name in the directory ``folder``.
    """
    try:
        status = os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(name, dir_fd=folder)
        return
    _let_in(folder, name, status)
    descent = Descent(files.below(folder, name))
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
    """Unlocks a directory that is to be removed.

    An overlay uses the mode that it saw first: if its upper directory was changed directly, as measuring does with
    closed ones, it shows another. So the test is whether the directory can be entered.
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


def _enter_next(descent: Descent, budget: _Budget, unlocks: bool) -> bool:
    """Enters the next directory that can be entered; returns whether there was one."""
    folders = descent.levels[-1].folders
    while folders:
        name = folders.pop()
        budget.drop(name)
        try:
            descent.enter(name, unlocks=unlocks)
        except (*_GONE, PermissionError):
            continue
        return True
    return False


def _unlink_files(folder: int) -> list[str]:
    """Removes everything in a directory but its subdirectories, whose names it returns."""
    while True:
        # Removing entries while reading a directory may hide others from the reader: repeat until none is left.
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
