"""Turns of installations: few run at once, shared fairly by namespaces, and each only while the disk has room.

Invariants: a turn is one attempt. Nobody holds one while it waits for another attempt, so that packages that cannot be
had now do not stop others. No namespace holds all turns.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Final, TypeAlias

from penstock_chassis.aio.fair_queue import FairQueue
from penstock_sandbox.domain.free_space import Watermark

AT_ONCE: Final = 4
"""Attempts: each is a process of pip or npm, of hundreds of megabytes, for up to a quarter of an hour."""
_AT_ONCE_EACH: Final = 3

Turn: TypeAlias = Callable[[], AbstractAsyncContextManager[Watermark | None]]
"""Makes the context of one attempt, which waits until it may begin, and gives the free space that it leaves."""


class Turns:
    """All turns of a service. ``space``: the free space that installations leave."""

    def __init__(self, space: Watermark) -> None:
        self._space = space
        self._queue: FairQueue[str] = FairQueue(AT_ONCE, lambda _: _AT_ONCE_EACH)

    def of(self, namespace: str, report: Callable[[str], None]) -> Turn:
        """Returns what takes a namespace's turns, and reports to ``report`` that it waits.

        Its contexts raise ResourceExhausted (DISK_LOW): at their beginning, or by cancelling their body.
        """
        return partial(self._turn, namespace, report)

    @asynccontextmanager
    async def _turn(self, namespace: str, report: Callable[[str], None]) -> AsyncIterator[Watermark]:
        if not self._queue.room(namespace):
            report("other toolboxes are being installed: this one waits for its turn")
        await self._queue.take(namespace)
        try:
            self._space.check()
            async with self._space.kept():
                yield self._space
        finally:
            self._queue.give_back(namespace)
