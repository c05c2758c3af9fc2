"""Host tools in the gate's journal: sessions' offers, each rollout's tools, and every call (decision 7)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from sqlite3 import Row
from typing import Final, TypeAlias

import orjson

from penstock_chassis.auth import DEFAULT_NAMESPACE
from penstock_chassis.journal import Journal, Statement
from penstock_interception.domain.calls import CallState
from penstock_interception.domain.host_tools import CallKey, HostTool, ToolCallRecord, ToolResult
from penstock_interception.domain.state import Selector, ToolCall

Submit: TypeAlias = Callable[[Sequence[Statement]], asyncio.Future[list[int]]]
"""Queues a write in order, and logs its failure even if no caller waits for it."""

SCHEMA: Final = """
CREATE TABLE tool_offers (
    session_id TEXT NOT NULL, selector BLOB NOT NULL, tools BLOB NOT NULL, PRIMARY KEY (session_id, selector)
) STRICT;
CREATE TABLE rollout_tools (
    rollout_id TEXT PRIMARY KEY REFERENCES rollouts ON DELETE CASCADE, tools BLOB NOT NULL
) STRICT;
CREATE TABLE tool_calls (
    tool_call_id TEXT PRIMARY KEY, rollout_id TEXT NOT NULL REFERENCES rollouts ON DELETE CASCADE,
    position INTEGER NOT NULL, name TEXT NOT NULL, arguments BLOB NOT NULL, mcp_session TEXT NOT NULL,
    request_id TEXT NOT NULL, body_sha256 BLOB NOT NULL, received REAL NOT NULL, expires REAL NOT NULL,
    state TEXT NOT NULL, session_id TEXT NOT NULL DEFAULT '', result BLOB, is_error INTEGER NOT NULL DEFAULT 0,
    end_reason TEXT NOT NULL DEFAULT '', ended REAL, told INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE UNIQUE INDEX tool_calls_by_rollout ON tool_calls (rollout_id, position);
"""


@dataclass(frozen=True, slots=True)
class StoredTools:
    """The state to restore; only calls of open rollouts, in order of arrival."""

    offers: list[tuple[str, Selector, tuple[HostTool, ...]]]
    rollouts: dict[str, tuple[HostTool, ...]]
    calls: list[ToolCallRecord]


class ToolStore:
    """The journal's tables of host tools."""

    def __init__(self, journal: Journal, submit: Submit) -> None:
        self._journal = journal
        self._submit = submit

    # Writes ----------------------------------------------------------------------------------------------------------

    def put_offer(self, session_id: str, selector: Selector, tools: Sequence[HostTool]) -> asyncio.Future[list[int]]:
        """Writes a session's offer to a selector, replacing its previous one; no tools withdraw it."""
        key = _dump_selector(selector)
        drop: Statement = ("DELETE FROM tool_offers WHERE session_id = ? AND selector = ?", (session_id, key))
        put: Statement = ("INSERT INTO tool_offers VALUES (?, ?, ?)", (session_id, key, _dump_tools(tools)))
        return self._submit([drop, put] if tools else [drop])

    def move_offers(self, session_id: str, to: str) -> asyncio.Future[list[int]]:
        """Moves the offers of a resumed session to its new id."""
        return self._submit([("UPDATE tool_offers SET session_id = ? WHERE session_id = ?", (to, session_id))])

    def drop_offers(self, session_id: str) -> asyncio.Future[list[int]]:
        """Deletes the offers of an ended session."""
        return self._submit([("DELETE FROM tool_offers WHERE session_id = ?", (session_id,))])

    @staticmethod
    def opening(rollout_id: str, tools: Iterable[HostTool]) -> list[Statement]:
        """Returns the statements for the write that opens a rollout."""
        given = _dump_tools(tuple(tools))
        return [("INSERT INTO rollout_tools VALUES (?, ?)", (rollout_id, given))] if given != b"[]" else []

    def put_call(self, call: ToolCall) -> asyncio.Future[list[int]]:
        """Inserts a new call."""
        return self._submit([_inserted(call)])

    def put_refused(self, call: ToolCall, reason: str) -> asyncio.Future[list[int]]:
        """Inserts a call that has its result already, in one transaction: no host may get it after a crash."""
        return self._submit([_inserted(call), _ended(call, CallState.DELIVERED, reason)])

    def put_replayed(self, call: ToolCall, recorded_call_id: str) -> asyncio.Future[list[int]]:
        """Inserts a call that a recorded one answers, which answers no other: as `put_refused`."""
        return self._submit([
            _inserted(call),
            _ended(call, CallState.DELIVERED),
            ("UPDATE tool_calls SET replayed_from = ? WHERE tool_call_id = ?", (call.origin, call.id)),
            (
                "UPDATE recorded_tools SET used = 1 WHERE rollout_id = ? AND tool_call_id = ?",
                (call.rollout.id, recorded_call_id),
            ),
        ])  # fmt: skip

    def put_holder(self, call: ToolCall) -> asyncio.Future[list[int]]:
        """Writes the session that holds the call; it keeps the call after a restart."""
        holder = call.holder.id if call.holder is not None else ""
        return self._submit(
            [
                (
                    "UPDATE tool_calls SET state = ?, session_id = ? WHERE tool_call_id = ?",
                    (call.state.value, holder, call.id),
                )
            ]
        )

    def end_call(self, call: ToolCall, state: CallState, reason: str = "") -> asyncio.Future[list[int]]:
        """Writes the call's end, with its result if any."""
        return self._submit([_ended(call, state, reason)])

    def mark_answer_sent(self, call: ToolCall) -> asyncio.Future[list[int]]:
        """Writes that the agent received the whole answer."""
        return self._submit([("UPDATE tool_calls SET told = 1 WHERE tool_call_id = ?", (call.id,))])

    # Reads -----------------------------------------------------------------------------------------------------------

    async def calls_of(self, rollout_id: str, *, after_index: int | None = None) -> list[ToolCallRecord]:
        """Returns a rollout's calls in order of arrival, as journalled: all, or those after an index."""
        least = 0 if after_index is None else after_index + 1
        rows = await self._journal.query(
            "SELECT * FROM tool_calls WHERE rollout_id = ? AND position >= ? ORDER BY position", (rollout_id, least)
        )
        return [_load_call(row) for row in rows]

    async def load(self) -> StoredTools:
        """Returns the state to restore."""
        offers = await self._journal.query("SELECT * FROM tool_offers")
        rollouts = await self._journal.query(
            "SELECT t.* FROM rollout_tools t JOIN rollouts r USING (rollout_id) WHERE r.state != 'closed'"
        )
        calls = await self._journal.query(
            "SELECT t.* FROM tool_calls t JOIN rollouts r USING (rollout_id) WHERE r.state != 'closed'"
            " ORDER BY t.rollout_id, t.position"
        )
        return StoredTools(
            [(row["session_id"], _load_selector(row["selector"]), _load_tools(row["tools"])) for row in offers],
            {row["rollout_id"]: _load_tools(row["tools"]) for row in rollouts},
            [_load_call(row) for row in calls],
        )


def _inserted(call: ToolCall) -> Statement:
    return (
        "INSERT INTO tool_calls (tool_call_id, rollout_id, position, name, arguments, mcp_session,"
        " request_id, body_sha256, received, expires, state) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            call.id,
            call.rollout.id,
            call.index,
            call.tool.name,
            call.arguments,
            call.key.mcp_session,
            call.key.request_id,
            call.key.body_sha256,
            call.received,
            call.expires,
            call.state.value,
        ),
    )


