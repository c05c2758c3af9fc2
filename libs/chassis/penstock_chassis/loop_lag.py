"""How long what is ready waits for the event loop: the first sign that something blocks it.

Nothing tells a loop's delay but asking it: 20 times a second a call is scheduled and is late by what was in its way, so
a hold-up shows wherever it falls, less at most the time between two asks. The longest of each second is told. It costs
a wake-up each time, of a few microseconds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from penstock_chassis.metrics import SHORT_S, histogram

LOOP_LAG: Final = histogram(
    "penstock_loop_lag_seconds",
    "Longest delay, in each second, of what was ready to run on the event loop",
    buckets=SHORT_S,
)
_EVERY_S: Final = 0.05
_TOLD_EVERY_S: Final = 1.0
_KEPT: Final = 60


class LoopLag:
    """Asks from its creation on until it is closed. Belongs to one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._last: deque[float] = deque(maxlen=_KEPT)
        self._longest = 0.0
        now = self._loop.time()
        self._told_at = now + _TOLD_EVERY_S
        self._due = now + _EVERY_S
        self._handle = self._loop.call_at(self._due, self._ask)

    @property
    def longest(self) -> float:
        """The longest delay of the last minute, in seconds; what is late just now counts."""
        return max(*self._last, self._longest, self._loop.time() - self._due)

    def close(self) -> None:
        """Asks no more."""
        self._handle.cancel()

    def _ask(self) -> None:
        now = self._loop.time()
        self._longest = max(self._longest, now - self._due)
        if now >= self._told_at:
            LOOP_LAG.observe(self._longest)
            self._last.append(self._longest)
            self._longest = 0.0
            self._told_at = now + _TOLD_EVERY_S
        self._due = now + _EVERY_S
        self._handle = self._loop.call_at(self._due, self._ask)
