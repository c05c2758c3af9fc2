"""Turns an agent's work into a layer for a fresh fork: the safe part of a sandbox's diff, below named directories, and
of what is copied whole.

Invariants: whatever the diff holds, the layer has only directories, regular files, links that stay within their
directory tree, and whiteouts (R76). Deletions come first. Nothing that an agent leaves makes this fail, except too much
of it: entries that cannot be carried are left out and counted, so an agent cannot choose not to be graded. What is left
out is a whiteout in the layer: a prepared file in its place would be graded as if the agent had left it intact.

Modes are carried but for the set-user-ID bit. A verifier may run the agent's programs as a lesser user, and such a
program would act as the sandbox's user, who owns the reward file. The other bits give no right that matters to it.
"""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import BinaryIO, Final

from penstock_driver.domain.rollout import Changes

WHITEOUT: Final = ".wh."
"""A member whose name begins with this removes what the rest of it names (OCI image specification)."""
MAX_LISTED: Final = 32
"""Number of left-out paths that are named."""
MAX_ENTRIES: Final = 500_000
"""Entries of a diff that are read, deletions included: empty files cost no bytes, and the agent chooses their number.
"""


class TooManyChanges(Exception):
    """An agent's work has more than MAX_ENTRIES."""


@dataclass(frozen=True, slots=True)
class Copied:
    """What the agent's sandbox has at `path`, absolute and in normal form.

    `tar` is read from its current position; its names are relative to a directory, or it has one file under any name.
    None = it is nothing that can be copied, which `is_left_out` counts, or it is not there.
    """

    path: str
    tar: BinaryIO | None = None
    is_directory: bool = False
    is_left_out: bool = False
    exclude: tuple[str, ...] = ()


def layer(
    diff: BinaryIO | None, deleted: Iterable[str], below: Sequence[str], sink: BinaryIO, copies: Sequence[Copied] = ()
) -> Changes:
    """Write the layer of a diff, and of what is copied whole, to `sink`, names relative to the root.

    `diff` is a tar with names relative to the root, read from its current position. `deleted` are absolute paths, and
    `below` absolute directories in normal form, never the root. At the paths of `copies` the diff does not count. The
    layer adds to a directory that the fork has there. TooManyChanges beyond MAX_ENTRIES. Blocks: run it in a thread.
    """
    return _Layer(tuple(below), sink, copies).made(diff, deleted)


def files_of(diff: BinaryIO) -> list[str]:
    """The absolute paths in a diff, without directories: a diff does not show whether those are new. Blocks."""
    with tarfile.open(fileobj=diff, mode="r:") as source:
        return ["/" + member.name.strip("/") for member in source if not member.isdir()]


