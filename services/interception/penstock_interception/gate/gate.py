"""The gate: the state machine of rollouts and their calls.

A call is admitted (index, budget), gets its prompt, is offered to a trainer or a model source, and ends exactly once.
Its row is written with its admission, or, where the prompt is made at once, with its first offer: see
`Interceptor.begin`. The first valid answer wins; it is on disk before the agent or a trainer sees it (decision 7).
Between acceptance and commit a call is *claimed*: nothing else can end it.

The gate knows neither wire formats nor tokens, and calls nothing above it. Calls that a rollout's model source must
answer now are DISPATCHED; the gate returns them, and its caller starts the source. An accepted answer brings its own
`settle`, which applies it to the rollout's graph or drops it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import structlog

from penstock_chassis.errors import ResourceExhausted, Unavailable
from penstock_chassis.homes import random_id
from penstock_codec.chat import Sampling
from penstock_interception.domain import models
from penstock_interception.domain.calls import (
    CallRequest,
    CallState,
    Mode,
    Prompt,
    RolloutState,
)
from penstock_interception.domain.completions import Failure
from penstock_interception.domain.kept_captures import Discarded
from penstock_interception.domain.results import Accepted, Answered, PreparedAnswer
from penstock_interception.domain.state import Call, Rollout, Selector, Session
from penstock_interception.domain.totals import count_ended, new_images
from penstock_interception.gate import telemetry
from penstock_interception.gate.budgets import BudgetEnforcer
from penstock_interception.gate.call_timeouts import CallTimeouts
from penstock_interception.gate.context import DeadlineKind, GateContext
from penstock_interception.gate.driver_leases import DriverLeases
from penstock_interception.gate.leasing import Leasing
from penstock_interception.gate.rollout_lifecycle import RolloutLifecycle
from penstock_interception.graph.values import CallClass, Plan
from penstock_interception.store.commits import durable, recorded
from penstock_interception.store.reading import StoredLease

_log = structlog.get_logger(__name__)

RETRY_S = 60.0
"""Delay before a failed deletion is retried when no caller retries it."""


@dataclass(slots=True)
class Due:
    """What deadlines leave to the gate's caller.

    `to_source`: calls for their model sources. `sessions`: sessions that ended. `rollouts`: closed rollouts to delete.
    `drivers`: lost drivers, whose rollouts are to be closed. `captures`: kept ones that are to be discarded.
    """

    to_source: list[Call] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    rollouts: list[str] = field(default_factory=list)
    drivers: list[str] = field(default_factory=list)
    captures: list[Discarded] = field(default_factory=list)


class Gate:
    """All calls, and how rollouts open and close. Belongs to one event loop; only `wait_closed` waits.

    Callers use its parts directly for what concerns only one of them: `leasing` for sessions, `lifecycle` for a
    rollout's opening and what comes after its close, `budgets` for requests that are no calls, `drivers` for their
    leases.
    """

    def __init__(self, context: GateContext) -> None:
        self._store = context.store
        self._registry = context.registry
        self._events = context.events
        self._deadlines = context.deadlines
        self._clock = context.clock
        self._limits = context.limits
        self._timeouts = CallTimeouts(context)
        self.budgets = BudgetEnforcer(context)
        self.leasing = Leasing(context, self._timeouts)
        self.drivers = DriverLeases(context)
        self.lifecycle = RolloutLifecycle(context, self.leasing, self.budgets, self._timeouts, self.drivers)

    # Rollouts --------------------------------------------------------------------------------------------------------

    def close(self, rollout: Rollout, reason: str) -> None:
        """Closes a rollout and cancels its calls, unless it is closed. Claimed calls end with their commits."""
        if rollout.state is RolloutState.CLOSED:
            return
        self.lifecycle.close(rollout, reason)  # first, so that credit freed below cannot lease another of its calls
        for call in rollout.open_calls():
            self.cancel(call, "ROLLOUT_CLOSED")
        self._events.rollout_closed(rollout)
        self.lifecycle.retain(rollout)

    async def wait_closed(self, rollout: Rollout) -> None:
        """Waits until the end of a closed rollout and every accepted answer are on disk.

        Raises Unavailable JOURNAL_FAILED (it is closed, but a restart may find it open).
        """
        for call in rollout.open_calls():  # claimed: their commits are in progress
            await asyncio.wait([call.ended])
        await durable(self._store.update_rollout(rollout))

    def delete_later(self, rollout_id: str) -> None:
        """Makes a rollout due for deletion again, which cannot be deleted now."""
        self.lifecycle.delete_in(rollout_id, RETRY_S)

    # Calls -----------------------------------------------------------------------------------------------------------

    def admit(self, rollout: Rollout, request: CallRequest, *, journal: bool) -> Call:
        """Creates a call of an agent. Without `journal`, its `offer` or its failure is written with it, or
        the caller writes it by `journal`.

        Raises what `Rollout.check_open`, BudgetEnforcer.admit and BudgetEnforcer.pace raise, and:
            Unavailable: DRAINING.
            ResourceExhausted: CALL_LIMIT (transient, with a retry delay).
        """
        rollout.check_open()
        if self._registry.draining:
            raise Unavailable("The service is stopping.", reason="DRAINING", retry_after_s=2.0)
        now = self._clock.wall()
        self.budgets.admit(rollout, request.body_bytes, sum(new_images(rollout, request).values()))
        if rollout.totals.open >= self._limits.max_open_calls_per_rollout:
            raise ResourceExhausted("Too many calls wait in this rollout.", reason="CALL_LIMIT", retry_after_s=1.0)
        self.budgets.pace(rollout)
        request = self.budgets.bounded(rollout, request)
        call = Call(
            id=random_id(),
            rollout=rollout,
            index=rollout.calls[-1].index + 1 if rollout.calls else 0,
            request=request,
            received=now,
            expires=now + rollout.spec.budgets.call_timeout_s,
            sampling=request.sampling,
            ended=asyncio.get_running_loop().create_future(),
            delegated=rollout.spec.mode is not Mode.INTERCEPTION_GATE,
        )
        self.budgets.count_admitted(call)
        self._registry.add_call(call)
        rollout.calls.append(call)
        rollout.by_retry_key[request.retry_key] = call
        self._timeouts.start(call)
        telemetry.admitted(call)
        self._events.call_changed(call)
        if journal:
            self.journal(call)
        return call

    def journal(self, call: Call) -> None:
        """Writes an admitted call to the journal in its current state. Called once, before the call can be answered.

        Raises what CallStore.put_call raises; the call has then failed.
        """
        call.submitted = True
        try:
            written = self._store.put_call(call)
        except Exception:
            self.fail(call, Failure("JOURNAL_FAILED"))
            raise
        written.add_done_callback(partial(self._call_written, call))
        if call.state.terminal:
            _shrink(call)
        elif call.request.folded is not None:  # the write has it: a waiting call needs its body alone
            call.request = replace(call.request, folded=None)

    def offer(self, call: Call, plan: Plan, sampling: Sampling) -> CallState:
        """Attaches the prompt to the call, and offers it to the trainers or the model source.

        Returns LEASED (to a session), DISPATCHED (the caller starts the model source), QUEUED, or a terminal state:
        FAILED where the run's budget has nothing left for a call that was to be replayed (BUDGET_EXHAUSTED).
        """
        if not call.state.terminal and (budget := self.budgets.charge(call)):
            detail = f"The run's budget {budget} is used up."
            self.fail(call, Failure("BUDGET_EXHAUSTED", detail, retriable=False))
        elif not call.state.terminal:
            call.plan, call.prompt, call.sampling = plan, Prompt.of(plan), sampling
            self.leasing.offer(call)
        if not call.submitted:  # one write has both the call and its lease
            self.journal(call)
        return call.state

    def choose_model(self, call: Call, turn: int, call_class: CallClass) -> None:
        """Chooses which of its rollout's models answers a call, once: a restart keeps the choice."""
        spec = call.rollout.spec
        if call.model is not None or not spec.models:
            return
        call.model = models.choose(spec, call.request.model_requested, call.index, turn, call_class)
        if (model := call.of_model) is not None:
            call.policy_id, call.delegated = model.policy_id, call.delegated or model.delegated
        if call.submitted:
            self._store.put_model(call)

    def answer_for(self, call: Call, policy_id: str) -> None:
        """Makes a held call one that this policy answered, or again one that its own model shall answer."""
        if call.policy_id != policy_id:
            call.policy_id = policy_id
            call.min_policy_version = self.leasing.least_version(call)

    def hold(self, call: Call, plan: Plan, sampling: Sampling) -> None:
        """Attaches the prompt to a call that a recording answers: it is offered to nobody."""
        if not call.state.terminal:
            call.plan, call.prompt, call.sampling = plan, Prompt.of(plan), sampling
            call.leased_at = self._clock.wall()
            call.min_policy_version = self.leasing.least_version(call)
        if not call.submitted:
            self.journal(call)

    def accept(self, call: Call, answered: Answered) -> Accepted:
        """Writes a valid answer to an open call, and claims the call: it ends with the commit.

        Raises what CallStore.put_answer raises; the call is then open, and the answer's record is dropped.
        """
        try:
            committed = self._store.put_answer(call, answered)
        except BaseException:
            if answered.prepared is not None:
                answered.prepared.settle(False)
            raise
        call.claim(answered.digest, committed)
        committed.add_done_callback(partial(self._committed, call, answered))
        return Accepted(call.id, committed)

    def await_rejoin(self, call: Call) -> None:
        """Cancels an open call without connections after the grace period, unless a retry rejoins it.

        A judge's and a user's stay open: who asks may be started again much later, and shall not have it sampled twice.
        """
        if not call.rollout.spec.belongs_to:
            self._set_deadline(DeadlineKind.GONE, call.id, self._limits.rejoin_grace_s)

    def stop_awaiting_rejoin(self, call: Call) -> None:
        """Drops the deadline of `await_rejoin`: a retry waits for the call again."""
        self._deadlines.drop((DeadlineKind.GONE, call.id))

    def answer_sent(self, call: Call) -> None:
        """Records that the agent received the whole answer."""
        if not call.answer_sent:
            call.answer_sent = True
            self._store.mark_answer_sent(call)

    def cancel(self, call: Call, reason: str) -> None:
        """Cancels a call whose answer is no longer wanted."""
        self._end(call, CallState.CANCELLED, reason)

    def fail(self, call: Call, failure: Failure) -> None:
        """Fails a call for a reason inside the service."""
        if not call.state.terminal and not call.claimed:
            call.failure = failure
            self._end(call, CallState.FAILED, failure.reason)
        if not call.submitted:
            self.journal(call)

    def pass_through(self, call: Call) -> None:
        """Ends a black box call: its answer passed through unread."""
        self._end(call, CallState.DELIVERED, "PASSED_THROUGH")

    def delegate(self, call: Call) -> asyncio.Future[list[int]]:
        """Takes a call from its session for the rollout's model source; returns the write.

        The call is DISPATCHED afterwards, or QUEUED while its rollout is paused.
        """
        if not call.delegated:
            self.leasing.delegate(call)
        return self._store.put_delegation(call)

    def release(self, call: Call) -> None:
        """Takes a call from its session, so that another session can take it."""
        if call.state is CallState.LEASED:
            self.leasing.requeue(call, avoid=call.holder)

    # Time ------------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Refuses rollouts and calls from now on."""
        self._registry.draining = True

    def next_deadline(self) -> float | None:
        """Returns when `tick` is due next, on the steady clock; None without deadlines."""
        return self._deadlines.next()

    def tick(self) -> Due:
        """Handles every deadline that is due; returns what is left to the caller."""
        due = Due()
        for kind, key in self._deadlines.due(self._clock.steady()):
            if kind in (DeadlineKind.SESSION, DeadlineKind.PAUSE):
                self._session_due(kind, str(key), due)
            elif kind is DeadlineKind.QUEUE:
                self.leasing.queue_linger_over(cast("Selector", key))
            elif kind is DeadlineKind.RETENTION:
                due.rollouts.append(str(key))
            elif kind is DeadlineKind.DRIVER:
                self.drivers.ended(str(key))
                due.drivers.append(str(key))
            elif kind is DeadlineKind.CAPTURES:
                due.captures.extend(self.lifecycle.captures_beyond())
            elif kind is DeadlineKind.RUN:
                self.lifecycle.forget_run(str(key))
            elif (call := self._registry.find_call(str(key))) is not None and not call.claimed:
                self._call_due(kind, call)
        return due

    def _session_due(self, kind: DeadlineKind, session_id: str, due: Due) -> None:
        session = self._registry.find_session(session_id)
        if session is None:
            return
        if kind is DeadlineKind.PAUSE:
            due.to_source.extend(self.leasing.resume(session) or ())
        else:  # it was lost, and not resumed in time
            due.to_source.extend(self.leasing.leave(session))
            due.sessions.append(session)

    def _call_due(self, kind: DeadlineKind, call: Call) -> None:
        if kind is DeadlineKind.EXPIRE:
            self._end(call, CallState.EXPIRED, "EXPIRED")
        elif kind is DeadlineKind.GONE and call.attached <= 0:
            if call.rollout.is_held:  # its agent may be frozen: it has the whole grace afterwards
                self.await_rejoin(call)
            else:
                self._end(call, CallState.CANCELLED, "AGENT_GONE")
        elif kind is DeadlineKind.OFFER:
            self.leasing.offer_again(call)
        elif kind is DeadlineKind.LEASE and call.state is CallState.LEASED:
            self.leasing.requeue(call)

    # After a restart -------------------------------------------------------------------------------------------------

    def restore_lease(self, call: Call, plan: Plan, sampling: Sampling, lease: StoredLease) -> None:
        """Restores the lease of a call that was leased when the service stopped; its session may resume."""
        call.plan, call.prompt, call.sampling = plan, Prompt.of(plan), sampling
        self.leasing.restore_lease(call, lease)

    def await_returns(self) -> None:
        """Begins the time that agents, trainers and drivers have to come back. Called once everything is restored.

        With thousands of open rollouts the restore takes longer than that time, and nobody can come back during it.
        """
        for call in self._registry.open_calls():
            self.await_rejoin(call)
        self.leasing.await_resumes()
        self.drivers.begin_restored()

    # Private ---------------------------------------------------------------------------------------------------------

    def _call_written(self, call: Call, done: asyncio.Future[list[int]]) -> None:
        if not recorded(done):
            # A call that is not in the journal cannot be answered: a restart would lose both the call and its answer.
            self.fail(call, Failure("JOURNAL_FAILED"))

    def _committed(self, call: Call, answered: Answered, done: asyncio.Future[list[int]]) -> None:
        """Ends a claimed call after its answer's commit."""
        kept = recorded(done)
        if answered.prepared is not None:
            answered.prepared.settle(kept)
        if not kept:
            self._fail_unrecorded(call)
            return
        call.answerer, call.ended_at = answered.answerer, answered.at
        if isinstance(answered.answer, Failure):
            call.failure = answered.answer
            self._finish(call, CallState.FAILED, answered.answer.reason)
        elif (prepared := answered.prepared) is not None:
            _take(call, prepared)
            self._finish(call, CallState.DELIVERED, "")

    def _end(self, call: Call, state: CallState, reason: str) -> None:
        """Ends a call, unless it has ended or is claimed."""
        if call.state.terminal or call.claimed:
            return
        self._finish(call, state, reason)
        if call.submitted:
            self._store.end_call(call)

    def _fail_unrecorded(self, call: Call) -> None:
        """Fails a call whose answer could not be journalled. Nothing was sent, so the agent may retry."""
        _log.error("an answer could not be journalled", call_id=call.id, rollout_id=call.rollout.id)
        call.failure = Failure("JOURNAL_FAILED")
        self._finish(call, CallState.FAILED, "JOURNAL_FAILED")
        call.accepted_digest = call.committed = None
        with suppress(Unavailable):  # the service is stopping; after its restart the call is open
            self._store.end_call(call)

    def _finish(self, call: Call, state: CallState, reason: str) -> None:
        call.state = state
        call.end_reason = reason
        call.ended_at = call.ended_at or self._clock.wall()
        self._timeouts.stop(call)
        self._deadlines.drop((DeadlineKind.GONE, call.id))
        unanswered = state in (CallState.CANCELLED, CallState.EXPIRED)
        self.leasing.withdraw(call, reason if unanswered or not call.claimed else "")
        work, call.work = call.work, None
        if work is not None and not call.claimed:
            work.cancel()
        count_ended(call, call.rollout.totals)
        self.budgets.count_ended(call)
        telemetry.ended(call)
        if call.submitted:
            _shrink(call)
        self._events.call_changed(call)
        if not call.ended.done():
            call.ended.set_result(None)

    def _set_deadline(self, kind: DeadlineKind, key: str, in_s: float) -> None:
        self._deadlines.set((kind, key), self._clock.steady() + in_s)


def _shrink(call: Call) -> None:
    """Frees an ended call's memory: its body is on disk, its tokens are in the graph."""
    call.request = call.request.without_body()
    call.plan = None


def _take(call: Call, prepared: PreparedAnswer) -> None:
    call.completion, call.message, call.prompt = prepared.completion, prepared.message, prepared.prompt
    call.injected, call.chain_index = prepared.injected, prepared.chain_index
    call.chain_sha256 = prepared.chain_sha256
