"""Brings archives into jobs and what differs out of them: the service's side of ``carried``, which runs there as root.

Invariants: an archive is unpacked only where all of it came through; what comes out of a job is measured before it is
fetched, and has the digest that was told.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock_chassis.errors import FailedPrecondition, PenstockError, Unavailable
from penstock_sandbox.backends.attended import ending
from penstock_sandbox.backends.hf import bootstrap, carried

if TYPE_CHECKING:
    from penstock_sandbox.backends.hf.client import Outcome, Remote

_PROGRAM = f"{bootstrap.FOLDER}/carried.py"
_NOTES = f"{bootstrap.FOLDER}/notes.json"
_CAPTURED = f"{bootstrap.FOLDER}/captured"
# Gigabytes may have to be packed or unpacked.
_LONG_S = 900.0
# Of the archive itself, beyond what was counted for what is in it.
_OVERHEAD = 16 * 1024 * 1024
_ERRORS_KEPT = 300


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive on this machine."""

    path: Path
    size: int
    sha256: str


async def equip(remote: Remote, place: bootstrap.Place, archives: Sequence[Archive], *, noted: bool) -> None:
    """Note how a fresh job's files are, where it is to be captured later (``noted``), and unpack archives in it.

    Raises Unavailable (CREATE_FAILED), after which the job is good for nothing.
    """
    if not archives and not noted:
        return
    program = await asyncio.to_thread(Path(carried.__file__).read_bytes)
    targets = [f"{bootstrap.FOLDER}/{secrets.token_hex(8)}" for _ in archives]
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(remote.upload(_PROGRAM, program))
            for archive, target in zip(archives, targets, strict=True):
                group.create_task(remote.send(archive.path, target))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    if noted:
        _check(await remote.run([*_command(place, "remember"), _NOTES], timeout_s=_LONG_S), "its files were not noted")
    if archives:
        digests = [part for archive in archives for part in ("--digest", archive.sha256)]
        restored = await remote.run([*_command(place, "restore"), *targets, *digests], timeout_s=_LONG_S)
        _check(restored, "what it is to hold was not unpacked")


async def capture(remote: Remote, place: bootstrap.Place, target: Path, limit: int) -> Archive:
    """End what runs in a job that was noted, and fetch what it differs by. Raises PenstockError."""
    stop = [place.python, "-I", "-S", "-c", ending.PROGRAM, bootstrap.SOCKET]
    ended = await remote.run(stop)
    if ended.code != 0:
        raise _sealing(f"its processes could not be ended (exit {ended.code})")
    user = () if place.as_root else ("--user", f"{place.uid}:{place.gid}")
    told = await remote.run(
        [*_command(place, "capture"), _NOTES, _CAPTURED, "--limit", str(limit), *user], timeout_s=_LONG_S
    )
    if told.code == carried.TOO_MUCH:
        raise _sealing(f"{told.stderr[-_ERRORS_KEPT:].strip()} (snapshot_cache_bytes)")
    size, _, sha256 = told.stdout.strip().partition(" ")
    if told.code != 0 or not size.isdigit():
        raise _sealing(f"its files could not be packed (exit {told.code}): {told.stderr[-_ERRORS_KEPT:].strip()}")
    if int(size) > limit + _OVERHEAD:
        raise _sealing("it told of an archive larger than what is in it")
    try:
        await remote.fetch(_CAPTURED, target)
        if await asyncio.to_thread(_digest, target) != sha256:
            raise _sealing("what came out is not what was packed")
    except BaseException:
        await asyncio.to_thread(target.unlink, missing_ok=True)
        raise
    return Archive(target, int(size), sha256)


def _command(place: bootstrap.Place, what: str) -> list[str]:
    return [
        *(place.python, "-I", "-S", _PROGRAM, what),
        *("--place", bootstrap.HOME, "--place", bootstrap.WORKDIR),
    ]


def _check(outcome: Outcome, what: str) -> None:
    if outcome.code != 0:
        raise Unavailable(
            f"{what} (exit {outcome.code}): {outcome.stderr[-_ERRORS_KEPT:].strip()}",
            reason="CREATE_FAILED",
            retry_after_s=1.0,
        )


def _sealing(what: str) -> PenstockError:
    return FailedPrecondition(what, reason="SEAL_FAILED")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