def _ended(call: ToolCall, state: CallState, reason: str = "") -> Statement:
    result = call.result
    return (
        "UPDATE tool_calls SET state = ?, end_reason = ?, ended = ?, result = ?, is_error = ? WHERE tool_call_id = ?",
        (
            state.value,
            reason,
            call.ended_at,
            result.content if result is not None else None,
            int(result is not None and result.is_error),
            call.id,
        ),
    )


def _load_call(row: Row) -> ToolCallRecord:
    content = row["result"]
    return ToolCallRecord(
        id=row["tool_call_id"],
        rollout_id=row["rollout_id"],
        index=row["position"],
        name=row["name"],
        arguments=row["arguments"],
        key=CallKey(row["mcp_session"], row["request_id"], row["body_sha256"]),
        received=row["received"],
        expires=row["expires"],
        state=CallState(row["state"]),
        session_id=row["session_id"],
        result=ToolResult(content, bool(row["is_error"])) if content is not None else None,
        end_reason=row["end_reason"],
        ended_at=row["ended"],
        answer_sent=bool(row["told"]),
        origin=bytes(row["replayed_from"]),
    )


def _dump_tools(tools: Sequence[HostTool]) -> bytes:
    return orjson.dumps([[tool.name, tool.description, tool.schema] for tool in tools])


def _load_tools(data: bytes) -> tuple[HostTool, ...]:
    return tuple(HostTool(*item) for item in orjson.loads(data))


def _dump_selector(selector: Selector) -> bytes:
    labels, rollout_ids = sorted(selector.labels), sorted(selector.rollout_ids)
    return orjson.dumps([selector.run_id, selector.group_id, rollout_ids, labels, selector.namespace])


def _load_selector(data: bytes) -> Selector:
    run_id, group_id, rollout_ids, labels, *more = orjson.loads(data)
    pairs = frozenset((key, value) for key, value in labels)
    # An earlier version wrote no namespace.
    return Selector(run_id, group_id, frozenset(rollout_ids), pairs, more[0] if more else DEFAULT_NAMESPACE)
