"""Event loop lag: how long ready callbacks wait, the first sign that something blocks the loop.

Measured by probing: 20 times a second a callback is scheduled and its lateness recorded. A stall shows wherever it
falls, less at most the interval between two probes. The longest of each second is kept. Each probe costs a wake-up of a
few microseconds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from penstock_chassis.telemetry.metrics import SHORT_S, histogram

LOOP_LAG: Final = histogram(
    "penstock_loop_lag_seconds",
    "Longest delay of the event loop in each second",
    buckets=SHORT_S,
)
_EVERY_S: Final = 0.05
_PUBLISH_EVERY_S: Final = 1.0
_KEPT: Final = 60


class LoopLag:
    """Probes from its creation until it is closed. Belongs to one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._last: deque[float] = deque(maxlen=_KEPT)
        self._longest = 0.0
        now = self._loop.time()
        self._publish_at = now + _PUBLISH_EVERY_S
        self._due = now + _EVERY_S
        self._handle = self._loop.call_at(self._due, self._ask)

    @property
    def longest(self) -> float:
        """Returns the longest delay of the last minute, in seconds, the current one included."""
        return max(*self._last, self._longest, self._loop.time() - self._due)

    def close(self) -> None:
        """Stops probing."""
        self._handle.cancel()

    def _ask(self) -> None:
        now = self._loop.time()
        self._longest = max(self._longest, now - self._due)
        if now >= self._publish_at:
            LOOP_LAG.observe(self._longest)
            self._last.append(self._longest)
            self._longest = 0.0
            self._publish_at = now + _PUBLISH_EVERY_S
        self._due = now + _EVERY_S
        self._handle = self._loop.call_at(self._due, self._ask)
