"""Host tools and their calls, as plain data. Only `desk.py` changes a call's state."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock_interception.calls import CallState, Opening

if TYPE_CHECKING:
    from penstock_interception.sessions import Session


@dataclass(frozen=True, slots=True)
class HostTool:
    """A tool that a trainer's host offers; `schema` is JSON text as `schemas.canonical` gives it."""

    name: str
    description: str
    schema: str


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool gave back: a JSON object. `is_error`: it failed, and the object says how."""

    content: bytes
    is_error: bool

    @property
    def sha256(self) -> bytes:
        """Of the object's bytes."""
        return hashlib.sha256(self.content).digest()

    def digest(self) -> bytes:
        """SHA-256; equal results are the same result again."""
        return hashlib.sha256(b"\1" + self.content if self.is_error else b"\0" + self.content).digest()


@dataclass(frozen=True, slots=True)
class CallKey:
    """What makes an agent's request recognisable when it is sent again: its MCP session, its JSON-RPC id, its body."""

    mcp_session: str
    request_id: str
    body_sha256: bytes


@dataclass(slots=True, eq=False)
class ToolCall:
    """One call of a host tool. QUEUED (nobody is there) or LEASED (to a session), then one of the terminal states."""

    id: str
    rollout: RolloutTools
    index: int
    tool: HostTool
    arguments: bytes
    key: CallKey
    received: float
    expires: float
    ended: asyncio.Future[None]
    state: CallState = CallState.QUEUED
    holder: Session | None = None
    result: ToolResult | None = None
    committed: asyncio.Future[list[int]] | None = None
    end_reason: str = ""
    ended_at: float | None = None
    attached: int = 0

    @property
    def claimed(self) -> bool:
        """Whether a result was accepted: nothing else can end it any more."""
        return self.result is not None


@dataclass(slots=True, eq=False)
class RolloutTools:
    """What one open rollout is offered, and its calls: those that are open, and those whose answer was not read yet."""

    opening: Opening
    tools: dict[str, HostTool]
    made: int = 0
    calls: OrderedDict[CallKey, ToolCall] = field(default_factory=OrderedDict)

    @property
    def id(self) -> str:
        """The rollout's identifier."""
        return self.opening.rollout_id


@dataclass(frozen=True, slots=True)
class ToolCallRecord:
    """A call as the journal has it."""

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
    told: bool
