"""Moves archives into machines and changes out of them; ``change_archive`` is the part that runs there as root.

Invariants: an archive is unpacked only if all of it has arrived; the result of a capture is measured before it is
fetched, and must have the reported digest.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock_chassis.errors import FailedPrecondition, PenstockError, Unavailable
from penstock_sandbox.backends.guest_client import ending
from penstock_sandbox.backends.remote_machine import bootstrap
from penstock_sandbox.backends.remote_machine.machine import Machine, Outcome
from penstock_sandbox.guest import change_archive

_PROGRAM = f"{bootstrap.FOLDER}/change_archive.py"
_NOTES = f"{bootstrap.FOLDER}/notes.json"
_CAPTURED = f"{bootstrap.FOLDER}/captured"
# Gigabytes may have to be packed or unpacked.
_LONG_S = 900.0
# Overhead of the archive itself, beyond the counted content.
_OVERHEAD = 16 * 1024 * 1024
_ERRORS_KEPT = 300
_LONGEST_SIZE = 20


@dataclass(frozen=True, slots=True)
class Archive:
    path: Path
    size: int
    sha256: str


async def equip(
    machine: Machine, place: bootstrap.PreparedMachine, archives: Sequence[Archive], *, noted: bool
) -> None:
    """Records a fresh machine's files, if it is to be captured later (``noted``), and unpacks archives in it.

    Raises Unavailable (CREATE_FAILED), after which the machine is unusable.
    """
    if not archives and not noted:
        return
    program = await asyncio.to_thread(Path(change_archive.__file__).read_bytes)
    targets = [f"{bootstrap.FOLDER}/{secrets.token_hex(8)}" for _ in archives]
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(machine.upload(_PROGRAM, program))
            for archive, target in zip(archives, targets, strict=True):
                group.create_task(machine.send(archive.path, target))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    if noted:
        listed = await machine.run([*_command(place, "remember"), _NOTES], timeout_s=_LONG_S)
        _check(listed, "its files were not listed")
    if archives:
        digests = [part for archive in archives for part in ("--digest", archive.sha256)]
        restored = await machine.run([*_command(place, "restore"), *targets, *digests], timeout_s=_LONG_S)
        _check(restored, "its archive was not unpacked")


async def capture(machine: Machine, place: bootstrap.PreparedMachine, target: Path, limit: int) -> Archive:
    """Ends the processes of a noted machine, and fetches its changes. Raises PenstockError."""
    stop = [place.python, "-I", "-S", "-c", ending.PROGRAM, bootstrap.SOCKET]
    ended = await machine.run(stop)
    if ended.code != 0:
        raise _cannot_seal(f"its processes could not be ended (exit {ended.code})")
    user = () if place.as_root else ("--user", f"{place.uid}:{place.gid}")
    result = await machine.run(
        [*_command(place, "capture"), _NOTES, _CAPTURED, "--limit", str(limit), *user], timeout_s=_LONG_S
    )
    if result.code == change_archive.TOO_MUCH:
        raise _cannot_seal(f"{result.stderr[-_ERRORS_KEPT:].strip()} (snapshot_cache_bytes)")
    size, _, sha256 = result.stdout.strip().partition(" ")
    # What is inside wrote it: digits of other scripts, or thousands of them, are no size.
    if result.code != 0 or not (size.isascii() and size.isdigit() and len(size) < _LONGEST_SIZE):
        raise _cannot_seal(
            f"its files could not be packed (exit {result.code}): {result.stderr[-_ERRORS_KEPT:].strip()}"
        )
    if int(size) > limit + _OVERHEAD:
        raise _cannot_seal("it reported an archive larger than its content")
    try:
        await machine.fetch(_CAPTURED, target)
        if await asyncio.to_thread(_digest, target) != sha256:
            raise _cannot_seal("the received archive is not the packed one")
    except BaseException:
        await asyncio.to_thread(target.unlink, missing_ok=True)
        raise
    return Archive(target, int(size), sha256)


def _command(place: bootstrap.PreparedMachine, what: str) -> list[str]:
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


def _cannot_seal(what: str) -> PenstockError:
    return FailedPrecondition(what, reason="SEAL_FAILED")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
