"""Judges answers: the first that holds the rules wins, is recorded, and counts once it is on disk (R29, R83).

An answer is judged against its call alone; what is wrong with one says nothing of the others that came with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

import structlog

from penstock_chassis.errors import AlreadyExists, Unavailable
from penstock_codec.chat import Sampling
from penstock_interception.calls import Answerer, Call, CallState
from penstock_interception.clock import Clock
from penstock_interception.completions import Completion, Failure
from penstock_interception.dispatch import Dispatcher
from penstock_interception.ports import (
    Accepted,
    Answered,
    CompletionRefused,
    Recorded,
    Recorder,
    Rejection,
    RejectionReason,
    Store,
    recorded,
)
from penstock_interception.sampling import merged
from penstock_interception.sessions import Session

_log = structlog.get_logger(__name__)


class Answers:
    """Takes answers from trainers and model sources. `finish` ends a call, `calls` has those that are known."""

    def __init__(
        self,
        calls: Mapping[str, Call],
        store: Store,
        recorder: Recorder,
        dispatcher: Dispatcher,
        *,
        clock: Clock,
        finish: Callable[[Call, CallState, str], None],
    ) -> None:
        self._calls = calls
        self._store = store
        self._recorder = recorder
        self._dispatcher = dispatcher
        self._clock = clock
        self._finish = finish

    async def accept(
        self, call_id: str, lease_id: str, answer: Completion | Failure, *, session: Session | None = None
    ) -> Accepted | Rejection:
        """Judges a trainer's answer. What is accepted counts, and is told to the agent, once it is committed."""
        if session is not None:
            session.answered_at = self._clock.wall()
        call = self._judge(call_id, lease_id, session)
        if isinstance(call, Rejection):
            return self._repeated(call_id, answer) or call
        verdict = await self._settle(call, answer, Answerer.TRAINER, lambda: self._judge(call_id, lease_id, session))
        if isinstance(verdict, Rejection) and verdict.reason is RejectionReason.CALL_ENDED:
            return self._repeated(call_id, answer) or verdict  # it came twice, and the other was taken meanwhile
        return verdict

    def delegate(
        self, call_id: str, lease_id: str, override: Sampling | None, *, session: Session | None = None
    ) -> Accepted | Rejection:
        """The trainer lets the rollout's model source answer; accepted once that is committed."""
        call = self._judge(call_id, lease_id, session)
        if isinstance(call, Rejection):
            return call
        if call.delegated:
            return Accepted(call_id, self._store.put_delegation(call))
        if override is not None:
            call.sampling = merged(call.sampling, override)
        self._dispatcher.delegate(call)
        return Accepted(call_id, self._store.put_delegation(call))

    def release(self, call_id: str, lease_id: str, *, session: Session | None = None) -> Accepted | Rejection:
        """The trainer gives a call back, for another session."""
        call = self._judge(call_id, lease_id, session)
        if isinstance(call, Rejection):
            return call
        if call.state is CallState.LEASED:
            self._dispatcher.requeue(call, avoid=call.holder)
        return Accepted(call_id, _done())

    async def settle(self, call: Call, answer: Completion | Failure, *, answerer: Answerer) -> Accepted | Rejection:
        """Takes an answer for a call that is open, whoever made it. The first that holds the rules wins."""
        over = _open(call)
        if isinstance(over, Rejection):
            return over
        return await self._settle(call, answer, answerer, lambda: _open(call))

    async def _settle(
        self, call: Call, answer: Completion | Failure, answerer: Answerer, judge: Callable[[], Call | Rejection]
    ) -> Accepted | Rejection:
        """`judge` says whether the answer may still be taken: a long one is read in a thread, and much may happen."""
        if isinstance(answer, Failure):
            return self._claim(call, Answered(answer, answer.digest(), answerer, self._clock.wall()))
        if (refused := self._stale(call, answer)) is not None:
            return refused
        try:
            read = await self._recorder.record(call, answer, answerer)
        except CompletionRefused as error:
            message = "The completion breaks a rule."
            return Rejection(call.id, RejectionReason.INVALID, message, error.violations)
        except AlreadyExists:  # another answer was taken while this one waited for its turn
            return Rejection(call.id, RejectionReason.CALL_ENDED, "The call is over.")
        over = judge()
        if isinstance(over, Rejection):
            read.settle(False)
            return over
        return self._claim(call, Answered(answer, answer.digest(), answerer, self._clock.wall(), read))

    def _claim(self, call: Call, answered: Answered) -> Accepted:
        try:
            committed = self._store.put_answer(call, answered)
        except BaseException:
            if answered.recorded is not None:
                answered.recorded.settle(False)
            raise
        call.accepted_digest, call.committed = answered.digest, committed
        committed.add_done_callback(lambda done: self._committed(call, answered, done))
        return Accepted(call.id, committed)

    def _repeated(self, call_id: str, answer: Completion | Failure) -> Accepted | Rejection | None:
        """What became of the answer that a call has already; None when it has none."""
        call = self._calls.get(call_id)
        if call is None or not call.claimed or call.committed is None:
            return None
        if call.accepted_digest == answer.digest():
            return Accepted(call_id, call.committed)
        return Rejection(call_id, RejectionReason.ALREADY_DELIVERED, "Another result came first.")

    def _judge(self, call_id: str, lease_id: str, session: Session | None) -> Call | Rejection:
        """The call, when whoever shows this lease may answer it."""
        call = self._calls.get(call_id)
        if call is None:
            return Rejection(call_id, RejectionReason.UNKNOWN_CALL, "There is no such call.")
        if call.state.terminal or call.claimed:
            return Rejection(call_id, RejectionReason.CALL_ENDED, f"The call is over: {call.end_reason or 'answered'}.")
        own = lease_id == call.lease_id or (session is not None and call.holder is session)
        if not call.offered or call.state is CallState.DISPATCHED or (call.state is CallState.LEASED and not own):
            return Rejection(call_id, RejectionReason.NOT_LEASED, "The call is leased to another.")
        return call

    def _stale(self, call: Call, completion: Completion) -> Rejection | None:
        least = call.min_policy_version
        if least is None:
            return None
        versions = completion.tokens.versions if completion.tokens is not None else ()
        if not versions:
            wanted = ("completion.span.versions: needed, since the rollout bounds the policy version",)
            return Rejection(call.id, RejectionReason.INVALID, "The completion breaks a rule.", wanted)
        oldest = min(span.policy_version for span in versions)
        if oldest >= least:
            return None
        if call.stale_since is None:
            call.stale_since = self._clock.wall()
        message = f"Sampled by version {oldest}; this call accepts {least} and newer."
        return Rejection(call.id, RejectionReason.STALE_POLICY, message)

    def _committed(self, call: Call, answered: Answered, done: asyncio.Future[list[int]]) -> None:
        kept = recorded(done)
        if answered.recorded is not None:
            answered.recorded.settle(kept)
        if not kept:
            self._refused(call)
            return
        call.answerer, call.ended_at = answered.answerer, answered.at
        if isinstance(answered.answer, Failure):
            call.failure = answered.answer
            self._finish(call, CallState.FAILED, answered.answer.reason)
        elif (read := answered.recorded) is not None:
            _take(call, read)
            self._finish(call, CallState.DELIVERED, "")

    def _refused(self, call: Call) -> None:
        """The disk refused an answer. It was told to nobody; the call fails, and the agent may try again."""
        _log.error("an answer could not be journalled", call_id=call.id, rollout_id=call.rollout.id)
        call.failure = Failure("JOURNAL_FAILED")
        self._finish(call, CallState.FAILED, "JOURNAL_FAILED")
        call.accepted_digest = call.committed = None
        with suppress(Unavailable):  # the service is stopping: its next start finds the call open
            self._store.end_call(call)


def _open(call: Call) -> Call | Rejection:
    if call.claimed or call.state.terminal:
        return Rejection(call.id, RejectionReason.CALL_ENDED, "The call is over.")
    return call


def _take(call: Call, read: Recorded) -> None:
    call.completion, call.message, call.prompt = read.completion, read.message, read.prompt
    call.injected, call.chain_index, call.chain_sha256 = read.injected, read.chain_index, read.chain_sha256


def _done() -> asyncio.Future[list[int]]:
    done: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
    done.set_result([])
    return done
