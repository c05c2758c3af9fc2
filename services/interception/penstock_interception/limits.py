"""The operator's limits on the gate, as one value."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_interception.dispatch import DispatchLimits
from penstock_interception.tools.desk import ToolLimits


@dataclass(frozen=True, slots=True)
class GateLimits:
    """The operator's limits. Seconds and counts."""

    max_rollouts: int = 10_000
    max_open_calls_per_rollout: int = 64
    rejoin_grace_s: float = 30.0
    retention_s: float = 24 * 3600.0
    dispatch: DispatchLimits = DispatchLimits()  # noqa: RUF009 - immutable
    tools: ToolLimits = ToolLimits()  # noqa: RUF009 - immutable
