"""Host tools and their calls, as plain data. Only `gate.host_tools.broker` changes a call's state."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from penstock_interception.domain.calls import CallState


@dataclass(frozen=True, slots=True)
class HostTool:
    """A tool that a trainer's host offers; `schema` is JSON text from `schemas.canonical`."""

    name: str
    description: str
    schema: str


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool's result, a JSON object. With `is_error` the tool failed and the object describes the failure."""

    content: bytes
    is_error: bool

    @property
    def sha256(self) -> bytes:
        """SHA-256 of the object's bytes."""
        return hashlib.sha256(self.content).digest()

    def digest(self) -> bytes:
        """SHA-256; equal digests mean the same result."""
        return hashlib.sha256(b"\1" + self.content if self.is_error else b"\0" + self.content).digest()


@dataclass(frozen=True, slots=True)
class CallKey:
    """Identifies a repeated request of an agent by its MCP session, JSON-RPC id and body."""

    mcp_session: str
    request_id: str
    body_sha256: bytes


@dataclass(frozen=True, slots=True)
class ToolCallRecord:
    """A call as stored in the journal."""

    id: str
    rollout_id: str
    index: int
    name: str
    arguments: bytes
    key: CallKey
    received: float
    expires: float
    state: CallState
    session_id: str
    result: ToolResult | None
    end_reason: str
    ended_at: float | None
    answer_sent: bool
    origin: bytes = b""
    """The serialised ReplayOrigin of a replayed result."""
