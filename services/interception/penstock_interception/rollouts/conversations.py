"""The rollouts' conversations in memory: all of open rollouts, the last used of closed ones (LRU).

A closed rollout that was not used for long is evicted with its calls; the journal rebuilds both when it is read again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from penstock_chassis.errors import NotFound
from penstock_interception.conversation.conversation import Conversation
from penstock_interception.domain.calls import Dialect, RolloutSpec, RolloutState
from penstock_interception.domain.live_rollouts import Registry
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.domain.state import Rollout
from penstock_interception.gate.gate import Gate
from penstock_interception.sources.base import Resolved
from penstock_interception.sources.registry import Sources
from penstock_interception.store.reading import StoredRollout
from penstock_interception.store.store import CallStore


class Conversations:
    """The conversations by rollout id, and which closed rollouts were used last."""

    def __init__(
        self,
        store: CallStore,
        sources: Sources,
        registry: Registry,
        gate: Gate,
        *,
        parse: Callable[[Dialect, bytes], ChatRequest],
        closed_kept: int,
    ) -> None:
        """`parse` parses a stored body again. `closed_kept` closed rollouts stay in memory."""
        self._store = store
        self._sources = sources
        self._registry = registry
        self._gate = gate
        self._parse = parse
        self._closed_kept = closed_kept
        self._conversations: dict[str, Conversation] = {}
        self._closed: OrderedDict[str, Rollout] = OrderedDict()
        self._reloading = asyncio.Lock()

    def __getitem__(self, rollout_id: str) -> Conversation:
        """The conversation of a rollout that is in memory, as each open one is."""
        return self._conversations[rollout_id]

    def get(self, rollout_id: str) -> Conversation | None:
        """Returns the conversation if it is in memory."""
        return self._conversations.get(rollout_id)

    def add(self, spec: RolloutSpec, resolved: Resolved) -> None:
        """Makes the conversation of a new rollout, unless a concurrent request with the same id was first."""
        if spec.rollout_id not in self._conversations:
            made = Conversation(spec, resolved.codec, vocab_size=resolved.facts.vocabulary_size)
            self._conversations[spec.rollout_id] = made

    def forget(self, rollout_id: str) -> None:
        """Drops the conversation of a rollout that does not exist any more."""
        self._conversations.pop(rollout_id, None)
        self._closed.pop(rollout_id, None)

    def use_closed(self, rollout: Rollout) -> None:
        """Marks a closed rollout as just used, and evicts the least recently used ones."""
        self._closed[rollout.id] = rollout
        self._closed.move_to_end(rollout.id)
        while len(self._closed) > self._closed_kept:
            _, oldest = self._closed.popitem(last=False)
            self.evict(oldest)

    def evict(self, rollout: Rollout) -> None:
        """Frees a closed rollout's calls and conversation."""
        self._gate.lifecycle.evict(rollout)
        self._conversations.pop(rollout.id, None)

    async def of(self, rollout: Rollout) -> Conversation:
        """Returns the rollout's conversation with its calls in memory; reloads an evicted rollout from the journal.

        Raises NotFound ROLLOUT_UNKNOWN if the rollout was deleted meanwhile, and what Sources.codec raises.
        """
        if rollout.state is RolloutState.CLOSED:
            async with self._reloading:
                self._check_known(rollout)
                if rollout.evicted:
                    stored = await self._store.load(rollout)
                    conversation = await self._rebuilt(stored)
                    self._check_known(rollout)
                    self._conversations[rollout.id] = conversation
                    self._gate.lifecycle.reload(rollout, stored.calls)
                self.use_closed(rollout)
        return self._conversations[rollout.id]

    async def rebuild(self, stored: StoredRollout) -> None:
        """Rebuilds the conversation of an open rollout after a restart. Raises PenstockError and CodecError."""
        self._conversations[stored.rollout.id] = await self._rebuilt(stored)

    async def _rebuilt(self, stored: StoredRollout) -> Conversation:
        rollout = stored.rollout
        codec = await self._sources.codec(rollout.facts)
        conversation = Conversation(rollout.spec, codec, vocab_size=rollout.facts.vocabulary_size, records=stored.graph)
        rollout.damaged = len(conversation.graph.calls) < stored.recorded
        for call in stored.calls:  # tools are only in the bodies: one body is read for each distinct set
            digest = call.request.tools_sha256
            if digest and digest not in conversation.tools:
                body = await self._store.body(call.id)
                conversation.tools[digest] = self._parse(call.request.dialect, body).tools
        return conversation

    def _check_known(self, rollout: Rollout) -> None:
        """Checks that the rollout was not deleted. The id alone is not enough: another rollout may have it by now."""
        if self._registry.find(rollout.id) is not rollout:
            raise NotFound("No such rollout.", reason="ROLLOUT_UNKNOWN")
