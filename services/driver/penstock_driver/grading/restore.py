"""Puts the verifier's own files back as they were prepared, before it runs; saves them before the agent starts.

A pattern is a path whose names may have `*`, `?` and `[...]`, and `**` for any number of directories. A directory
includes everything in it, so `tests/**` is `tests`. Matching follows no link.

Invariant: `Baseline.put_back` returns every saved path to its saved state and removes any other match, whatever the
agent did to it and to the directories above it (R76).
"""

from __future__ import annotations

import asyncio
import io
import posixpath
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

from penstock_chassis.errors import NotFound, PermissionDenied, ResourceExhausted
from penstock_driver.domain.failures import OF_THE_SANDBOX
from penstock_driver.domain.ports import PathKind, Sandboxes
from penstock_driver.domain.rollout import Cause, Phase, RolloutFailed, failed
from penstock_driver.grading.overlay import WHITEOUT

MAX_LOOKED_AT: Final = 100_000
"""Directory entries that are checked for matches."""
_WILD: Final = frozenset("*?[")

Pattern: TypeAlias = tuple[str, ...]
"""The names of an absolute pattern, in order."""


def expanded(patterns: Iterable[str], home: str, workdir: str) -> tuple[Pattern, ...]:
    """Absolute patterns, with `tests/**` reduced to `tests`."""
    found = []
    for pattern in patterns:
        if pattern.startswith("~/"):
            whole = f"{home}/{pattern[2:]}"
        else:
            whole = pattern if pattern.startswith("/") else f"{workdir}/{pattern}"
        names = _names(whole)
        while names[-1] == "**":
            names = names[:-1]
        found.append(tuple(names))
    return tuple(dict.fromkeys(found))


def _names(pattern: str) -> list[str]:
    return [name for name in pattern.split("/") if name not in ("", ".")]


