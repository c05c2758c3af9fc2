"""What a container's files differ by from its image, in the form of every backend's diff.

Purpose: the daemon tells which paths differ and hands out tars of paths; from both comes one tar of what was added or
changed, and the list of what was deleted.

Invariants: a directory that only holds changes is not a change of its own; a directory that was removed and made again
is told as deleted and comes with what it holds now; neither devices, sockets nor pipes come out; a link comes as it is,
also where the daemon, which follows what it is asked for, fails at it. All of this runs in threads of the daemon's
pool, a piece at a time.
"""

from __future__ import annotations

import io
import posixpath
import stat
import tarfile
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from penstock_sandbox.backends.diffs import CHUNK, DEFAULT_BYTES, MAX_KEPT, DiffWriter, stepwise, too_large
from penstock_sandbox.backends.docker.daemon import GO_DIRECTORY, Daemon, Refused
from penstock_sandbox.backends.docker.places import OURS
from penstock_sandbox.backends.local.layers import is_below

# What a changed path takes in memory beside its characters, with all that is made of it.
_CHANGE_COST = 256
_CHANGES_A_STEP = 1_000
_CHANGED, _ADDED, _DELETED = 0, 1, 2


async def diff(
    daemon: Daemon, container: str, below: Sequence[str] = (), max_bytes: int = DEFAULT_BYTES
) -> AsyncGenerator[bytes | list[str], None]:
    """Tar chunks (names relative to the root), then the deleted absolute paths; see ``SandboxHandle.diff``."""
    async with aclosing(stepwise(_pieces(daemon, container, below, max_bytes), daemon.in_thread)) as pieces:
        async for piece in pieces:
            yield piece


class Listed:
    """What of the daemon's list is at or below some paths (all of it where there are none), by path, without what comes
    whole with a directory that was added. Raises ResourceExhausted (TREE_TOO_LARGE) beyond what may be kept."""

    def __init__(self, below: Sequence[str]) -> None:
        self.kinds: dict[str, int] = {}
        self._roots = {posixpath.normpath(path) for path in below}
        self._added = ""
        self._kept = 0

    def take(self, path: str, kind: int) -> None:
        """Count a change in."""
        if _ours(path):
            return
        # What is in an added directory follows it, and may be a million entries.
        if self._added and path.startswith(self._added):
            return
        if self._roots and not any(is_below(path, root) for root in self._roots):
            if kind == _DELETED:
                # A deleted directory above one of them is the deletion of that one.
                for root in self._roots:
                    if is_below(root, path) and root not in self.kinds:
                        self._keep(root, _DELETED)
            return
        if kind == _ADDED:
            self._added = f"{path}/"
        self._keep(path, kind)

    def _keep(self, path: str, kind: int) -> None:
        self._kept += _CHANGE_COST + len(path)
        if self._kept > MAX_KEPT:
            raise too_large("more paths changed than are kept in mind at once")
        self.kinds[path] = kind


def plan(kinds: Mapping[str, int]) -> tuple[list[str], list[str], list[str]]:
    """From the daemon's list: paths to take whole, paths to take if they are no directory, and deleted paths."""
    parents = {path.rpartition("/")[0] for path in kinds}
    whole = [path for path, kind in kinds.items() if kind == _ADDED and kinds.get(_parent(path)) != _ADDED]
    maybe = [path for path, kind in kinds.items() if kind == _CHANGED and path not in parents]
    deleted = [path for path, kind in kinds.items() if kind == _DELETED]
    return sorted(whole), sorted(maybe), sorted(deleted)


