"""Keeps space free on the disk: enforces sandboxes' own limits and a minimum for the services' journals.

Purpose: without quotas, sandboxes are measured repeatedly and ended when over their limit (R95). With or without them,
when the disk is nearly full sandboxes are ended, first those over their limit, then the largest.

Invariants
- A cheap look at the file system sets the rate: all sandboxes are measured when it has grown by half of what the
  sandbox nearest to its limit may still write, and about every second in any case, since one may write what another
  has freed. Measuring uses a bounded share of the time.
- Only a sandbox over its own limit is lost for DISK_EXHAUSTED, which blames its workload; others for DISK_LOW.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

import structlog

from penstock_sandbox.backends.local.disk.usage import Limit, Use
from penstock_sandbox.domain.free_space import Free, free_of
from penstock_sandbox.domain.model import DISK_EXHAUSTED

TICK_S: Final = 0.1
_NEARLY: Final = 4
"""With less free than this multiple of the floor, looks are more frequent by the same factor."""
_HASTE_S: Final = 1.0
"""Maximum time to measure when the disk is nearly full; unmeasured sandboxes count with their last value."""
_AT_LEAST_EVERY_S: Final = 1.0
_SHARE: Final = 20
"""Routine measuring uses one part in this many of a thread's time."""
_STEP: Final = Use(16 << 20, 2_000)
"""Growth of the file system below which no early measurement starts."""
_WORTH: Final = Use(1 << 20, 100)
"""Ending a sandbox with less than this does not help."""
_UNMEASURED: Final = 3
"""Number of consecutive failed measurements that end a sandbox: it has too many entries, or hides them."""

_log = structlog.get_logger(__name__)


class Allotted(Protocol):
    """A sandbox's disk limit and usage; see ``disk.Allotment``."""

    limit: Limit
    held: Use
    unmeasured: int

    async def look(self, first_pid: int) -> Use | None:
        """Measures its usage."""


class Guarded(Protocol):
    """What the guard needs of a sandbox."""

    id: str
    first_pid: int

    @property
    def disk(self) -> Allotted:
        """The sandbox's disk limit and usage."""

    @property
    def at_work(self) -> bool:
        """Whether it was made and has not ended."""

    def lose(self, reason: str) -> None:
        """Marks it as lost."""

    async def destroy(self) -> None:
        """Waits for its end."""


class DiskGuard:
    """Guards the file system of ``place``.

    Args:
            sandboxes: returns the current sandboxes.
            floor: with less than this free, sandboxes are ended until twice as much is free.
            removed: waits until the files of ended sandboxes are gone.
            watches: whether limits are enforced here and not by the kernel.
    """

    def __init__(
        self,
        place: Path,
        sandboxes: Callable[[], Sequence[Guarded]],
        floor: Use,
        removed: Callable[[], Awaitable[None]],
        *,
        watches: bool,
        free: Callable[[Path], Free] = free_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place = place
        self._sandboxes = sandboxes
        self._floor = floor
        self._removed = removed
        self._watches = watches
        self._free = free
        self._clock = clock
        self._measured_at = clock()
        self._took_s = 0.0
        self._then = free(place)
        self._helpless = False
        self._pause_s = TICK_S

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await asyncio.sleep(self._pause_s)
            try:
                await self.look()
            except Exception:  # noqa: BLE001
                # The next look may succeed; without any the disk fills.
                _log.exception("checking the disk failed")

    async def look(self) -> None:
        """Measures and ends sandboxes as necessary, once."""
        free = self._free(self._place)
        near = free.bytes < _NEARLY * self._floor.bytes
        self._pause_s = TICK_S / _NEARLY if near else TICK_S
        if self._is_low(free):
            await self._make_room()
        elif self._watches and self._is_due(free):
            await self._measure()
        else:
            return
        self._helpless = self._helpless and self._is_low(self._free(self._place))

    def _is_low(self, free: Free) -> bool:
        return free.bytes < self._floor.bytes or (free.inodes is not None and free.inodes < self._floor.inodes)

    def _is_due(self, free: Free) -> bool:
        since = self._clock() - self._measured_at
        if since >= max(_AT_LEAST_EVERY_S, _SHARE * self._took_s):
            return True
        if since < self._took_s:
            return False
        bytes_left = [
            box.disk.limit.bytes - box.disk.held.bytes for box in self._sandboxes() if box.disk.limit.bytes is not None
        ]
        inodes_left = [
            box.disk.limit.inodes - box.disk.held.inodes
            for box in self._sandboxes()
            if box.disk.limit.inodes is not None
        ]
        if self._then.bytes - free.bytes >= max(_STEP.bytes, min(bytes_left, default=0) // 2):
            return True
        if self._then.inodes is None or free.inodes is None:
            return False
        return self._then.inodes - free.inodes >= max(_STEP.inodes, min(inodes_left, default=0) // 2)

    async def _measure(self, patience_s: float | None = None) -> None:
        """Measures all, and ends those over their limit."""
        began, self._then = self._clock(), self._free(self._place)
        judging = [asyncio.ensure_future(self._judge(box)) for box in self._sandboxes() if box.at_work]
        if judging:
            done, late = await asyncio.wait(judging, timeout=patience_s)
            for one in late:
                one.cancel()
            for one in done:
                one.result()
        self._measured_at = self._clock()
        self._took_s = self._measured_at - began

    async def _judge(self, box: Guarded) -> None:
        held = await box.disk.look(box.first_pid)
        if self._watches and box.at_work and self._is_over(box):
            _log.warning("a sandbox exceeded its disk limit", sandbox_id=box.id, held=held, limit=box.disk.limit)
            box.lose(DISK_EXHAUSTED)

    @staticmethod
    def _is_over(box: Guarded) -> bool:
        return box.disk.unmeasured >= _UNMEASURED or box.disk.limit.exceeded_by(box.disk.held)

    async def _make_room(self) -> None:
        await self._measure(_HASTE_S)
        free = self._free(self._place)
        if not self._is_low(free):
            return
        lacking = Use(
            2 * self._floor.bytes - free.bytes, 2 * self._floor.inodes - free.inodes if free.inodes is not None else 0
        )
        worth = [
            box
            for box in self._sandboxes()
            if box.at_work
            and ((lacking.bytes > 0 and box.disk.held.bytes >= _WORTH.bytes) or box.disk.held.inodes >= _WORTH.inodes)
        ]
        by_bytes = free.bytes < self._floor.bytes
        worth.sort(
            key=lambda box: (self._is_over(box), box.disk.held.bytes if by_bytes else box.disk.held.inodes),
            reverse=True,
        )
        ended, freed = [], Use()
        for box in worth:
            if freed.bytes >= lacking.bytes and freed.inodes >= lacking.inodes:
                break
            ended.append(box)
            freed += box.disk.held
            if self._is_over(box):
                box.lose(DISK_EXHAUSTED)
            else:
                box.lose("DISK_LOW")
        if ended:
            _log.warning("the disk is nearly full: sandboxes are ended", free=free, ended=[box.id for box in ended])
            await asyncio.gather(*(box.destroy() for box in ended), return_exceptions=True)
        elif not self._helpless:
            self._helpless = True
            _log.error("the disk is nearly full, but not with sandboxes' files: free space", free=free)
        # Also those that ended before: their space is freed only now.
        await self._removed()
