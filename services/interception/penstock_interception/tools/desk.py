"""The desk between agents and the tools of trainers' hosts: who offers what, and each call's way to its result (R15).

Invariants:
- a rollout has the tools that were offered to it when it was opened, as they were then, for as long as it is open;
- a call is given to one session only, whatever happens: tools have side effects. When its session is resumed it is
  given to that one again under its id; when the session is gone the call fails. While nobody is there it waits for the
  resume window;
- the first result of the session that has the call wins, is on disk before anybody hears of it, and ends the call;
- an agent's request that is sent again joins its call, or gets the result that it never read.

Belongs to one event loop; nothing here waits.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import structlog

from penstock_chassis.errors import ResourceExhausted
from penstock_interception.calls import CallState, Opening
from penstock_interception.clock import Clock
from penstock_interception.deadlines import Deadlines
from penstock_interception.ports import Accepted, Rejection, RejectionReason, recorded
from penstock_interception.sessions import Selector, Session
from penstock_interception.tools.model import (
    CallKey,
    HostTool,
    RolloutTools,
    ToolCall,
    ToolCallRecord,
    ToolResult,
)
from penstock_interception.tools.store import ToolStore

_log = structlog.get_logger(__name__)

UNREAD_KEPT = 16
"""Results of a rollout that its agent asked for and did not read, kept for its request to come again."""
VERDICTS_KEPT = 65_536
"""Results that were taken lately: a repeat of one is not an error."""


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """The operator's limits: calls, bytes of JSON, seconds."""

    max_calls_per_rollout: int = 1000
    max_open_calls_per_rollout: int = 16
    max_bytes: int = 256 << 10
    call_timeout_s: float = 600.0
    # Each is looked at whenever a rollout is opened.
    max_selectors_per_session: int = 64


ARGUMENTS_INVALID: Final = "ARGUMENTS_INVALID"
"""Why nobody was asked: what the agent gave does not fit the tool's schema."""


