"""Brings calls to sessions: leases, credits, pauses, lost sessions.

Invariants:
- a call is in the lanes' queues exactly while it is QUEUED for a trainer, its prompt is made and nobody holds its
  rollout back;
- a call has a holder exactly while it is LEASED; a delegated one goes to the rollout's model source (DISPATCHED);
- whatever happens to a session, its calls are either answered or queued again, ahead of those that never were leased.

Work per event is bounded by the sessions' credit and the lanes of one rollout; only a selector that is new, a pause and
a resume look at all rollouts of a lane.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Container, Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from penstock_chassis.errors import NotFound, ResourceExhausted
from penstock_codec.random_ids import random_id
from penstock_interception.calls import Call, CallState, Mode, Rollout
from penstock_interception.clock import Clock
from penstock_interception.deadlines import Deadlines
from penstock_interception.sessions import Credits, Lane, Selector, Session, View

LANE_LINGER_S = 60.0
RELEASE_PAUSE_S = 1.0
PAUSE_AFTER_RESUME_S = 600.0

DeadlineKey: TypeAlias = tuple[str, Hashable]


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """Limits on sessions. Seconds and counts."""

    resume_window_s: float = 30.0
    max_sessions: int = 4096
    max_credit_calls: int = 65_536
    max_credit_bytes: int = 1 << 30


class Listener(Protocol):
    """Who is told what the dispatcher does."""

    def call_changed(self, call: Call) -> None:
        """A call went between QUEUED, LEASED and DISPATCHED."""
        ...

    def dispatched(self, call: Call) -> None:
        """The rollout's model source shall answer this call now."""
        ...

    def rollout_held(self, rollout: Rollout) -> None:
        """Nothing of the rollout is leased or dispatched from now on."""
        ...

    def rollout_released(self, rollout: Rollout) -> None:
        """Its calls flow again."""
        ...

    def session_resumed(self, old: Session, session: Session) -> None:
        """What the one had is the other's now."""
        ...

    def session_gone(self, session: Session) -> None:
        """It left, or nobody resumed it in time."""
        ...


