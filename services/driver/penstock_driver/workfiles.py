"""The small files of a working directory, for who asks for them without a path (Task.keep_files).

What an agent left is hostile: names and sizes are bounded here, and nothing of a name is used as one of this machine's.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from typing import BinaryIO, Final

from penstock_driver.worktree import MAX_ENTRIES, entries, opened

PREFIX: Final = "files/"
"""Of the artifacts' names; the path in the working directory follows."""
MAX_FILES: Final = 32
MAX_FILE_BYTES: Final = 64 << 10
MAX_BYTES: Final = 512 << 10
"""Of all of them together."""
MAX_DEPTH: Final = 2
"""Parts of a path."""


@dataclass(frozen=True, slots=True)
class Found:
    """Files by path, and how many more there are that are not kept."""

    files: tuple[tuple[str, bytes], ...]
    more: int


def small_files(tree: BinaryIO) -> Found:
    """The first small files of a tar, by path. Blocks: to be run in a thread. TarError for what is no tar."""
    with opened(tree) as archive:
        candidates: dict[str, tarfile.TarInfo] = {}
        more = 0
        for count, (path, member) in enumerate(entries(archive)):
            parts = path.split("/")
            if not member.isreg() or any(part.startswith(".") or not part for part in parts):
                continue
            # A name that is no text cannot be told.
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
    return Found(tuple(kept), more)
