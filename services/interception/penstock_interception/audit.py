"""The audit log: one structured line for each event that concerns security, bounded in rate, without secrets.

Lines are warnings whose `event` is "audit" and whose `audit` names what happened. An agent can cause as many events as
it likes, so each kind writes at most `BURST` lines at once for each rollout and peer, then one in `INTERVAL_S`; the
next line says how many were left out. What a stranger sent is never repeated but a rollout's id, and that only where it
has the form of one.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from enum import StrEnum
from typing import Final

import structlog

from penstock_chassis.logging import Meter

BURST: Final = 5
INTERVAL_S: Final = 10.0
MAX_KEYS: Final = 4096
"""Rollouts and peers that are told apart; those not heard of for longest are forgotten."""
ALL_BURST: Final = 200
ALL_INTERVAL_S: Final = 0.05
"""Of all lines together, since whoever may choose his address, or a rollout's name, has as many keys as he likes."""

_ID: Final = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,127}")
_log = structlog.get_logger("penstock.audit")


class Event(StrEnum):
    """What happened."""

    CREDENTIAL_REFUSED = "credential_refused"
    SCOPE_REFUSED = "scope_refused"
    BUDGET_EXHAUSTED = "budget_exhausted"
    RATE_LIMITED = "rate_limited"
    BODY_TOO_LARGE = "body_too_large"
    ROUTE_UNKNOWN = "route_unknown"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    BODY_TOO_SLOW = "body_too_slow"
    PROVIDER_TOOL_REFUSED = "provider_tool_refused"
    TOKEN_ISSUED = "token_issued"  # noqa: S105 - the name of an event
    TOKENS_REVOKED = "tokens_revoked"


class Audit:
    """Belongs to one event loop. `steady` is a clock that never jumps, in seconds."""

    def __init__(self, steady: Callable[[], float]) -> None:
        self._steady = steady
        self._meters: OrderedDict[tuple[Event, str, str], Meter] = OrderedDict()
        self._all = Meter(ALL_BURST, ALL_INTERVAL_S)

    def tell(
        self,
        event: Event,
        *,
        rollout_id: str = "",
        peer: str | None = None,
        reason: str = "",
        **facts: str | float,
    ) -> None:
        """Writes a line, unless too many were. `rollout_id` may be what a stranger said; `facts` are our own."""
        rollout_id = rollout_id if not rollout_id or _ID.fullmatch(rollout_id) else "?"
        now = self._steady()
        key = (event, rollout_id, peer or "")
        meter = self._meters.pop(key, None) or Meter(BURST, INTERVAL_S)
        self._meters[key] = meter
        if len(self._meters) > MAX_KEYS:
            self._meters.popitem(last=False)
        if not meter.allows(now) or not self._all.allows(now):
            return
        told = {"rollout_id": rollout_id, "peer": peer, "reason": reason, "left_out": meter.left_out(), **facts}
        told["left_out_in_all"] = self._all.left_out()
        _log.warning("audit", audit=event.value, **{name: value for name, value in told.items() if value})
