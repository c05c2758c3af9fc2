"""A snapshot of the gate: waiting calls, their holders, and the trainers' free credit.

It visits everything that is open: meant for people, once a second, not for each call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock_interception.domain.calls import CallState, RolloutState
from penstock_interception.domain.state import Rollout, SelectorQueue, Session


@dataclass(frozen=True, slots=True)
class SessionSnapshot:
    """A session, the queued calls that match its selector, and the open rollouts that match."""

    session: Session
    queued: int
    rollouts: int


@dataclass(frozen=True, slots=True)
class GateSnapshot:
    """Counts of calls. `oldest_received`: of the queued calls, in seconds since 1970; None if there are none."""

    open_rollouts: int
    queued: int
    paused: int
    leased: int
    dispatched: int
    oldest_received: float | None
    sessions: Sequence[SessionSnapshot]


def take_snapshot(
    rollouts: Iterable[Rollout], sessions: Iterable[Session], namespace: str | None = None
) -> GateSnapshot:
    """Takes a snapshot of a namespace (None = of all); sessions with the most held or queued calls come first.

    A namespace's calls that a session of all namespaces holds count as leased.
    """
    count = queued = paused = unanswered = leased = 0
    oldest: float | None = None
    for rollout in rollouts:
        if rollout.state is RolloutState.CLOSED or namespace not in (None, rollout.spec.namespace):
            continue
        count += 1
        unanswered += rollout.totals.open
        leased += sum(call.state is CallState.LEASED for call in rollout.open_calls())
        queued += len(rollout.queued)
        paused += len(rollout.queued) if rollout.paused_by else 0
        for call in rollout.queued.values():
            oldest = call.received if oldest is None else min(oldest, call.received)
    waiting: dict[SelectorQueue, int] = {}  # counted once for all sessions of a queue
    found = []
    for session in sessions:
        queue = session.queue
        if namespace not in (None, session.namespace):
            continue
        if queue not in waiting:
            waiting[queue] = queue.waiting
        found.append(SessionSnapshot(session, waiting[queue], len(queue.rollouts)))
    found.sort(key=lambda one: (-len(one.session.held) - one.queued, one.session.identity))
    return GateSnapshot(count, queued, paused, leased, max(0, unanswered - queued - leased), oldest, found)
