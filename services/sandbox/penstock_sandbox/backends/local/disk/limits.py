"""Disk limits of local sandboxes: by the kernel's quotas if available, else by measuring.

Invariants: a sandbox's limit covers its files and those of the layers below it; it may write the remainder. Its quota
project is released once none of its processes runs, even if its files stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from penstock_chassis.validation import invalid_field
from penstock_sandbox.backends.local.disk.guard import DiskGuard, Guarded
from penstock_sandbox.backends.local.disk.quotas import Quotas
from penstock_sandbox.backends.local.disk.usage import DiskUse, Limit, Use
from penstock_sandbox.domain.model import LEAST_DISK_BYTES, LEAST_INODES, DiskLimit, Resources

_NONE = Limit()


class Allotment:
    """One sandbox's disk limit and usage."""

    def __init__(
        self, upper: Path, disk_use: DiskUse, limit: Limit = _NONE, quotas: Quotas | None = None, project: int = 0
    ) -> None:
        self._upper = upper
        self._disk_use = disk_use
        self._quotas = quotas
        self._project = project
        self.limit = limit
        """For its own files: the layers below are subtracted already."""
        self.held = Use()
        """Usage at the last successful measurement."""
        self.unmeasured = 0
        """Number of failed measurements since then."""

    async def look(self, first_pid: int) -> Use | None:
        """Measures its own files; returns None if that fails. ``first_pid``: its first process."""
        if self._quotas is not None:
            found: Use | None = await asyncio.to_thread(self._quotas.use, self._project)
        else:
            found = await self._disk_use.of(self._upper, first_pid)
        if found is None:
            self.unmeasured += 1
        else:
            self.held, self.unmeasured = found, 0
        return found

    async def release(self) -> None:
        """Releases its quota; none of its processes runs any more. Raises OSError."""
        if self._quotas is not None:
            await asyncio.to_thread(self._quotas.release, self._project)


class Disk:
    """The disk of the sandboxes below ``root``; ``least`` is the minimum free space for a create."""

    def __init__(self, root: Path, least: Use) -> None:
        self._root = root
        self._least = least
        self._disk_use = DiskUse()
        self._quotas: Quotas | None = None
        self._guarding: asyncio.Task[None] | None = None

    async def open(self, user: int | None) -> None:
        """Finds out how limits can be enforced; ``user`` is one of theirs if this service is root."""
        if user is not None:
            self._quotas = await asyncio.to_thread(Quotas.detect, self._root / "sandboxes", user)

    @property
    def kind(self) -> DiskLimit:
        return DiskLimit.WATCHED if self._quotas is None else DiskLimit.HARD

    def guard(self, sandboxes: Callable[[], Sequence[Guarded]], removed: Callable[[], Awaitable[None]]) -> None:
        """Starts the guard; the arguments are ``DiskGuard``'s."""
        floor = Use(self._least.bytes // 2, self._least.inodes // 2)
        guard = DiskGuard(self._root, sandboxes, floor, removed, watches=self._quotas is None)
        self._guarding = asyncio.create_task(guard.run(), name="disk-guard")

    def allot(self, folder: Path, asked: Resources, below: Use) -> Allotment:
        """Applies a limit to an empty directory, in which a sandbox's layer will be ``upper``.

        ``below`` is the usage of the layers below. Raises InvalidArgument if that leaves nothing; OSError.
        """
        limit = _left(asked, below)
        project = self._quotas.give(folder, limit) if self._quotas is not None else 0
        return Allotment(folder / "upper", self._disk_use, limit, self._quotas, project)

    async def aclose(self) -> None:
        """Stops the guard."""
        self._disk_use.close()
        if self._guarding is not None:
            self._guarding.cancel()
            await asyncio.gather(self._guarding, return_exceptions=True)

    def close(self) -> None:
        """Releases the file system, when no sandbox is left."""
        if self._quotas is not None:
            self._quotas.close()


def _left(asked: Resources, below: Use) -> Limit:
    for name, amount, taken, least in (
        ("disk_bytes", asked.disk_bytes, below.bytes, LEAST_DISK_BYTES),
        ("inodes", asked.inodes, below.inodes, LEAST_INODES),
    ):
        if amount is not None and amount < taken + least:
            problem = f"{amount} is too little for a sandbox on this snapshot, whose files already use {taken}"
            raise invalid_field(f"spec.resources.{name}", problem)
    return Limit(
        asked.disk_bytes - below.bytes if asked.disk_bytes is not None else None,
        asked.inodes - below.inodes if asked.inodes is not None else None,
    )
