"""Agent keys in the gate's journal: only their ids and terms, which authenticate nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

from penstock_chassis.journal import Journal, Statement
from penstock_interception.domain.agent_keys import AgentKey, KeySigner, Scope

Submit: TypeAlias = Callable[[Sequence[Statement]], asyncio.Future[list[int]]]
"""Queues a write in order, and logs its failure even if no caller waits for it."""

SCHEMA: Final = """
CREATE TABLE tokens (
    rollout_id TEXT NOT NULL REFERENCES rollouts ON DELETE CASCADE, token_id BLOB NOT NULL, scopes TEXT NOT NULL,
    created_ms INTEGER NOT NULL, expires_ms INTEGER, dies_ms INTEGER, PRIMARY KEY (rollout_id, token_id)
) STRICT;
INSERT INTO tokens
    SELECT rollout_id, randomblob(16), 'completions read tools', CAST(created * 1000 AS INTEGER), NULL, NULL
    FROM rollouts;
"""


class AgentKeyStore:
    """The journal's table of agent keys, and the signer."""

    def __init__(self, journal: Journal, key: bytes, submit: Submit) -> None:
        self.signer = KeySigner(key)
        self._journal = journal
        self._submit = submit

    @staticmethod
    def opening(rollout_id: str, agent_key: AgentKey) -> Statement:
        """Returns the statement for the write that opens a rollout."""
        scopes = " ".join(sorted(agent_key.scopes))
        values = (rollout_id, agent_key.id, scopes, agent_key.created_ms, agent_key.expires_ms, agent_key.dies_ms)
        return "INSERT INTO tokens VALUES (?, ?, ?, ?, ?, ?)", values

    def put(self, rollout_id: str, agent_key: AgentKey, retired: Iterable[AgentKey]) -> asyncio.Future[list[int]]:
        """Writes an issued key and the keys that were retired with it."""
        return self._submit([self.opening(rollout_id, agent_key), *_retiring(rollout_id, retired)])

    def retire(self, rollout_id: str, retired: Iterable[AgentKey]) -> asyncio.Future[list[int]]:
        return self._submit(_retiring(rollout_id, retired))

    async def load(self) -> dict[str, dict[bytes, AgentKey]]:
        """Returns all keys by rollout, in order of creation."""
        found: dict[str, dict[bytes, AgentKey]] = {}
        for row in await self._journal.query("SELECT * FROM tokens ORDER BY rowid"):
            scopes = frozenset(Scope(name) for name in row["scopes"].split())
            agent_key = AgentKey(bytes(row["token_id"]), scopes, row["created_ms"], row["expires_ms"], row["dies_ms"])
            found.setdefault(row["rollout_id"], {})[agent_key.id] = agent_key
        return found


def _retiring(rollout_id: str, retired: Iterable[AgentKey]) -> list[Statement]:
    sql = "UPDATE tokens SET dies_ms = ? WHERE rollout_id = ? AND token_id = ?"
    return [(sql, (agent_key.dies_ms, rollout_id, agent_key.id)) for agent_key in retired]
