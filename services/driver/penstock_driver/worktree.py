"""A working directory as it was read: a tar, of which no more is looked at than is bounded here."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import BinaryIO, Final

MAX_ENTRIES: Final = 20_000
"""Of a directory that are looked at."""


class TooMany(Exception):
    """There are more entries than are looked at, and without them there is nothing true to tell."""


def opened(tree: BinaryIO) -> tarfile.TarFile:
    """The tar from its beginning, to be closed by the caller. TarError for what is no tar."""
    tree.seek(0)
    return tarfile.open(fileobj=tree, mode="r:")


def entries(archive: tarfile.TarFile) -> Iterator[tuple[str, tarfile.TarInfo]]:
    """What lies there, by its path in the directory."""
    for member in archive:
        yield member.name.removeprefix("./"), member
