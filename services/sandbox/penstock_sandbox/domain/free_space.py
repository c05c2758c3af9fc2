"""Free space of the service's disk, and the minimum of it: what takes much more is refused, and ended, below that.

Purpose: the service's journal is on that disk (R95), and below half of the minimum sandboxes are ended, which did not
take the space.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock_chassis.aio.retry import Pause
from penstock_chassis.errors import ResourceExhausted

_RETRY_AFTER_S: Final = 5.0
_LOOK_S: Final = 0.1
"""What is written meanwhile must stay below half of the minimum."""


@dataclass(frozen=True, slots=True)
class Free:
    """Free space of a file system; ``inodes`` is None if it has no fixed number."""

    bytes: int
    inodes: int | None


def free_of(place: Path) -> Free:
    """Returns the free space, without what is reserved for root, whatever user this service runs as. Raises OSError."""
    there = os.statvfs(place)
    # Some file systems have no fixed number of inodes and report 0 of 0.
    return Free(there.f_bavail * there.f_frsize, there.f_favail if there.f_files else None)


class Watermark:
    """Minimum free bytes and inodes on the disk of ``folder``, so that the service's own writes have room. 0 = none.

    ``folder`` is in the state directory, where the journal is: for every backend that file system is checked.
    """

    def __init__(
        self,
        folder: Path,
        least_bytes: int = 0,
        least_inodes: int = 0,
        *,
        free: Callable[[Path], Free] = free_of,
        pause: Pause = asyncio.sleep,
    ) -> None:
        self._folder = folder
        self._least_bytes = least_bytes
        self._least_inodes = least_inodes
        self._free = free
        self._pause = pause

    def check(self, more_bytes: int = 0) -> None:
        """Raises ResourceExhausted (DISK_LOW) if less than the minimum is free, or would be after so many bytes."""
        lack = self._lack(more_bytes)
        if lack is not None:
            raise lack

    def allows(self, more_bytes: int = 0) -> bool:
        """Whether ``check`` raises nothing."""
        return self._lack(more_bytes) is None

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Cancels its body once less than the minimum is free. Raises ResourceExhausted (DISK_LOW) then."""
        try:
            async with asyncio.TaskGroup() as group:
                looking = group.create_task(self._look(), name="free-space")
                yield
                looking.cancel()
        except BaseExceptionGroup as failures:
            # The first has cancelled the other.
            first = failures.exceptions[0]
            raise first from first.__cause__

    async def _look(self) -> None:
        while True:
            await self._pause(_LOOK_S)
            self.check()

    def _lack(self, more_bytes: int) -> ResourceExhausted | None:
        if not self._least_bytes and not self._least_inodes:
            return None
        free = self._free(self._folder)
        if free.bytes - more_bytes < self._least_bytes:
            return _low("bytes", free.bytes, self._least_bytes, more_bytes)
        if free.inodes is not None and free.inodes < self._least_inodes:
            return _low("inodes", free.inodes, self._least_inodes)
        return None


def _low(what: str, free: int, least: int, more: int = 0) -> ResourceExhausted:
    beside = f" beside the {more} that this takes" if more else ""
    return ResourceExhausted(
        f"the disk of the sandbox service has {free} {what} left, but needs {least}{beside} (min_free_{what}): delete "
        "sandboxes or snapshots, or free space",
        reason="DISK_LOW",
        retry_after_s=_RETRY_AFTER_S,
        metadata={"free": str(free), "least": str(least), "of": what},
    )
