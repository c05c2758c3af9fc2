"""Computes the changes in a working directory as a unified diff for people.

Invariants: text files appear exactly; binary or large files are only named. The diff's size and the cost of making it
are bounded.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO, Final

from penstock_driver.rollouts.workdir.edits import Effort, hunks
from penstock_driver.rollouts.workdir.files import MAX_ENTRIES, TooMany, entries, opened

NAME: Final = "changes.diff"
"""The artifact's name."""
MAX_DIFF_BYTES: Final = 256 << 10
COUNTED_BYTES: Final = 4 << 20
"""A diff is generated up to this size, to report its length, although less of it is kept."""
MAX_FILE_BYTES: Final = 256 << 10
"""Maximum size of a file whose text is shown."""
_NOWHERE: Final = "/dev/null"


@dataclass(frozen=True, slots=True)
class WorkdirDiff:
    """A diff: `text` is its first MAX_DIFF_BYTES in whole lines; `size_bytes` its full size, counted up to
    COUNTED_BYTES.
    """

    text: bytes
    size_bytes: int


def unified(before: BinaryIO, after: BinaryIO) -> WorkdirDiff:
    """The diff of two tars of one directory. Blocks: run it in a thread. TarError for an invalid tar, TooMany."""
    with opened(before) as old, opened(after) as new:
        return _bounded(_lines(old, _compared(old), new, _compared(new)))


def _bounded(lines: Iterator[str]) -> WorkdirDiff:
    kept = bytearray()
    size = 0
    for line in lines:
        data = line.encode("utf-8", "surrogateescape")
        if size == len(kept) and size + len(data) <= MAX_DIFF_BYTES:
            kept += data
        size += len(data)
        if size > COUNTED_BYTES:
            break
    return WorkdirDiff(bytes(kept), size)


def _compared(archive: tarfile.TarFile) -> Mapping[str, tarfile.TarInfo]:
    found: dict[str, tarfile.TarInfo] = {}
    for path, member in entries(archive):
        if len(found) >= MAX_ENTRIES:
            raise TooMany(f"the working directory has more than {MAX_ENTRIES} entries")
        if not member.isdir():
            found[path] = member
    return found


def _lines(
    old: tarfile.TarFile,
    before: Mapping[str, tarfile.TarInfo],
    new: tarfile.TarFile,
    after: Mapping[str, tarfile.TarInfo],
) -> Iterator[str]:
    effort = Effort()
    for path in sorted(before.keys() | after.keys()):
        was, now = before.get(path), after.get(path)
        if was and now and was.type == now.type and _is_equal(old, was, new, now):
            continue
        name = _shown(path)
        heading = (f"a/{name}" if was else _NOWHERE, f"b/{name}" if now else _NOWHERE)
        one, other = _text(old, was), _text(new, now)
        yield f"diff --git a/{name} b/{name}\n"
        if one is None or other is None:
            yield f"Binary files {heading[0]} and {heading[1]} differ\n"
            continue
        yield f"--- {heading[0]}\n"
        yield f"+++ {heading[1]}\n"
        yield from hunks(one, other, effort)


def _is_equal(old: tarfile.TarFile, was: tarfile.TarInfo, new: tarfile.TarFile, now: tarfile.TarInfo) -> bool:
    if not was.isreg():
        return was.linkname == now.linkname
    if was.size != now.size:
        return False
    one, other = old.extractfile(was), new.extractfile(now)
    assert one and other
    while True:
        part = one.read(1 << 16)
        if part != other.read(1 << 16):
            return False
        if not part:
            return True


def _text(archive: tarfile.TarFile, member: tarfile.TarInfo | None) -> str | None:
    """The text at a path, or a link's target; empty for a missing path, None for what cannot be shown as text."""
    if member is None:
        return ""
    if member.issym():
        return f"link to {member.linkname!a}\n"
    if not member.isreg() or member.size > MAX_FILE_BYTES:
        return None
    content = archive.extractfile(member)
    assert content
    data = content.read()
    if b"\0" in data:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _shown(path: str) -> str:
    """A path on one line: unprintable characters are escaped."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "replace").decode() for letter in path
    )
