"""File operations inside a sandbox's mount namespace, with the sandbox user's rights.

Purpose: shared by sandbox helpers (local sandboxes) and guest agents (all others, where this module is part of a
program for Python 3.8). Single-file operations open the file and return its descriptor, through which its bytes go;
operations over a tree are in ``trees``.

Invariants
- Paths are absolute. Reading operations (read, stat, list) follow links in the directories of a path, as any program
  does: with the user's rights, inside the sandbox, they reach nothing that the user could not. Changes follow none:
  they happen where they were meant to.
- A write goes to a fresh file in the target's directory, which is renamed over the target: readers see no half file.
- Descriptors are opened without blocking and only regular files are handed out, so a planted FIFO blocks no caller.
"""

from __future__ import annotations

import _thread
import bisect
import errno
import os
import stat
from typing import Any, Callable, Dict, List, Optional, Tuple

Message = Dict[str, Any]
Reply = Tuple[Message, List[int]]

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

MOST_LISTED = 1_000_000
"""Maximum number of entries of a directory that can be listed."""
_MOST_LISTED_BYTES = 64 * 1024 * 1024
_LISTINGS = 4
# Of names and link targets; they may grow to six times that in a guest agent's reply.
_PAGE_BYTES = 512 * 1024


class Refused(Exception):
    """A refused operation: ``errno`` classifies it, ``what`` describes it."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(what)
        self.errno = number
        self.what = what


def open_read(request: Message) -> Reply:
    """Opens a regular file for reading; follows a link in the last component only on request."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    # stat first: opening a pipe releases a writer that waits for it, and opening a device may do anything.
    found = os.stat(request["path"]) if request["follow"] else os.lstat(request["path"])
    if stat.S_ISLNK(found.st_mode):
        raise Refused(errno.EISDIR, "a symbolic link")
    if not stat.S_ISREG(found.st_mode):
        raise Refused(errno.EISDIR, "not a regular file")
    if not request["follow"]:
        flags |= os.O_NOFOLLOW
    try:
        descriptor = os.open(request["path"], flags)
    except OSError as error:
        if error.errno == errno.ELOOP and not request["follow"]:
            raise Refused(errno.EISDIR, "a symbolic link") from error
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or _is_ours(descriptor):
        os.close(descriptor)
        if stat.S_ISREG(status.st_mode):
            raise Refused(errno.EACCES, "is reserved for the sandbox's guest")
        raise Refused(errno.EISDIR, "not a regular file")
    return _describe(status), [descriptor]


def _is_ours(descriptor: int) -> bool:
    """Whether it is the caller's own process in /proc: the kernel lets a process read that, no matter who owns it."""
    try:
        path = os.readlink("/proc/self/fd/%d" % descriptor)
        return path.startswith("/proc/%s/" % os.readlink("/proc/self"))
    except OSError:
        return False  # it is not in the sandbox's /proc


def open_write(request: Message) -> Reply:
    """Opens a fresh file beside ``path``; ``commit`` renames it over ``path``, ``discard`` removes it."""
    folder, name = parent(request["path"], create=True)
    try:
        try:
            if stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
                raise Refused(errno.EISDIR, "the path is a directory")
        except FileNotFoundError:
            pass
        # By bytes: a name has at most 255, and the suffix needs 26.
        stem = os.fsdecode(os.fsencode(name)[:200])
        partial = f".{stem}.{os.urandom(8).hex()}.partial"
        descriptor = os.open(
            partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder
        )
        # The directory's descriptor comes back with commit: a renamed parent cannot redirect the rename.
        return {"partial": partial, "name": name}, [descriptor, os.dup(folder)]
    finally:
        os.close(folder)


def commit(request: Message, descriptors: list[int]) -> Reply:
    """Renames the file of ``open_write`` over its target: descriptors are the file's and its directory's."""
    file, folder = descriptors
    os.fchmod(file, request["mode"])
    os.rename(request["partial"], request["name"], src_dir_fd=folder, dst_dir_fd=folder)
    expected, found = os.fstat(file), os.lstat(request["name"], dir_fd=folder)
    if (expected.st_dev, expected.st_ino) != (found.st_dev, found.st_ino):
        raise Refused(errno.ESTALE, "another process replaced the file while it was being written")
    return _describe(found), []


def discard(request: Message, descriptors: list[int]) -> Reply:
    """Removes the file of ``open_write``."""
    os.unlink(request["partial"], dir_fd=descriptors[1])
    return {}, []


def stat_path(request: Message) -> Reply:
    """Describes a path; of a link, the link itself."""
    path = request["path"]
    status = os.lstat(path)
    described = _describe(status)
    if stat.S_ISLNK(status.st_mode):
        described["target"] = os.readlink(path)
    return described, []


