"""A rollout's life as its driver sees it: checked, opened, closed, deleted; restored after a restart.

Each step goes down to the gate, which decides; what stands beside the gate (conversation, host tools) follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from functools import partial
from typing import Final

import structlog

from penstock_chassis.auth import acting_in
from penstock_chassis.errors import AlreadyExists, FailedPrecondition, NotFound, PenstockError, Unavailable
from penstock_codec import CodecError
from penstock_interception import cache, metrics
from penstock_interception.domain.calls import ModelFacts, RolloutModel, RolloutSpec, RolloutState
from penstock_interception.domain.kept_captures import Discarded
from penstock_interception.domain.live_rollouts import Registry
from penstock_interception.domain.state import Rollout
from penstock_interception.gate.gate import Gate
from penstock_interception.gate.host_tools.broker import HostToolBroker
from penstock_interception.rollouts.agent_keys import AgentKeys
from penstock_interception.rollouts.conversations import Conversations
from penstock_interception.sources.base import Resolved
from penstock_interception.sources.registry import Sources
from penstock_interception.store.commits import durable, failed
from penstock_interception.store.reading import StoredRollout
from penstock_interception.store.store import CallStore

DRIVER_LOST: Final = "DRIVER_LOST"
"""Why a rollout is closed whose driver is gone."""
_log = structlog.get_logger(__name__)


class Rollouts:
    """Opens, closes, deletes and restores rollouts."""

    def __init__(
        self,
        store: CallStore,
        sources: Sources,
        registry: Registry,
        gate: Gate,
        conversations: Conversations,
        tools: HostToolBroker,
        agent_keys: AgentKeys,
    ) -> None:
        self._store = store
        self._sources = sources
        self._registry = registry
        self._gate = gate
        self._conversations = conversations
        self._tools = tools
        self._agent_keys = agent_keys

    async def check(self, spec: RolloutSpec, caller_key: str | None) -> Resolved:
        """Checks the source and the budgets of a rollout, and returns the source's properties.

        Raises what Sources.resolve and BudgetEnforcer.check raise.
        """
        resolved = await self._resolve(spec, caller_key, "")
        self._gate.budgets.check(spec)
        return resolved

    async def open(self, spec: RolloutSpec, caller_key: str | None) -> Rollout:
        """Opens a rollout after its source has answered a check; returns once it is on disk. Idempotent by request id.

        Raises what Registry.find_opened, Sources.resolve and RolloutLifecycle.open raise, FailedPrecondition
        TOKENIZER_MISMATCH for a model whose source has another tokenizer, and Unavailable
        JOURNAL_FAILED (the rollout then does not exist). For a judge: NotFound ROLLOUT_UNKNOWN, FailedPrecondition
        JUDGE_TOO_EARLY, AlreadyExists ROLLOUT_EXISTS; for a user the same with USER_TOO_LATE.
        """
        before = self._registry.find_opened(spec)
        if before is None:
            self._check_beside(spec)
            resolved = await self._resolve(spec, caller_key, spec.model_name)
            before = self._registry.find_opened(spec)  # a concurrent request may have been first
            if before is None:
                self._check_beside(spec)
                return await self._open(spec, resolved, caller_key)
        before.caller_key = caller_key
        if before.opened is not None:
            await durable(before.opened)
        return before

    async def close(self, rollout_id: str, reason: str, *, capture_stored: bool = False) -> Rollout:
        """Closes a rollout, its judge and its user; returns once that and every accepted answer is on disk. Idempotent.

        `capture_stored`: its capture needs to be kept no longer than the retention.

        Evicts the rollouts that were closed longest ago. Raises NotFound ROLLOUT_UNKNOWN, and as Gate.wait_closed does.
        """
        rollout = self._registry.rollout(rollout_id)
        await self._close(rollout, reason)
        if capture_stored and (written := self._gate.lifecycle.capture_stored(rollout)) is not None:
            await durable(written)
        if self._registry.find(rollout_id) is rollout and not rollout.evicted:  # it may have been deleted meanwhile
            self._conversations.use_closed(rollout)
        if rollout.recording is not None and rollout.recording.forget():
            self._store.recordings.drop_calls(rollout_id)
        cache.PARSED_BODIES.forget(rollout_id)
        for one in self._registry.beside(rollout_id):
            await self.close(one.id, reason, capture_stored=capture_stored)
        return rollout

    async def abandon(self, driver_id: str) -> None:
        """Closes the open rollouts of a driver that is lost. One whose end cannot be recorded is closed in memory."""
        left = [
            rollout.id
            for rollout in self._registry.rollouts()
            if rollout.spec.driver_id == driver_id and rollout.state is not RolloutState.CLOSED
        ]
        if not left:
            return
        _log.warning("a driver is lost: its rollouts are closed", driver_id=driver_id, rollouts=len(left))
        closings = (self.close(rollout_id, DRIVER_LOST) for rollout_id in left)
        for failure in await asyncio.gather(*closings, return_exceptions=True):
            if isinstance(failure, PenstockError):
                _log.error("the end of a lost driver's rollout could not be recorded", reason=failure.reason)
            elif isinstance(failure, BaseException):
                raise failure

    async def delete(self, rollout_id: str) -> None:
        """Deletes a rollout, its whole capture, its judge's and its user's; returns once that is on disk. Idempotent.

        Raises Unavailable JOURNAL_FAILED (the rollout is closed but still exists).
        """
        rollout = self._registry.find(rollout_id)
        if rollout is None:
            return
        for one in self._registry.beside(rollout_id):
            await self.delete(one.id)
        await self._close(rollout, "DELETED")
        if self._registry.find(rollout_id) is not rollout:
            return  # another request has deleted it meanwhile
        pending = rollout.deleted is not None
        written = self._gate.lifecycle.delete(rollout)
        if not pending:
            # With the gate's own end of this write, so that no rollout of the same id can be opened in between.
            written.add_done_callback(partial(self._deleted, rollout))
        await durable(written)
        cache.PARSED_BODIES.forget(rollout_id)

    async def discard(self, captures: Iterable[Discarded]) -> None:
        """Deletes these rollouts, whose captures were kept for drivers that have not stored them. Returns once that is
        on disk; what cannot be recorded stays.
        """
        for record in captures:
            rollout = self._registry.find(record.rollout_id)
            if rollout is None or not rollout.is_kept or rollout.deleted is not None:
                continue
            written = self._gate.lifecycle.discard(rollout, record)
            written.add_done_callback(partial(self._deleted, rollout))
            try:
                await durable(written)
                for one in self._registry.beside(record.rollout_id):
                    await self.delete(one.id)
            except Unavailable as error:
                _log.error("a capture could not be discarded", rollout_id=record.rollout_id, reason=error.reason)
                return
            metrics.DISCARDED_CAPTURES.labels(record.why.value).inc()
            cache.PARSED_BODIES.forget(record.rollout_id)
            _log.warning(
                "a capture was discarded that its driver had not exported",
                rollout_id=record.rollout_id,
                run_id=record.run_id,
                driver_id=record.driver_id,
                limit=record.why.value,
                size_bytes=record.size_bytes,
            )

    async def restore(self) -> AsyncIterator[StoredRollout]:
        """Restores all rollouts from the journal. Yields those that can continue; their calls wait for a prompt."""
        self._registry.kept_captures.record(await self._store.discarded.load())
        for rollout in await self._store.rollouts():
            if rollout.state is RolloutState.CLOSED:
                self._gate.lifecycle.restore(rollout, [])
                rollout.evicted = True
                continue
            stored = await self._store.load(rollout)
            self._gate.lifecycle.restore(rollout, stored.calls)
            if await self._is_whole(stored):
                yield stored

    async def restore_runs_and_tools(self) -> None:
        """Restores runs and host tools from the journal, once all rollouts are restored."""
        self._gate.lifecycle.restore_runs(await self._store.runs.load())
        still_open = [one.spec for one in self._registry.rollouts() if one.state is not RolloutState.CLOSED]
        await self._tools.restore(still_open, self._gate.leasing.restore_session)

    def _check_beside(self, spec: RolloutSpec) -> None:
        """Checks the rollout whose verifier is to ask a judge, for which its agent must not be able to call any more,
        or whose agent a user is to instruct.
        """
        if not spec.belongs_to:
            return
        other = self._registry.rollout(spec.belongs_to)
        if other.spec.namespace != spec.namespace or other.spec.belongs_to:
            raise NotFound("No such rollout.", reason="ROLLOUT_UNKNOWN")
        is_closed = other.state is RolloutState.CLOSED
        if spec.judge_of and not is_closed:
            raise FailedPrecondition("A judge is asked once the rollout is closed.", reason="JUDGE_TOO_EARLY")
        if spec.user_of and is_closed:
            raise FailedPrecondition("A user is there while the rollout is open.", reason="USER_TOO_LATE")
        if spec.judge_of and self._registry.judge_of(other.id) is not None:
            raise AlreadyExists("The rollout has a judge.", reason="ROLLOUT_EXISTS")
        if spec.user_of and self._registry.user_of(other.id) is not None:
            raise AlreadyExists("The rollout has a user.", reason="ROLLOUT_EXISTS")

    async def _resolve(self, spec: RolloutSpec, caller_key: str | None, asked_model: str) -> Resolved:
        with acting_in(spec.namespace):
            own = await self._sources.resolve(spec.mode, spec.source, caller_key, asked_model, spec.namespace)
            of_models = [await self._of_model(spec, model, own) for model in spec.models]
        sizes = [facts.vocabulary_size or 0 for facts in of_models if facts is not None and facts.tokenizer_sha256]
        facts = replace(own.facts, of_models=tuple(of_models))
        if facts.vocabulary_size is not None:  # of one tokenizer, but weights may have more rows
            facts = replace(facts, vocabulary_size=max(facts.vocabulary_size, *sizes, 0))
        return replace(own, facts=facts)

    async def _of_model(self, spec: RolloutSpec, model: RolloutModel, own: Resolved) -> ModelFacts | None:
        """Returns the facts of a model's own source; None if it has none. Raises what Sources.resolve raises."""
        if model.source is None:
            return None
        found = await self._sources.resolve(spec.mode, model.source, None, "", spec.namespace)
        facts = found.facts
        if facts.tokenizer_sha256 or model.trained:
            same = (own.facts.tokenizer_sha256, own.facts.template_sha256)
            if (facts.tokenizer_sha256, facts.template_sha256) != same:
                raise FailedPrecondition(
                    f"The source of the model of policy {model.policy_id} has another tokenizer or chat template than"
                    " the rollout's source, which makes the prompts.",
                    reason="TOKENIZER_MISMATCH",
                )
        if model.delegated and not found.answers:
            raise FailedPrecondition(
                f"The source of the model of policy {model.policy_id} has no engine, and no trainer answers for it.",
                reason="SOURCE_UNSUITABLE",
            )
        # Beside the rollout's own tokenizer, what it says of ids is of no use.
        return replace(facts, returns_tokens=False)

    async def _open(self, spec: RolloutSpec, resolved: Resolved, caller_key: str | None) -> Rollout:
        key = self._agent_keys.make_first(spec)
        offered = self._tools.offered_to(spec)
        self._conversations.add(spec, resolved)
        try:
            rollout, written = self._gate.lifecycle.open(spec, resolved.facts, caller_key, key, offered)
        except Exception:
            self._conversations.forget(spec.rollout_id)
            raise
        self._tools.open(spec, offered)
        written.add_done_callback(partial(self._opened, rollout))
        await durable(written)
        return rollout

    def _opened(self, rollout: Rollout, done: asyncio.Future[list[int]]) -> None:
        if failed(done):
            self._tools.close(rollout.id)
            self._conversations.forget(rollout.id)

    async def _close(self, rollout: Rollout, reason: str) -> None:
        self._gate.close(rollout, reason)
        self._tools.close(rollout.id)
        await self._gate.wait_closed(rollout)

    def _deleted(self, rollout: Rollout, done: asyncio.Future[list[int]]) -> None:
        if not failed(done):
            self._conversations.forget(rollout.id)

    async def _is_whole(self, stored: StoredRollout) -> bool:
        """Returns whether a restored rollout can continue. If not, it is closed; its readable part stays readable."""
        rollout, reason = stored.rollout, "JOURNAL_DAMAGED"
        try:
            await self._conversations.rebuild(stored)
        except (PenstockError, CodecError) as error:
            reason = error.reason
        else:
            if not rollout.damaged:
                return True
        _log.error("a rollout cannot continue", rollout_id=rollout.id, reason=reason)
        try:
            await self._close(rollout, reason)
        except PenstockError as error:
            _log.error("the call's end could not be recorded", rollout_id=rollout.id, reason=error.reason)
        self._conversations.evict(rollout)
        return False
