"""A token bucket that tells those whom it refuses when to come again."""

from __future__ import annotations

from penstock_interception.budgets import CallRate

MAX_DELAY_S = 60.0
"""The longest delay that SDKs obey; they ignore a longer one and ask again at once."""


class Bucket:
    """Starts full. Times are of a clock that never jumps, in seconds."""

    def __init__(self, rate: CallRate, now: float) -> None:
        self._interval = rate.period_s / rate.calls
        self._burst = float(rate.burst)
        self._level = self._burst
        self._at = now
        self._told = now

    def wait(self, now: float) -> float:
        """0.0 when a call may be taken, else the seconds after which to ask again.

        Those who are refused are told times one after the other, as many as come in one burst and one more, so that
        they do not all come back for the same one.
        """
        self._fill(now)
        if self._level >= 1.0:
            return 0.0
        free = now + (1.0 - self._level) * self._interval
        self._told = min(max(free, self._told + self._interval), free + self._burst * self._interval)
        return min(self._told - now, MAX_DELAY_S)

    def take(self, now: float) -> None:
        """Takes a call."""
        self._fill(now)
        self._level -= 1.0

    def _fill(self, now: float) -> None:
        # A hair more than flowed in, so that who comes when he was told to is not a rounding error early.
        gained = (max(0.0, now - self._at) + 1e-6) / self._interval if now > self._at else 0.0
        self._level = min(self._burst, self._level + gained)
        self._at = max(self._at, now)