class Listings:
    """Caches sorted names of directories that are being listed, so that each directory is read and sorted once.

    Without it each page would cost as much as the whole directory, whose size the agent controls. An evicted listing is
    made again where its next page begins.
    """

    def __init__(self) -> None:
        self._kept: Dict[str, List[str]] = {}

    def begin(self, path: str, folder: int) -> List[str]:
        """Returns a directory's names in order. Raises Refused (EFBIG)."""
        self._kept.pop(path, None)
        names: List[str] = []
        size = 0
        with os.scandir(folder) as scan:
            for entry in scan:
                names.append(entry.name)
                size += len(entry.name)
                if len(names) > MOST_LISTED or size > _MOST_LISTED_BYTES:
                    raise Refused(errno.EFBIG, "the directory has more than %d entries" % len(names[:-1]))
        names.sort()
        return names

    def keep(self, path: str, names: List[str]) -> None:
        """Keeps them for the next page."""
        self._kept.pop(path, None)
        while len(self._kept) >= _LISTINGS:
            del self._kept[next(iter(self._kept))]
        self._kept[path] = names

    def go_on(self, path: str, folder: int) -> List[str]:
        """Returns the kept names, or reads them again."""
        return self._kept.get(path) or self.begin(path, folder)

    def end(self, path: str) -> None:
        """Drops a listing after its last page."""
        self._kept.pop(path, None)


_listings = Listings()


def list_directory(request: Message) -> Reply:
    """Lists a directory's entries by name, after ``after``; at most ``limit``, and fewer if they are long.

    ``last`` is the name after which there are more, or empty. Each entry is examined once, whatever the limit.
    """
    path: str = request["path"]
    after: str = request["after"]
    folder = os.open(path, _FOLDER)
    try:
        names = _listings.go_on(path, folder) if after else _listings.begin(path, folder)
        position = bisect.bisect_right(names, after) if after else 0
        entries: List[Message] = []
        room = _PAGE_BYTES
        while position < len(names) and len(entries) < request["limit"] and room > 0:
            name = names[position]
            position += 1
            described = _entry(folder, name)
            if described is not None:
                entries.append(described)
                room -= len(name) + len(described.get("target", ""))
    finally:
        os.close(folder)
    more = position < len(names)
    if more:
        _listings.keep(path, names)
    else:
        _listings.end(path)
    return {"entries": entries, "last": names[position - 1] if more else ""}, []


def _entry(folder: int, name: str) -> Optional[Message]:
    """Returns an entry of a directory; None if it is gone."""
    try:
        status = os.lstat(name, dir_fd=folder)
        described = _describe(status)
        if stat.S_ISLNK(status.st_mode):
            described["target"] = os.readlink(name, dir_fd=folder)
    except FileNotFoundError:
        return None
    described["name"] = name
    return described


def make_directory(request: Message) -> Reply:
    """Creates a directory and its parents; succeeds if it exists."""
    folder, name = parent(request["path"], create=True)
    try:
        try:
            os.mkdir(name, 0o700, dir_fd=folder)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
                raise
            return {}, []
        made = below(folder, name)
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


def parent(path: str, *, create: bool, anchor: int | None = None, force: bool = False) -> tuple[int, str]:
    """Opens the directory that holds ``path``; returns its descriptor (the caller's to close) and the last name."""
    folder, _, name = path.rstrip("/").rpartition("/")
    if name in ("", ".", ".."):
        raise Refused(errno.EINVAL, "the path does not end in a name")
    return open_folder(folder, create=create, anchor=anchor, force=force), name


def open_folder(path: str, *, create: bool, anchor: int | None = None, force: bool = False) -> int:
    """Opens a directory component by component from the root (or ``anchor``); none may be a symbolic link.

    ``force``: opens directories that their owner may not enter; with ``create``, also replaces what is not a directory.
    """
    here = os.dup(anchor) if anchor is not None else os.open("/", _FOLDER)
    try:
        for part in path.split("/"):
            if part in ("", "."):
                continue
            if part == "..":
                raise Refused(errno.EINVAL, "the path contains '..'")
            inner = enter(here, part, create=create, force=force)
            os.close(here)
            here = inner
        return here
    except BaseException:
        os.close(here)
        raise


def enter(folder: int, name: str, *, create: bool, force: bool) -> int:
    """Opens a subdirectory. ``create`` and ``force`` are those of ``open_folder``."""
    if force:
        _make_way(folder, name, create=create)
    elif create:
        try:
            os.mkdir(name, 0o755, dir_fd=folder)
        except FileExistsError:
            pass
    return below(folder, name)


def below(folder: Optional[int], name: str) -> int:
    """Opens a subdirectory, which may not be a symbolic link."""
    try:
        opened = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ENOTDIR and stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode):
            raise Refused(errno.ELOOP, f"{name} is a symbolic link") from error
        raise
    try:
        # gVisor (of 2022) follows the link even so when a directory is requested.
        if not os.path.samestat(os.fstat(opened), os.lstat(name, dir_fd=folder)):
            raise Refused(errno.ELOOP, f"{name} is a symbolic link")
    except BaseException:
        os.close(opened)
        raise
    return opened


