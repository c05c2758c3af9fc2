"""Reads the tar of a working directory, and collects its small files for callers that name no path (Task.keep_files).

The agent's files are hostile: names and sizes are bounded here, and no name is used as a path on this machine.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

MAX_ENTRIES: Final = 20_000
"""Maximum number of entries read of a directory."""


class TooMany(Exception):
    """More than MAX_ENTRIES entries: any partial result would be wrong."""


def opened(tree: BinaryIO) -> tarfile.TarFile:
    """Open the tar at its beginning; the caller closes it. TarError for an invalid tar."""
    tree.seek(0)
    return tarfile.open(fileobj=tree, mode="r:")


def entries(archive: tarfile.TarFile) -> Iterator[tuple[str, tarfile.TarInfo]]:
    """The entries by their path in the directory."""
    for member in archive:
        yield member.name.removeprefix("./"), member


PREFIX: Final = "files/"
"""Prefix of the artifacts' names, followed by the path in the working directory."""
MAX_FILES: Final = 32
MAX_FILE_BYTES: Final = 64 << 10
MAX_BYTES: Final = 512 << 10
"""Maximum of all files together."""
MAX_DEPTH: Final = 2
"""Maximum number of parts of a path."""


@dataclass(frozen=True, slots=True)
class SmallFiles:
    """Files by path, and the number of files left out."""

    files: tuple[tuple[str, bytes], ...]
    more: int


def small_files(tree: BinaryIO) -> SmallFiles:
    """The first small files of a tar, by path. Blocks: run it in a thread. TarError for an invalid tar."""
    with opened(tree) as archive:
        candidates: dict[str, tarfile.TarInfo] = {}
        more = 0
        for count, (path, member) in enumerate(entries(archive)):
            parts = path.split("/")
            if not member.isreg() or any(part.startswith(".") or not part for part in parts):
                continue
            # A name that is not valid text cannot be sent.
            if path.isprintable() and count < MAX_ENTRIES and member.size <= MAX_FILE_BYTES and len(parts) <= MAX_DEPTH:
                candidates[path] = member
            else:
                more += 1
        kept: list[tuple[str, bytes]] = []
        left = MAX_BYTES
        for path in sorted(candidates):
            member = candidates[path]
            if len(kept) == MAX_FILES or member.size > left:
                more += 1
                continue
            content = archive.extractfile(member)
            assert content
            kept.append((path, content.read()))
            left -= member.size
    return SmallFiles(tuple(kept), more)
