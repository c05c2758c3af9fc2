"""The interceptor: carries a model call from the agent's request to the answer of the trainer or the model source.

It stands above the gate, the conversations, the sources and the store. Calls go down only; what a part below has done
comes back as its result. CPU work above a small size runs in a thread pool, not on the event loop (R32).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import structlog

from penstock_chassis.auth import acting_in
from penstock_chassis.errors import NotFound, PenstockError, Unavailable
from penstock_chassis.telemetry import tracing
from penstock_codec import CodecError
from penstock_codec.chat import Sampling
from penstock_interception.domain.audit import Audit
from penstock_interception.domain.calls import Answerer, CallRequest, CallState, Dialect, Mode, Prompt, RolloutState
from penstock_interception.domain.completions import Completion, Failure
from penstock_interception.domain.deadlines import Clock, Deadlines
from penstock_interception.domain.live_rollouts import Registry
from penstock_interception.domain.recordings import Point, RecordedCall
from penstock_interception.domain.requests import ChatRequest, Spell, merged_sampling, sampling_within
from penstock_interception.domain.results import Accepted, Rejection
from penstock_interception.domain.state import CALL_BYTES, Call, Rollout, Session, SessionRequest
from penstock_interception.gate import telemetry
from penstock_interception.gate.context import DeadlineKey, GateContext, GateLimits
from penstock_interception.gate.events import CallEvents
from penstock_interception.gate.gate import Gate
from penstock_interception.gate.host_tools.broker import HostToolBroker
from penstock_interception.graph import Plan
from penstock_interception.graph.inline import TooLongInline
from penstock_interception.graph.paths import NO_TOKENS
from penstock_interception.graph.values import IntArray
from penstock_interception.rollouts.agent_keys import AgentKeys
from penstock_interception.rollouts.answers import AnswerHandler, judge_trainer
from penstock_interception.rollouts.conversations import Conversation, Conversations
from penstock_interception.rollouts.manager import Rollouts
from penstock_interception.rollouts.replay import Replays
from penstock_interception.sources.base import SourceError, answer
from penstock_interception.sources.registry import Sources
from penstock_interception.store.commits import durable, nothing_to_write
from penstock_interception.store.commits import recorded as written
from penstock_interception.store.reading import StoredLease
from penstock_interception.store.store import CallStore

_log = structlog.get_logger(__name__)

# Up to 8 KiB of new text (about 2,000 tokens, 2 ms) is processed inline: a thread handover would cost more.
INLINE_BYTES = 8 << 10
MAX_PROMPT_TOKENS = (CALL_BYTES - (1 << 20)) // 4
"""Largest prompt that fits into one call, whatever the model's context: 4 bytes a token, 1 MiB left for the rest."""

T = TypeVar("T")


