"""What an attempt at a rollout is given, and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from penstock_driver.domain.ports import Gate, Sandboxes
from penstock_driver.domain.records import Record
from penstock_driver.domain.rollout import Cause, Failure, Outcome, Phase, RolloutSpec
from penstock_driver.environments.forks import ThrottledForks
from penstock_driver.environments.prepare import Environments
from penstock_driver.environments.throttle import AdaptiveThrottle
from penstock_driver.grading.grader import DEFAULT_MAX_CHANGES_BYTES

_CANCELLED: Final = Failure(Cause.CANCELLED, "CANCELLED", "the rollout was cancelled", False, Phase.QUEUED)


@dataclass(frozen=True, slots=True)
class RunnerServices:
    """What the attempts at one sandbox service and one gate share.

    `openings` throttles the requests that open a rollout at the gate.

    An agent finds its model endpoint at `agent_port` on its sandbox's own loopback. `spool` is the directory of the
    temporary files of grading, each kind limited to `max_changes_bytes`.
    """

    sandboxes: Sandboxes
    gate: Gate
    environments: Environments
    forks: ThrottledForks
    agent_port: int
    spool: Path | None = None
    max_changes_bytes: int = DEFAULT_MAX_CHANGES_BYTES
    openings: AdaptiveThrottle = field(default_factory=AdaptiveThrottle)
    is_node_lost: Callable[[], bool] = lambda: False
    """Whether the sandbox service does not answer any more, so that a clean-up there is left for later."""
    is_gate_lost: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class AttemptSpec:
    """One attempt at a rollout, counted from 1. `labels` are those of its resources in other services."""

    record: Record
    rollout: RolloutSpec
    number: int
    labels: dict[str, str]


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
