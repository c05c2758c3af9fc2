"""Spaces the starts of something, so that many callers do not start all at once."""

from __future__ import annotations

import asyncio
from typing import Final

from penstock_chassis.aio.retry import Delays

_JITTER: Final = 0.25


class Pace:
    """At most so many starts a second, evenly spaced with jitter; 0 = any number.

    Callers have their turns one after another. Each is spaced from when the one before really began: turns given out
    ahead would all be due after a moment in which the event loop was late. What is lost then is made up for by the
    jitter of later ones.
    """

    def __init__(self, per_s: float = 0.0) -> None:
        self._spacing = Delays(1 / per_s, 1 / per_s, jitter=(1.0, 1.0 + _JITTER)) if per_s else None
        self._order = asyncio.Lock()
        self._due = self._free = 0.0

    async def turn(self) -> None:
        """Wait for this caller's turn. One that is cancelled meanwhile leaves it to the next."""
        if self._spacing is None:
            return
        loop = asyncio.get_running_loop()
        async with self._order:
            due = max(loop.time(), self._due)
            if (wait_s := max(due, self._free) - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            self._free = loop.time() + self._spacing.first_s
            self._due = due + self._spacing.after(1)
