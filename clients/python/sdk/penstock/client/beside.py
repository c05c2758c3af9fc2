"""Files that a task file names: they lie in its directory, are regular files, and are not too large.

A task's author is a stranger, and what his file names becomes the agent's, the model's and the trajectory's: a path or
link that leads out of the directory is refused, unless the user, not the file, allowed the directory that it leads to.
Invariants: nothing that could block or never end is opened (pipes, devices); memory holds at most what is allowed.
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.client.taskrules import MAX_FILE_BYTES

MAX_FILES: Final = 20_000
"""Of one directory, with all below it."""
MAX_BYTES: Final = 256 << 20
"""Of one directory, with all below it."""
_CHUNK: Final = 1 << 20


class CannotRead(Exception):
    """What is named may not, or cannot, be read; the text says why."""


@dataclass(frozen=True, slots=True)
class Beside:
    """A task file's directory. `also`: further directories whose files it may name, by the user's choice.

    `bounds` says of what is outside where that is, and what to do.
    """

    directory: Path
    also: tuple[Path, ...] = ()
    bounds: str = "the task's directory; if you trust the task, allow it with --files-from DIR"

    def place(self, name: str) -> Path:
        """Where what the file names is, links followed.

        Raises:
            CannotRead: it is not there, or outside.
        """
        if "\0" in name:
            raise CannotRead("must be a path")
        return self._inside(self.directory / name)

    def read(self, name: str, most: int = MAX_FILE_BYTES) -> tuple[bytes, int]:
        """A file's content, at most `most` bytes, and its permission bits.

        Raises:
            CannotRead: as `place`; or it is no regular file, or too large.
        """
        return regular(self.place(name), most)

    def tree(self, name: str) -> Iterator[tuple[str, bytes, int]]:
        """The files of a directory and below, sorted: path in it, content, permission bits. Links are followed.

        Raises:
            CannotRead: as `read` of one of them; or there are too many, or a directory leads into itself.
        """
        files, size = 0, 0
        for path, file in self._below(self.place(name), "", ()):
            content, mode = regular(file, MAX_FILE_BYTES)
            files, size = files + 1, size + len(content)
            if files > MAX_FILES or size > MAX_BYTES:
                raise CannotRead(f"{name} has more than {MAX_FILES} files, or more than {MAX_BYTES} bytes")
            yield path, content, mode

    def _below(self, folder: Path, prefix: str, above: tuple[Path, ...]) -> Iterator[tuple[str, Path]]:
        """The files of a directory by their paths in it; `above` are the directories that it is in."""
        if folder in above:
            raise CannotRead(f"{prefix.rstrip('/')} is a link to a directory that it is in")
        try:
            with os.scandir(folder) as entries:
                names = []
                for entry in entries:
                    names.append(entry.name)
                    if len(names) > MAX_FILES:
                        raise CannotRead(f"{folder} has more than {MAX_FILES} files")
        except OSError as error:
            raise CannotRead(f"{folder}: {error.strerror}") from None
        for name in sorted(names):
            found = self._inside(folder / name)
            if found.is_dir():
                yield from self._below(found, f"{prefix}{name}/", (*above, folder))
            else:
                yield prefix + name, found

    def _inside(self, path: Path) -> Path:
        try:
            found = path.resolve(strict=True)
            roots = [root.resolve() for root in (self.directory, *self.also)]
        except (OSError, RuntimeError) as error:  # RuntimeError: links that lead to one another
            raise CannotRead(f"{path}: {getattr(error, 'strerror', None) or 'leads to itself'}") from None
        if not any(found.is_relative_to(root) for root in roots):
            raise CannotRead(f"{path} is outside of {self.bounds}")
        return found


def regular(path: Path, most: int) -> tuple[bytes, int]:
    """The content of a regular file, and its permission bits.

    Raises:
        CannotRead: it is no regular file, has more than `most` bytes, or cannot be read.
    """
    try:
        # A pipe would keep the open waiting, and a device may do something when it is opened.
        if not stat.S_ISREG(path.stat().st_mode):
            raise CannotRead(f"{path} is no regular file")
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise CannotRead(f"{path} is no regular file")
            content = bytearray()
            while len(content) <= most and (chunk := file.read(_CHUNK)):
                content += chunk
    except OSError as error:
        raise CannotRead(f"{path}: {error.strerror}") from None
    if len(content) > most:
        raise CannotRead(f"{path} has {max(found.st_size, len(content))} bytes, at most {most} are taken")
    return bytes(content), found.st_mode & 0o777
