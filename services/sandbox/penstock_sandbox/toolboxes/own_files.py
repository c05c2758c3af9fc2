"""The files that a toolbox's caller gives: checked by name, then written beside what its packages unpacked to.

Invariants
- Each is a new file in the toolbox: no link is followed and none is written through. The service may be root, and
  links are whatever a package's author wanted.
- None is among the Debian packages, which are mounted under the root of sandboxes: what they may have is checked there.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from penstock_chassis.errors import Violation
from penstock_chassis.validation import invalid_field
from penstock_sandbox.domain.model import ToolboxFile
from penstock_sandbox.guest.common import files
from penstock_sandbox.toolboxes import debian_packages

_MOST_PATH_BYTES: Final = 4000
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_PLACE: Final = frozenset({errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG})
"""Refusals that are due to the file's path, not to the disk."""


def inside(path: str) -> bool:
    """Whether a path is relative and names something inside of a toolbox, as far as no link leads out of it."""
    return bool(path) and not path.startswith("/") and "\0" not in path and ".." not in path.split("/")


def mode(file: ToolboxFile) -> int:
    """Returns a file's permission bits."""
    if file.mode is not None:
        return file.mode & 0o777
    return 0o755 if file.path.startswith("bin/") else 0o644


def problems(given: Iterable[ToolboxFile]) -> Iterator[Violation]:
    """Yields what is wrong with the files' paths, whatever packages the toolbox has."""
    for index, file in enumerate(given):
        parts = [part for part in file.path.split("/") if part not in ("", ".")]
        if not inside(file.path):
            yield Violation(_field(index), "must be relative and stay inside the toolbox")
        elif len(os.fsencode(file.path)) > _MOST_PATH_BYTES:
            # Each directory on the way is made, and takes an inode.
            yield Violation(_field(index), f"must have at most {_MOST_PATH_BYTES:,} bytes")
        elif parts[:1] == [debian_packages.FOLDER]:
            yield Violation(_field(index), f"must not be {debian_packages.FOLDER} or in it: Debian packages are there")


def put(content: Path, given: Sequence[ToolboxFile]) -> None:
    """Writes the files into the toolbox's directory; each replaces what a package, or a file before it, has there.

    Raises InvalidArgument (FIELD_INVALID) where a path leads through a link or a file, or is a directory; OSError.
    """
    anchor = os.open(content, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for index, file in enumerate(given):
            try:
                _put(anchor, file)
            except files.Refused as refused:
                raise invalid_field(_field(index), f"cannot be written: {refused.what}") from refused
            except OSError as error:
                if error.errno not in _NO_PLACE:
                    raise
                raise invalid_field(_field(index), f"cannot be written: {error.strerror}") from error
    finally:
        os.close(anchor)


def _put(anchor: int, file: ToolboxFile) -> None:
    folder, name = files.parent(f"/{file.path}", create=True, anchor=anchor)
    try:
        try:
            if stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
                raise files.Refused(errno.EISDIR, f"{name} is a directory")
            # Not written over: it may be a link, or have other names.
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            pass
        with open(os.open(name, _NEW, 0o600, dir_fd=folder), "wb") as opened:
            opened.write(file.content)
            os.fchmod(opened.fileno(), mode(file))
    finally:
        os.close(folder)


def _field(index: int) -> str:
    return f"spec.files[{index}].path"
