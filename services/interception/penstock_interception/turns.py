"""Turns: what happens between an agent's request and its answer, whoever gives it.

Opens rollouts with their source checked (R27), makes prompts, records answers in the rollout's graph, and lets model
sources answer where the trainer does not. CPU work that is not tiny goes to a small thread pool, so that a long prompt
stalls nobody else (R32).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import TypeVar

import structlog

from penstock_chassis import tracing
from penstock_chassis.errors import NotFound, PenstockError
from penstock_codec import CodecError
from penstock_codec.chat import Sampling
from penstock_interception.calls import (
    Answerer,
    Arrival,
    Call,
    Dialect,
    Mode,
    Opening,
    Prompt,
    Rollout,
    RolloutState,
    Source,
)
from penstock_interception.clock import Clock
from penstock_interception.completions import Completion, Failure
from penstock_interception.conversation import Conversation
from penstock_interception.gate import Gate
from penstock_interception.graph import Plan
from penstock_interception.limits import GateLimits
from penstock_interception.ports import Recorded, Rejection
from penstock_interception.recall import Recall
from penstock_interception.requests import ChatRequest, Spell
from penstock_interception.sampling import with_max_tokens
from penstock_interception.sessions import CALL_BYTES
from penstock_interception.sources.base import Resolved, SourceError
from penstock_interception.sources.registry import Sources
from penstock_interception.store import CallStore
from penstock_interception.stored import StoredRollout

_log = structlog.get_logger(__name__)

# A fresh 8 KiB of text is about 2,000 tokens, or 2 ms: what costs less is cheaper done where it is than handed over.
INLINE_BYTES = 8 << 10
INLINE_TOKENS = 4096
MAX_PROMPT_TOKENS = (CALL_BYTES - (1 << 20)) // 4
"""What a call can carry, whatever the model's context: four bytes a token, and some room for the rest of it."""

T = TypeVar("T")