class _Layer:
    def __init__(self, below: tuple[str, ...], sink: BinaryIO, copies: Sequence[Copied]) -> None:
        self._below = below
        self._copies = copies
        self._archive = tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115 - closed at the end
        self._seen = 0
        self._entries = 0
        self._bytes = 0
        self._removed = 0
        self._left_out: list[str] = []
        self._left_out_count = 0
        self._kept: set[str] = set()

    def made(self, diff: BinaryIO | None, deleted: Iterable[str]) -> Changes:
        for path in deleted:
            self._count()
            self._delete(path)
        if diff is not None:
            with tarfile.open(fileobj=diff, mode="r:") as source:
                for member in self._members(source):
                    path = "/" + member.name.strip("/")
                    if (root := self._root_of(path)) is not None:
                        self._take(source, member, path, root, "/" + member.linkname.strip("/"))
        for copied in self._copies:
            self._copy(copied)
        self._archive.close()
        return Changes(self._entries, self._bytes, self._removed, self._left_out_count, tuple(self._left_out))

    def _members(self, source: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
        for member in source:
            self._count()
            yield member
            # Both archives would keep every member in memory: a gigabyte at the maximum number of empty files.
            for archive in (source, self._archive):
                archive.members.clear()  # type: ignore[attr-defined]  # typeshed leaves it out

    def _copy(self, copied: Copied) -> None:
        """Add what is copied whole. Where it is no directory, one that the fork has there goes with all its content."""
        path = copied.path
        if copied.tar is None:
            self._count()
            self._archive.addfile(_whiteout(path))
            if copied.is_left_out:
                self._leave_out(path)
            return
        if copied.is_directory:
            directory = tarfile.TarInfo(path[1:])
            directory.type, directory.mode = tarfile.DIRTYPE, 0o755
            self._archive.addfile(directory)
            self._entries += 1
        with tarfile.open(fileobj=copied.tar, mode="r:") as source:
            for member in self._members(source):
                if not copied.is_directory:
                    self._take(source, member, path, path, "")
                    continue
                name = member.name.strip("/")
                if not any(fnmatchcase(part, pattern) for part in name.split("/") for pattern in copied.exclude):
                    self._take(source, member, f"{path}/{name}", path, f"{path}/{member.linkname.strip('/')}")

    def _count(self) -> None:
        self._seen += 1
        if self._seen > MAX_ENTRIES:
            raise TooManyChanges(f"they are more than {MAX_ENTRIES}")

    def _delete(self, path: str) -> None:
        if self._root_of(path) is None:
            return
        if _names_a_file(path):
            self._white_out(path)
            self._removed += 1
        else:
            self._leave_out(path)

    def _white_out(self, path: str) -> None:
        self._archive.addfile(_whiteout(path))
        if path in self._below:  # empty it instead: the verifier works in it
            directory = tarfile.TarInfo(path[1:])
            directory.type, directory.mode = tarfile.DIRTYPE, 0o755
            self._archive.addfile(directory)

    def _take(self, source: tarfile.TarFile, member: tarfile.TarInfo, path: str, root: str, target: str) -> None:
        """Add the member as `path`, if it stays below `root`; `target` is where it leads as a hard link."""
        if _unusable(path) or not self._stays(member, path, root, target):
            self._leave_out(path)
            if _names_a_file(path) and not member.isdir():  # a directory's prepared content is unchanged
                self._white_out(path)
                self._kept.discard(path)
            return
        made = tarfile.TarInfo(path[1:])
        made.type = member.type
        made.linkname = _relative(path, member.linkname) if member.issym() else target[1:] if member.islnk() else ""
        # A directory that its owner may not enter would lock out the verifier, which runs as the same user.
        made.mode = member.mode & 0o3777 | (0o700 if member.isdir() else 0)
        made.mtime = member.mtime
        if "mtime" in member.pax_headers:  # exactly, where a float is not exact
            made.pax_headers = {"mtime": member.pax_headers["mtime"]}
        made.size = member.size if member.isreg() else 0
        self._archive.addfile(made, source.extractfile(member) if member.isreg() else None)
        self._kept.add(path)
        self._entries += 1
        self._bytes += made.size

    def _stays(self, member: tarfile.TarInfo, path: str, root: str, target: str) -> bool:
        """Whether the member's kind is carried and, for a link, its target stays inside `root`."""
        if member.issym():
            leads_to = posixpath.join(posixpath.dirname(path), member.linkname)
            return not _climbs_late(member.linkname) and _is_below(posixpath.normpath(leads_to), root)
        if member.islnk():
            # The target of a hard link came earlier, or is not carried either.
            return target in self._kept
        return member.isreg() or member.isdir()

    def _root_of(self, path: str) -> str | None:
        """The directory of changes that has the path; None also for what is copied whole."""
        if any(_is_below(path, copied.path) for copied in self._copies):
            return None
        return next((root for root in self._below if _is_below(path, root)), None)

    def _leave_out(self, path: str) -> None:
        self._left_out_count += 1
        if len(self._left_out) < MAX_LISTED:
            self._left_out.append(path.encode("utf-8", "replace").decode())


def _whiteout(path: str) -> tarfile.TarInfo:
    folder, name = posixpath.split(path)
    return tarfile.TarInfo(f"{folder[1:]}/{WHITEOUT}{name}".lstrip("/"))


def emptying(names: Mapping[str, Iterable[str]], sink: BinaryIO) -> None:
    """Write a layer to `sink` that removes what directories have: names by absolute path."""
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, found in names.items():
            for name in found:
                archive.addfile(_whiteout(f"{path}/{name}"))


def _relative(path: str, target: str) -> str:
    """The target of a link at `path`, relative to there."""
    return posixpath.relpath(target, posixpath.dirname(path)) if target.startswith("/") else target


def _climbs_late(target: str) -> bool:
    """Whether `..` follows a name: the name may be a link, so the text does not show where the path leads."""
    parts = [part for part in target.split("/") if part not in ("", ".")]
    named = next((index for index, part in enumerate(parts) if part != ".."), len(parts))
    return ".." in parts[named:]


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}/")


def _names_a_file(path: str) -> bool:
    return path != "/" and not {".", ".."} & set(path.split("/"))


def _unusable(path: str) -> bool:
    """Whether a layer would read the path as something else."""
    return not _names_a_file(path) or any(part.startswith(WHITEOUT) for part in path.split("/"))
