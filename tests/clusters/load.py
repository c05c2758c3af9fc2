"""What a run on a cluster drives, and what it must reach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HOME_S: Final = 110.0
"""The most that a client waits for a driver on a machine that is cut for good: 40 s until its connection is known to be
broken, the minute of its patience, and 10 s for the last attempt."""


@dataclass(frozen=True)
class Load:
    """At least so many rollouts, `at_once` at a time."""

    rollouts: int
    at_once: int
    work_s: float
    """Seconds that an agent's command takes."""
    max_attempts: int
    least: float
    """Share of the rollouts that must have their reward."""
    noticed_s: float
    """See `Seen.noticed_s`."""
    waited_s: float
    """See `Seen.waited_s`."""
    home_s: float
    """See `Seen.home_s`."""

    def arguments(self) -> list[str]:
        """Of the program that drives it."""
        return [f"--at-once={self.at_once}", f"--work={self.work_s}", f"--max-attempts={self.max_attempts}"]
