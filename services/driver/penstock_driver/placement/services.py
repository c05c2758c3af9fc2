"""What an attempt works with: one sandbox service, one gate, and what the driver keeps of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from penstock_driver.domain.ports import Gate, Sandboxes
from penstock_driver.environments.forks import ThrottledForks
from penstock_driver.environments.prepare import Environments
from penstock_driver.environments.throttle import AdaptiveThrottle
from penstock_driver.grading.grader import DEFAULT_MAX_CHANGES_BYTES


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
