"""Recordings in the gate's journal: the answers of an earlier attempt at a rollout, and where its calls diverged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from pydantic import TypeAdapter

from penstock_chassis.journal import Journal, Statement
from penstock_interception.domain.recordings import Divergence, Point, RecordedCall, RecordedTool, Recording

Submit: TypeAlias = Callable[[Sequence[Statement]], asyncio.Future[list[int]]]
"""Queues a write in order, and logs its failure even if no caller waits for it."""

SCHEMA: Final = """
CREATE TABLE recordings (
    rollout_id TEXT PRIMARY KEY REFERENCES rollouts ON DELETE CASCADE, exact INTEGER NOT NULL,
    calls INTEGER NOT NULL, size INTEGER NOT NULL, divergences BLOB NOT NULL
) STRICT;
CREATE TABLE recorded_calls (
    rollout_id TEXT NOT NULL REFERENCES rollouts ON DELETE CASCADE, position INTEGER NOT NULL, call_id TEXT NOT NULL,
    parent_call_id TEXT NOT NULL, keep INTEGER NOT NULL, prompt_sha256 BLOB NOT NULL, body_sha256 BLOB NOT NULL,
    is_side INTEGER NOT NULL, answer BLOB NOT NULL, PRIMARY KEY (rollout_id, position), UNIQUE (rollout_id, call_id)
) STRICT;
"""
HOST_TOOLS: Final = """
CREATE TABLE recorded_tools (
    rollout_id TEXT NOT NULL REFERENCES rollouts ON DELETE CASCADE, position INTEGER NOT NULL,
    tool_call_id TEXT NOT NULL, digest BLOB NOT NULL, result BLOB NOT NULL, used INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (rollout_id, position), UNIQUE (rollout_id, tool_call_id)
) STRICT;
ALTER TABLE tool_calls ADD COLUMN replayed_from BLOB NOT NULL DEFAULT x'';
ALTER TABLE recorded_calls ADD COLUMN refused INTEGER NOT NULL DEFAULT 0;
"""
BRANCHES: Final = """
ALTER TABLE recordings ADD COLUMN point_call_id TEXT NOT NULL DEFAULT '';
ALTER TABLE recorded_calls ADD COLUMN point TEXT NOT NULL DEFAULT '';
"""
"""Adds the call at which a branch leaves its parent: the branch's own, and the recorded one."""
_DIVERGENCES: Final = TypeAdapter(list[Divergence])


@dataclass(frozen=True, slots=True)
class StoredCall:
    """A recorded call with `answer`: the serialised call as it came, opaque here."""

    call: RecordedCall
    answer: bytes


@dataclass(frozen=True, slots=True)
class StoredTool:
    """A recorded host tool call with `result`: the serialised call as it came, opaque here."""

    tool: RecordedTool
    result: bytes


