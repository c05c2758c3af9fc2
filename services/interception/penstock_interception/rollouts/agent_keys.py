"""Agent keys: issuing, checking and revoking the credentials of rollouts.

A key's MAC is checked before anything is looked up. Callers get the same error whatever is wrong with a key (R5); only
the audit log has the reason.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from enum import StrEnum
from typing import Final

from penstock_chassis.errors import AlreadyExists, FailedPrecondition, NotFound, ResourceExhausted, Unavailable
from penstock_interception.domain.agent_keys import ALL, ID_BYTES, AgentKey, KeyTerms, Scope
from penstock_interception.domain.audit import Audit, Event
from penstock_interception.domain.calls import RolloutSpec, RolloutState
from penstock_interception.domain.deadlines import Clock
from penstock_interception.domain.live_rollouts import Registry
from penstock_interception.domain.state import Rollout
from penstock_interception.store.commits import durable, failed
from penstock_interception.store.store import CallStore

MAX_TOKENS: Final = 256
"""Limit per rollout, revoked keys included: they are kept so that a repeated request never revives one."""


class Refusal(StrEnum):
    """Why a credential was refused; never sent to the caller."""

    MISSING = "missing"
    NOT_OURS = "not_ours"
    EXPIRED = "expired"
    UNKNOWN = "unknown"
    REVOKED = "revoked"
    CLOSED = "closed"


class AgentKeys:
    """Issues, checks and revokes the keys of all rollouts."""

    def __init__(self, store: CallStore, registry: Registry, *, clock: Clock, audit: Audit) -> None:
        self._store = store
        self._registry = registry
        self._clock = clock
        self._audit = audit

    def check(self, rollout_id: str, token: str) -> tuple[Rollout, frozenset[Scope]] | Refusal:
        """Returns the open rollout that a key belongs to and the key's scopes, or the reason of its refusal."""
        if not token:
            return Refusal.MISSING
        claims = self._store.agent_keys.signer.read(rollout_id, token)
        if claims is None:
            return Refusal.NOT_OURS
        now = self._now()
        if claims.expires_ms is not None and claims.expires_ms <= now:
            return Refusal.EXPIRED
        rollout = self._registry.find(rollout_id)
        key = rollout.keys.get(claims.id) if rollout is not None else None
        if rollout is None or key is None:
            return Refusal.UNKNOWN  # its rollout was deleted, and the id may be in use again
        if key.dies_ms is not None and key.dies_ms <= now:
            return Refusal.REVOKED
        if rollout.state is RolloutState.CLOSED:
            return Refusal.CLOSED
        return rollout, claims.scopes

    def make_first(self, spec: RolloutSpec) -> AgentKey:
        return self._make(secrets.token_bytes(ID_BYTES), spec.token_terms)

    def first_text(self, rollout: Rollout) -> str:
        """Returns the text of the first key of a rollout, computed each time: keys are not stored."""
        return self.text(rollout, next(iter(rollout.keys.values())))

    def text(self, rollout: Rollout, key: AgentKey) -> str:
        """Returns the text of an agent key."""
        return self._store.agent_keys.signer.write(rollout.id, key)

    async def issue(
        self, rollout: Rollout, request_id: str, terms: KeyTerms, retire_others_after_s: float | None
    ) -> AgentKey:
        """Issues another key; returns once it is on disk. Idempotent by request id.

        Raises:
            FailedPrecondition: ROLLOUT_CLOSED.
            AlreadyExists: REQUEST_ID_REUSED.
            ResourceExhausted: TOKEN_LIMIT.
            Unavailable: JOURNAL_FAILED (the key then does not exist).
        """
        if rollout.state is RolloutState.CLOSED:
            raise FailedPrecondition("The rollout is closed: its agent keys are void.", reason="ROLLOUT_CLOSED")
        key = self._make(self._store.agent_keys.signer.derived_id(rollout.id, request_id), terms)
        before = rollout.keys.get(key.id)
        if before is not None:
            if (before.scopes, before.ttl_ms) != (key.scopes, key.ttl_ms):
                raise AlreadyExists("The request id was used for another agent key.", reason="REQUEST_ID_REUSED")
            await self._store.settled()
            if key.id not in rollout.keys:
                raise Unavailable("The agent key could not be recorded: try again.", reason="JOURNAL_FAILED")
            return before
        if len(rollout.keys) >= MAX_TOKENS:
            raise ResourceExhausted(f"A rollout can have at most {MAX_TOKENS} agent keys.", reason="TOKEN_LIMIT")
        others: list[AgentKey] = []
        retired = 0
        if retire_others_after_s is not None:
            others = list(rollout.keys.values())
            retired = self._retire(others, retire_others_after_s)
        rollout.keys[key.id] = key
        self._audit.record(Event.AGENT_KEY_ISSUED, rollout_id=rollout.id, token_id=key.id.hex(), retired=retired)
        written = self._store.agent_keys.put(rollout.id, key, others)
        written.add_done_callback(lambda done: _issued(rollout, key, done))
        await durable(written)
        return key

    async def revoke(self, rollout: Rollout, token_ids: Iterable[bytes], grace_s: float) -> None:
        """Revokes these keys, or all of the rollout's; returns once that is on disk.

        Raises NotFound TOKEN_UNKNOWN, Unavailable JOURNAL_FAILED (they are void until a restart: revoke them again).
        """
        wanted = list(token_ids) or list(rollout.keys)
        if any(token_id not in rollout.keys for token_id in wanted):
            raise NotFound("The rollout has no such agent key.", reason="TOKEN_UNKNOWN")
        keys = [rollout.keys[token_id] for token_id in wanted]
        retired = self._retire(keys, grace_s)
        if retired:
            self._audit.record(Event.AGENT_KEYS_REVOKED, rollout_id=rollout.id, count=retired, grace_s=grace_s)
        # Includes keys that were retired before: that write may have failed.
        await durable(self._store.agent_keys.retire(rollout.id, keys))

    def _retire(self, keys: Iterable[AgentKey], after_s: float) -> int:
        now = self._now()
        return sum(key.retire(now, round(after_s * 1000)) for key in keys)

    def _make(self, token_id: bytes, terms: KeyTerms) -> AgentKey:
        now = self._now()
        expires = None if terms.ttl_s is None else now + round(terms.ttl_s * 1000)
        return AgentKey(token_id, frozenset(terms.scopes) or ALL, now, expires)

    def _now(self) -> int:
        return int(self._clock.wall() * 1000)


def _issued(rollout: Rollout, key: AgentKey, done: asyncio.Future[list[int]]) -> None:
    if failed(done):
        rollout.keys.pop(key.id, None)  # keys retired with it stay retired: refusing too many is the safer error
