"""Judges answers of trainers and model sources, and prepares what the gate accepts (R29, R41, R83).

The rules of judgement are functions: they read the call, and change nothing but `stale_since`. Each answer is judged
against its call alone; an invalid answer does not affect others in the same message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import TypeAlias, TypeVar

from penstock_chassis.errors import AlreadyExists
from penstock_interception.domain.calls import Answerer, CallState
from penstock_interception.domain.completions import Completion, Failure
from penstock_interception.domain.deadlines import Clock
from penstock_interception.domain.live_rollouts import Registry
from penstock_interception.domain.results import (
    Accepted,
    Answered,
    CompletionRefused,
    PreparedAnswer,
    Rejection,
    RejectionReason,
)
from penstock_interception.domain.state import Call, Session
from penstock_interception.gate.gate import Gate
from penstock_interception.rollouts.conversations import Conversations

T = TypeVar("T")
Judge: TypeAlias = Callable[[], Call | Rejection]
"""Returns the call while it may be answered."""

INLINE_TOKENS = 4096
"""Longer answers are parsed in a thread (R32)."""


class AnswerHandler:
    """Carries an answer down: it is judged, the conversation makes its record, and the gate accepts it."""

    def __init__(
        self, registry: Registry, gate: Gate, conversations: Conversations, pool: Executor, clock: Clock
    ) -> None:
        self._registry = registry
        self._gate = gate
        self._conversations = conversations
        self._pool = pool
        self._clock = clock

    async def from_trainer(
        self, call_id: str, lease_id: str, session: Session | None, answer: Completion | Failure
    ) -> Accepted | Rejection:
        """Accepts a trainer's answer if it is valid: the first valid answer wins, and its repetition is accepted too.

        The call of an evicted rollout is loaded already.
        """
        verdict = await self._accept(partial(self._trainers, call_id, lease_id, session), answer, Answerer.TRAINER)
        if isinstance(verdict, Rejection) and verdict.reason is RejectionReason.CALL_ENDED:
            return _repeated(self._registry.find_call(call_id), answer) or verdict
        return verdict

    async def from_source(self, call: Call, answer: Completion | Failure, answerer: Answerer) -> Accepted | Rejection:
        """Accepts the answer of a call's model source if it is valid and the call has not ended."""
        return await self._accept(partial(_judge_source, call), answer, answerer)

    def _trainers(self, call_id: str, lease_id: str, session: Session | None) -> Call | Rejection:
        return judge_trainer(self._registry.find_call(call_id), call_id, lease_id, session)

    async def _accept(self, judge: Judge, answer: Completion | Failure, answerer: Answerer) -> Accepted | Rejection:
        call = judge()
        if isinstance(call, Rejection):
            return call
        if isinstance(answer, Failure):
            return self._gate.accept(call, Answered(answer, answer.digest(), answerer, self._clock.wall()))
        bounded = call.min_policy_version is not None and not _is_context(call, answer)
        if bounded and (refused := _too_stale(call, answer, self._clock.wall())):
            return refused
        try:
            prepared = await self._prepare(call, answer, answerer)
        except CompletionRefused as error:
            message = "The completion breaks a rule."
            return Rejection(call.id, RejectionReason.INVALID, message, error.violations)
        except AlreadyExists:  # another answer was recorded while this one waited for its turn
            return Rejection(call.id, RejectionReason.CALL_ENDED, "The call has ended.")
        # Judged again: parsing a long answer in a thread, and the wait for the rollout's earlier answers, take time.
        if isinstance(over := judge(), Rejection):
            prepared.settle(False)
            return over
        return self._gate.accept(call, Answered(answer, answer.digest(), answerer, self._clock.wall(), prepared))

    async def _prepare(self, call: Call, completion: Completion, answerer: Answerer) -> PreparedAnswer:
        """Validates an answer once the rollout's earlier answers are on disk, and makes its record.

        On return the conversation's `recording` is held: the record's `settle` releases it, which `_accept` calls if
        the call has ended meanwhile, and `Gate.accept` if there is no write or after it.
        """
        conversation = self._conversations[call.rollout.id]
        plan = call.plan
        if plan is None:
            raise RuntimeError("an answer was accepted before its prompt was ready")
        tools = call.callable_sha256
        if completion.count <= INLINE_TOKENS:
            parsed = conversation.parse(plan, completion, tools)
        else:
            parsed = await self._in_thread(lambda: conversation.parse(plan, completion, tools))
        await conversation.recording.acquire()
        try:
            return conversation.prepare_answer(call, plan, completion, parsed, answerer)
        except BaseException:
            conversation.recording.release()
            raise

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def call_unknown(call_id: str) -> Rejection:
    """Returns the verdict on an answer to a call that does not exist for the trainer."""
    return Rejection(call_id, RejectionReason.UNKNOWN_CALL, "There is no such call.")


def judge_trainer(call: Call | None, call_id: str, lease_id: str, session: Session | None) -> Call | Rejection:
    """Returns the call, if the owner of this lease or session may answer it. `call` is None if it is unknown."""
    if call is None:
        return call_unknown(call_id)
    if call.state.terminal or call.claimed:
        return Rejection(call_id, RejectionReason.CALL_ENDED, f"The call has ended: {call.end_reason or 'answered'}.")
    held = session is not None and call.holder is session
    own = lease_id == call.lease_id or held
    # A call that nobody holds has no lease.
    if session is not None and not (held or (lease_id and own)) and not session.queue.selector.wants(call):
        return Rejection(call_id, RejectionReason.NOT_LEASED, "This session does not take calls of that policy.")
    if not call.offered or call.state is CallState.DISPATCHED or (call.state is CallState.LEASED and not own):
        return Rejection(call_id, RejectionReason.NOT_LEASED, "The call is leased to another session.")
    return call


def _judge_source(call: Call) -> Call | Rejection:
    """Returns the call, if its model source may answer it: without a lease."""
    if call.claimed or call.state.terminal:
        return Rejection(call.id, RejectionReason.CALL_ENDED, "The call has ended.")
    return call


def _repeated(call: Call | None, answer: Completion | Failure) -> Accepted | Rejection | None:
    """Returns the verdict on an answer to a call that already has one; None if it has none."""
    if call is None or not call.claimed or call.committed is None:
        return None
    if call.accepted_digest == answer.digest():
        return Accepted(call.id, call.committed)
    return Rejection(call.id, RejectionReason.ALREADY_DELIVERED, "Another result came first.")


def _is_context(call: Call, completion: Completion) -> bool:
    """Whether an answer of a branch is its parent's, or was given, so that no policy of the branch's acts in it."""
    branch, origin = call.rollout.spec.branched_from, completion.origin
    if branch is None or origin is None:
        return False
    if branch.train_prefix:
        return not origin.rollout_id  # a given answer, which nobody trains
    return origin.rollout_id != call.rollout.id


def _too_stale(call: Call, completion: Completion, now: float) -> Rejection | None:
    """Returns the rejection of an answer by older weights than the call accepts. `now` in seconds since 1970."""
    least = call.min_policy_version
    if least is None:
        return None
    versions = completion.tokens.versions if completion.tokens is not None else ()
    if not versions:
        wanted = ("completion.span.versions: required, because the rollout bounds the policy version",)
        return Rejection(call.id, RejectionReason.INVALID, "The completion breaks a rule.", wanted)
    oldest = min(span.policy_version for span in versions)
    if oldest >= least:
        return None
    if call.stale_since is None:
        call.stale_since = now
    message = f"Sampled by version {oldest}; this call accepts {least} and newer."
    return Rejection(call.id, RejectionReason.STALE_POLICY, message)