def _make_way(folder: int, name: str, *, create: bool) -> None:
    try:
        status = os.lstat(name, dir_fd=folder)
        if stat.S_ISDIR(status.st_mode):
            unlock(folder, name, status)
            return
        if not create:
            return
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        if not create:
            return
    os.mkdir(name, 0o755, dir_fd=folder)


def unlock(folder: Optional[int], name: str, status: os.stat_result, *, always: bool = False) -> None:
    """Lets its owner read, write and enter the directory described by ``status``; ``always``: even if it seems so."""
    if always or status.st_mode & 0o700 != 0o700:
        try:
            found = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                # By descriptor: a link put in its place meanwhile cannot redirect the change.
                os.chmod(f"/proc/self/fd/{found}", stat.S_IMODE(status.st_mode) | 0o700)
            finally:
                os.close(found)
        except PermissionError:
            pass  # another owner's: later operations in it fail


class Unlocked:
    """Something that was closed to its owner and is open for a while; keeps no descriptor.

    All that open it at the same time, in several threads, share one of these: it is closed again by the last of them.
    """

    def __init__(self, mode: int, opened: os.stat_result) -> None:
        self.mode = mode
        """That it had, and gets again."""
        self._opened = opened
        self._holders = 1

    def is_as_opened(self, now: os.stat_result) -> bool:
        """Whether nobody else has changed it since, or put another in its place."""
        then = self._opened
        return os.path.samestat(now, then) and (now.st_ctime_ns, now.st_mode) == (then.st_ctime_ns, then.st_mode)

    def join(self) -> None:
        """Counts one more that needs it open."""
        self._holders += 1

    def lock(self, folder: Optional[int], name: str) -> None:
        """Restores its mode, if nobody else needs it open and it still has its name.

        A mode changed by others meanwhile is kept.
        """
        with _UNLOCKING:
            if not self._left():
                return
            try:
                found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            except FileNotFoundError:
                return
            try:
                if self.is_as_opened(os.fstat(found)):
                    os.chmod(f"/proc/self/fd/{found}", self.mode)
            finally:
                os.close(found)

    def abandon(self) -> None:
        """As ``lock`` where its name is not known any more."""
        with _UNLOCKING:
            self._left()

    def _left(self) -> bool:
        """Counts one less; returns whether nobody is left."""
        self._holders -= 1
        if self._holders:
            return False
        key = (self._opened.st_dev, self._opened.st_ino)
        if _unlocked.get(key) is self:
            del _unlocked[key]
        return True


# Without the module threading, which nothing else in a sandbox helper needs.
_UNLOCKING = _thread.allocate_lock()
_unlocked: Dict[Tuple[int, int], Unlocked] = {}
"""What is open for a while in any thread of this process, by its identity."""


def unlocked(folder: Optional[int], name: str) -> Optional[Unlocked]:
    """Opens a closed directory or file to its owner, the caller; returns None if it is open, or another owner's.

    What another thread has opened for a while is closed. Raises OSError if it is gone.
    """
    found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        with _UNLOCKING:
            status = os.fstat(found)
            key = (status.st_dev, status.st_ino)
            shared = _unlocked.get(key)
            if shared is not None and shared.is_as_opened(status):
                shared.join()
                return shared
            needed = 0o500 if stat.S_ISDIR(status.st_mode) else 0o400
            if stat.S_ISLNK(status.st_mode) or status.st_mode & needed == needed:
                return None
            mode = stat.S_IMODE(status.st_mode)
            # By descriptor: a link put in its place meanwhile cannot redirect the change.
            os.chmod(f"/proc/self/fd/{found}", mode | 0o700)
            _unlocked[key] = made = Unlocked(mode, os.fstat(found))
            return made
    except PermissionError:
        return None
    finally:
        os.close(found)


def own_mode(folder: int, name: str, status: os.stat_result) -> int:
    """Returns the mode of a directory or file as its owner set it, no matter who has opened it for a while.

    ``status`` is from before. Raises OSError if it is gone.
    """
    if status.st_mode & 0o700 == 0o700:
        with _UNLOCKING:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            shared = _unlocked.get((status.st_dev, status.st_ino))
            if shared is not None and shared.is_as_opened(status):
                return shared.mode
    return stat.S_IMODE(status.st_mode)


def program(name: str, path: str) -> str:
    """Returns the file of a program, searched in ``path`` as by a shell; raises Refused."""
    if "/" in name:
        return name
    denied = False
    for folder in path.split(":"):
        candidate = os.path.join(folder or ".", name)
        if os.access(candidate, os.X_OK):
            if not os.path.isdir(candidate):
                return candidate
        elif os.path.exists(candidate):
            denied = True
    if denied:
        raise Refused(errno.EACCES, f"{name}: not executable")
    raise Refused(errno.ENOENT, f"{name}: not found in PATH")


def _describe(status: os.stat_result) -> Message:
    return {
        "kind": _KINDS.get(stat.S_IFMT(status.st_mode), "other"),
        "size": status.st_size,
        "mode": stat.S_IMODE(status.st_mode),
        "mtime_ns": status.st_mtime_ns,
    }


_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}
