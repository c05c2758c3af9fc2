"""Who may come in: the tokens of the rollouts, from their making to their end.

A token is judged by computing before anything is looked up; whatever is wrong with one, those outside are told the same
(R5). What exactly was wrong is for the audit.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Final

from penstock_chassis.errors import AlreadyExists, FailedPrecondition, NotFound, ResourceExhausted, Unavailable
from penstock_interception.audit import Audit, Event
from penstock_interception.calls import Opening, Rollout, RolloutState
from penstock_interception.clock import Clock
from penstock_interception.ports import Store, durable
from penstock_interception.tokens import ALL, ID_BYTES, Grant, Scope, TokenTerms

MAX_TOKENS: Final = 256
"""Of one rollout in its life: revoked ones are kept, so that a repeated request never brings one back."""


class Refusal(StrEnum):
    """What is wrong with a credential; never told outside."""

    MISSING = "missing"
    NOT_OURS = "not_ours"
    EXPIRED = "expired"
    UNKNOWN = "unknown"
    REVOKED = "revoked"
    CLOSED = "closed"


class Credentials:
    """Belongs to the gate. `find` knows the rollouts."""

    def __init__(self, store: Store, find: Callable[[str], Rollout | None], *, clock: Clock, audit: Audit) -> None:
        self._store = store
        self._find = find
        self._clock = clock
        self._audit = audit

    def check(self, rollout_id: str, token: str) -> tuple[Rollout, frozenset[Scope]] | Refusal:
        """The open rollout that a token is for, and what its holder may do there."""
        if not token:
            return Refusal.MISSING
        claims = self._store.tokens.key.read(rollout_id, token)
        if claims is None:
            return Refusal.NOT_OURS
        now = self._now()
        if claims.expires_ms is not None and claims.expires_ms <= now:
            return Refusal.EXPIRED
        rollout = self._find(rollout_id)
        grant = rollout.grants.get(claims.id) if rollout is not None else None
        if rollout is None or grant is None:
            return Refusal.UNKNOWN  # of a rollout of this name that was deleted
        if grant.dies_ms is not None and grant.dies_ms <= now:
            return Refusal.REVOKED
        if rollout.state is RolloutState.CLOSED:
            return Refusal.CLOSED
        return rollout, claims.scopes

    def first(self, opening: Opening) -> Grant:
        """The token that a rollout is opened with."""
        return self._grant(secrets.token_bytes(ID_BYTES), opening.token_terms)

    def token(self, rollout: Rollout) -> str:
        """The token that a rollout was opened with; made anew each time, since none is stored."""
        return self.written(rollout, next(iter(rollout.grants.values())))

    def written(self, rollout: Rollout, grant: Grant) -> str:
        """A grant's token."""
        return self._store.tokens.key.write(rollout.id, grant)

    async def issue(
        self, rollout: Rollout, request_id: str, terms: TokenTerms, retire_others_after_s: float | None
    ) -> Grant:
        """Another token, once it is on disk. Idempotent by request id.

        Raises:
            FailedPrecondition: ROLLOUT_CLOSED.
            AlreadyExists: REQUEST_ID_REUSED.
            ResourceExhausted: TOKEN_LIMIT.
            Unavailable: JOURNAL_FAILED, and then there is no such token.
        """
        if rollout.state is RolloutState.CLOSED:
            raise FailedPrecondition("The rollout is closed: its tokens are void.", reason="ROLLOUT_CLOSED")
        grant = self._grant(self._store.tokens.key.derived_id(rollout.id, request_id), terms)
        before = rollout.grants.get(grant.id)
        if before is not None:
            if (before.scopes, before.ttl_ms) != (grant.scopes, grant.ttl_ms):
                raise AlreadyExists("The request id was used for another token.", reason="REQUEST_ID_REUSED")
            await self._store.settled()
            if grant.id not in rollout.grants:
                raise Unavailable("The token could not be recorded. Try again.", reason="JOURNAL_FAILED")
            return before
        if len(rollout.grants) >= MAX_TOKENS:
            raise ResourceExhausted(f"A rollout has at most {MAX_TOKENS} tokens.", reason="TOKEN_LIMIT")
        others: list[Grant] = []
        retired = 0
        if retire_others_after_s is not None:
            others = list(rollout.grants.values())
            retired = self._retire(others, retire_others_after_s)
        rollout.grants[grant.id] = grant
        self._audit.tell(Event.TOKEN_ISSUED, rollout_id=rollout.id, token_id=grant.id.hex(), retired=retired)
        written = self._store.tokens.put(rollout.id, grant, others)
        written.add_done_callback(lambda done: _issued(rollout, grant, done))
        await durable(written)
        return grant

    async def revoke(self, rollout: Rollout, token_ids: Iterable[bytes], grace_s: float) -> None:
        """Makes these tokens void, or all; returns once that is on disk.

        Raises NotFound TOKEN_UNKNOWN, Unavailable JOURNAL_FAILED (they are void until a restart: revoke them again).
        """
        wanted = list(token_ids) or list(rollout.grants)
        if any(token_id not in rollout.grants for token_id in wanted):
            raise NotFound("The rollout has no such token.", reason="TOKEN_UNKNOWN")
        grants = [rollout.grants[token_id] for token_id in wanted]
        retired = self._retire(grants, grace_s)
        if retired:
            self._audit.tell(Event.TOKENS_REVOKED, rollout_id=rollout.id, count=retired, grace_s=grace_s)
        # Those too that were retired before: the disk may have refused that.
        await durable(self._store.tokens.retire(rollout.id, grants))

    def _retire(self, grants: Iterable[Grant], after_s: float) -> int:
        at = self._now() + round(after_s * 1000)
        return sum(grant.retire(at) for grant in grants)

    def _grant(self, token_id: bytes, terms: TokenTerms) -> Grant:
        now = self._now()
        expires = None if terms.ttl_s is None else now + round(terms.ttl_s * 1000)
        return Grant(token_id, frozenset(terms.scopes) or ALL, now, expires)

    def _now(self) -> int:
        return int(self._clock.wall() * 1000)


def _issued(rollout: Rollout, grant: Grant, done: asyncio.Future[list[int]]) -> None:
    if done.cancelled() or done.exception() is not None:
        rollout.grants.pop(grant.id, None)  # what was retired stays so: a refusal too many is the safer mistake
