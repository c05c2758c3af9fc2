"""Spaces the starts of something, so that many callers do not start all at once."""

from __future__ import annotations

import asyncio
from typing import Final

from penstock_chassis.aio.retry import Delays

_JITTER: Final = 0.25


class Pace:
    """At most so many starts a second, evenly spaced with jitter; 0 = any number."""

    def __init__(self, per_s: float = 0.0) -> None:
        self._spacing = Delays(0.0, 0.0) if not per_s else Delays(1 / per_s, 1 / per_s, jitter=(1.0, 1.0 + _JITTER))
        self._next = 0.0

    async def turn(self) -> None:
        """Wait for this caller's turn. A caller that is cancelled meanwhile leaves its turn unused."""
        now = asyncio.get_running_loop().time()
        at = max(now, self._next)
        self._next = at + self._spacing.after(1)
        if at > now:
            await asyncio.sleep(at - now)
