"""What all parts of the gate work on, and the operator's limits on them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from penstock_interception.domain.audit import Audit
from penstock_interception.domain.deadlines import Clock, Deadlines
from penstock_interception.domain.kept_captures import CAPTURE_LIMITS, CaptureLimits
from penstock_interception.domain.live_rollouts import Registry
from penstock_interception.gate.events import CallEvents
from penstock_interception.store.store import CallStore


@dataclass(frozen=True, slots=True)
class LeasingLimits:
    """Limits on sessions. Seconds and counts."""

    resume_window_s: float = 30.0
    max_sessions: int = 4096
    max_credit_calls: int = 65_536
    max_credit_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Limits on host tools: calls, bytes of JSON, seconds."""

    max_calls_per_rollout: int = 1000
    max_open_calls_per_rollout: int = 16
    max_bytes: int = 256 << 10
    call_timeout_s: float = 600.0
    # Opening a rollout checks each of them.
    max_selectors_per_session: int = 64


@dataclass(frozen=True, slots=True)
class GateLimits:
    """The operator's limits. Seconds, counts and bytes."""

    max_rollouts: int = 10_000
    max_open_calls_per_rollout: int = 64
    # Approximate journal size of a rollout's calls.
    max_rollout_bytes: int = 1 << 30
    rejoin_grace_s: float = 30.0
    driver_lease_s: float = 60.0
    retention_s: float = 24 * 3600.0
    leasing: LeasingLimits = LeasingLimits()
    tools: ToolLimits = ToolLimits()
    captures: CaptureLimits = CAPTURE_LIMITS
    quotas: tuple[tuple[str, int], ...] = ()
    """Namespaces, and the most rollouts that each may have open."""


class DeadlineKind(StrEnum):
    """What is due."""

    OFFER = "offer"
    """A released call is offered to every session again."""
    LEASE = "lease"
    """A unary lease ends, and its call is queued again."""
    EXPIRE = "expire"
    """A call has used its time."""
    GONE = "gone"
    """A call has no connection, and no retry rejoined it."""
    PAUSE = "pause"
    """A session's pause ends."""
    SESSION = "session"
    """A lost session was not resumed."""
    QUEUE = "queue"
    """A selector queue has had no session for a while."""
    RETENTION = "retention"
    """A closed rollout is deleted."""
    RUN = "run"
    """A run without rollouts is forgotten."""
    DRIVER = "driver"
    """A driver is lost: its open rollouts are closed."""
    CAPTURES = "captures"
    """It is time to look for captures that are kept beyond the limits."""


DeadlineKey: TypeAlias = tuple[DeadlineKind, Hashable]
"""What is due, and for which call, rollout, run, driver, session or selector, by its id, or the selector itself."""


@dataclass(frozen=True, slots=True)
class GateContext:
    """The state in memory and on disk, the clocks and the limits."""

    store: CallStore
    registry: Registry
    events: CallEvents
    deadlines: Deadlines[DeadlineKey]
    audit: Audit
    clock: Clock
    limits: GateLimits
