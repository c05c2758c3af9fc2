"""How local sandboxes are held to their disk: by the kernel's quotas where there are some, else by being watched.

Invariants: a sandbox's limit is what its files and those of the layers below it may take together; it writes what is
left of that. Its project is released once nothing of it runs, and its files may outlive that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from penstock_chassis.errors import InvalidArgument, Violation
from penstock_sandbox.backends.local.disk_use import DiskUse, Limit, Use
from penstock_sandbox.backends.local.guard import DiskGuard, Guarded
from penstock_sandbox.backends.local.quotas import Quotas
from penstock_sandbox.model import LEAST_DISK_BYTES, LEAST_INODES, DiskLimit, Resources

_NONE = Limit()


class Allotment:
    """What one sandbox may have on disk, and has."""

    def __init__(
        self, upper: Path, disk_use: DiskUse, limit: Limit = _NONE, quotas: Quotas | None = None, project: int = 0
    ) -> None:
        self._upper = upper
        self._disk_use = disk_use
        self._quotas = quotas
        self._project = project
        self.limit = limit
        """Of its own files: what it stands on is taken off already."""
        self.held = Use()
        """What it was last found to have."""
        self.unmeasured = 0
        """How often since then that could not be found out."""

    async def look(self, first_pid: int) -> Use | None:
        """What its own files take now; None where that cannot be found out. ``first_pid``: its first process."""
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
        """Nothing of it runs any more. Raises OSError."""
        if self._quotas is not None:
            await asyncio.to_thread(self._quotas.release, self._project)


class Disk:
    """The disk of the sandboxes below ``root``; ``least`` is what must be free for one to be made."""

    def __init__(self, root: Path, least: Use) -> None:
        self._root = root
        self._least = least
        self._disk_use = DiskUse()
        self._quotas: Quotas | None = None
        self._guarding: asyncio.Task[None] | None = None

    async def open(self, user: int | None) -> None:
        """Find out how sandboxes can be held; ``user`` is one of theirs where this service is root."""
        if user is not None:
            self._quotas = await asyncio.to_thread(Quotas.detect, self._root / "sandboxes", user)

    @property
    def kind(self) -> DiskLimit:
        """How they are held."""
        return DiskLimit.WATCHED if self._quotas is None else DiskLimit.HARD

    def guard(self, sandboxes: Callable[[], Sequence[Guarded]], removed: Callable[[], Awaitable[None]]) -> None:
        """Guard it from here on; the arguments are ``DiskGuard``'s."""
        floor = Use(self._least.bytes // 2, self._least.inodes // 2)
        guard = DiskGuard(self._root, sandboxes, floor, removed, watches=self._quotas is None)
        self._guarding = asyncio.create_task(guard.run(), name="disk-guard")

    def allot(self, folder: Path, asked: Resources, below: Use) -> Allotment:
        """Hold an empty directory, in which a sandbox's layer will be ``upper``, to what it asked for.

        ``below`` is what it stands on. Raises InvalidArgument where that leaves nothing; OSError.
        """
        limit = _left(asked, below)
        project = self._quotas.give(folder, limit) if self._quotas is not None else 0
        return Allotment(folder / "upper", self._disk_use, limit, self._quotas, project)

    async def aclose(self) -> None:
        """Guard nothing more."""
        self._disk_use.close()
        if self._guarding is not None:
            self._guarding.cancel()
            await asyncio.gather(self._guarding, return_exceptions=True)

    def close(self) -> None:
        """Give the file system back, when no sandbox is left."""
        if self._quotas is not None:
            self._quotas.close()


def _left(asked: Resources, below: Use) -> Limit:
    for name, amount, taken, least in (
        ("disk_bytes", asked.disk_bytes, below.bytes, LEAST_DISK_BYTES),
        ("inodes", asked.inodes, below.inodes, LEAST_INODES),
    ):
        if amount is not None and amount < taken + least:
            problem = f"{amount} is too little for a sandbox on this snapshot, whose files alone take {taken}"
            raise InvalidArgument(
                f"spec.resources.{name}: {problem}",
                reason="INVALID_SPEC",
                violations=[Violation(f"spec.resources.{name}", problem)],
            )
    return Limit(
        asked.disk_bytes - below.bytes if asked.disk_bytes is not None else None,
        asked.inodes - below.inodes if asked.inodes is not None else None,
    )
