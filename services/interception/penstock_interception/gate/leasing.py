"""Assigns calls to sessions: leases, credits, pauses, lost sessions.

Invariants:
- a call is in the selector queues exactly while it is QUEUED for a trainer, its prompt is made and its rollout is not
  paused;
- a rollout is paused as long as a session that paused it lives, or `hold` is in force, which alone outlives a restart;
- a call has a holder exactly while it is LEASED; a delegated call goes to the rollout's model source (DISPATCHED);
- whatever happens to a session, its calls are answered or queued again, ahead of calls that were never leased.

The work per event is bounded by the session's credit and the number of selector queues of one rollout. Only a new
selector, a pause and a resume visit all rollouts of a selector queue.

Calls that the rollout's model source must answer are returned: the caller starts the source.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Container, Hashable, Iterable, Mapping

from penstock.values.models import MOST
from penstock_chassis.errors import ResourceExhausted
from penstock_chassis.homes import random_id
from penstock_chassis.validation import invalid_field
from penstock_interception.domain import models
from penstock_interception.domain.calls import CallState, Mode
from penstock_interception.domain.state import (
    HOLD,
    Call,
    Credits,
    Rollout,
    Selector,
    SelectorQueue,
    Session,
    SessionRequest,
    View,
)
from penstock_interception.gate import telemetry
from penstock_interception.gate.call_timeouts import CallTimeouts
from penstock_interception.gate.context import DeadlineKind, GateContext
from penstock_interception.gate.unary_leases import UnaryLeases
from penstock_interception.store.reading import StoredLease

QUEUE_LINGER_S = 60.0
RELEASE_PAUSE_S = 1.0
MAX_POLICIES = MOST
"""The most policies that trainers of one selector announce versions of."""


class Leasing:
    """All selector queues and sessions: which session each call is leased to."""

    def __init__(self, context: GateContext, timeouts: CallTimeouts) -> None:
        self._store = context.store
        self._registry = context.registry
        self._events = context.events
        self._clock = context.clock
        self._deadlines = context.deadlines
        self._limits = context.limits.leasing
        self._timeouts = timeouts
        self._queues: dict[Selector, SelectorQueue] = {}
        self._rollouts: dict[str, Rollout] = {}
        # The newest announced version of each policy, by run with open rollouts, or by rollout for those without a run.
        self._newest: dict[Hashable, dict[str, int]] = {}
        self._in_run: Counter[str] = Counter()
        self.unary = UnaryLeases(context)
        # Queues whose first call has left: the next one may fit into a window that the first did not fit into.
        self._moved_up: list[SelectorQueue] = []

    # Rollouts --------------------------------------------------------------------------------------------------------

    def link(self, rollout: Rollout) -> None:
        """Makes the rollout's calls available for leasing and dispatch."""
        self._rollouts[rollout.id] = rollout
        if (run_key := rollout.spec.run_key) is not None:
            self._in_run[run_key] += 1
        if rollout.spec.mode is not Mode.INTERCEPTION_GATE:
            return
        for queue in self._queues.values():
            if queue.selector.matches(rollout.spec):
                self._connect(queue, rollout)

    def unlink(self, rollout: Rollout) -> None:
        """Removes a closed rollout and notifies the sessions that match it."""
        if self._rollouts.pop(rollout.id, None) is not None:
            self._forget_newest(rollout)
        for call in rollout.queued.values():
            self._drop(call)
        rollout.queued.clear()
        for queue in rollout.queues:
            queue.rollouts.pop(rollout.id, None)
            for session in queue.sessions.values():
                session.notify_closed(rollout.id)
        rollout.queues.clear()
        if rollout.paused_by:
            rollout.paused_by.clear()
            self._timeouts.resume(rollout)
        self._lease_moved_up()

    # Calls -----------------------------------------------------------------------------------------------------------

    def offer(self, call: Call, *, first: bool = False, avoid: Session | None = None) -> None:
        """Offers a call: leases it to a session with credit, queues it, or marks it DISPATCHED.

        The caller starts the model source on a call that is DISPATCHED afterwards.
        """
        rollout = call.rollout
        rollout.queued[call.id] = call
        if rollout.paused_by:
            return
        if call.delegated:
            self._dispatch(call)
            return
        queues = [queue for queue in rollout.queues if queue.selector.wants(call)]
        found = [queue.next_session(call, avoid, first=first) for queue in queues]
        if ready := [session for session in found if session is not None]:
            self._lease(call, min(ready, key=lambda session: (len(session.held), session.ready_serial)))
            return
        for queue in queues:
            queue.put(call, first=first)
        if avoid is not None:
            # If no other session takes the call within the pause, the one that released it may get it again.
            self._deadlines.set((DeadlineKind.OFFER, call.id), self._clock.steady() + RELEASE_PAUSE_S)

    def offer_again(self, call: Call) -> None:
        """Offers a released call again, now to every session."""
        if call.id in call.rollout.queued:
            self._unqueue(call)
            self.offer(call, first=True)

    def withdraw(self, call: Call, reason: str) -> None:
        """Removes a call that has ended. Its holder is sent `reason`, unless that is "" (the holder answered it)."""
        self._unqueue(call)
        if call.lease_s is not None:
            self.unary.end(call)
        session, call.holder = call.holder, None
        if session is not None:
            session.release(call)
            if reason:
                session.notify_cancelled(call, reason)
            self._fill(session)
        self._lease_moved_up()

    def least_version(self, call: Call) -> int | None:
        """Returns the oldest version of the call's policy that may answer it now; None = any."""
        spec, policy_id = call.rollout.spec, call.policy_id
        bounds = models.bounds_of(spec, call.model, policy_id)
        announced = self._newest.get(_run_of(call.rollout), {})
        newest = announced.get(policy_id)
        least = bounds.min_version
        if bounds.max_staleness is not None and newest is not None:
            least = max(newest - bounds.max_staleness, least if least is not None else 0)
        return least

    def requeue(self, call: Call, *, avoid: Session | None = None) -> None:
        """Takes a call from its session, if it has one, and offers it ahead of other calls.

        The session `avoid` is not tried at once.
        """
        if call.lease_s is not None:
            self.unary.end(call)
        session, call.holder = call.holder, None
        if session is not None:
            session.release(call)
            self._fill(session)
        unary, call.lease_s, call.lease_request = call.lease_s is not None, None, ""
        call.state = CallState.QUEUED
        self._moved(call)
        self.offer(call, first=True, avoid=avoid)
        if unary and call.state is CallState.QUEUED and call.submitted:
            self._store.put_lease(call)  # nobody has it: a restart would begin its last lease anew

    def delegate(self, call: Call) -> None:
        """Takes a call from its session for the rollout's model source: DISPATCHED, or QUEUED while it is paused."""
        call.delegated = True
        self.requeue(call)

    def restore_lease(self, call: Call, lease: StoredLease) -> None:
        """Restores a call's lease after a restart; its session may resume within the window, unless it is unary."""
        call.state, call.lease_id = CallState.LEASED, lease.lease_id
        call.lease_s, call.lease_request = lease.lease_s, lease.lease_request
        if lease.lease_s is None:
            session = self.restore_session(lease.session_id, call.rollout.spec.namespace)
        else:
            session = self.unary.restored(call, lease.session_id)
        call.holder = session
        session.hold(call)

    def restore_session(self, session_id: str, namespace: str | None) -> Session:
        """Restores a session after a restart, as lost until it is resumed within the window of `await_resumes`.

        `namespace` is that of something which it holds; a session that holds things of several is of all.
        """
        session = self._registry.find_session(session_id)
        if session is not None and session.namespace != namespace:
            session.queue = SelectorQueue(Selector())
        if session is None:
            queue = SelectorQueue(Selector(namespace=namespace))
            session = Session(session_id, queue, "", Credits(self._limits.max_credit_calls), View())
            session.lost = True
            self._registry.add_session(session)
        return session

    def await_resumes(self) -> None:
        """Opens the resume window of all restored sessions, and begins the restored unary leases."""
        for session in self._registry.sessions():
            self._await_resume(session)
        self.unary.begin_restored()

    # Sessions --------------------------------------------------------------------------------------------------------

    def join(self, asked: SessionRequest, resumed: Session | None = None) -> tuple[Session, list[Call]]:
        """Opens a session; returns it, and the calls that now go to the model source.

        The calls of the session that it resumes stay leased and move to this one's `session.held`.

        Raises ResourceExhausted: SESSION_LIMIT; InvalidArgument FIELD_INVALID: too many policies.
        """
        if resumed is None and self._registry.session_count() >= self._limits.max_sessions:
            raise ResourceExhausted(
                "Too many sessions are connected: try again later.", reason="SESSION_LIMIT", retry_after_s=5.0
            )
        queue = self._queue_of(asked.selector)
        _check_room(queue, asked.versions)
        session = Session(
            secrets.token_hex(16), queue, asked.identity, self.granted(asked.credit), asked.view, asked.sent_prompts
        )
        session.lease_s, session.lease_request = asked.lease_s, asked.lease_request
        self._registry.add_session(session)
        queue.sessions[session.id] = session
        self._deadlines.drop((DeadlineKind.QUEUE, queue.selector))
        for policy_id, version in asked.versions.items():
            self.announce(session, version, policy_id)
        to_source: list[Call] = []
        if resumed is not None:
            to_source = self._take_over(resumed, session, asked.has)
            session.resumed = True
        self._fill(session)
        return session, to_source

    def announce(self, session: Session, policy_version: int, policy_id: str = "") -> None:
        """Records the version of a policy's weights, for the runs that match the session's selector.

        An empty `policy_id` is the only trained policy of each rollout. Raises InvalidArgument FIELD_INVALID.
        """
        queue = session.queue
        _check_room(queue, [policy_id])
        queue.newest[policy_id] = max(policy_version, queue.newest.get(policy_id, 0))
        for rollout in queue.rollouts.values():
            self._announce_for(rollout, queue.selector, {policy_id: policy_version})

    def granted(self, credit: Credits) -> Credits:
        """Returns the credits, capped by the operator's limits."""
        return Credits(
            min(credit.calls, self._limits.max_credit_calls), min(credit.bytes, self._limits.max_credit_bytes)
        )

    def set_credit(self, session: Session, credit: Credits) -> None:
        """Replaces a session's credits. Lowering them below what it holds takes no call back."""
        session.credit = self.granted(credit)
        self._fill(session)

    def leave(self, session: Session) -> list[Call]:
        """Ends a session; its calls are queued again immediately. Returns the calls that now go to the model source."""
        to_source = self._forget(session)
        for call in list(session.held.values()):
            if call.accepted_digest is None:
                self.requeue(call)
        return to_source

    def lose(self, session: Session) -> None:
        """Marks a session as lost after its stream broke; its calls stay leased for the resume window."""
        if self._registry.find_session(session.id) is session and not session.lost:
            session.lost = True
            session.queue.refresh(session)
            session.end()
            self._await_resume(session)

    def close_unary(self, session: Session) -> None:
        """Ends the session of a unary request; its leases stay until they are answered or expire."""
        self._forget(session)

    def pause(self, session: Session, max_duration_s: float) -> int:
        """Pauses all calls that match the session's selector; returns how many are leased or dispatched now."""
        session.queue.paused_by.add(session.id)
        self._deadlines.set((DeadlineKind.PAUSE, session.id), self._clock.steady() + max_duration_s)
        for rollout in session.queue.rollouts.values():
            self._pause(rollout, session.id)
        self._lease_moved_up()
        return sum(rollout.totals.open - len(rollout.queued) for rollout in session.queue.rollouts.values())

    def resume(self, session: Session) -> list[Call] | None:
        """Ends this session's pause; returns the calls that now go to the model source, or None if it had no pause."""
        if session.id not in session.queue.paused_by:
            return None
        session.queue.paused_by.discard(session.id)
        self._deadlines.drop((DeadlineKind.PAUSE, session.id))
        session.notify_resumed()
        to_source: list[Call] = []
        for rollout in list(session.queue.rollouts.values()):
            if session.id in rollout.paused_by:
                to_source += self._resume(rollout, session.id)
        return to_source

    def hold(self, rollout: Rollout) -> asyncio.Future[list[int]]:
        """Holds an open rollout's calls until `release`, over a restart too; returns the write."""
        self._pause(rollout, HOLD)
        self._lease_moved_up()
        return self._store.put_pause(rollout)

    def release(self, rollout: Rollout) -> tuple[list[Call], asyncio.Future[list[int]]]:
        """Ends the hold; returns the calls that now go to the model source, and the write."""
        to_source = self._resume(rollout, HOLD) if rollout.is_held else []
        return to_source, self._store.put_pause(rollout)

    def queue_linger_over(self, selector: Selector) -> None:
        """Removes a selector queue that has had no session for `QUEUE_LINGER_S`."""
        queue = self._queues.get(selector)
        if queue is not None and not queue.sessions:
            del self._queues[selector]
            for rollout in queue.rollouts.values():
                rollout.queues.remove(queue)

    # Private ---------------------------------------------------------------------------------------------------------

    def _await_resume(self, session: Session) -> None:
        self._deadlines.set((DeadlineKind.SESSION, session.id), self._clock.steady() + self._limits.resume_window_s)

    def _lease(self, call: Call, session: Session) -> None:
        self._unqueue(call)
        call.holder = session
        call.state = CallState.LEASED
        call.lease_id = random_id()[:16]
        call.lease_s, call.lease_request = session.lease_s, session.lease_request
        self._mark_given(call)
        session.hold(call)
        if call.lease_s is not None:
            self.unary.begin(call)
        session.queue.refresh(session)
        session.send(call)

    def _dispatch(self, call: Call) -> None:
        self._unqueue(call)
        call.state = CallState.DISPATCHED
        self._mark_given(call)

    def _mark_given(self, call: Call) -> None:
        call.leases += 1
        call.leased_at = self._clock.wall()
        call.min_policy_version = self.least_version(call)
        self._moved(call)

    def _moved(self, call: Call) -> None:
        """A call moved between QUEUED, LEASED and DISPATCHED."""
        if call.state is CallState.LEASED and call.submitted:
            self._store.put_lease(call)
        telemetry.moved(call)
        self._events.call_changed(call)

    def _announce_for(self, rollout: Rollout, selector: Selector, versions: Mapping[str, int]) -> None:
        own = {model.policy_id for model in rollout.spec.models} or {""}
        newest = self._newest.setdefault(_run_of(rollout), {})
        for named, version in versions.items():
            policy_id = named or models.only_trained(rollout.spec)
            # Without a policy it is of those that its session trains.
            if policy_id in own and (named or not selector.policy_ids or policy_id in selector.policy_ids):
                newest[policy_id] = max(version, newest.get(policy_id, 0))

    def _forget_newest(self, rollout: Rollout) -> None:
        run_key = rollout.spec.run_key
        if run_key is not None:
            self._in_run[run_key] -= 1
            if self._in_run[run_key] > 0:
                return
            del self._in_run[run_key]
        self._newest.pop(_run_of(rollout), None)

    def _unqueue(self, call: Call) -> None:
        self._deadlines.drop((DeadlineKind.OFFER, call.id))
        if call.rollout.queued.pop(call.id, None) is not None:
            self._drop(call)

    def _drop(self, call: Call) -> None:
        self._moved_up.extend(queue for queue in call.rollout.queues if queue.drop(call))

    def _fill(self, session: Session) -> None:
        while (call := session.queue.next_call()) is not None and session.takes(call):
            self._lease(call, session)
        session.queue.refresh(session)
        self._lease_moved_up()

    def _lease_moved_up(self) -> None:
        while self._moved_up:
            queue = self._moved_up.pop()
            while (call := queue.next_call()) is not None:
                session = queue.next_session(call, first=True)
                if session is None:
                    break
                self._lease(call, session)

    def _queue_of(self, selector: Selector) -> SelectorQueue:
        queue = self._queues.get(selector)
        if queue is None:
            queue = self._queues[selector] = SelectorQueue(selector)
            matching = [
                rollout
                for rollout in self._rollouts.values()
                if rollout.spec.mode is Mode.INTERCEPTION_GATE and selector.matches(rollout.spec)
            ]
            for rollout in matching:
                self._connect(queue, rollout)
            waiting = [call for rollout in matching if not rollout.paused_by for call in rollout.queued.values()]
            for call in sorted(waiting, key=lambda call: call.received):
                if selector.wants(call):
                    queue.put(call)
        return queue

    def _connect(self, queue: SelectorQueue, rollout: Rollout) -> None:
        queue.rollouts[rollout.id] = rollout
        rollout.queues.append(queue)
        if queue.newest:
            self._announce_for(rollout, queue.selector, queue.newest)
        for session_id in queue.paused_by:
            self._pause(rollout, session_id)

    def _pause(self, rollout: Rollout, session_id: str) -> None:
        if not rollout.paused_by:
            for call in rollout.queued.values():
                self._drop(call)
            self._timeouts.pause(rollout)
        rollout.paused_by.add(session_id)

    def _resume(self, rollout: Rollout, session_id: str) -> list[Call]:
        """Ends one pause of a rollout; returns the calls that now go to the model source."""
        rollout.paused_by.discard(session_id)
        if rollout.paused_by:
            return []
        self._timeouts.resume(rollout)
        to_source: list[Call] = []
        for call in list(rollout.queued.values()):
            self.offer(call)
            if call.state is CallState.DISPATCHED:
                to_source.append(call)
        return to_source

    def _take_over(self, old: Session, session: Session, has: Container[str] | None) -> list[Call]:
        self._deadlines.drop((DeadlineKind.SESSION, old.id))
        unwanted: list[Call] = []
        for call in list(old.held.values()):
            old.release(call)
            if not session.queue.selector.wants(call):
                call.holder = None
                unwanted.append(call)
                continue
            call.holder = session
            session.hold(call)
            if call.submitted:
                self._store.put_lease(call)  # after a restart it is found under the new session's id
        unsent = {call.id for call in old.drain_calls()}
        for call in session.held.values():
            # Its frame was never sent, or was lost in transit or with the service.
            if call.id in unsent or (has is not None and call.id not in has and not call.claimed):
                session.send(call)
        old.taken_over = True
        if (paused_until := self._deadlines.at((DeadlineKind.PAUSE, old.id))) is not None:
            self.pause(session, paused_until - self._clock.steady())
        to_source = self._forget(old)
        for call in unwanted:
            self.requeue(call)
        return to_source

    def _forget(self, session: Session) -> list[Call]:
        if not self._registry.drop_session(session):
            return []
        self._deadlines.drop((DeadlineKind.SESSION, session.id))
        session.end()
        queue = session.queue
        queue.refresh(session)
        queue.sessions.pop(session.id, None)
        to_source = self.resume(session) or []
        if not queue.sessions:
            self._deadlines.set((DeadlineKind.QUEUE, queue.selector), self._clock.steady() + QUEUE_LINGER_S)
        return to_source


def _check_room(queue: SelectorQueue, policy_ids: Iterable[str]) -> None:
    """Checks that versions of at most `MAX_POLICIES` policies, and one without a policy, are kept for a selector."""
    if len({*queue.newest, *policy_ids} - {""}) > MAX_POLICIES:
        raise invalid_field("policies", f"versions of at most {MAX_POLICIES} policies are announced for a selector")


def _run_of(rollout: Rollout) -> Hashable:
    """Scope of a rollout's policy versions: its run, or the rollout itself if it has none."""
    run_key = rollout.spec.run_key
    return ("rollout", rollout.id) if run_key is None else ("run", run_key)
