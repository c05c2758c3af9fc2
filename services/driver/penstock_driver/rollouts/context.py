"""What an attempt at a rollout is given, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from penstock_driver.domain.records import Record
from penstock_driver.domain.rollout import Cause, Failure, Outcome, Phase, RolloutSpec

_CANCELLED: Final = Failure(Cause.CANCELLED, "CANCELLED", "the rollout was cancelled", False, Phase.QUEUED)


@dataclass(frozen=True, slots=True)
class AttemptSpec:
    """One attempt at a rollout, counted from 1. `labels` are those of its resources in other services."""

    record: Record
    rollout: RolloutSpec
    number: int
    labels: dict[str, str]
    is_moved: bool = False
    """Whether it began at another place before, which took no new work."""

    @property
    def is_first(self) -> bool:
        """Whether nothing of the rollout can be at a gate yet."""
        return self.number == 1 and not self.is_moved


@dataclass(slots=True)
class Cancellation:
    """Why a rollout is to end early; None while it is not."""

    failure: Failure | None = None

    def at(self, phase: Phase) -> Failure:
        """The failure of a rollout that was cancelled in this phase."""
        return replace(self.failure or _CANCELLED, phase=phase)


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """How an attempt ended; `cleanup_pending` if something that it held could not be released."""

    outcome: Outcome
    cleanup_pending: bool = False


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """How a rollout ended; `cleanup_pending` if something that any of its attempts held could not be released."""

    outcome: Outcome
    cleanup_pending: bool = False
