"""The gate: rollouts, their calls, and what may become of each.

A call is admitted (index, budget, journal), gets its prompt, is offered to whoever answers, and ends exactly once.
The first answer that holds its rules wins; it is on disk before anybody, agent or trainer, hears of it (decision 7).
Between acceptance and commit a call is *claimed*: nothing else can end it any more.

The gate knows no wire. Whoever knows tokens (`Recorder`) judges and records answers; `CallStore` makes them durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import cast

import structlog

from penstock_chassis.errors import AlreadyExists, NotFound, ResourceExhausted, Unavailable
from penstock_codec.chat import Sampling
from penstock_codec.random_ids import random_id
from penstock_interception import observing
from penstock_interception.answers import Answers
from penstock_interception.audit import Audit
from penstock_interception.calls import (
    Arrival,
    Call,
    CallState,
    Mode,
    ModelFacts,
    Opening,
    Prompt,
    Rollout,
    RolloutState,
    count_ended,
)
from penstock_interception.changes import Changes
from penstock_interception.clock import Clock
from penstock_interception.completions import Failure
from penstock_interception.credentials import Credentials
from penstock_interception.deadlines import Deadlines
from penstock_interception.dispatch import DeadlineKey, Dispatcher
from penstock_interception.graph.model import Plan
from penstock_interception.limits import GateLimits
from penstock_interception.metering import Metering
from penstock_interception.ports import Recorder, Store, durable, recorded
from penstock_interception.runs import Run
from penstock_interception.sessions import Selector, Session
from penstock_interception.tools.desk import ToolDesk

_log = structlog.get_logger(__name__)

RETRY_S = 60.0
"""Until what the disk refused, and nobody asks for again, is tried once more."""


class Gate:
    """All rollouts and calls. Belongs to one event loop; every method but those that say so returns without waiting."""

    def __init__(
        self, store: Store, recorder: Recorder, *, limits: GateLimits | None = None, clock: Clock | None = None
    ):
        self.limits = limits or GateLimits()
        self.clock = clock or Clock()
        self.changes = Changes(int(self.clock.wall() * 1e6))
        self.draining = False
        self.audit = Audit(self.clock.steady)
        self.credentials = Credentials(store, self.find, clock=self.clock, audit=self.audit)
        self.metering = Metering(store, clock=self.clock, audit=self.audit)
        self._store = store
        self._recorder = recorder
        # Set when `next_deadline` is sooner than it was.
        self.sooner = asyncio.Event()
        self._deadlines: Deadlines[DeadlineKey] = Deadlines(self.sooner.set)
        self.dispatcher = Dispatcher(self, clock=self.clock, deadlines=self._deadlines, limits=self.limits.dispatch)
        self.tools = ToolDesk(
            store.tools,
            clock=self.clock,
            sooner=self.sooner.set,
            limits=self.limits.tools,
            resume_window_s=self.limits.dispatch.resume_window_s,
            rejoin_grace_s=self.limits.rejoin_grace_s,
        )
        self._rollouts: dict[str, Rollout] = {}
        self._by_request: dict[str, Rollout] = {}
        self._calls: dict[str, Call] = {}
        self._open_rollouts = 0
        self.answers = Answers(self._calls, store, recorder, self.dispatcher, clock=self.clock, finish=self._finish)

    # Rollouts --------------------------------------------------------------------------------------------------------

    def find_opening(self, opening: Opening) -> Rollout | None:
        """The rollout that this very request opened before, or None when it is new.

        Raises AlreadyExists: REQUEST_ID_REUSED, ROLLOUT_EXISTS.
        """
        before = self._by_request.get(opening.request_id)
        if before is not None:
            if before.opening != opening:
                raise AlreadyExists("The request id was used for another rollout.", reason="REQUEST_ID_REUSED")
            return before
        if opening.rollout_id in self._rollouts:
            raise AlreadyExists("A rollout has this id already.", reason="ROLLOUT_EXISTS")
        return None

    def find(self, rollout_id: str) -> Rollout | None:
        """The rollout, or None."""
        return self._rollouts.get(rollout_id)

    async def open(
        self, opening: Opening, *, facts: ModelFacts | None = None, caller_key: str | None = None
    ) -> Rollout:
        """Opens a rollout and returns it once that is on disk. Idempotent by request id.

        Raises what find_opening and Metering.check raise, and:
            Unavailable: DRAINING; JOURNAL_FAILED, and then there is no such rollout.
            ResourceExhausted: ROLLOUT_LIMIT.
        """
        before = self.find_opening(opening)
        if before is not None:
            before.caller_key = caller_key
            if before.opened is not None:
                await durable(before.opened)
            return before
        if self.draining:
            raise Unavailable("The service is stopping.", reason="DRAINING", retry_after_s=5.0)
        if self._open_rollouts >= self.limits.max_rollouts:
            raise ResourceExhausted("Too many rollouts are open.", reason="ROLLOUT_LIMIT", retry_after_s=5.0)
        self.metering.check(opening)
        rollout = Rollout(opening, self.clock.wall(), facts=facts or ModelFacts(), caller_key=caller_key)
        first = self.credentials.first(opening)
        rollout.grants[first.id] = first
        run = self.metering.open(rollout, self._rollouts.values())
        written = rollout.opened = self._store.put_rollout(rollout, self.tools.open(opening), run)
        written.add_done_callback(lambda done: self._opened(rollout, done))
        self._keep(rollout)
        self.dispatcher.link(rollout)
        await durable(written)
        return rollout

    def rollout(self, rollout_id: str) -> Rollout:
        """Raises NotFound ROLLOUT_UNKNOWN."""
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            raise NotFound("No such rollout.", reason="ROLLOUT_UNKNOWN")
        return rollout

    def rollouts(self) -> Iterable[Rollout]:
        """All rollouts, oldest first."""
        return self._rollouts.values()

    async def close(self, rollout_id: str, reason: str) -> Rollout:
        """Closes a rollout and waits until that, and every answer that was accepted, is on disk. Idempotent.

        Raises NotFound ROLLOUT_UNKNOWN, Unavailable JOURNAL_FAILED (it is closed; a restart may not know it yet).
        """
        rollout = self.rollout(rollout_id)
        if rollout.state is not RolloutState.CLOSED:
            rollout.state = RolloutState.CLOSED
            rollout.closed = self.clock.wall()
            rollout.close_reason = reason
            self._open_rollouts -= 1
            self.dispatcher.unlink(rollout)  # first, so that no credit that comes free leases another of its calls
            for call in self._open_calls(rollout):
                self.cancel(call, "ROLLOUT_CLOSED")
            self.tools.close(rollout.id)
            self.changes.rollout_closed(rollout)
            self._set_deadline(("retention", rollout.id), self.limits.retention_s)
        for call in self._open_calls(rollout):  # claimed: their commit is under way
            await asyncio.wait([call.ended])
        await durable(self._store.update_rollout(rollout))
        return rollout

    async def delete(self, rollout_id: str) -> None:
        """Removes a rollout and everything that was captured of it, once that is on disk. Idempotent.

        Raises Unavailable JOURNAL_FAILED: the rollout is closed and still there.
        """
        if rollout_id not in self._rollouts:
            return
        rollout = await self.close(rollout_id, "DELETED")
        if self._rollouts.get(rollout_id) is not rollout:
            return  # another request deleted it meanwhile
        written = rollout.deleted
        if written is None:
            written = rollout.deleted = self._store.delete_rollout(rollout_id, self.metering.gone(rollout))
            written.add_done_callback(lambda done: self._deleted(rollout, done))
        await durable(written)

    # Calls -----------------------------------------------------------------------------------------------------------

    def admit(self, rollout: Rollout, arrival: Arrival) -> Call:
        """A new call of an agent, to be journalled next; it is offered when its prompt is made.

        Raises what Metering.admit and Metering.pace raise, and:
            Unavailable: DRAINING.
            ResourceExhausted: CALL_LIMIT (for now, with a delay).
        """
        if self.draining:
            raise Unavailable("The service is stopping.", reason="DRAINING", retry_after_s=2.0)
        budgets, now = rollout.opening.budgets, self.clock.wall()
        self.metering.admit(rollout, arrival.body_bytes)
        if rollout.totals.open >= self.limits.max_open_calls_per_rollout:
            raise ResourceExhausted("Too many calls wait in this rollout.", reason="CALL_LIMIT", retry_after_s=1.0)
        self.metering.pace(rollout)
        arrival = self.metering.bounded(rollout, arrival)
        call = Call(
            id=random_id(),
            rollout=rollout,
            index=rollout.calls[-1].index + 1 if rollout.calls else 0,
            arrival=arrival,
            received=now,
            expires=now + budgets.call_timeout_s,
            sampling=arrival.sampling,
            ended=asyncio.get_running_loop().create_future(),
            delegated=rollout.opening.mode is not Mode.INTERCEPTION_GATE,
        )
        self.metering.admitted(call)
        self._calls[call.id] = call
        rollout.calls.append(call)
        rollout.by_retry_key[arrival.retry_key] = call
        if not rollout.holds:
            self._set_deadline(("expire", call.id), budgets.call_timeout_s)
        observing.admitted(call)
        self.changes.call_changed(call)
        return call

    def journal(self, call: Call) -> None:
        """Writes an admitted call down, as it is now: once, before anybody can answer it."""
        call.journalled = True
        try:
            written = self._store.put_call(call)
        except Exception:
            self.fail(call, Failure("JOURNAL_FAILED"))
            raise
        written.add_done_callback(lambda done: self._admitted(call, done))
        if call.state.terminal:
            self._shrink(call)

    def offer(self, call: Call, plan: Plan, sampling: Sampling) -> None:
        """The call's prompt is made: whoever answers may have it."""
        if not call.state.terminal:
            call.plan, call.prompt, call.sampling = plan, Prompt.of(plan), sampling
            self.dispatcher.offer(call)

    def call(self, call_id: str) -> Call:
        """Raises NotFound CALL_UNKNOWN."""
        call = self._calls.get(call_id)
        if call is None:
            raise NotFound("No such call.", reason="CALL_UNKNOWN")
        return call

    def knows(self, call_id: str) -> bool:
        """Whether a call is in memory."""
        return call_id in self._calls

    def open_calls(self) -> list[Call]:
        """Calls that have not ended."""
        return [call for rollout in self._rollouts.values() for call in self._open_calls(rollout)]

    def attach(self, call: Call) -> None:
        """A connection of the agent waits for this call."""
        call.attached += 1
        self._deadlines.drop(("gone", call.id))

    def detach(self, call: Call) -> None:
        """That connection is gone; when it was the last, a retry may join for a while, then the call is CANCELLED."""
        call.attached -= 1
        if call.attached <= 0:
            observing.left(call)
            if not call.state.terminal:
                self._set_deadline(("gone", call.id), self.limits.rejoin_grace_s)

    def told(self, call: Call) -> None:
        """The agent took the whole answer."""
        if not call.told:
            call.told = True
            self._store.mark_told(call)

    def cancel(self, call: Call, reason: str) -> None:
        """Nobody wants the answer any more."""
        self._end(call, CallState.CANCELLED, reason)

    def fail(self, call: Call, failure: Failure) -> None:
        """The call cannot be answered, for a reason found by the service itself."""
        if not call.state.terminal and not call.claimed:
            call.failure = failure
            self._end(call, CallState.FAILED, failure.reason)

    def pass_through(self, call: Call) -> None:
        """Black box: the answer went by unread."""
        self._end(call, CallState.DELIVERED, "PASSED_THROUGH")

    # The dispatcher tells --------------------------------------------------------------------------------------------

    def call_changed(self, call: Call) -> None:
        """A call went between QUEUED, LEASED and DISPATCHED."""
        if call.state is CallState.LEASED and call.journalled:
            self._store.put_lease(call)
        observing.moved(call)
        self.changes.call_changed(call)

    def dispatched(self, call: Call) -> None:
        """The rollout's model source shall answer this call now."""
        self._recorder.answer_by_source(call)

    def rollout_held(self, rollout: Rollout) -> None:
        """Time stands still for the rollout's calls."""
        rollout.held_since = self.clock.wall()
        for call in self._open_calls(rollout):
            self._deadlines.drop(("expire", call.id))
        self._store.put_pause(rollout)

    def rollout_released(self, rollout: Rollout) -> None:
        """Time goes on."""
        now = self.clock.wall()
        moved = self._open_calls(rollout)
        _go_on(rollout, moved, now)
        for call in moved:
            self._set_deadline(("expire", call.id), max(0.0, call.expires - now))
        self._store.put_pause(rollout, moved)

    def session_resumed(self, old: Session, session: Session) -> None:
        """Its host tools and their calls go along."""
        self.tools.session_resumed(old, session)

    def session_gone(self, session: Session) -> None:
        """Its host tools go with it."""
        self.tools.session_gone(session)

    # Time ------------------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When `tick` is due next, on the steady clock; None when nothing waits for time."""
        due = [at for at in (self._deadlines.next(), self.tools.next_deadline()) if at is not None]
        return min(due, default=None)

    async def tick(self) -> None:
        """Does what is due."""
        self.tools.tick()
        for kind, key in self._deadlines.due(self.clock.steady()):
            if kind == "session":
                self.dispatcher.session_window_over(str(key))
            elif kind == "lane":
                self.dispatcher.lane_linger_over(cast("Selector", key))
            elif kind == "pause":
                self.dispatcher.pause_over(str(key))
            elif kind == "retention":
                await self._retire(str(key))
            elif kind == "run":
                if self.metering.forget(str(key)):
                    self._store.runs.delete(str(key))
            elif (call := self._calls.get(str(key))) is not None and not call.claimed:
                if kind == "expire":
                    self._end(call, CallState.EXPIRED, "EXPIRED")
                elif kind == "gone" and call.attached <= 0:
                    self._end(call, CallState.CANCELLED, "AGENT_GONE")
                elif kind == "offer":
                    self.dispatcher.offer_again(call)
                elif kind == "lease" and call.state is CallState.LEASED:
                    self.dispatcher.requeue(call)

    # After a restart -------------------------------------------------------------------------------------------------

    def restore_runs(self, runs: Iterable[Run]) -> None:
        """Takes runs back as the journal has them, when all rollouts are restored."""
        for idle in self.metering.restore(runs, self._rollouts.values()):
            self._set_deadline(("run", idle), self.limits.retention_s)

    def restore(self, rollout: Rollout, calls: list[Call]) -> None:
        """Takes a rollout back as the journal has it: its agents' retries join its open calls."""
        self._keep(rollout)
        rollout.calls = calls
        if rollout.held_since is not None:  # who held it is gone, and holds it again when he is back
            moved = self._open_calls(rollout)
            _go_on(rollout, moved, self.clock.wall())
            self._store.put_pause(rollout, moved)
        for call in calls:
            self._calls[call.id] = call
            rollout.by_retry_key[call.arrival.retry_key] = call
            if not call.state.terminal:
                self._set_deadline(("expire", call.id), max(0.0, call.expires - self.clock.wall()))
                self._set_deadline(("gone", call.id), self.limits.rejoin_grace_s)
        if rollout.state is RolloutState.CLOSED:
            age = self.clock.wall() - (rollout.closed or rollout.created)
            self._set_deadline(("retention", rollout.id), max(0.0, self.limits.retention_s - age))
        else:
            self.dispatcher.link(rollout)

    def restore_lease(self, call: Call, plan: Plan, sampling: Sampling, session_id: str, lease_id: str) -> None:
        """A call was leased when the service died; its session may come back for it."""
        call.plan, call.prompt, call.sampling = plan, Prompt.of(plan), sampling
        self.dispatcher.restore_lease(call, session_id, lease_id)

    def shelve(self, rollout: Rollout) -> None:
        """Lets go of a closed rollout's calls; the journal has them."""
        for call in rollout.calls:
            self._calls.pop(call.id, None)
        rollout.calls, rollout.by_retry_key, rollout.shelved = [], {}, True

    def unshelve(self, rollout: Rollout, calls: list[Call]) -> None:
        """Takes them back."""
        rollout.calls, rollout.shelved = calls, False
        for call in calls:
            self._calls[call.id] = call

    # Private ---------------------------------------------------------------------------------------------------------

    def _keep(self, rollout: Rollout) -> None:
        self._rollouts[rollout.id] = rollout
        self._by_request[rollout.opening.request_id] = rollout
        if rollout.state is not RolloutState.CLOSED:
            self._open_rollouts += 1

    def _opened(self, rollout: Rollout, done: asyncio.Future[list[int]]) -> None:
        rollout.opened = None
        if not done.cancelled() and done.exception() is None:
            return
        # The disk refused: a rollout that a crash would lose is not opened.
        if rollout.state is not RolloutState.CLOSED:
            rollout.state = RolloutState.CLOSED
            self._open_rollouts -= 1
        self.dispatcher.unlink(rollout)
        self.tools.close(rollout.id)
        self.metering.gone(rollout)
        self._drop(rollout)

    def _deleted(self, rollout: Rollout, done: asyncio.Future[list[int]]) -> None:
        rollout.deleted = None
        if done.cancelled() or done.exception() is not None:
            self.metering.stays(rollout)
        else:
            self._drop(rollout)

    def _admitted(self, call: Call, done: asyncio.Future[list[int]]) -> None:
        if not recorded(done):
            # What is not in the journal cannot be answered: a restart would know neither the call nor its answer.
            self.fail(call, Failure("JOURNAL_FAILED"))

    async def _retire(self, rollout_id: str) -> None:
        try:
            await self.delete(rollout_id)
        except Unavailable as error:
            _log.error("an old rollout could not be deleted", rollout_id=rollout_id, reason=error.reason)
            self._set_deadline(("retention", rollout_id), RETRY_S)

    def _drop(self, rollout: Rollout) -> None:
        """Lets go of a rollout that is in the journal no more."""
        self._rollouts.pop(rollout.id, None)
        self._by_request.pop(rollout.opening.request_id, None)
        self._deadlines.drop(("retention", rollout.id))
        for call in rollout.calls:
            self._calls.pop(call.id, None)
        self._recorder.forget(rollout)
        if (run_id := self.metering.idle_run(rollout)) is not None:
            self._set_deadline(("run", run_id), self.limits.retention_s)

    def _set_deadline(self, key: DeadlineKey, in_s: float) -> None:
        self._deadlines.set(key, self.clock.steady() + in_s)

    def _open_calls(self, rollout: Rollout) -> list[Call]:
        if not rollout.totals.open:
            return []
        return [call for call in rollout.calls if not call.state.terminal]

    def _end(self, call: Call, state: CallState, reason: str) -> None:
        """Ends a call that nobody has claimed."""
        if call.state.terminal or call.claimed:
            return
        self._finish(call, state, reason)
        if call.journalled:
            self._store.end_call(call)

    def _finish(self, call: Call, state: CallState, reason: str) -> None:
        call.state = state
        call.end_reason = reason
        call.ended_at = call.ended_at or self.clock.wall()
        self._deadlines.drop(("expire", call.id))
        self._deadlines.drop(("gone", call.id))
        unanswered = state in (CallState.CANCELLED, CallState.EXPIRED)
        self.dispatcher.withdraw(call, reason if unanswered or not call.claimed else "")
        work, call.work = call.work, None
        if work is not None and not call.claimed:
            work.cancel()
        count_ended(call, call.rollout.totals)
        self.metering.ended(call)
        observing.ended(call)
        if call.journalled:
            self._shrink(call)
        self.changes.call_changed(call)
        if not call.ended.done():
            call.ended.set_result(None)

    def _shrink(self, call: Call) -> None:
        """What ended stays small in memory: its body is on disk, its tokens are in the graph."""
        call.arrival = call.arrival.without_body()
        call.plan = None


def _go_on(rollout: Rollout, calls: Iterable[Call], now: float) -> None:
    """Time goes on for a rollout that was held, and for these calls of it."""
    since, rollout.held_since = rollout.held_since or now, None
    rollout.paused_s += now - since
    for call in calls:
        call.expires += now - max(since, call.received)