class Baseline:
    """The paths that matched in the prepared state. Close it with `close()`; `tar` has names relative to the root."""

    def __init__(self, patterns: tuple[Pattern, ...], found: Mapping[str, PathKind], tar: BinaryIO) -> None:
        self._patterns = patterns
        self._found = found
        self._tar = tar

    @classmethod
    async def keep(
        cls, sandboxes: Sandboxes, sandbox_id: str, patterns: tuple[Pattern, ...], spool: Path | None, max_bytes: int
    ) -> Baseline:
        """Save the matching paths of a sandbox that no agent has touched.

        RolloutFailed (TASK; RESTORE_TOO_LARGE, RESTORE_NOT_TEXT).
        """
        try:
            found = await _find(sandboxes, sandbox_id, patterns)
        except _TooMany as error:
            raise _too_large(str(error)) from error
        except _NotText as error:
            message = f"a name that is not UTF-8 cannot be restored: {error}; restore narrower patterns, or rename it"
            raise failed(Cause.TASK, "RESTORE_NOT_TEXT", message, Phase.CONFIGURING) from error
        tar = tempfile.TemporaryFile(dir=spool)  # noqa: SIM115 - kept until the rollout is graded
        try:
            archive = tarfile.open(fileobj=tar, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115
            for path, kind in found.items():
                with tempfile.TemporaryFile(dir=spool) as read:
                    try:
                        await sandboxes.read_tree(sandbox_id, path, read, max_bytes)
                    except ResourceExhausted as error:
                        raise _too_large(f"more than {max_bytes} bytes at {path}") from error
                    max_bytes -= read.tell()
                    await asyncio.to_thread(_add, archive, read, path, kind)
            await asyncio.to_thread(archive.close)
        except BaseException:
            with suppress(OSError):
                tar.close()
            raise
        return cls(patterns, found, tar)

    async def put_back(self, sandboxes: Sandboxes, sandbox_id: str, spool: Path | None) -> int:
        """Restore all matching paths and return their number.

        RolloutFailed (AGENT) when the agent left too many entries to search (CHANGES_TOO_LARGE), or a name to restore
        that is not UTF-8 (GRADING_BLOCKED).
        """
        try:
            now = await _find(sandboxes, sandbox_id, self._patterns)
        except _TooMany as error:
            message = f"the agent left too many files to search: {error}"
            raise failed(Cause.AGENT, "CHANGES_TOO_LARGE", message, Phase.VERIFYING) from error
        except _NotText as error:
            message = f"the agent left a name that is not UTF-8 among the files to restore: {error}"
            raise failed(Cause.AGENT, "GRADING_BLOCKED", message, Phase.VERIFYING) from error
        added = [path for path in now if path not in self._found]
        emptied = [path for path, kind in self._found.items() if kind is PathKind.DIRECTORY]
        with tempfile.TemporaryFile(dir=spool) as layer:
            await asyncio.to_thread(_write_layer, layer, [*added, *emptied], self._tar)
            layer.seek(0)
            await sandboxes.put_layer(sandbox_id, "/", layer)
        return len(self._found) + len(added)

    def close(self) -> None:
        """Remove the temporary file."""
        with suppress(OSError):  # closing flushes again what a full disk refused; the data is no longer needed
            self._tar.close()


async def _find(sandboxes: Sandboxes, sandbox_id: str, patterns: Sequence[Pattern]) -> dict[str, PathKind]:
    """The matching paths, in a fixed order; nothing below a matching directory.

    No request can name what is not UTF-8. What has such a name, or lies below it, could be neither found nor removed,
    so one that matters raises _NotText.
    """
    found: dict[str, PathKind] = {}
    pending: list[tuple[str, frozenset[Pattern]]] = [("", frozenset(patterns))]
    room = MAX_LOOKED_AT
    while pending:
        folder, wanted = pending.pop()
        wanted |= {pattern[1:] for pattern in wanted if pattern[0] == "**"}
        entries = await _look(sandboxes, sandbox_id, folder, {pattern[0] for pattern in wanted}, room)
        room -= len(entries)
        if room < 0:
            raise _TooMany(f"more than {MAX_LOOKED_AT} entries to search")
        for name, kind in sorted(entries.items()):
            path = f"{folder}/{name}"
            further: set[Pattern] = set()
            if any(len(pattern) == 1 and fnmatchcase(name, pattern[0]) for pattern in wanted):
                found[path] = kind
            elif kind is PathKind.DIRECTORY:
                further = {pattern[1:] for pattern in wanted if len(pattern) > 1 and fnmatchcase(name, pattern[0])}
                further |= {pattern for pattern in wanted if pattern[0] == "**"}
                if further:
                    pending.append((path, frozenset(further)))
            if (path in found or further) and not _is_text(name):
                raise _NotText(path.encode(errors="surrogateescape").decode(errors="replace"))
    return found


def _is_text(name: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in name)


async def _look(
    sandboxes: Sandboxes, sandbox_id: str, folder: str, names: set[str], room: int
) -> Mapping[str, PathKind]:
    """Entries of a directory, at least those with the given names."""
    try:
        return await _seen(sandboxes, sandbox_id, folder, names, room)
    except PermissionDenied:
        # The agent may have removed our permission, or left only search permission: set mode 0755 again.
        with io.BytesIO() as layer:
            with tarfile.open(fileobj=layer, mode="w", format=tarfile.PAX_FORMAT) as archive:
                archive.addfile(_directory(folder))
            layer.seek(0)
            await sandboxes.put_layer(sandbox_id, "/", layer)
        return await _seen(sandboxes, sandbox_id, folder, names, room)


async def _seen(
    sandboxes: Sandboxes, sandbox_id: str, folder: str, names: set[str], room: int
) -> Mapping[str, PathKind]:
    if not any(_WILD & set(name) for name in names):
        kinds = {name: await sandboxes.kind(sandbox_id, f"{folder}/{name}") for name in sorted(names)}
        return {name: kind for name, kind in kinds.items() if kind is not None}
    try:
        return await sandboxes.entries(sandbox_id, folder or "/", room)
    except NotFound as error:
        if error.reason in OF_THE_SANDBOX:
            raise
        return {}


def _add(archive: tarfile.TarFile, read: BinaryIO, path: str, kind: PathKind) -> None:
    """Add what was read of a path to the archive, under the path's own name."""
    read.seek(0)
    folder = path if kind is PathKind.DIRECTORY else posixpath.dirname(path)
    if kind is PathKind.DIRECTORY:
        archive.addfile(_directory(path))
    with tarfile.open(fileobj=read, mode="r:") as source:
        for member in source:
            if member.issym() and member.linkname.startswith("/"):
                # A layer has no absolute links; make it relative to the link's directory.
                member.linkname = posixpath.relpath(member.linkname, posixpath.dirname(f"{folder}/{member.name}"))
            member.name = f"{folder}/{member.name}"[1:]
            # The time is exact there; the name there is the old one.
            member.pax_headers = {key: text for key, text in member.pax_headers.items() if key == "mtime"}
            archive.addfile(member, source.extractfile(member) if member.isreg() else None)


def _write_layer(layer: BinaryIO, removed: Iterable[str], kept: BinaryIO) -> None:
    kept.seek(0)
    with tarfile.open(fileobj=layer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in removed:
            folder, name = posixpath.split(path)
            archive.addfile(tarfile.TarInfo(f"{folder}/{WHITEOUT}{name}"[1:]))
        with tarfile.open(fileobj=kept, mode="r:") as source:
            for member in source:
                archive.addfile(member, source.extractfile(member) if member.isreg() else None)


def _directory(path: str) -> tarfile.TarInfo:
    made = tarfile.TarInfo(path[1:])
    made.type, made.mode = tarfile.DIRTYPE, 0o755
    return made


class _NotText(Exception):
    """A path that matters has a name that is not UTF-8."""


class _TooMany(Exception):
    """There are more entries than MAX_LOOKED_AT."""


def _too_large(what: str) -> RolloutFailed:
    message = f"the files to restore are too large: {what}"
    return failed(Cause.TASK, "RESTORE_TOO_LARGE", message, Phase.CONFIGURING)
