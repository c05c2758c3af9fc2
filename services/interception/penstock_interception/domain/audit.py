"""The audit log: one structured line per security event, rate-limited, without secrets.

Lines are warnings whose `event` is "audit" and whose `audit` names the event. An agent can cause any number of events,
so each kind writes at most `BURST` lines at once per rollout and peer, then one per `INTERVAL_S`; the next line counts
the omitted ones. Of unauthenticated input only a rollout's id is logged, and only if it has the form of one.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from enum import StrEnum
from typing import Final

import structlog

from penstock_chassis.telemetry.logging import Meter

BURST: Final = 5
INTERVAL_S: Final = 10.0
MAX_KEYS: Final = 4096
"""Rollouts and peers with a rate limit of their own; the least recently seen are dropped."""
ALL_BURST: Final = 200
ALL_INTERVAL_S: Final = 0.05
"""Rate limit of all lines together, since a caller that chooses its address or a rollout's name has unlimited keys."""

_ID: Final = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,127}")
_log = structlog.get_logger("penstock.audit")


class Event(StrEnum):
    """The security events."""

    CREDENTIAL_REFUSED = "credential_refused"
    SCOPE_REFUSED = "scope_refused"
    BUDGET_EXHAUSTED = "budget_exhausted"
    RATE_LIMITED = "rate_limited"
    BODY_TOO_LARGE = "body_too_large"
    ROUTE_UNKNOWN = "route_unknown"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    BODY_TOO_SLOW = "body_too_slow"
    PROVIDER_TOOL_REFUSED = "provider_tool_refused"
    AGENT_KEY_ISSUED = "agent_key_issued"
    AGENT_KEYS_REVOKED = "agent_keys_revoked"


class Audit:
    """Belongs to one event loop. `steady` is a clock that never jumps, in seconds."""

    def __init__(self, steady: Callable[[], float]) -> None:
        self._steady = steady
        self._meters: OrderedDict[tuple[Event, str, str], Meter] = OrderedDict()
        self._all = Meter(ALL_BURST, ALL_INTERVAL_S)

    def record(
        self,
        event: Event,
        *,
        rollout_id: str = "",
        peer: str | None = None,
        reason: str = "",
        **facts: str | float,
    ) -> None:
        """Writes a line, within the rate limits. `rollout_id` may be unauthenticated; `facts` are the service's own."""
        rollout_id = rollout_id if not rollout_id or _ID.fullmatch(rollout_id) else "?"
        now = self._steady()
        key = (event, rollout_id, peer or "")
        meter = self._meters.pop(key, None) or Meter(BURST, INTERVAL_S)
        self._meters[key] = meter
        if len(self._meters) > MAX_KEYS:
            self._meters.popitem(last=False)
        if not meter.allows(now) or not self._all.allows(now):
            return
        fields = {"rollout_id": rollout_id, "peer": peer, "reason": reason, "left_out": meter.left_out(), **facts}
        fields["left_out_in_all"] = self._all.left_out()
        _log.warning("audit", audit=event.value, **{name: value for name, value in fields.items() if value})
