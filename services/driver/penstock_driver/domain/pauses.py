"""A rollout's pauses, and their limits. Times are seconds, of a moment since the epoch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Final

MOST_PAUSES: Final = 1000
"""Of one rollout: each has two events in the journal."""
MOST_REASON: Final = 1000
"""Characters of a reason."""


class PauseEnd(StrEnum):
    """Why a pause ended."""

    RESUMED = "RESUMED"
    EXPIRED = "PAUSE_EXPIRED"
    DRAINING = "DRAINING"


@dataclass(frozen=True, slots=True)
class Pause:
    """A rollout is held. `sandbox_frozen` says whether its agent's sandbox is frozen now."""

    reason: str
    start_time: float
    end_time: float
    sandbox_frozen: bool = False

    def to_json(self) -> str:
        """As it is stored."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Pause:
        """The stored pause."""
        data = json.loads(text)
        return cls(data["reason"], data["start_time"], data["end_time"], data["sandbox_frozen"])


@dataclass(frozen=True, slots=True)
class PauseLimits:
    """At most `most_s` seconds in all pauses of a rollout together, and at most `most` pauses."""

    most_s: float
    most: int = MOST_PAUSES


@dataclass(frozen=True, slots=True)
class RolloutPaused:
    """The rollout is paused from now on, for at most `max_duration_s`."""

    reason: str
    max_duration_s: float


@dataclass(frozen=True, slots=True)
class RolloutResumed:
    """A pause ended after `paused_time_s`; `reason` is a PauseEnd."""

    paused_time_s: float
    reason: str