class Dispatcher:
    """All lanes and sessions."""

    def __init__(
        self, listener: Listener, *, clock: Clock, deadlines: Deadlines[DeadlineKey], limits: DispatchLimits
    ) -> None:
        self._listener = listener
        self._clock = clock
        self._deadlines = deadlines
        self._limits = limits
        self._lanes: dict[Selector, Lane] = {}
        self._sessions: dict[str, Session] = {}
        self._rollouts: dict[str, Rollout] = {}
        # The newest policy version announced for each run that has open rollouts, or for a rollout without one.
        self._newest: dict[Hashable, int] = {}
        self._in_run: Counter[str] = Counter()
        # Calls leased by unary requests, by lease.
        self._unary: dict[str, Call] = {}

    # Rollouts --------------------------------------------------------------------------------------------------------

    def link(self, rollout: Rollout) -> None:
        """From now on the rollout's calls may be leased or dispatched."""
        self._rollouts[rollout.id] = rollout
        if rollout.opening.run_id is not None:
            self._in_run[rollout.opening.run_id] += 1
        if rollout.opening.mode is not Mode.INTERCEPTION_GATE:
            return
        for lane in self._lanes.values():
            if lane.selector.matches(rollout.opening):
                self._connect(lane, rollout)

    def unlink(self, rollout: Rollout) -> None:
        """The rollout is closed: tells those who watch it."""
        if self._rollouts.pop(rollout.id, None) is not None:
            self._forget_newest(rollout)
        for call in rollout.queued.values():
            for lane in rollout.lanes:
                lane.drop(call)
        rollout.queued.clear()
        for lane in rollout.lanes:
            lane.rollouts.pop(rollout.id, None)
            for session in lane.sessions.values():
                session.tell_closed(rollout.id)
        rollout.lanes.clear()
        if rollout.holds:
            rollout.holds.clear()
            self._listener.rollout_released(rollout)

    # Calls -----------------------------------------------------------------------------------------------------------

    def offer(self, call: Call, *, first: bool = False, avoid: Session | None = None) -> None:
        """A call waits for an answer: it goes at once to a session with credit or to the source, or into the queues."""
        rollout = call.rollout
        rollout.queued[call.id] = call
        if rollout.holds:
            return
        if call.delegated:
            self._dispatch(call)
            return
        ready = [session for lane in rollout.lanes if (session := lane.next_session(avoid)) is not None]
        if ready:
            self._lease(call, min(ready, key=lambda session: (len(session.held), session.ready_serial)))
            return
        for lane in rollout.lanes:
            lane.put(call, first=first)
        if avoid is not None:
            # Nobody else may come: then the one who gave it back gets it again, a little later.
            self._deadlines.set(("offer", call.id), self._clock.steady() + RELEASE_PAUSE_S)

    def offer_again(self, call: Call) -> None:
        """A call that was given back has waited long enough for another session."""
        if call.id in call.rollout.queued:
            self._unqueue(call)
            self.offer(call, first=True)

    def withdraw(self, call: Call, reason: str) -> None:
        """A call waits no more. `reason` is told to the session that holds it; "" when that session answered it."""
        self._unqueue(call)
        self._end_lease(call)
        session, call.holder = call.holder, None
        if session is None:
            return
        session.release(call)
        if reason:
            session.tell_cancelled(call, reason)
        self._fill(session)

    def requeue(self, call: Call, *, avoid: Session | None = None) -> None:
        """Takes a leased call back and offers it anew, ahead of others, and not at once to the session `avoid`."""
        self._end_lease(call)
        session, call.holder = call.holder, None
        if session is not None:
            session.release(call)
            self._fill(session)
        call.state = CallState.QUEUED
        self._listener.call_changed(call)
        self.offer(call, first=True, avoid=avoid)

    def delegate(self, call: Call) -> None:
        """The rollout's model source shall answer a call: it leaves the session that held it."""
        call.delegated = True
        self.requeue(call)

    def restore_lease(self, call: Call, session_id: str, lease_id: str) -> None:
        """A call was leased when the service died: its session may resume within the window."""
        session = self.restore_session(session_id)
        call.state = CallState.LEASED
        call.holder = session
        call.lease_id = lease_id
        session.hold(call)

    def restore_session(self, session_id: str) -> Session:
        """A session that was there when the service died, lost until somebody resumes it within the window."""
        session = self._sessions.get(session_id)
        if session is None:
            session = Session(session_id, Lane(Selector()), "", Credits(self._limits.max_credit_calls), View())
            session.lost = True
            self._sessions[session_id] = session
            self._deadlines.set(("session", session_id), self._clock.steady() + self._limits.resume_window_s)
        return session

    def extend(self, lease_id: str) -> bool:
        """Starts a unary lease anew; False when it is no more."""
        call = self._unary.get(lease_id)
        if call is None or call.lease_s is None:
            return False
        self._deadlines.set(("lease", call.id), self._clock.steady() + call.lease_s)
        return True

    def queued_for(self, session: Session) -> int:
        """Calls that now wait for this session's selector, held back ones included."""
        return sum(len(rollout.queued) for rollout in session.lane.rollouts.values())

    # Sessions --------------------------------------------------------------------------------------------------------

    def join(
        self,
        selector: Selector,
        credit: Credits,
        *,
        identity: str,
        view: View,
        policy_version: int | None = None,
        resume: str | None = None,
        has: Container[str] | None = None,
        lease_s: float | None = None,
    ) -> Session:
        """A trainer comes. With `resume`, what that session holds stays leased to this one; `session.held` has it.

        `has` are the calls that the trainer knows of: what else the session holds is sent again. None = all.

        Raises ResourceExhausted: SESSION_LIMIT.
        """
        if len(self._sessions) >= self._limits.max_sessions:
            raise ResourceExhausted("Too many sessions are connected.", reason="SESSION_LIMIT", retry_after_s=5.0)
        old = self._sessions.get(resume) if resume else None
        lane = self._lane(selector)
        session = Session(secrets.token_hex(16), lane, identity, self.granted(credit), view)
        session.lease_s = lease_s
        self._sessions[session.id] = session
        lane.sessions[session.id] = session
        self._deadlines.drop(("lane", lane.selector))
        if policy_version is not None:
            self.announce(session, policy_version)
        if old is not None:
            self._take_over(old, session, has)
            session.resumed = True
        self._fill(session)
        return session

    def announce(self, session: Session, policy_version: int) -> None:
        """The trainer has weights of this version, for the runs that it answers."""
        lane = session.lane
        lane.newest_version = max(policy_version, lane.newest_version or 0)
        for rollout in lane.rollouts.values():
            self._announce_for(rollout, policy_version)

    def granted(self, credit: Credits) -> Credits:
        """Credits as the operator allows them."""
        return Credits(
            min(credit.calls, self._limits.max_credit_calls), min(credit.bytes, self._limits.max_credit_bytes)
        )

    def set_credit(self, session: Session, credit: Credits) -> None:
        """Replaces a session's credits; less than it holds takes nothing back."""
        session.credit = self.granted(credit)
        self._fill(session)

    def leave(self, session: Session) -> None:
        """A session ends in order: its calls are queued again at once."""
        self._forget(session)
        for call in list(session.held.values()):
            if call.accepted_digest is None:
                self.requeue(call)

    def lose(self, session: Session) -> None:
        """A session's stream broke: its calls stay leased for the resume window."""
        if session.id in self._sessions and not session.lost:
            session.lost = True
            session.lane.refresh(session)
            session.end()
            self._deadlines.set(("session", session.id), self._clock.steady() + self._limits.resume_window_s)

    def close_unary(self, session: Session) -> None:
        """A unary request has its calls: the session goes, the leases stay until they end by themselves."""
        self._forget(session)

    def pause(self, session: Session, max_duration_s: float) -> int:
        """Holds the calls of the session's selector back from everybody; returns how many are with somebody now."""
        session.lane.paused_by.add(session.id)
        self._deadlines.set(("pause", session.id), self._clock.steady() + max_duration_s)
        for rollout in session.lane.rollouts.values():
            self._hold(rollout, session.id)
        return sum(rollout.totals.open - len(rollout.queued) for rollout in session.lane.rollouts.values())

    def resume(self, session: Session) -> bool:
        """Lets go of what this session held back; False when it held nothing."""
        if session.id not in session.lane.paused_by:
            return False
        session.lane.paused_by.discard(session.id)
        self._deadlines.drop(("pause", session.id))
        session.tell_resumed()
        for rollout in list(session.lane.rollouts.values()):
            if session.id in rollout.holds:
                rollout.holds.discard(session.id)
                if not rollout.holds:
                    self._listener.rollout_released(rollout)
                    for call in list(rollout.queued.values()):
                        self.offer(call)
        return True

    def pause_over(self, session_id: str) -> None:
        """A pause ran out."""
        session = self._sessions.get(session_id)
        if session is not None:
            self.resume(session)

    def session_window_over(self, session_id: str) -> None:
        """Nobody resumed a lost session in time."""
        session = self._sessions.get(session_id)
        if session is not None:
            self.leave(session)

    def lane_linger_over(self, selector: Selector) -> None:
        """A lane has had no session for a while."""
        lane = self._lanes.get(selector)
        if lane is not None and not lane.sessions:
            del self._lanes[selector]
            for rollout in lane.rollouts.values():
                rollout.lanes.remove(lane)

    def session(self, session_id: str) -> Session:
        """Raises NotFound SESSION_UNKNOWN."""
        session = self._sessions.get(session_id)
        if session is None:
            raise NotFound("No such session.", reason="SESSION_UNKNOWN")
        return session

    def sessions(self) -> Iterable[Session]:
        """All sessions."""
        return list(self._sessions.values())

    # Private ---------------------------------------------------------------------------------------------------------

    def _lease(self, call: Call, session: Session) -> None:
        self._unqueue(call)
        call.holder = session
        call.state = CallState.LEASED
        call.lease_id = random_id()[:16]
        call.lease_s = session.lease_s
        self._mark_given(call)
        session.hold(call)
        if session.lease_s is not None:
            self._unary[call.lease_id] = call
            self._deadlines.set(("lease", call.id), self._clock.steady() + session.lease_s)
        session.lane.refresh(session)
        session.send(call)

    def _dispatch(self, call: Call) -> None:
        self._unqueue(call)
        call.state = CallState.DISPATCHED
        self._mark_given(call)
        self._listener.dispatched(call)

    def _mark_given(self, call: Call) -> None:
        call.leases += 1
        call.leased_at = self._clock.wall()
        bounds = call.rollout.opening.policy
        least = bounds.min_version
        newest = self._newest.get(_run_of(call.rollout))
        if bounds.max_staleness is not None and newest is not None:
            least = max(newest - bounds.max_staleness, least if least is not None else 0)
        call.min_policy_version = least
        self._listener.call_changed(call)

    def _announce_for(self, rollout: Rollout, version: int) -> None:
        run = _run_of(rollout)
        self._newest[run] = max(version, self._newest.get(run, version))

    def _forget_newest(self, rollout: Rollout) -> None:
        run_id = rollout.opening.run_id
        if run_id is not None:
            self._in_run[run_id] -= 1
            if self._in_run[run_id] > 0:
                return
            del self._in_run[run_id]
        self._newest.pop(_run_of(rollout), None)

    def _end_lease(self, call: Call) -> None:
        self._deadlines.drop(("lease", call.id))
        self._unary.pop(call.lease_id, None)

    def _unqueue(self, call: Call) -> None:
        self._deadlines.drop(("offer", call.id))
        if call.rollout.queued.pop(call.id, None) is not None:
            for lane in call.rollout.lanes:
                lane.drop(call)

    def _fill(self, session: Session) -> None:
        while session.has_credit and (call := session.lane.next_call()) is not None:
            self._lease(call, session)
        session.lane.refresh(session)

    def _lane(self, selector: Selector) -> Lane:
        lane = self._lanes.get(selector)
        if lane is None:
            lane = self._lanes[selector] = Lane(selector)
            matching = [
                rollout
                for rollout in self._rollouts.values()
                if rollout.opening.mode is Mode.INTERCEPTION_GATE and selector.matches(rollout.opening)
            ]
            for rollout in matching:
                self._connect(lane, rollout)
            waiting = [call for rollout in matching if not rollout.holds for call in rollout.queued.values()]
            for call in sorted(waiting, key=lambda call: call.received):
                lane.put(call)
        return lane

    def _connect(self, lane: Lane, rollout: Rollout) -> None:
        lane.rollouts[rollout.id] = rollout
        rollout.lanes.append(lane)
        if lane.newest_version is not None:
            self._announce_for(rollout, lane.newest_version)
        for session_id in lane.paused_by:
            self._hold(rollout, session_id)

    def _hold(self, rollout: Rollout, session_id: str) -> None:
        if not rollout.holds:
            for call in rollout.queued.values():
                for lane in rollout.lanes:
                    lane.drop(call)
            rollout.holds.add(session_id)
            self._listener.rollout_held(rollout)
        rollout.holds.add(session_id)

    def _take_over(self, old: Session, session: Session, has: Container[str] | None) -> None:
        self._deadlines.drop(("session", old.id))
        for call in list(old.held.values()):
            old.release(call)
            call.holder = session
            session.hold(call)
        unsent = {call.id for call in old.drain_calls()}
        for call in session.held.values():
            # Its frame never left, or was lost on the way, or with the service.
            if call.id in unsent or (has is not None and call.id not in has and not call.claimed):
                session.send(call)
        old.taken_over = True
        self._listener.session_resumed(old, session)
        if old.id in old.lane.paused_by:
            self.pause(session, PAUSE_AFTER_RESUME_S)
        self._forget(old)

    def _forget(self, session: Session) -> None:
        if self._sessions.pop(session.id, None) is None:
            return
        self._deadlines.drop(("session", session.id))
        session.end()
        self._listener.session_gone(session)
        lane = session.lane
        lane.refresh(session)
        lane.sessions.pop(session.id, None)
        self.resume(session)
        if not lane.sessions:
            self._deadlines.set(("lane", lane.selector), self._clock.steady() + LANE_LINGER_S)


def _run_of(rollout: Rollout) -> Hashable:
    """What its policy versions belong to: without a run they are its own, and not another trainer's."""
    run_id = rollout.opening.run_id
    return ("rollout", rollout.id) if run_id is None else ("run", run_id)
