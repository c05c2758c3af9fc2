"""How the gate stands: what waits, with whom it is, and how much the trainers' sessions can take.

A look at everything that is open, for people; what is asked for once a second, not for each call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock_interception.calls import Rollout, RolloutState
from penstock_interception.sessions import Lane, Session


@dataclass(frozen=True, slots=True)
class SessionStanding:
    """A session, the calls that wait for its selector, and the open rollouts whose calls it may get."""

    session: Session
    queued: int
    rollouts: int


@dataclass(frozen=True, slots=True)
class Standing:
    """Counts of calls; `oldest_received` of a queued one, in seconds since 1970, None when none waits."""

    open_rollouts: int
    queued: int
    paused: int
    leased: int
    dispatched: int
    oldest_received: float | None
    sessions: Sequence[SessionStanding]


def standing(rollouts: Iterable[Rollout], sessions: Iterable[Session]) -> Standing:
    """Looks; sessions that hold or await most come first."""
    count = queued = paused = unanswered = 0
    oldest: float | None = None
    for rollout in rollouts:
        if rollout.state is RolloutState.CLOSED:
            continue
        count += 1
        unanswered += rollout.totals.open
        queued += len(rollout.queued)
        paused += len(rollout.queued) if rollout.holds else 0
        for call in rollout.queued.values():
            oldest = call.received if oldest is None else min(oldest, call.received)
    waiting: dict[int, int] = {}
    found = [
        SessionStanding(session, _queued(session.lane, waiting), len(session.lane.rollouts)) for session in sessions
    ]
    found.sort(key=lambda one: (-len(one.session.held) - one.queued, one.session.identity))
    leased = sum(len(one.session.held) for one in found)
    return Standing(count, queued, paused, leased, max(0, unanswered - queued - leased), oldest, found)


def _queued(lane: Lane, known: dict[int, int]) -> int:
    """Calls that wait for a lane, counted once for all of its sessions."""
    if id(lane) not in known:
        known[id(lane)] = sum(len(rollout.queued) for rollout in lane.rollouts.values())
    return known[id(lane)]
