"""A moment that any number of tasks wait for."""

from __future__ import annotations

import asyncio


class Moment:
    """As `asyncio.Event` without `clear`, and without the 700 bytes of one that nobody waits for."""

    __slots__ = ("_future", "_is_set")

    def __init__(self) -> None:
        self._is_set = False
        self._future: asyncio.Future[None] | None = None
        """Of those that wait, as soon as there is one."""

    def set(self) -> None:
        """The moment has come; idempotent."""
        if not self._is_set and self._future is not None:
            self._future.set_result(None)
        self._is_set = True

    async def wait(self) -> None:
        """Return once it has come. A caller that is cancelled leaves it to the others."""
        if self._is_set:
            return
        if self._future is None:
            self._future = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._future])
