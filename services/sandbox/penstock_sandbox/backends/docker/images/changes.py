"""The difference of a container's files from its image, in the form of every backend's diff.

Purpose: the daemon lists changed paths and returns tars of paths; this makes one tar of what was added or changed, and
the list of deletions.

Invariants: a directory that holds changes is included as well, since the daemon does not say whether its mode changed;
a directory that was removed and made again comes with its current content, and the daemon lists it, or all that it
held, as deleted; a link is included unchanged, also if the daemon, which follows requested paths, fails at it; a file
is included also if its name is not UTF-8, which the daemon lists with replacement characters. What is read of
directories only to find such names and links is limited (_Search). Times have whole seconds, as in the daemon's tars.
All of this runs in threads of the daemon's pool, a piece at a time.
"""

from __future__ import annotations

import io
import posixpath
import re
import stat
import tarfile
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import IO, Any

from penstock_chassis.errors import FailedPrecondition
from penstock_sandbox.backends.docker.engine.daemon import GO_SOCKET, Daemon
from penstock_sandbox.backends.docker.engine.errors import Refused
from penstock_sandbox.backends.host.layers import is_below
from penstock_sandbox.backends.images.additions import OURS
from penstock_sandbox.domain.diffs import CHUNK, DEFAULT_BYTES, MAX_KEPT, DiffWriter, stepwise, too_large
from penstock_sandbox.guest.common import trees

# Memory of a changed path beside its characters, with all that is derived from it.
_CHANGE_COST = 256
_CHANGES_A_STEP = 1_000
_CHANGED, _ADDED, _DELETED = 0, 1, 2
_REPLACED = "\ufffd"
# Entries that one diff reads of whole directories for some of them, those of the image included.
_MOST_SEARCHED = 2_000_000


async def diff(
    daemon: Daemon, container: str, below: Sequence[str] = (), max_bytes: int = DEFAULT_BYTES
) -> AsyncGenerator[bytes | list[str], None]:
    """Yields tar chunks (names relative to the root), then the deleted absolute paths; see ``SandboxHandle.diff``."""
    async with aclosing(stepwise(_pieces(daemon, container, below, max_bytes), daemon.in_thread)) as pieces:
        async for piece in pieces:
            yield piece


class Listed:
    """The daemon's changes at or below some paths (all, if there are none), by path, without the content of added
    directories, which come whole. Raises ResourceExhausted (TREE_TOO_LARGE) over the limit of what is kept."""

    def __init__(self, below: Sequence[str]) -> None:
        self.kinds: dict[str, int] = {}
        self._roots = {posixpath.normpath(path) for path in below}
        self._added = ""
        self._kept = 0

    def take(self, path: str, kind: int) -> None:
        """Adds a change."""
        if _ours(path):
            return
        # The content of an added directory follows it, and may be a million entries.
        if self._added and path.startswith(self._added):
            return
        if self._roots and not any(is_below(path, root) for root in self._roots):
            if kind == _DELETED:
                # Deleting a directory above a requested path deletes that path.
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
            raise too_large("too many paths changed")
        self.kinds[path] = kind


def plan(kinds: Mapping[str, int]) -> tuple[list[str], list[str], list[str]]:
    """Sorts the daemon's changes: paths to take whole, paths to take without what is below them, and deleted paths."""
    whole = [path for path, kind in kinds.items() if kind == _ADDED and kinds.get(_parent(path)) != _ADDED]
    alone = [path for path, kind in kinds.items() if kind == _CHANGED]
    deleted = [path for path, kind in kinds.items() if kind == _DELETED]
    return sorted(whole), sorted(alone), sorted(deleted)


def _ours(path: str) -> bool:
    """Whether a path is one of our mount points, or the root, whose mode is ours."""
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
    whole, alone, deleted = plan(listed.kinds)
    writer = DiffWriter(max_bytes)
    refused: dict[str, Refused] = {}
    for path in whole:
        if _REPLACED not in path:
            yield from _copy(daemon, container, path, writer, refused, whole=True)
    for path in deleted:
        if _REPLACED in path:
            raise _not_text(path)
        writer.delete(path)
    # A deleted directory may exist again: what it holds is listed.
    for path in sorted([*alone, *deleted]):
        if _REPLACED not in path:
            yield from _copy(daemon, container, path, writer, refused, whole=False)
    search = _Search(daemon, container, max_bytes)
    # Last, so that oversized content is refused before whole directories are read for one link.
    for folder in sorted({_parent(path) for path in refused}):
        yield from _links(search, folder, writer, refused)
    yield from _not_utf8(search, whole, alone, writer)
    for failed in refused.values():
        raise failed
    yield from writer.end()


def _not_text(path: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"{path} was deleted: U+FFFD stands for what is not UTF-8 in Docker's list, which does not say what it was",
        reason="PATH_NOT_TEXT",
    )