class Turns:
    """Owns the gate and every rollout's conversation. Belongs to one event loop."""

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
        """`parse` reads a stored body again; `closed_kept` closed rollouts stay in memory, the others on disk."""
        self.store = store
        self.gate = Gate(store, self, limits=limits, clock=clock)
        self._sources = sources
        self._tasks = tasks
        self._pool = pool
        self._parse = parse
        self._conversations: dict[str, Conversation] = {}
        self._closed: OrderedDict[str, Rollout] = OrderedDict()
        self._closed_kept = closed_kept
        self._shelf = asyncio.Lock()
        self.recall = Recall()

    # Rollouts --------------------------------------------------------------------------------------------------------

    async def check(self, mode: Mode, source: Source, caller_key: str | None) -> Resolved:
        """What a rollout with this source would get. Raises what Sources.resolve raises."""
        return await self._sources.resolve(mode, source, caller_key, "")

    async def open(self, opening: Opening, caller_key: str | None) -> Rollout:
        """Opens a rollout whose source was seen to answer. Idempotent by request id.

        Raises what Sources.resolve and Gate.open raise.
        """
        before = self.gate.find_opening(opening)
        if before is not None:
            return await self.gate.open(opening, caller_key=caller_key)
        resolved = await self._sources.resolve(opening.mode, opening.source, caller_key, opening.model_name)
        if opening.rollout_id not in self._conversations:  # a twin of this request may have come first
            self._conversations[opening.rollout_id] = self._conversation(opening, resolved)
        try:
            return await self.gate.open(opening, facts=resolved.facts, caller_key=caller_key)
        except Exception:
            if self.gate.find(opening.rollout_id) is None:
                self._conversations.pop(opening.rollout_id, None)
            raise

    async def close(self, rollout_id: str, reason: str) -> Rollout:
        """As Gate.close; the rollouts closed longest ago leave memory."""
        rollout = await self.gate.close(rollout_id, reason)
        self.recall.forget(rollout_id)
        if not rollout.shelved:
            self._use_closed(rollout)
        return rollout

    async def conversation(self, rollout: Rollout) -> Conversation:
        """The rollout's graph and codec, with its calls in their place; read from the journal when they were shelved.

        Raises NotFound ROLLOUT_UNKNOWN when it was deleted meanwhile; what Sources.codec raises.
        """
        if rollout.state is RolloutState.CLOSED:
            async with self._shelf:
                self._check_known(rollout)
                if rollout.shelved:
                    stored = await self.store.load(rollout)
                    conversation = await self._rebuild(stored)
                    self._check_known(rollout)
                    self._conversations[rollout.id] = conversation
                    self.gate.unshelve(rollout, stored.calls)
                self._use_closed(rollout)
        return self._conversations[rollout.id]

    async def find_call(self, call_id: str) -> Call:
        """A call, wherever it is kept. Raises NotFound CALL_UNKNOWN."""
        if not self.gate.knows(call_id):
            rollout = self.gate.find(await self.store.rollout_of(call_id) or "")
            if rollout is not None:
                await self.conversation(rollout)
        return self.gate.call(call_id)

    async def restore(self) -> int:
        """Takes everything back from the journal. Returns how many rollouts are open."""
        count = 0
        for rollout in await self.store.rollouts():
            if rollout.state is RolloutState.CLOSED:
                self.gate.restore(rollout, [])
                rollout.shelved = True
                continue
            stored = await self.store.load(rollout)
            self.gate.restore(rollout, stored.calls)
            if not await self._taken_back(stored):
                continue
            count += 1
            leases = {call.id: (session, lease, prompt) for call, session, lease, prompt in stored.leases}
            for call in stored.calls:
                if not call.state.terminal:
                    request = self._parse(call.arrival.dialect, call.arrival.body)
                    self._prepare(call, request, leases.get(call.id))
        self.gate.restore_runs(await self.store.runs.load())
        still_open = [rollout.opening for rollout in self.gate.rollouts() if rollout.state is not RolloutState.CLOSED]
        await self.gate.tools.restore(still_open, self.gate.dispatcher.restore_session)
        return count

    # Calls -----------------------------------------------------------------------------------------------------------

    async def begin(self, rollout: Rollout, arrival: Arrival, request: ChatRequest) -> Call:
        """A new call. Returns once it is admitted; its prompt may still be in the making.

        Raises what Gate.admit raises.
        """
        call = self.gate.admit(rollout, arrival)
        self.recall.hear(rollout.id, request, arrival.body)
        conversation = self._conversations[rollout.id]
        if conversation.fresh_bytes(len(arrival.body)) <= INLINE_BYTES:
            # Nobody else runs in between: one write says that the call came and to whom it was leased.
            self._prepare(call, request, None)
            self.gate.journal(call)
        else:
            self.gate.journal(call)
            self._tasks.create_task(self._prepare_elsewhere(call, request))
        return call

    def spell(self, rollout: Rollout) -> Spell | None:
        """What tells the bytes of a rollout's tokens; None where its source tells no tokens."""
        conversation = self._conversations.get(rollout.id)
        return None if conversation is None else conversation.spell

    async def count(self, rollout: Rollout, request: ChatRequest, body_length: int) -> int:
        """How many tokens the prompt of a request would have; nothing is recorded.

        Raises:
            PenstockError, CodecError: as planning a call does.
            FailedPrecondition: TOKENIZER_ABSENT, where the rollout's source tells no tokens.
            ResourceExhausted: RATE_LIMIT.
        """
        self.gate.metering.pace(rollout)
        conversation = self._conversations[rollout.id]
        return await self.elsewhere(lambda: conversation.count(request, body_length))

    async def record(self, call: Call, completion: Completion, answerer: Answerer) -> Recorded:
        """For the gate: judges an answer, once those of its rollout that came before are on disk."""
        conversation = self._conversations[call.rollout.id]
        plan = call.plan
        if plan is None:
            raise RuntimeError("an answer was accepted before its prompt was made")
        tools = call.arrival.tools_sha256
        if completion.count <= INLINE_TOKENS:
            parsed = conversation.parse(plan, completion, tools)
        else:
            parsed = await self.elsewhere(lambda: conversation.parse(plan, completion, tools))
        await conversation.recording.acquire()
        try:
            return conversation.record(call, plan, completion, parsed, answerer)
        except BaseException:
            conversation.recording.release()
            raise

    def forget(self, rollout: Rollout) -> None:
        """For the gate: the rollout is deleted."""
        self._conversations.pop(rollout.id, None)
        self._closed.pop(rollout.id, None)
        self.recall.forget(rollout.id)

    def answer_by_source(self, call: Call) -> None:
        """For the gate: the rollout's model source answers this call."""
        call.work = self._tasks.create_task(self._ask_source(call))

    # Private ---------------------------------------------------------------------------------------------------------

    def _check_known(self, rollout: Rollout) -> None:
        """That it was not deleted: its id may be another's by now."""
        if self.gate.find(rollout.id) is not rollout:
            raise NotFound("No such rollout.", reason="ROLLOUT_UNKNOWN")

    def _use_closed(self, rollout: Rollout) -> None:
        """Keeps the closed rollouts that were used last."""
        self._closed[rollout.id] = rollout
        self._closed.move_to_end(rollout.id)
        while len(self._closed) > self._closed_kept:
            _, oldest = self._closed.popitem(last=False)
            self.gate.shelve(oldest)
            self._conversations.pop(oldest.id, None)

    async def _taken_back(self, stored: StoredRollout) -> bool:
        """Whether an open rollout can go on; one that cannot is closed, and what can be read of it stays readable."""
        rollout, reason = stored.rollout, "JOURNAL_DAMAGED"
        try:
            self._conversations[rollout.id] = await self._rebuild(stored)
        except (PenstockError, CodecError) as error:
            reason = error.reason
        else:
            if not rollout.damaged:
                return True
        _log.error("a rollout cannot go on", rollout_id=rollout.id, reason=reason)
        try:
            await self.gate.close(rollout.id, reason)
        except PenstockError as error:
            _log.error("its end could not be recorded", rollout_id=rollout.id, reason=error.reason)
        self._conversations.pop(rollout.id, None)
        self.gate.shelve(rollout)
        return False

    async def _rebuild(self, stored: StoredRollout) -> Conversation:
        rollout = stored.rollout
        codec = await self._sources.codec(rollout.facts)
        conversation = Conversation(
            rollout.opening, codec, vocab_size=rollout.facts.vocabulary_size, records=stored.graph
        )
        rollout.damaged = len(conversation.graph.calls) < stored.recorded
        for call in stored.calls:  # tools are in the bodies only; one body for each set of them
            digest = call.arrival.tools_sha256
            if digest and digest not in conversation.tools:
                body = await self.store.body(call.id)
                conversation.tools[digest] = self._parse(call.arrival.dialect, body).tools
        return conversation

    def _conversation(self, opening: Opening, resolved: Resolved) -> Conversation:
        return Conversation(opening, resolved.codec, vocab_size=resolved.facts.vocabulary_size)

    def _prepare(self, call: Call, request: ChatRequest, lease: tuple[str, str, bytes] | None) -> None:
        conversation = self._conversations[call.rollout.id]
        try:
            heard = self.recall.of(call.rollout.id)
            body = call.arrival.body
            plan = conversation.plan(request, call.arrival.agent_session, len(body), heard)
            notes = conversation.notes_on(request, body, plan)
        except Exception as error:  # noqa: BLE001 - a call that cannot be planned fails, and fails alone
            self._refuse(call, error)
        else:
            _note(call, notes)
            self._offer(call, plan, lease)

    async def _prepare_elsewhere(self, call: Call, request: ChatRequest) -> None:
        conversation = self._conversations[call.rollout.id]
        session, body = call.arrival.agent_session, call.arrival.body
        heard = self.recall.of(call.rollout.id)

        def prepare() -> tuple[Plan, tuple[str, ...]]:
            plan = conversation.plan(request, session, len(body), heard)
            return plan, conversation.notes_on(request, body, plan)

        try:
            plan, notes = await self.elsewhere(prepare)
        except Exception as error:  # noqa: BLE001 - as above; in a task group it would take the service along
            self._refuse(call, error)
        else:
            if _note(call, notes):
                self.store.put_arrival(call)
            self._offer(call, plan, None)

    def _offer(self, call: Call, plan: Plan, lease: tuple[str, str, bytes] | None) -> None:
        limit, size = call.rollout.facts.max_context_tokens, int(plan.prompt_ids.size)
        room = limit - size if limit is not None else None
        if size > MAX_PROMPT_TOKENS or (room is not None and room < 1):
            detail = f"The conversation has {size} tokens; the model's context is {limit}."
            if limit is None or limit > MAX_PROMPT_TOKENS:
                detail = f"The conversation has {size} tokens; a prompt has {MAX_PROMPT_TOKENS} at most."
            call.prompt = Prompt.of(plan)  # how long it was stays known
            self.gate.fail(call, Failure("CONTEXT_EXCEEDED", detail, retriable=False))
            return
        sampling = _bounded(call.sampling, room)
        if lease is not None and not call.state.terminal:
            session, lease_id, digest = lease
            if digest == plan.prompt_sha256:
                self.gate.restore_lease(call, plan, sampling, session, lease_id)
                return
        self.gate.offer(call, plan, sampling)

    def _refuse(self, call: Call, error: Exception) -> None:
        if isinstance(error, CodecError | PenstockError):
            # The template and the codec speak to the agent here: its own conversation is what cannot be taken.
            self.gate.fail(call, Failure(error.reason, str(error), retriable=False))
            return
        _log.error("a prompt could not be made", call_id=call.id, rollout_id=call.rollout.id, exc_info=error)
        self.gate.fail(call, Failure("INTERNAL"))

    async def _ask_source(self, call: Call) -> None:
        rollout = call.rollout
        try:
            source = self._sources.source(rollout.opening.mode, rollout.opening.source, rollout.caller_key)
            tracing.working_for(
                request_id=call.id, rollout_id=rollout.id, group_id=rollout.opening.group_id, call_id=call.id
            )
            with tracing.using(call.trace.step if call.trace is not None else None):
                completion = await source.complete(call)
            outcome = await self.gate.answers.settle(call, completion, answerer=source.answerer)
        except SourceError as error:
            _log.warning("a model source failed", call_id=call.id, rollout_id=rollout.id, reason=error.reason)
            outcome = await self.gate.answers.settle(
                call, Failure(error.reason, str(error), error.retriable), answerer=Answerer.INFERENCE
            )
        except PenstockError as error:
            self.gate.fail(call, Failure(error.reason, error.message))
            return
        except Exception:  # noqa: BLE001 - logged, and the call fails
            # One call's trouble must not take the service down with its task group.
            _log.exception("a call could not be answered", call_id=call.id, rollout_id=rollout.id)
            self.gate.fail(call, Failure("INTERNAL"))
            return
        if isinstance(outcome, Rejection) and not call.state.terminal:
            _log.warning("a source's answer was refused", call_id=call.id, violations=outcome.violations)
            self.gate.fail(call, Failure(f"SOURCE_{outcome.reason.name}"))

    async def elsewhere(self, work: Callable[[], T]) -> T:
        """Does CPU work in the pool, so that it stalls nobody (R32)."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def _bounded(sampling: Sampling, room: int | None) -> Sampling:
    if room is None or (sampling.max_tokens is not None and sampling.max_tokens <= room):
        return sampling
    return with_max_tokens(sampling, room)


def _note(call: Call, notes: Sequence[str]) -> bool:
    """Adds what a call's record does not say yet; whether there was any."""
    new = tuple(note for note in notes if note not in call.arrival.normalisations)
    if new:
        call.arrival = replace(call.arrival, normalisations=(*call.arrival.normalisations, *new))
    return bool(new)
