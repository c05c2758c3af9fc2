"""What an attempt works with: one sandbox service, one gate, and what the driver keeps of both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from penstock_driver.domain.ports import Captures, Gate, Sandboxes
from penstock_driver.environments.forks import ThrottledForks
from penstock_driver.environments.prepare import Environments
from penstock_driver.environments.throttle import AdaptiveThrottle, never
from penstock_driver.grading.grader import DEFAULT_MAX_CHANGES_BYTES

LOADINGS: Final = 4
"""Parts of recordings that are in memory at once, each several times (the file's bytes, the message, the request)."""


def new_loadings() -> asyncio.Semaphore:
    """The limit of parts of recordings that are being loaded into one gate."""
    return asyncio.Semaphore(LOADINGS)


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
    loadings: asyncio.Semaphore = field(default_factory=new_loadings)
    """Held by those that load a part of a recording into the gate, or write one to a file."""
    has_room_elsewhere: Callable[[], bool] = never
    """Whether another sandbox service has room, by what it said last: a full one is not waited for then."""
    is_node_lost: Callable[[], bool] = lambda: False
    """Whether the sandbox service does not answer any more, so that a clean-up there is left for later."""
    is_gate_lost: Callable[[], bool] = lambda: False
    captures: Captures | None = None
    """What all gates captured; None = nothing is replayed."""
    recordings: Path | None = None
    """Directory of the recordings that attempts replay; None = nothing is replayed."""
    recording_wait_s: float = 0.0
    """How long a gate that is away is waited for, because its disk has what the last attempt was answered."""
    leave_s: float = 600.0
    """How long sandboxes are kept for the next process of a driver that leaves its rollouts, in seconds."""
    carried: Path | None = None
    """Directory of agents' work that waits to be graded, which survives a driver; None = none is kept."""