class _Search:
    """Reads whole directories for some of their entries; within `max_bytes` of files, prepared ones included, and
    _MOST_SEARCHED entries in all."""

    def __init__(self, daemon: Daemon, container: str, max_bytes: int) -> None:
        self._daemon = daemon
        self._container = container
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries = 0

    def entries(self, folder: str) -> Generator[tuple[tarfile.TarInfo, IO[bytes] | None] | None, None, None]:
        """Yields a directory's entries as they go into the diff, with their content, and None while work goes on.

        Raises ResourceExhausted (TREE_TOO_LARGE) over the limits, before the excess is read.
        """
        yield None
        found = self._daemon.fetch_stream(self._container, folder or "/")
        if found is None:
            return
        _, chunks = found
        prefix = _parent(folder).lstrip("/")
        try:
            with tarfile.open(fileobj=Source(chunks), mode="r|", bufsize=CHUNK) as source:
                for member in source:
                    source.members.clear()  # type: ignore[attr-defined] # otherwise every entry is kept until the end
                    self._count(member)
                    yield None
                    yield _known(member, prefix), source.extractfile(member) if member.isreg() else None
        finally:
            chunks.close()

    def _count(self, member: tarfile.TarInfo) -> None:
        self._entries += 1
        self._bytes += member.size if member.isreg() else 0
        if self._entries > _MOST_SEARCHED or self._bytes > self._max_bytes:
            what = f"more than {_MOST_SEARCHED} entries or {self._max_bytes} bytes"
            raise too_large(f"{what} to search for a name that is not UTF-8 or a link that leads nowhere")


def _not_utf8(search: _Search, whole: Sequence[str], alone: Sequence[str], writer: DiffWriter) -> Iterator[bytes]:
    """Yields what no path of text leads to, from the tars of the nearest directories that have one."""
    complete = {_as_listed(path) for path in whole if _REPLACED in path}
    single = {_as_listed(path) for path in alone if _REPLACED in path}
    folders = {_parent(path[: path.index(_REPLACED)]) for path in complete | single}
    for folder in sorted(folders):
        if any(above in folders for above in _above(folder)):
            continue  # it is read with the one above it: nothing is read twice
        with closing(search.entries(folder)) as entries:
            for entry in entries:
                yield b""
                if entry is None:
                    continue
                member, content = entry
                path = _as_listed(f"/{member.name}")
                if path in single or path in complete or any(above in complete for above in _above(path)):
                    yield from writer.add(member, content.read if content is not None else None)


def _as_listed(path: str) -> str:
    """Returns a path with one replacement character for each run of what is no UTF-8, however many were made of it."""
    return re.sub(f"{_REPLACED}+", _REPLACED, path.encode(errors="surrogateescape").decode(errors="replace"))


def _above(path: str) -> Iterator[str]:
    """Yields the directories above a path, the root as the empty one."""
    while path:
        path = _parent(path)
        yield path


def _links(search: _Search, folder: str, writer: DiffWriter, refused: dict[str, Refused]) -> Iterator[bytes]:
    """Yields the links of a directory that could not be fetched by path, because they lead in circles, through files or
    to names that are too long: taken from the directory's tar, and out of `refused`."""
    with closing(search.entries(folder)) as entries:
        for entry in entries:
            yield b""
            if entry is None:
                continue
            member, _ = entry
            if member.issym() and refused.pop(posixpath.normpath(f"/{member.name}"), None) is not None:
                yield from writer.add(member)


def _copy(
    daemon: Daemon, container: str, path: str, writer: DiffWriter, refused: dict[str, Refused], *, whole: bool
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
        if int(described["mode"]) & GO_SOCKET:  # its tar is empty
            yield from writer.add_other(path.lstrip("/"))
            return
        prefix = _parent(path).lstrip("/")
        with tarfile.open(fileobj=Source(chunks), mode="r|", bufsize=CHUNK) as source:
            for member in source:
                yield b""
                source.members.clear()  # type: ignore[attr-defined] # otherwise every entry is kept until the end
                content = source.extractfile(member) if member.isreg() else None
                yield from writer.add(_known(member, prefix), content.read if content is not None else None)
                if not whole:
                    return
    finally:
        chunks.close()


def _known(member: tarfile.TarInfo, prefix: str) -> tarfile.TarInfo:
    """Returns the entry as it goes into the diff; a device becomes a pipe, as everywhere."""
    made = tarfile.TarInfo(f"{prefix}/{member.name}".strip("/"))
    plain = member.isreg() or member.isdir() or member.issym() or member.islnk()
    made.type = member.type if plain else tarfile.FIFOTYPE
    made.mode = stat.S_IMODE(member.mode)
    trees.set_time(made, int(member.mtime) * 10**9)
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
        """Always true."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Returns at most ``size`` bytes; fewer only at the end."""
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
