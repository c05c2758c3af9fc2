"""What an agent's work left: a unified diff of its working directory for people (Task.keep_diff), and the small files
that lie there (Task.keep_files).

The directory is read when the agent is dead, for a diff also before there is one, so it works on every backend. Both
are records: nothing is graded by them. Invariants: their size, and what they cost to make, are bounded whatever the
agent left; a text is in a diff as it is, and whatever is no text, or too large, is named; that one cannot be made is
told in a line and never fails a rollout, the loss of its sandbox apart.
"""

from __future__ import annotations

import asyncio
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from penstock_chassis.errors import PenstockError, ResourceExhausted
from penstock_driver.edits import Effort, hunks
from penstock_driver.endings import OF_THE_SANDBOX
from penstock_driver.ports import Sandboxes, SandboxFacts
from penstock_driver.rollouts import DIFF_S, ArtifactCollected, Happening, Progress, Task
from penstock_driver.workfiles import PREFIX, Found, small_files

NAME: Final = "changes.diff"
"""Of the artifact."""
MAX_DIFF_BYTES: Final = 256 << 10
COUNTED_BYTES: Final = 4 << 20
"""How far a diff is made although no more of it is kept, to say how long it is."""
MAX_TREE_BYTES: Final = 32 << 20
"""Of a working directory that is compared."""
MAX_ENTRIES: Final = 20_000
MAX_FILE_BYTES: Final = 256 << 10
"""Of a file whose text is shown."""
_NOWHERE: Final = "/dev/null"


class Work:
    """The record of one rollout's directory: `keep` before the agent, `tell` when it is dead, `close` in any case."""

    def __init__(
        self, task: Task, sandboxes: Sandboxes, *, spool: Path | None, record: Callable[[Happening], None]
    ) -> None:
        self._task = task
        self._sandboxes = sandboxes
        self._spool = spool
        self._record = record
        self._before: BinaryIO | None = None

    async def keep(self, sandbox: SandboxFacts) -> None:
        """Read the directory as it was prepared, where a diff is wanted."""
        if self._task.keep_diff:
            self._before = await self._read(sandbox)

    async def tell(self, sandbox: SandboxFacts) -> None:
        """Record what changed since, be it nothing, and what lies there; that it cannot be told is told."""
        if self._before is None and not self._task.keep_files:
            return
        after = await self._read(sandbox)
        if after is None:
            return
        with after:
            try:
                if self._before is not None:
                    made = await asyncio.to_thread(unified, self._before, after)
                    self._record(ArtifactCollected(NAME, made.text, made.size_bytes))
                if self._task.keep_files:
                    self._tell_files(await asyncio.to_thread(small_files, after))
            except (tarfile.TarError, _TooMany) as error:
                self._give_up(str(error))

    def _tell_files(self, found: Found) -> None:
        for path, content in found.files:
            self._record(ArtifactCollected(PREFIX + path, content, len(content)))
        if found.more:
            self._record(Progress(f"{found.more} more files of the working directory are not kept"))

    def close(self) -> None:
        """Forget it; idempotent."""
        if self._before is not None:
            with suppress(OSError):  # a full disk: what it did not take is wanted by nobody now
                self._before.close()

    async def _read(self, sandbox: SandboxFacts) -> BinaryIO | None:
        tree = tempfile.TemporaryFile(dir=self._spool)  # noqa: SIM115 - closed by the caller, or below
        try:
            async with asyncio.timeout(DIFF_S):
                await self._sandboxes.read_tree(sandbox.sandbox_id, sandbox.workdir, tree, MAX_TREE_BYTES)
        except BaseException as error:
            tree.close()
            match error:
                case ResourceExhausted():
                    self._give_up(f"the working directory has more than {MAX_TREE_BYTES >> 20} MiB")
                case TimeoutError():
                    self._give_up(f"the working directory could not be read in {DIFF_S:g} s")
                case PenstockError() if error.reason not in OF_THE_SANDBOX:
                    self._give_up(error.message)
                case OSError():
                    self._give_up(f"the driver's disk did not take the working directory: {error.strerror}")
                case _:
                    raise
            return None
        return tree

    def _give_up(self, why: str) -> None:
        self._record(Progress(f"the agent's work is not kept as the task asks: {why}"))


@dataclass(frozen=True, slots=True)
class Made:
    """A diff: `text` is the first MAX_DIFF_BYTES of it, whole lines; `size_bytes` what it has in all, counted up to
    COUNTED_BYTES."""

    text: bytes
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """What is at a path: a kind of tar member, the target of a link, and where in the tar its content lies."""

    member: tarfile.TarInfo

    def same_kind(self, other: _Entry) -> bool:
        return self.member.type == other.member.type


class _TooMany(Exception):
    """There are more files than are compared."""


def unified(before: BinaryIO, after: BinaryIO) -> Made:
    """The diff of two tars of one directory. Blocks: to be run in a thread. TarError for what is no tar."""
    before.seek(0)
    after.seek(0)
    with tarfile.open(fileobj=before, mode="r:") as old, tarfile.open(fileobj=after, mode="r:") as new:
        return _bounded(_lines(old, _entries(old), new, _entries(new)))


def _bounded(lines: Iterator[str]) -> Made:
    kept = bytearray()
    size = 0
    for line in lines:
        data = line.encode("utf-8", "surrogateescape")
        if size == len(kept) and size + len(data) <= MAX_DIFF_BYTES:
            kept += data
        size += len(data)
        if size > COUNTED_BYTES:
            break
    return Made(bytes(kept), size)


def _entries(archive: tarfile.TarFile) -> Mapping[str, _Entry]:
    found: dict[str, _Entry] = {}
    for member in archive:
        if len(found) >= MAX_ENTRIES:
            raise _TooMany(f"the working directory has more than {MAX_ENTRIES} entries")
        if not member.isdir():
            found[member.name.removeprefix("./")] = _Entry(member)
    return found


def _lines(
    old: tarfile.TarFile, before: Mapping[str, _Entry], new: tarfile.TarFile, after: Mapping[str, _Entry]
) -> Iterator[str]:
    effort = Effort()
    for path in sorted(before.keys() | after.keys()):
        was, now = before.get(path), after.get(path)
        if was and now and was.same_kind(now) and _is_equal(old, was.member, new, now.member):
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


def _text(archive: tarfile.TarFile, entry: _Entry | None) -> str | None:
    """The text at a path; of a link where it leads, nothing for what is not there, None for what is no text to show."""
    if entry is None:
        return ""
    member = entry.member
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
    """A path that stays on its line: what cannot be printed is written as an escape."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "replace").decode() for letter in path
    )
