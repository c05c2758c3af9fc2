"""A moment that any number of tasks wait for."""

from __future__ import annotations

import asyncio


class Moment:
    """As `asyncio.Event` without `clear`, and without the 700 bytes of one that nobody waits for."""

    __slots__ = ("_future",)

    def __init__(self) -> None:
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def set(self) -> None:
        """It has come; idempotent."""
        if not self._future.done():
            self._future.set_result(None)

    async def wait(self) -> None:
        """Return once it has come. A caller that is cancelled leaves it to the others."""
        if not self._future.done():
            await asyncio.wait([self._future])