def _ours(path: str) -> bool:
    """Whether a path is a mount point of ours, or the root, whose mode is ours."""
    return path in ("/", OURS) or path.startswith(f"{OURS}/")


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _pieces(
    daemon: Daemon, container: str, below: Sequence[str], max_bytes: int
) -> Generator[bytes | list[str], None, None]:
    listed = Listed(below)
    changes = daemon.changes(container)
    try:
        for number, (path, kind) in enumerate(changes):
            if number % _CHANGES_A_STEP == 0:
                yield b""
            listed.take(path, kind)
    finally:
        changes.close()
    whole, maybe, deleted = plan(listed.kinds)
    writer = DiffWriter(max_bytes)
    refused: dict[str, Refused] = {}
    for path in whole:
        yield from _copy(daemon, container, path, writer, refused, only=None)
    for path in maybe:
        yield from _copy(daemon, container, path, writer, refused, only="no directory")
    for path in deleted:
        writer.delete(path)
        # What is there again: an empty directory in the place of the one that was removed.
        yield from _copy(daemon, container, path, writer, refused, only="directory")
    # Last, so that what is too large was refused before whole directories are read for one link.
    for folder in sorted({_parent(path) for path in refused}):
        yield from _links(daemon, container, folder, writer, refused)
    for failed in refused.values():
        raise failed
    yield from writer.end()


def _links(
    daemon: Daemon, container: str, folder: str, writer: DiffWriter, refused: dict[str, Refused]
) -> Iterator[bytes]:
    """The links of a directory that could not be fetched by their paths, since they lead in circles, through files or
    to names that are too long: taken out of the directory's tar, and out of `refused`."""
    yield b""
    found = daemon.fetch_stream(container, folder or "/")
    if found is None:
        return
    _, chunks = found
    prefix = _parent(folder).lstrip("/")
    try:
        with tarfile.open(fileobj=Source(chunks), mode="r|", bufsize=CHUNK) as source:
            for member in source:
                yield b""
                source.members.clear()  # type: ignore[attr-defined] # as below
                known = _known(member, prefix) if member.issym() else None
                if known is not None and refused.pop(posixpath.normpath(f"/{known.name}"), None) is not None:
                    yield from writer.add(known)
    finally:
        chunks.close()


def _copy(
    daemon: Daemon, container: str, path: str, writer: DiffWriter, refused: dict[str, Refused], *, only: str | None
) -> Iterator[bytes]:
    yield b""
    try:
        found = daemon.fetch_stream(container, path)
    except Refused as error:
        refused[path] = error
        return
    if found is None:
        return
    described, chunks = found
    try:
        directory = bool(int(described["mode"]) & GO_DIRECTORY)
        if only == "no directory" and directory:
            return
        prefix = _parent(path).lstrip("/")
        with tarfile.open(fileobj=Source(chunks), mode="r|", bufsize=CHUNK) as source:
            for member in source:
                yield b""
                source.members.clear()  # type: ignore[attr-defined] # otherwise every entry is kept until the end
                known = _known(member, prefix)
                if known is not None:
                    content = source.extractfile(member) if member.isreg() else None
                    yield from writer.add(known, content.read if content is not None else None)
                if only == "directory":
                    return
    finally:
        chunks.close()


def _known(member: tarfile.TarInfo, prefix: str) -> tarfile.TarInfo | None:
    """The entry as it goes into the diff, or None for what does not belong there."""
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        return None
    made = tarfile.TarInfo(f"{prefix}/{member.name}".strip("/"))
    made.type = member.type
    made.mode = stat.S_IMODE(member.mode)
    made.mtime = int(member.mtime)
    made.size = member.size if member.isreg() else 0
    made.linkname = f"{prefix}/{member.linkname}".strip("/") if member.islnk() else member.linkname
    return made


class Source(io.RawIOBase):
    """A read-only file over chunks."""

    def __init__(self, chunks: Any) -> None:
        super().__init__()
        self._chunks = iter(chunks)
        self._left = b""

    def readable(self) -> bool:
        """Always."""
        return True

    def read(self, size: int = -1) -> bytes:
        """At most ``size`` bytes; fewer only at the end."""
        parts = [self._left]
        have = len(self._left)
        while size < 0 or have < size:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            parts.append(chunk)
            have += len(chunk)
        data = b"".join(parts)
        if size < 0:
            size = len(data)
        self._left = data[size:]
        return data[:size]