class RecordingStore:
    """The journal's tables of recordings."""

    def __init__(self, journal: Journal, submit: Submit) -> None:
        self._journal = journal
        self._submit = submit

    def put_calls(
        self,
        rollout_id: str,
        recording: Recording,
        calls: Sequence[StoredCall],
        size: int,
        tools: Sequence[StoredTool] = (),
    ) -> asyncio.Future[list[int]]:
        """Inserts recorded calls after those that are there, in one transaction; `size` is that of all of them."""
        first = recording.count
        opened: Statement = (
            "INSERT INTO recordings VALUES (?, ?, ?, ?, ?, '') ON CONFLICT DO UPDATE SET calls = excluded.calls,"
            " size = excluded.size",
            (rollout_id, int(recording.exact), first + len(calls), size, b"[]"),
        )
        put: list[Statement] = [
            (
                "INSERT INTO recorded_calls VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?)",
                (
                    rollout_id,
                    first + index,
                    item.call.call_id,
                    item.call.parent_call_id,
                    item.call.keep,
                    item.call.prompt_sha256,
                    item.call.body_sha256,
                    int(item.call.is_side),
                    item.answer,
                    item.call.point.value,
                ),
            )
            for index, item in enumerate(calls)
        ]
        put += [
            (
                "INSERT INTO recorded_tools (rollout_id, position, tool_call_id, digest, result)"
                " VALUES (?, ?, ?, ?, ?)",
                (rollout_id, recording.tools + index, stored.tool.call_id, stored.tool.digest, stored.result),
            )
            for index, stored in enumerate(tools)
        ]
        return self._submit([opened, *put])

    def put_divergences(self, rollout_id: str, recording: Recording) -> asyncio.Future[list[int]]:
        """Writes where a rollout's calls diverged."""
        changed: Statement = (
            "UPDATE recordings SET divergences = ? WHERE rollout_id = ?",
            (_DIVERGENCES.dump_json(recording.divergences), rollout_id),
        )
        return self._submit([changed])

    def put_point(self, rollout_id: str, recording: Recording) -> asyncio.Future[list[int]]:
        """Writes which call of a branch is the one at which it leaves its parent."""
        changed: Statement = (
            "UPDATE recordings SET point_call_id = ? WHERE rollout_id = ?",
            (recording.point_call_id, rollout_id),
        )
        return self._submit([changed])

    def drop_calls(self, rollout_id: str) -> asyncio.Future[list[int]]:
        """Deletes the recorded calls of a closed rollout; what it counts stays."""
        return self._submit([
            ("DELETE FROM recorded_calls WHERE rollout_id = ?", (rollout_id,)),
            ("DELETE FROM recorded_tools WHERE rollout_id = ?", (rollout_id,)),
        ])  # fmt: skip

    async def tool_call(self, rollout_id: str, call_id: str) -> bytes:
        """Returns a recorded host tool call as it came; empty if there is none."""
        rows = await self._journal.query(
            "SELECT result FROM recorded_tools WHERE rollout_id = ? AND tool_call_id = ?", (rollout_id, call_id)
        )
        return bytes(rows[0][0]) if rows else b""

    def put_refused(self, rollout_id: str, call_id: str) -> asyncio.Future[list[int]]:
        """Writes that a recorded answer was refused, being too old, say: it answers no call any more."""
        return self._submit([(
            "UPDATE recorded_calls SET refused = 1 WHERE rollout_id = ? AND call_id = ?", (rollout_id, call_id),
        )])  # fmt: skip

    async def answer(self, rollout_id: str, call_id: str) -> bytes:
        """Returns a recorded call as it came; empty if there is none."""
        rows = await self._journal.query(
            "SELECT answer FROM recorded_calls WHERE rollout_id = ? AND call_id = ?", (rollout_id, call_id)
        )
        return bytes(rows[0][0]) if rows else b""

    async def load(self, rollout_id: str, *, is_open: bool) -> Recording | None:
        """Returns a rollout's recording, as if it had answered no call; of a closed rollout only what it counts."""
        rows = await self._journal.query("SELECT * FROM recordings WHERE rollout_id = ?", (rollout_id,))
        if not rows:
            return None
        recording = Recording(exact=bool(rows[0]["exact"]), count=rows[0]["calls"], size=rows[0]["size"])
        recording.divergences = _DIVERGENCES.validate_json(rows[0]["divergences"])
        recording.point_call_id = rows[0]["point_call_id"]
        if is_open:
            recording.count = 0
            calls = await self._journal.query(
                "SELECT call_id, parent_call_id, keep, prompt_sha256, body_sha256, is_side, refused, point"
                " FROM recorded_calls"
                " WHERE rollout_id = ? ORDER BY position",
                (rollout_id,),
            )
            recording.add(
                RecordedCall(
                    row["call_id"],
                    row["parent_call_id"],
                    row["keep"],
                    row["prompt_sha256"],
                    row["body_sha256"],
                    bool(row["is_side"]),
                    Point(row["point"]),
                )
                for row in calls
            )
            for row in calls:
                if row["refused"]:
                    recording.use(row["call_id"])
            tools = await self._journal.query(
                "SELECT tool_call_id, digest, used FROM recorded_tools WHERE rollout_id = ? ORDER BY position",
                (rollout_id,),
            )
            recording.add_tools(RecordedTool(row["tool_call_id"], row["digest"]) for row in tools if not row["used"])
            recording.used_tools(row["tool_call_id"] for row in tools if row["used"])
            if recording.point is not None and recording.point.point is Point.SAMPLED and recording.point_call_id:
                recording.use(recording.point.call_id)
        return recording
