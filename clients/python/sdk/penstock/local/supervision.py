"""Restart policy for services that die.

The pause before a start doubles from `FIRST_PAUSE_S` to `LONGEST_PAUSE_S`. A service that dies more than `limit` times
in `WINDOW_S` is not restarted: the cause is persistent.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

MAX_RESTARTS: Final = 5
"""Restarts of one service in `WINDOW_S` seconds."""
WINDOW_S: Final = 600.0
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRestart:
    """A service died and is about to be restarted, or is back."""

    service: str
    cause: str
    """How it ended, for people: "The sandbox service was killed by SIGKILL. Its log is ..."."""
    number: int
    """Number of this restart among those in the last `WINDOW_S` seconds, from 1."""
    limit: int
    """Maximum restarts of the service in that time."""
    pause: float
    """Seconds until it is started."""
    ready: bool = False
    """Whether it is back."""

    def __str__(self) -> str:
        if self.ready:
            return f"The {self.service} service is running again."
        return (
            f"{self.cause} It restarts in {self.pause:g} s"
            f" (restart {self.number} of at most {self.limit} in {WINDOW_S / 60:g} minutes)."
        )


@dataclass(slots=True)
class Deaths:
    limit: int = MAX_RESTARTS
    clock: Callable[[], float] = monotonic
    total: int = 0
    """Total since the services were first started."""
    _recent: deque[float] = field(default_factory=deque)

    def pause(self) -> float | None:
        """Counts a death.

        Returns:
            Seconds until the restart; None = it has died too often.
        """
        now = self.clock()
        self.total += 1
        self._recent.append(now)
        while now - self._recent[0] > WINDOW_S:
            self._recent.popleft()
        if len(self._recent) > self.limit:
            return None
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (len(self._recent) - 1))

    @property
    def recent(self) -> int:
        """Deaths in the last `WINDOW_S` seconds before the last one."""
        return len(self._recent)
