"""The rollouts' tokens in the gate's journal: their ids and terms, nothing that opens anything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

from penstock_chassis.journal import Journal, Statement
from penstock_interception.tokens import Grant, Scope, TokenKey

Submit: TypeAlias = Callable[[Sequence[Statement]], asyncio.Future[list[int]]]
"""Fixes a write's place in the order, and reports a failure that nobody waits for."""

SCHEMA: Final = """
CREATE TABLE tokens (
    rollout_id TEXT NOT NULL REFERENCES rollouts ON DELETE CASCADE, token_id BLOB NOT NULL, scopes TEXT NOT NULL,
    created_ms INTEGER NOT NULL, expires_ms INTEGER, dies_ms INTEGER, PRIMARY KEY (rollout_id, token_id)
) STRICT;
INSERT INTO tokens
    SELECT rollout_id, randomblob(16), 'completions read tools', CAST(created * 1000 AS INTEGER), NULL, NULL
    FROM rollouts;
"""


class TokenStore:
    """The journal's table of tokens, and the key that makes them."""

    def __init__(self, journal: Journal, key: bytes, submit: Submit) -> None:
        self.key = TokenKey(key)
        self._journal = journal
        self._submit = submit

    @staticmethod
    def opening(rollout_id: str, grant: Grant) -> Statement:
        """What belongs into the write that opens a rollout."""
        scopes = " ".join(sorted(grant.scopes))
        values = (rollout_id, grant.id, scopes, grant.created_ms, grant.expires_ms, grant.dies_ms)
        return "INSERT INTO tokens VALUES (?, ?, ?, ?, ?, ?)", values

    def put(self, rollout_id: str, grant: Grant, retired: Iterable[Grant]) -> asyncio.Future[list[int]]:
        """A token was issued, and these were retired with it."""
        return self._submit([self.opening(rollout_id, grant), *_retiring(rollout_id, retired)])

    def retire(self, rollout_id: str, retired: Iterable[Grant]) -> asyncio.Future[list[int]]:
        """Tokens were revoked."""
        return self._submit(_retiring(rollout_id, retired))

    async def load(self) -> dict[str, dict[bytes, Grant]]:
        """All tokens by rollout, in the order in which they were made."""
        found: dict[str, dict[bytes, Grant]] = {}
        for row in await self._journal.query("SELECT * FROM tokens ORDER BY rowid"):
            scopes = frozenset(Scope(name) for name in row["scopes"].split())
            grant = Grant(bytes(row["token_id"]), scopes, row["created_ms"], row["expires_ms"], row["dies_ms"])
            found.setdefault(row["rollout_id"], {})[grant.id] = grant
        return found


def _retiring(rollout_id: str, retired: Iterable[Grant]) -> list[Statement]:
    sql = "UPDATE tokens SET dies_ms = ? WHERE rollout_id = ? AND token_id = ?"
    return [(sql, (grant.dies_ms, rollout_id, grant.id)) for grant in retired]