class Interceptor:
    """Stands above the gate, the conversations, the sources and the store. Belongs to one event loop.

    What concerns one part only, callers ask of that part: `rollouts` opens, closes and deletes, `conversations` has the
    graphs, `sessions` has credits, pauses and losses, `drivers` their leases; `tools`, `agent_keys`, `events`, `audit`;
    `registry`, `limits` and `clock` (read-only); `store` for reads and until writes are on disk.
    """

    def __init__(
        self,
        store: CallStore,
        sources: Sources,
        tasks: asyncio.TaskGroup,
        pool: Executor,
        *,
        parse: Callable[[Dialect, bytes], ChatRequest],
        limits: GateLimits | None = None,
        clock: Clock | None = None,
        closed_kept: int = 256,
    ) -> None:
        """`parse` parses a stored body again. `closed_kept` closed rollouts stay in memory, the others only on disk."""
        self.store = store
        self.limits = limits or GateLimits()
        self.clock = clock or Clock()
        self.audit = Audit(self.clock.steady)
        self.registry = Registry()
        self.events = CallEvents(int(self.clock.wall() * 1e6))
        self.agent_keys = AgentKeys(store, self.registry, clock=self.clock, audit=self.audit)
        # Set when the next deadline becomes earlier.
        self._sooner = asyncio.Event()
        self.tools = HostToolBroker(store.tools, clock=self.clock, sooner=self._sooner, limits=self.limits)
        deadlines: Deadlines[DeadlineKey] = Deadlines(self._sooner.set)
        self.gate = Gate(GateContext(store, self.registry, self.events, deadlines, self.audit, self.clock, self.limits))
        self.sessions = self.gate.leasing
        self.drivers = self.gate.drivers
        self.conversations = Conversations(
            store, sources, self.registry, self.gate, parse=parse, closed_kept=closed_kept
        )
        self.rollouts = Rollouts(
            store, sources, self.registry, self.gate, self.conversations, self.tools, self.agent_keys
        )
        self.replays = Replays(store, pool, max_bytes=self.limits.max_rollout_bytes)
        self._answers = AnswerHandler(self.registry, self.gate, self.conversations, pool, self.clock)
        self._sources = sources
        self._tasks = tasks
        self._pool = pool
        self._parse = parse

    # Rollouts --------------------------------------------------------------------------------------------------------

    async def find_call(self, call_id: str) -> Call:
        """Returns a call from memory or from disk. Raises NotFound CALL_UNKNOWN."""
        if self.registry.find_call(call_id) is None:
            rollout = self.registry.find(await self.store.rollout_of(call_id) or "")
            if rollout is not None:
                await self.conversations.of(rollout)
        return self.registry.call(call_id)

    async def namespace_of_call(self, call_id: str) -> str | None:
        """Returns the namespace of a call, which may be evicted; None if there is no such call."""
        call = self.registry.find_call(call_id)
        rollout = call.rollout if call is not None else self.registry.find(await self.store.rollout_of(call_id) or "")
        return None if rollout is None else rollout.spec.namespace

    async def restore(self) -> int:
        """Restores all rollouts and calls from the journal, just before they are served.

        Returns the number of open rollouts.
        """
        count = 0
        async for stored in self.rollouts.restore():
            count += 1
            for call in stored.calls:
                if not call.state.terminal:
                    self._restore(call, stored.leases.get(call.id))
        await self.rollouts.restore_runs_and_tools()
        self.gate.await_returns()
        return count

    # Calls -----------------------------------------------------------------------------------------------------------

    async def begin(self, rollout: Rollout, request: CallRequest, parsed: ChatRequest) -> Call:
        """Admits a new call, for which one agent connection waits, and returns it; its prompt may not be made yet.

        Raises what Gate.admit raises.
        """
        try:
            rollout.check_open()  # its id may be another rollout's by now
            conversation = self.conversations[rollout.id]
            call = self.gate.admit(rollout, request, journal=False)
        except Exception:
            # What repeats this request is a new call, as this one was: no retry of the last call with its key.
            rollout.by_retry_key.pop(request.retry_key, None)
            raise
        call.callable_sha256 = conversation.add_tools(parsed)
        if not self._prepare_inline(call, parsed):
            self.gate.journal(call)  # the insert; the lease is an update of its row
            self._tasks.create_task(self._prepare_in_thread(call, parsed))
        call.attached += 1
        return call

    def rejoin(self, call: Call) -> None:
        """Counts another agent connection that waits for this call."""
        call.http_attempts += 1
        call.attached += 1
        self.gate.stop_awaiting_rejoin(call)

    def detach(self, call: Call) -> None:
        """Counts a lost agent connection. A retry may rejoin within the grace period; then the call is CANCELLED."""
        call.attached -= 1
        if call.attached <= 0:
            telemetry.left(call)
            if not call.state.terminal:
                self.gate.await_rejoin(call)

    def answer_sent(self, call: Call) -> None:
        """Records that the agent received the whole answer."""
        self.gate.answer_sent(call)

    def fail(self, call: Call, failure: Failure) -> None:
        """Fails a call that cannot be sent to a trainer, unless it has ended."""
        self.gate.fail(call, failure)

    def begin_black_box(self, rollout: Rollout, request: CallRequest) -> Call:
        """Admits a call that goes to the rollout's endpoint unread, until `end_black_box`.

        Raises what Gate.admit raises.
        """
        return self.gate.admit(rollout, request, journal=True)

    def end_black_box(self, call: Call, failure: Failure | None = None, *, agent_gone: bool = False) -> None:
        """Ends a black box call, unless it has ended: its answer has passed through, or why it has not."""
        if agent_gone:
            self.gate.cancel(call, "AGENT_GONE")
        elif failure is not None:
            self.gate.fail(call, failure)
        else:
            self.gate.pass_through(call)

    def spell(self, rollout: Rollout) -> Spell | None:
        """Returns the function that maps token ids to bytes; None where the rollout's source has no token ids."""
        conversation = self.conversations.get(rollout.id)
        return None if conversation is None else conversation.spell

    async def count(self, rollout: Rollout, request: ChatRequest) -> int:
        """Returns the prompt length of a request in tokens, without recording anything.

        Raises:
            PenstockError, CodecError: as planning a call does.
            FailedPrecondition: TOKENIZER_ABSENT, where the rollout's source has no token ids; ROLLOUT_CLOSED.
            ResourceExhausted: RATE_LIMIT.
        """
        rollout.check_open()
        self.gate.budgets.pace(rollout)
        conversation = self.conversations[rollout.id]
        return await self.in_thread(lambda: conversation.count(request))

    # Answers ---------------------------------------------------------------------------------------------------------

    async def deliver(
        self, call_id: str, lease_id: str, answer: Completion | Failure, *, session: Session | None = None
    ) -> Accepted | Rejection:
        """Validates a trainer's answer. Once committed, an accepted answer takes effect and goes to the agent."""
        if session is not None:
            session.answered_at = self.clock.wall()
        if self.registry.find_call(call_id) is None:
            await self._load(call_id)
        return await self._answers.from_trainer(call_id, lease_id, session, answer)

    async def delegate(
        self, call_id: str, lease_id: str, override: Sampling | None, *, session: Session | None = None
    ) -> Accepted | Rejection:
        """Delegates a call to the rollout's model source; effective once that is committed.

        A repeat under the same lease is accepted too, and changes nothing: the first acknowledgement may be lost.
        """
        await self._load(call_id)
        found = self.registry.find_call(call_id)
        if found is not None and found.delegated and lease_id and lease_id == found.lease_id:
            return Accepted(call_id, self.gate.delegate(found))
        call = judge_trainer(found, call_id, lease_id, session)
        if isinstance(call, Rejection):
            return call
        if override is not None and not call.delegated:
            call.sampling = merged_sampling(call.sampling, override)
        written = self.gate.delegate(call)
        if call.state is CallState.DISPATCHED:
            self._ask([call])
        return Accepted(call_id, written)

    async def release(self, call_id: str, lease_id: str, *, session: Session | None = None) -> Accepted | Rejection:
        """Releases a trainer's call so that another session can take it."""
        await self._load(call_id)
        call = judge_trainer(self.registry.find_call(call_id), call_id, lease_id, session)
        if isinstance(call, Rejection):
            return call
        self.gate.release(call)
        return Accepted(call_id, nothing_to_write())

    async def _load(self, call_id: str) -> None:
        """Loads an evicted call, so that an answer to it can be judged."""
        with suppress(NotFound):
            await self.find_call(call_id)

    # Sessions --------------------------------------------------------------------------------------------------------

    def join(self, asked: SessionRequest, *, resume: str = "") -> Session:
        """Opens a session. The calls of the session with the id `resume` stay leased and move to `session.held`.

        A session of another namespace is unknown to a selector of one.

        Raises ResourceExhausted: SESSION_LIMIT.
        """
        old = self.registry.find_session(resume)
        if old is not None and asked.selector.namespace not in (None, old.namespace):
            old = None
        session, to_source = self.sessions.join(asked, old)
        if old is not None:
            self.tools.session_resumed(old, session)
        self._ask(to_source)
        return session

    def leave(self, session: Session) -> None:
        """Ends a session normally; its calls are queued again immediately, its host tools are withdrawn."""
        self._ask(self.sessions.leave(session))
        self.tools.session_gone(session)

    def resume(self, session: Session) -> bool:
        """Ends this session's pause; returns False if it had none."""
        to_source = self.sessions.resume(session)
        self._ask(to_source or ())
        return to_source is not None

    async def hold_calls(self, rollout: Rollout, *, held: bool) -> None:
        """Holds an open rollout's calls, or lets them go; returns when that is on disk.

        Raises FailedPrecondition ROLLOUT_CLOSED, Unavailable JOURNAL_FAILED.
        """
        rollout.check_open()
        if held:
            await durable(self.sessions.hold(rollout))
            return
        to_source, written = self.sessions.release(rollout)
        self._ask(to_source)
        await durable(written)

    # Time ------------------------------------------------------------------------------------------------------------

    async def keep_time(self) -> None:
        """Runs `tick` at each deadline, until it is cancelled."""
        while True:
            self._sooner.clear()
            deadlines = (self.gate.next_deadline(), self.tools.next_deadline())
            waits = [max(0.0, at - self.clock.steady()) for at in deadlines if at is not None]
            with suppress(TimeoutError):
                async with asyncio.timeout(min(waits, default=None)):
                    await self._sooner.wait()
            try:
                await self.tick()
            except Exception:  # noqa: BLE001 - one deadline's trouble must not stop all others
                _log.exception("handling a deadline failed")

    async def tick(self) -> None:
        """Handles every deadline that is due."""
        self.tools.tick()
        due = self.gate.tick()
        self._ask(due.to_source)
        for session in due.sessions:
            self.tools.session_gone(session)
        for driver_id in due.drivers:
            await self.rollouts.abandon(driver_id)
        for rollout_id in due.rollouts:
            await self._retire(rollout_id)
        await self.rollouts.discard(due.captures)

    async def _retire(self, rollout_id: str) -> None:
        judge = self.registry.judge_of(rollout_id)
        if judge is not None and judge.state is not RolloutState.CLOSED:
            self.gate.delete_later(rollout_id)  # its verifier is at work
            return
        try:
            await self.rollouts.delete(rollout_id)
        except Unavailable as error:
            _log.error("an old rollout could not be deleted", rollout_id=rollout_id, reason=error.reason)
            self.gate.delete_later(rollout_id)

    def take(self, takes: bool) -> None:
        """Opens rollouts, or refuses to (DRAINING), but for those of runs whose budgets are counted here."""
        self.registry.closed_to_new = not takes

    async def drain(self, grace_s: float) -> None:
        """Stops admitting calls, wakes everybody who waits, and waits up to `grace_s` for the open calls to end."""
        self.gate.drain()
        for session in self.registry.sessions():
            session.wake()
        self.events.wake()
        waiting = [call.ended for call in self.registry.open_calls()]
        if waiting:
            await asyncio.wait(waiting, timeout=grace_s)

    # Private ---------------------------------------------------------------------------------------------------------

    def _restore(self, call: Call, lease: StoredLease | None) -> None:
        """Makes the prompt of an open call from the journal again, or ends the call, alone."""
        if call.rollout.spec.mode is Mode.BLACK_BOX:
            # Its body was never stored, and its connection is gone. A retry of the agent is a call of its own.
            self.end_black_box(call, agent_gone=True)
            return
        try:
            parsed = self._parse(call.request.dialect, call.request.body)
        except Exception as error:  # noqa: BLE001 - the version that took the call may have been less strict
            _log.error(
                "a journalled request cannot be parsed any more",
                call_id=call.id,
                rollout_id=call.rollout.id,
                exc_info=error,
            )
            self.gate.fail(call, Failure("REQUEST_UNREADABLE"))
            return
        # The journal has tools in bodies only, and the body that they were looked for in may be unreadable.
        call.callable_sha256 = self.conversations[call.rollout.id].add_tools(parsed)
        self._prepare(call, parsed, lease)

    def _prepare_inline(self, call: Call, request: ChatRequest) -> bool:
        """Prepares a new call here and now, unless that is too much work for the event loop (R32).

        1. `admit` made the call in memory only. 2. `_prepare` makes its prompt; the gate leases it and wakes the
        session. 3. The gate submits one insert with the call and its lease. Nothing is awaited in between. 4. The
        session's writer sends the call only after `store.settled()`, so it is on disk first.
        """
        if call.request.folded is not None:
            return False  # an image's cost is not in proportion to its bytes
        try:
            self._prepare(call, request, None, INLINE_BYTES)
        except TooLongInline:
            return False
        return True

    def _prepare(
        self,
        call: Call,
        request: ChatRequest,
        lease: StoredLease | None,
        inline_bytes: int | None = None,
    ) -> None:
        conversation = self.conversations[call.rollout.id]
        try:
            plan = conversation.plan(request, call.request.agent_session, inline_bytes)
        except TooLongInline:
            raise
        except Exception as error:  # noqa: BLE001 - a call that cannot be planned fails, and fails alone
            self._refuse(call, error)
        else:
            _note(call, plan.notes)
            self._offer(call, plan, lease)

    async def _prepare_in_thread(self, call: Call, request: ChatRequest) -> None:
        session = call.request.agent_session
        try:
            conversation = self.conversations[call.rollout.id]  # gone where the rollout could not be recorded
            plan = await self.in_thread(lambda: conversation.plan(request, session))
            if _note(call, plan.notes):
                self.store.put_request(call)
            self._offer(call, plan, None)
        except Exception as error:  # noqa: BLE001 - as above; in a task group it would take the service along
            self._refuse(call, error)

    def _offer(self, call: Call, plan: Plan, lease: StoredLease | None) -> None:
        if call.rollout.spec.models:
            graph = self.conversations[call.rollout.id].graph
            self.gate.choose_model(call, graph.turn_of(plan), plan.call_class)
        limit, size = call.facts.max_context_tokens, int(plan.prompt_ids.size)
        room = limit - size if limit is not None else None
        if size > MAX_PROMPT_TOKENS or (room is not None and room < 1):
            detail = f"The conversation has {size} tokens; the model's context is {limit}."
            if limit is None or limit > MAX_PROMPT_TOKENS:
                detail = f"The conversation has {size} tokens; a prompt has {MAX_PROMPT_TOKENS} at most."
            call.prompt = Prompt.of(plan)  # keeps the prompt's length on record
            self.gate.fail(call, Failure("CONTEXT_EXCEEDED", detail, retriable=False))
            return
        sampling = sampling_within(call.sampling, room)
        if sampling.token_tensors and call.of_model is not None and not call.of_model.trained:
            # No sample trains its tokens, and its engine may have none.
            sampling = replace(sampling, token_tensors=None)
        if lease is not None and not call.state.terminal and lease.prompt_sha256 == plan.prompt_sha256:
            self.gate.restore_lease(call, plan, sampling, lease)
            return
        if call.rollout.recording is None:
            self._sample(call, plan, sampling)
        else:
            self._replay_or_sample(call, plan, sampling)

    def _replay_or_sample(self, call: Call, plan: Plan, sampling: Sampling) -> None:
        recorded = self.replays.take(call, plan)
        if recorded is not None and recorded.point is Point.SAMPLED:
            self._sample(call, plan, sampling)
        elif recorded is not None:
            self.gate.hold(call, plan, sampling)
            work = self._tasks.create_task(self._replay(call, recorded, plan, sampling))
            work.add_done_callback(lambda done: self._replayed(call, recorded, done))
            call.work = work
        elif not self._diverges(call, plan):
            self._sample(call, plan, sampling)

    def _replayed(self, call: Call, recorded: RecordedCall, done: asyncio.Task[bool]) -> None:
        if done.cancelled() or not done.result():  # cancelled with its call, perhaps before it ran
            self.replays.give_back(call, recorded)

    def _sample(self, call: Call, plan: Plan, sampling: Sampling) -> None:
        if self.gate.offer(call, plan, sampling) is CallState.DISPATCHED:
            self._ask([call])

    def _diverges(self, call: Call, plan: Plan) -> bool:
        """Notes where a call differs from what was recorded at its place; returns whether it fails for that."""
        parent = self.registry.find_call(plan.parent_call_id or "")
        left = self.replays.left_at(call, plan, parent)
        if not left:
            return False
        conversation = self.conversations[call.rollout.id]
        before = NO_TOKENS if parent is None else conversation.graph.path(parent.id)
        fails = self.replays.may_fail(call.rollout)
        if fails:
            call.prompt = Prompt.of(plan)
        self._tasks.create_task(self._note_divergence(call, plan, conversation, left, before, fails=fails))
        return fails

    async def _note_divergence(
        self,
        call: Call,
        plan: Plan,
        conversation: Conversation,
        left: Sequence[RecordedCall],
        before: IntArray,
        *,
        fails: bool,
    ) -> None:
        """Notes where a call differs; if it `fails`, afterwards, so that the note is there when its agent ends."""
        try:
            await self.replays.diverged(call, plan, conversation, left, before)
        except Exception:  # noqa: BLE001 - it is a note; in a task group its failure would take the service along
            _log.exception("a divergence could not be noted", call_id=call.id, rollout_id=call.rollout.id)
        if fails:
            detail = "The prompt differs from the recorded one, and the replay is to be exact."
            self.gate.fail(call, Failure("REPLAY_DIVERGED", detail, retriable=False))

    async def _replay(self, call: Call, recorded: RecordedCall, plan: Plan, sampling: Sampling) -> bool:
        """Answers a call with a recorded answer; has it sampled if that may not answer it, being too old, say.

        Returns whether the recorded answer is used up, or given back already; if not, the agent may ask for it again.
        """
        try:
            found = await self.replays.answer(call, recorded, plan)
            outcome = None
            if found is not None:
                completion, answerer, policy_id = found
                self.gate.answer_for(call, policy_id)
                outcome = await self._answers.from_source(call, completion, answerer)
        except Exception:  # noqa: BLE001 - logged, and the call fails
            _log.exception("a call could not be replayed", call_id=call.id, rollout_id=call.rollout.id)
            self.gate.fail(call, Failure("INTERNAL"))
            return False
        if isinstance(outcome, Accepted):
            await asyncio.wait([outcome.committed])
            return written(outcome.committed)
        if call.state.terminal or call.claimed:
            return False
        if outcome is not None:
            _log.warning("a recorded answer was refused", call_id=call.id, reason=outcome.reason.name)
            self.replays.refused(call, recorded)
        else:
            # Before it is offered: the agent's next call may come before this task's callback runs.
            self.replays.give_back(call, recorded)
        self.gate.answer_for(call, "" if call.of_model is None else call.of_model.policy_id)
        call.work = None
        self._sample(call, plan, sampling)
        return True

    def _refuse(self, call: Call, error: Exception) -> None:
        if isinstance(error, CodecError | PenstockError):
            # The agent gets the codec's own message: the fault is in the agent's conversation.
            self.gate.fail(call, Failure(error.reason, str(error), retriable=False))
            return
        _log.error("a prompt could not be made", call_id=call.id, rollout_id=call.rollout.id, exc_info=error)
        self.gate.fail(call, Failure("INTERNAL"))

    def _ask(self, calls: Iterable[Call]) -> None:
        """Starts the tasks in which the rollouts' model sources answer these calls."""
        for call in calls:
            call.work = self._tasks.create_task(self._ask_source(call))

    async def _ask_source(self, call: Call) -> None:
        rollout = call.rollout
        try:
            source = self._sources.source(rollout.spec.mode, call.source, rollout.caller_key)
            tracing.working_for(
                request_id=call.id, rollout_id=rollout.id, group_id=rollout.spec.group_id, call_id=call.id
            )
            with acting_in(rollout.spec.namespace), tracing.using(call.trace.step if call.trace is not None else None):
                completion = await answer(source, call)
            if rollout.facts.tokenizer_sha256 and not call.facts.tokenizer_sha256:
                # Its ids, if there are any, are of a tokenizer of its own.
                completion = replace(completion, tokens=None, prompt_ids=None)
            outcome = await self._answers.from_source(call, completion, source.answerer)
        except SourceError as error:
            _log.warning("a model source failed", call_id=call.id, rollout_id=rollout.id, reason=error.reason)
            failure = Failure(error.reason, str(error), error.retriable)
            outcome = await self._answers.from_source(call, failure, Answerer.INFERENCE)
        except PenstockError as error:
            self.gate.fail(call, Failure(error.reason, error.message))
            return
        except Exception:  # noqa: BLE001 - logged, and the call fails
            # An exception must not escape: the task group would stop the whole service.
            _log.exception("a call could not be answered", call_id=call.id, rollout_id=rollout.id)
            self.gate.fail(call, Failure("INTERNAL"))
            return
        if isinstance(outcome, Rejection) and not call.state.terminal:
            _log.warning("a source's answer was refused", call_id=call.id, violations=outcome.violations)
            self.gate.fail(call, Failure(f"SOURCE_{outcome.reason.name}"))

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Runs CPU work in the thread pool, off the event loop (R32)."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def _note(call: Call, notes: Sequence[str]) -> bool:
    """Adds the notes that the call's record lacks; returns whether there were any."""
    new = tuple(note for note in notes if note not in call.request.normalisations)
    if new:
        call.request = replace(call.request, normalisations=(*call.request.normalisations, *new))
    return bool(new)