class ToolDesk:
    """All offers, and the host tool calls of all open rollouts."""

    def __init__(
        self,
        store: ToolStore,
        *,
        clock: Clock,
        sooner: Callable[[], None],
        limits: ToolLimits,
        resume_window_s: float,
        rejoin_grace_s: float,
    ) -> None:
        """`sooner` is called when `next_deadline` is sooner than it was."""
        self.limits = limits
        self._store = store
        self._clock = clock
        self._resume_window_s = resume_window_s
        self._rejoin_grace_s = rejoin_grace_s
        self._deadlines: Deadlines[tuple[str, str]] = Deadlines(sooner)
        self._offers: dict[Session, dict[Selector, tuple[HostTool, ...]]] = {}
        self._rollouts: dict[str, RolloutTools] = {}
        self._calls: dict[str, ToolCall] = {}
        self._waiting: dict[str, ToolCall] = {}
        self._verdicts: OrderedDict[str, tuple[bytes, asyncio.Future[list[int]]]] = OrderedDict()

    # Offers ----------------------------------------------------------------------------------------------------------

    def offer(self, session: Session, selector: Selector, tools: tuple[HostTool, ...]) -> asyncio.Future[list[int]]:
        """A session offers these to rollouts opened later, in place of what it offered to this selector before.

        Raises ResourceExhausted: TOOL_OFFER_LIMIT.
        """
        offers = self._offers.get(session, {})
        if tools and selector not in offers and len(offers) >= self.limits.max_selectors_per_session:
            raise ResourceExhausted(
                f"A session offers tools to at most {self.limits.max_selectors_per_session} selectors."
                " Withdraw those that are not needed, or offer more tools to one.",
                reason="TOOL_OFFER_LIMIT",
            )
        self._offers[session] = offers
        offers.pop(selector, None)
        if tools:
            offers[selector] = tools
        if not offers:
            del self._offers[session]
        written = self._store.put_offer(session.id, selector, tools)
        self._serve_waiting()
        return written

    def offered_to(self, opening: Opening) -> list[HostTool]:
        """What a rollout opened so would be offered now. Of one name the first that was offered counts."""
        found: dict[str, HostTool] = {}
        for offers in self._offers.values():
            for selector, tools in offers.items():
                if selector.matches(opening):
                    for tool in tools:
                        found.setdefault(tool.name, tool)
        return list(found.values())

    def session_resumed(self, old: Session, session: Session) -> None:
        """What a session offered is another's now; so are its calls, which that one gets again."""
        offers = self._offers.pop(old, None)
        if offers is not None:
            self._offers[session] = offers
            self._store.move_offers(old.id, session.id)
        for call in list(old.tool_calls.values()):
            del old.tool_calls[call.id]
            self._give(call, session)
        self._serve_waiting()

    def session_gone(self, session: Session) -> None:
        """A session left, or nobody resumed it: its offers go with it, its calls fail."""
        if self._offers.pop(session, None) is not None:
            self._store.drop_offers(session.id)
        for call in list(session.tool_calls.values()):
            self._end(call, CallState.FAILED, "TRAINER_GONE")

    # Rollouts --------------------------------------------------------------------------------------------------------

    def open(self, opening: Opening) -> Iterable[HostTool]:
        """A rollout is opened: what it is offered, to be written down with it."""
        tools = self.offered_to(opening)
        self._rollouts[opening.rollout_id] = RolloutTools(opening, {tool.name: tool for tool in tools})
        return tools

    def of(self, rollout_id: str) -> Iterable[HostTool]:
        """What an open rollout is offered."""
        rollout = self._rollouts.get(rollout_id)
        return rollout.tools.values() if rollout is not None else ()

    def tool(self, rollout_id: str, name: str) -> HostTool | None:
        """A tool that an open rollout is offered."""
        rollout = self._rollouts.get(rollout_id)
        return rollout.tools.get(name) if rollout is not None else None

    def close(self, rollout_id: str) -> None:
        """A rollout is closed: its calls are cancelled, and nothing of it is kept here."""
        rollout = self._rollouts.pop(rollout_id, None)
        if rollout is not None:
            for call in list(rollout.calls.values()):
                self._end(call, CallState.CANCELLED, "ROLLOUT_CLOSED")

    # Calls -----------------------------------------------------------------------------------------------------------

    def same_call(self, rollout_id: str, key: CallKey) -> ToolCall | None:
        """The call that a request repeats: one that is open, or whose result was not read; None when it is new."""
        rollout = self._rollouts.get(rollout_id)
        call = rollout.calls.get(key) if rollout is not None else None
        return call if call is not None and (not call.state.terminal or call.result is not None) else None

    def begin(self, rollout_id: str, tool: HostTool, arguments: bytes, key: CallKey) -> ToolCall:
        """A new call, written down and on its way.

        Raises:
            ResourceExhausted: TOOL_BUDGET_EXHAUSTED (for good), TOOL_CALL_LIMIT (for now).
        """
        call = self._made(rollout_id, tool, arguments, key)
        self._serve(call)
        return call

    def refuse(self, rollout_id: str, tool: HostTool, arguments: bytes, key: CallKey, told: ToolResult) -> ToolCall:
        """A call whose arguments do not hold: nobody is asked, and it is recorded with what the agent is told (R15).

        Raises what `begin` does: it counts as they do.
        """
        call = self._made(rollout_id, tool, arguments, key)
        call.result, call.ended_at = told, self._clock.wall()
        call.committed = self._store.end_call(call, CallState.DELIVERED, ARGUMENTS_INVALID)
        call.committed.add_done_callback(lambda written: self._committed(call, written, ARGUMENTS_INVALID))
        return call

    def _made(self, rollout_id: str, tool: HostTool, arguments: bytes, key: CallKey) -> ToolCall:
        rollout = self._rollouts[rollout_id]
        budget = rollout.opening.budgets.max_tool_calls
        if rollout.made >= (self.limits.max_calls_per_rollout if budget is None else budget):
            raise ResourceExhausted("The budget of tool calls is used up.", reason="TOOL_BUDGET_EXHAUSTED")
        if sum(not call.state.terminal for call in rollout.calls.values()) >= self.limits.max_open_calls_per_rollout:
            raise ResourceExhausted("Too many tool calls are under way.", reason="TOOL_CALL_LIMIT", retry_after_s=1.0)
        now = self._clock.wall()
        call = ToolCall(
            id=secrets.token_hex(16),
            rollout=rollout,
            index=rollout.made,
            tool=tool,
            arguments=arguments,
            key=key,
            received=now,
            expires=now + self.limits.call_timeout_s,
            ended=asyncio.get_running_loop().create_future(),
        )
        rollout.made += 1
        self._keep(call)
        self._store.put_call(call).add_done_callback(lambda written: self._written(call, written))
        return call

    def attach(self, call: ToolCall) -> None:
        """A connection of the agent waits for this call."""
        call.attached += 1
        self._deadlines.drop(("gone", call.id))

    def detach(self, call: ToolCall) -> None:
        """That connection is gone; when it was the last, a repeat may join for a while, then the call is cancelled."""
        call.attached -= 1
        if call.attached <= 0 and not call.state.terminal:
            self._set_deadline("gone", call, self._rejoin_grace_s)

    def told(self, call: ToolCall) -> None:
        """The agent has the whole answer."""
        if call.rollout.calls.get(call.key) is call:
            del call.rollout.calls[call.key]
            self._store.mark_told(call)

    def cancel(self, rollout_id: str, reason: str, mcp_session: str, request_id: str | None = None) -> None:
        """The agent wants no answer any more: to one request of an MCP session, or to any of it."""
        rollout = self._rollouts.get(rollout_id)
        for call in list(rollout.calls.values()) if rollout is not None else ():
            if call.key.mcp_session == mcp_session and request_id in (None, call.key.request_id):
                self._end(call, CallState.CANCELLED, reason)

    def settle(self, session: Session, tool_call_id: str, result: ToolResult) -> Accepted | Rejection:
        """Judges a result. What is accepted counts, and is told to the agent, once it is committed."""
        call, digest = self._calls.get(tool_call_id), result.digest()
        before = self._verdicts.get(tool_call_id)
        if before is not None:
            if before[0] == digest:
                return Accepted(tool_call_id, before[1])
            return Rejection(tool_call_id, RejectionReason.ALREADY_DELIVERED, "Another result came first.")
        if call is None:
            return Rejection(tool_call_id, RejectionReason.UNKNOWN_CALL, "No such tool call is open.")
        if call.holder is not session:
            return Rejection(tool_call_id, RejectionReason.NOT_LEASED, "Another session has this tool call.")
        if len(result.content) > self.limits.max_bytes:
            text = f"result: more than {self.limits.max_bytes} bytes of JSON"
            return Rejection(tool_call_id, RejectionReason.INVALID, "The result is too large.", (text,))
        call.result, call.ended_at = result, self._clock.wall()
        committed = self._store.end_call(call, CallState.DELIVERED)
        call.committed = committed
        self._verdicts[call.id] = (digest, committed)
        if len(self._verdicts) > VERDICTS_KEPT:
            self._verdicts.popitem(last=False)
        committed.add_done_callback(lambda written: self._committed(call, written))
        return Accepted(tool_call_id, committed)

    # Time ------------------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When `tick` is due next, on the steady clock; None when nothing waits for time."""
        return self._deadlines.next()

    def tick(self) -> None:
        """Does what is due."""
        for kind, call_id in self._deadlines.due(self._clock.steady()):
            call = self._calls.get(call_id)
            if call is None:
                continue
            if kind == "expire":
                self._end(call, CallState.EXPIRED, "EXPIRED")
            elif kind == "nobody" and call.holder is None:
                self._end(call, CallState.FAILED, "TRAINER_GONE")
            elif kind == "gone" and call.attached <= 0:
                self._end(call, CallState.CANCELLED, "AGENT_GONE")

    # After a restart -------------------------------------------------------------------------------------------------

    async def restore(self, openings: Iterable[Opening], session: Callable[[str], Session]) -> None:
        """Takes back what the journal has of these open rollouts; `session` gives a lost session to resume."""
        stored = await self._store.load()
        for session_id, selector, tools in stored.offers:
            self._offers.setdefault(session(session_id), {})[selector] = tools
        for opening in openings:
            tools = stored.rollouts.get(opening.rollout_id, ())
            self._rollouts[opening.rollout_id] = RolloutTools(opening, {tool.name: tool for tool in tools})
        for record in stored.calls:
            rollout = self._rollouts.get(record.rollout_id)
            if rollout is not None:
                rollout.made = max(rollout.made, record.index + 1)
                self._restore_call(rollout, record, session)

    def _restore_call(self, rollout: RolloutTools, record: ToolCallRecord, session: Callable[[str], Session]) -> None:
        tool = rollout.tools.get(record.name)
        unread = record.result is not None and not record.told
        if tool is None or (record.state.terminal and not unread):
            return
        call = ToolCall(
            id=record.id,
            rollout=rollout,
            index=record.index,
            tool=tool,
            arguments=record.arguments,
            key=record.key,
            received=record.received,
            expires=record.expires,
            ended=asyncio.get_running_loop().create_future(),
            state=record.state,
            result=record.result,
            ended_at=record.ended_at,
        )
        if record.state.terminal:
            call.ended.set_result(None)
            self._remember_unread(call)
            return
        self._keep(call)
        self._set_deadline("gone", call, self._rejoin_grace_s)
        if record.session_id:
            call.holder = session(record.session_id)
            call.holder.tool_calls[call.id] = call
        else:
            self._serve(call)

    # Private ---------------------------------------------------------------------------------------------------------

    def _keep(self, call: ToolCall) -> None:
        self._calls[call.id] = call
        call.rollout.calls[call.key] = call
        self._set_deadline("expire", call, max(0.0, call.expires - self._clock.wall()))

    def _serve(self, call: ToolCall) -> None:
        """Gives a call to a session that is there and offers its tool, or lets it wait for one."""
        ready = [
            session
            for session, offers in self._offers.items()
            if not (session.lost or session.ended)
            and any(call.tool in tools and selector.matches(call.rollout.opening) for selector, tools in offers.items())
        ]
        if ready:
            self._give(call, min(ready, key=lambda session: len(session.tool_calls)))
        elif call.id not in self._waiting:
            self._waiting[call.id] = call
            self._set_deadline("nobody", call, self._resume_window_s)

    def _serve_waiting(self) -> None:
        for call in list(self._waiting.values()):
            self._serve(call)

    def _give(self, call: ToolCall, session: Session) -> None:
        self._waiting.pop(call.id, None)
        self._deadlines.drop(("nobody", call.id))
        call.state = CallState.LEASED
        call.holder = session
        session.tool_calls[call.id] = call
        self._store.put_holder(call)
        if not call.claimed:
            session.send_tool_call(call)

    def _written(self, call: ToolCall, written: asyncio.Future[list[int]]) -> None:
        if not recorded(written):
            self._end(call, CallState.FAILED, "JOURNAL_FAILED")

    def _committed(self, call: ToolCall, written: asyncio.Future[list[int]], reason: str = "") -> None:
        if not recorded(written):
            call.result = None
            self._finish(call, CallState.FAILED, "JOURNAL_FAILED")
        else:
            self._finish(call, CallState.DELIVERED, reason)

    def _end(self, call: ToolCall, state: CallState, reason: str) -> None:
        """Ends a call that has no result."""
        if call.state.terminal or call.claimed:
            return
        call.ended_at = self._clock.wall()
        self._store.end_call(call, state, reason)
        holder = call.holder
        self._finish(call, state, reason)
        if holder is not None and state is not CallState.FAILED:
            holder.tell_tool_call_cancelled(call, reason)

    def _finish(self, call: ToolCall, state: CallState, reason: str) -> None:
        call.state, call.end_reason = state, reason
        for kind in ("expire", "nobody", "gone"):
            self._deadlines.drop((kind, call.id))
        self._calls.pop(call.id, None)
        self._waiting.pop(call.id, None)
        holder, call.holder = call.holder, None
        if holder is not None:
            holder.tool_calls.pop(call.id, None)
        if call.rollout.calls.get(call.key) is call:
            del call.rollout.calls[call.key]
            if state is CallState.DELIVERED:
                self._remember_unread(call)
        if not call.ended.done():
            call.ended.set_result(None)

    def _remember_unread(self, call: ToolCall) -> None:
        calls = call.rollout.calls
        calls[call.key] = call
        unread = [key for key, other in calls.items() if other.state.terminal]
        for key in unread[:-UNREAD_KEPT]:
            del calls[key]

    def _set_deadline(self, kind: str, call: ToolCall, in_s: float) -> None:
        self._deadlines.set((kind, call.id), self._clock.steady() + in_s)
