"""Files that a task file names: they must be in its directory, be regular files, and not be too large.

A task's author is a stranger, and a named file goes to the agent, the model and the trajectory: a path or link that
leads out of the directory is refused, unless the user, not the file, allowed the directory that it leads to.
Invariants: nothing that could block or never end is opened (pipes, devices); memory holds at most the allowed size.
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.client.tasks.field_types import MAX_FILE_BYTES

MAX_FILES: Final = 20_000
"""Maximum files of one directory tree."""
MAX_BYTES: Final = 256 << 20
"""Maximum bytes of one directory tree."""
_CHUNK: Final = 1 << 20


class CannotRead(Exception):
    """A named file may not, or cannot, be read; the text gives the reason."""


@dataclass(frozen=True, slots=True)
class Beside:
    """A task file's directory. `also`: further directories whose files it may name, by the user's choice.

    `bounds` is the part of the error message that names the allowed place and the remedy.
    """

    directory: Path
    also: tuple[Path, ...] = ()
    bounds: str = "the task's directory; if you trust the task, allow it with --files-from DIR"

    def place(self, name: str) -> Path:
        """Returns the path of a named file, links followed.

        Raises:
            CannotRead: it does not exist, or is outside.
        """
        if "\0" in name:
            raise CannotRead("must be a path")
        return self._inside(self.directory / name)

    def read(self, name: str, most: int = MAX_FILE_BYTES) -> tuple[bytes, int]:
        """Returns a file's content, at most `most` bytes, and its permission bits.

        Raises:
            CannotRead: as `place`; or it is not a regular file, or too large.
        """
        return regular(self.place(name), most)

    def tree(self, name: str) -> Iterator[tuple[str, bytes, int]]:
        """Yields the files of a directory tree, sorted: path in it, content, permission bits. Links are followed.

        Raises:
            CannotRead: as `read` of one of them; or there are too many, or a directory contains itself.
        """
        files, size = 0, 0
        for path, file in self._below(self.place(name), "", ()):
            content, mode = regular(file, MAX_FILE_BYTES)
            files, size = files + 1, size + len(content)
            if files > MAX_FILES or size > MAX_BYTES:
                raise CannotRead(f"{name} has more than {MAX_FILES} files, or more than {MAX_BYTES} bytes")
            yield path, content, mode

    def _below(self, folder: Path, prefix: str, above: tuple[Path, ...]) -> Iterator[tuple[str, Path]]:
        """Yields the files of a directory tree by their paths in it; `above` are its parent directories."""
        if folder in above:
            raise CannotRead(f"{prefix.rstrip('/')} is a link to one of its parent directories")
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
        except (OSError, RuntimeError) as error:  # RuntimeError: circular links
            raise CannotRead(f"{path}: {getattr(error, 'strerror', None) or 'links to itself'}") from None
        if not any(found.is_relative_to(root) for root in roots):
            raise CannotRead(f"{path} is outside of {self.bounds}")
        return found


def regular(path: Path, most: int) -> tuple[bytes, int]:
    """Returns the content of a regular file, and its permission bits.

    Raises:
        CannotRead: it is not a regular file, has more than `most` bytes, or cannot be read.
    """
    try:
        # A pipe would block the open, and opening a device may have an effect.
        if not stat.S_ISREG(path.stat().st_mode):
            raise CannotRead(f"{path} is not a regular file")
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise CannotRead(f"{path} is not a regular file")
            content = bytearray()
            while len(content) <= most and (chunk := file.read(_CHUNK)):
                content += chunk
    except OSError as error:
        raise CannotRead(f"{path}: {error.strerror}") from None
    if len(content) > most:
        raise CannotRead(f"{path} has {max(found.st_size, len(content))} bytes; at most {most} are allowed")
    return bytes(content), found.st_mode & 0o777


def dockerfile_problem(beside: Beside | None, build: str) -> str:
    """Returns why a directory beside a file has no Dockerfile to build; empty: it has one, or nothing can be read."""
    if beside is None:
        return ""
    try:
        beside.read(f"{build}/Dockerfile")
    except CannotRead as error:
        return f"has no usable Dockerfile: {error}"
    return ""
