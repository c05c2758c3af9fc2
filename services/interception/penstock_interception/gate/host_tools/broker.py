"""Brokers host tools between trainers' hosts and agents: the offers, and each call from request to result (R15).

Invariants:
- a rollout keeps the tools that were offered when it was opened, unchanged, for as long as it is open;
- a call goes to only one session, since tools have side effects. If that session is resumed, it gets the call again
  under the same id; if the session is gone, the call fails. Without a session, a call waits for the resume window;
- the first result from the session that holds the call wins, is on disk before anyone sees it, and ends the call;
- a repeated request of an agent joins its call, or gets the result that the agent never read.

Belongs to one event loop; nothing here waits.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

from penstock_chassis.errors import ResourceExhausted
from penstock_interception.domain.calls import CallState, RolloutSpec
from penstock_interception.domain.deadlines import Clock, Deadlines
from penstock_interception.domain.host_tools import CallKey, HostTool, ToolCallRecord, ToolResult
from penstock_interception.domain.recordings import ReplayedResult
from penstock_interception.domain.results import Accepted, Rejection, RejectionReason
from penstock_interception.domain.state import RolloutTools, Selector, Session, ToolCall
from penstock_interception.gate.context import GateLimits
from penstock_interception.store.commits import recorded
from penstock_interception.store.host_tools import ToolStore

UNREAD_KEPT = 16
"""Results per rollout that its agent has not read, kept in case it repeats the request."""
VERDICTS_KEPT = 65_536
"""Recently accepted results: repeating one of them is not an error."""


ARGUMENTS_INVALID: Final = "ARGUMENTS_INVALID"
"""The arguments do not match the tool's schema; the call was not sent to a host."""


class HostToolBroker:
    """All offers, and the host tool calls of all open rollouts."""

    def __init__(
        self,
        store: ToolStore,
        *,
        clock: Clock,
        sooner: asyncio.Event,
        limits: GateLimits,
    ) -> None:
        """`sooner` is set when `next_deadline` becomes earlier."""
        self.limits = limits.tools
        self._store = store
        self._clock = clock
        self._resume_window_s = limits.leasing.resume_window_s
        self._rejoin_grace_s = limits.rejoin_grace_s
        self._deadlines: Deadlines[tuple[str, str]] = Deadlines(sooner.set)
        self._offers: dict[Session, dict[Selector, tuple[HostTool, ...]]] = {}
        self._rollouts: dict[str, RolloutTools] = {}
        self._calls: dict[str, ToolCall] = {}
        self._waiting: dict[str, ToolCall] = {}
        self._verdicts: OrderedDict[str, tuple[bytes, asyncio.Future[list[int]]]] = OrderedDict()

    # Offers ----------------------------------------------------------------------------------------------------------

    def offer(self, session: Session, selector: Selector, tools: tuple[HostTool, ...]) -> asyncio.Future[list[int]]:
        """Sets the tools that a session offers to later rollouts of a selector; replaces its previous offer for it.

        Raises ResourceExhausted: TOOL_OFFER_LIMIT.
        """
        offers = self._offers.get(session, {})
        if tools and selector not in offers and len(offers) >= self.limits.max_selectors_per_session:
            raise ResourceExhausted(
                f"A session offers tools to at most {self.limits.max_selectors_per_session} selectors."
                " Withdraw unused ones, or offer more tools to one selector.",
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

    def offered_to(self, spec: RolloutSpec) -> list[HostTool]:
        """Returns the tools that such a rollout would be offered now. For equal names, the first offer wins."""
        found: dict[str, HostTool] = {}
        for offers in self._offers.values():
            for selector, tools in offers.items():
                if selector.matches(spec):
                    for tool in tools:
                        found.setdefault(tool.name, tool)
        return list(found.values())

    def session_resumed(self, old: Session, session: Session) -> None:
        """Moves the offers and calls of a resumed session to its successor, which is sent the calls again."""
        offers = self._offers.pop(old, None)
        if offers is not None:
            self._offers[session] = offers
            self._store.move_offers(old.id, session.id)
        for call in list(old.tool_calls.values()):
            del old.tool_calls[call.id]
            self._give(call, session)
        self._serve_waiting()

    def session_gone(self, session: Session) -> None:
        """Ends a session that left or was not resumed: drops its offers and fails its calls."""
        if self._offers.pop(session, None) is not None:
            self._store.drop_offers(session.id)
        for call in list(session.tool_calls.values()):
            self._end(call, CallState.FAILED, "TRAINER_GONE")

    # Rollouts --------------------------------------------------------------------------------------------------------

    def open(self, spec: RolloutSpec, tools: Iterable[HostTool]) -> None:
        """Fixes the tools that were offered to a new rollout; they are written with it."""
        self._rollouts[spec.rollout_id] = RolloutTools(spec, {tool.name: tool for tool in tools})

    def of(self, rollout_id: str) -> Iterable[HostTool]:
        """Returns the tools offered to an open rollout."""
        rollout = self._rollouts.get(rollout_id)
        return rollout.tools.values() if rollout is not None else ()

    def tool(self, rollout_id: str, name: str) -> HostTool | None:
        """Returns a tool offered to an open rollout, or None."""
        rollout = self._rollouts.get(rollout_id)
        return rollout.tools.get(name) if rollout is not None else None

    def close(self, rollout_id: str) -> None:
        """Cancels a closed rollout's calls and frees its state."""
        rollout = self._rollouts.pop(rollout_id, None)
        if rollout is not None:
            for call in list(rollout.calls.values()):
                self._end(call, CallState.CANCELLED, "ROLLOUT_CLOSED")

    # Calls -----------------------------------------------------------------------------------------------------------

    def same_call(self, rollout_id: str, key: CallKey) -> ToolCall | None:
        """Returns the call that a request repeats, if it is open or its result was not read; else None."""
        rollout = self._rollouts.get(rollout_id)
        call = rollout.calls.get(key) if rollout is not None else None
        return call if call is not None and (not call.state.terminal or call.result is not None) else None

    def begin(self, rollout_id: str, tool: HostTool, arguments: bytes, key: CallKey) -> ToolCall:
        """Creates a call, journals it and gives it to a session.

        Raises:
            ResourceExhausted: TOOL_BUDGET_EXHAUSTED (permanent), TOOL_CALL_LIMIT (transient).
        """
        call = self._made(rollout_id, tool, arguments, key)
        self._store.put_call(call).add_done_callback(lambda written: self._written(call, written))
        self._serve(call)
        return call

    def replay(
        self, rollout_id: str, tool: HostTool, arguments: bytes, key: CallKey, replayed: ReplayedResult
    ) -> ToolCall:
        """Records a call that a recorded result answers. No host gets it (R128).

        Raises what `begin` raises: the call counts against the same limits.
        """
        call = self._made(rollout_id, tool, arguments, key)
        call.result, call.origin, call.ended_at = replayed.result, replayed.origin, self._clock.wall()
        call.committed = self._store.put_replayed(call, replayed.recorded.call_id)
        call.committed.add_done_callback(lambda written: self._committed(call, written))
        return call

    def refuse(
        self,
        rollout_id: str,
        tool: HostTool,
        arguments: bytes,
        key: CallKey,
        result: ToolResult,
        reason: str = ARGUMENTS_INVALID,
    ) -> ToolCall:
        """Records a call that is refused for a reason, and `result`, the result for the agent. No host gets it (R15).

        Raises what `begin` raises: the call counts against the same limits.
        """
        call = self._made(rollout_id, tool, arguments, key)
        call.result, call.ended_at = result, self._clock.wall()
        call.committed = self._store.put_refused(call, reason)
        call.committed.add_done_callback(lambda written: self._committed(call, written, reason))
        return call

    def _made(self, rollout_id: str, tool: HostTool, arguments: bytes, key: CallKey) -> ToolCall:
        rollout = self._rollouts[rollout_id]
        budget = rollout.spec.budgets.max_tool_calls
        if rollout.made >= (self.limits.max_calls_per_rollout if budget is None else budget):
            raise ResourceExhausted("The budget of tool calls is used up.", reason="TOOL_BUDGET_EXHAUSTED")
        if sum(not call.state.terminal for call in rollout.calls.values()) >= self.limits.max_open_calls_per_rollout:
            raise ResourceExhausted("Too many tool calls are open.", reason="TOOL_CALL_LIMIT", retry_after_s=1.0)
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
        return call

    def attach(self, call: ToolCall) -> None:
        """Counts an agent connection that waits for this call."""
        call.attached += 1
        self._deadlines.drop(("gone", call.id))

    def detach(self, call: ToolCall) -> None:
        """Counts a lost agent connection. A repeat may rejoin within the grace period; then the call is cancelled."""
        call.attached -= 1
        if call.attached <= 0 and not call.state.terminal:
            self._set_deadline("gone", call, self._rejoin_grace_s)

    def answer_sent(self, call: ToolCall) -> None:
        """Records that the agent received the whole answer."""
        if call.rollout.calls.get(call.key) is call:
            del call.rollout.calls[call.key]
            self._store.mark_answer_sent(call)

    def cancel(self, rollout_id: str, reason: str, mcp_session: str, request_id: str | None = None) -> None:
        """Cancels the agent's calls of an MCP session: one request's, or all."""
        rollout = self._rollouts.get(rollout_id)
        for call in list(rollout.calls.values()) if rollout is not None else ():
            if call.key.mcp_session == mcp_session and request_id in (None, call.key.request_id):
                self._end(call, CallState.CANCELLED, reason)

    def find(self, tool_call_id: str) -> ToolCall | None:
        """Returns an open call, or None."""
        return self._calls.get(tool_call_id)

    def settle(self, session: Session, tool_call_id: str, result: ToolResult) -> Accepted | Rejection:
        """Validates a result. An accepted result takes effect, and goes to the agent, once it is committed."""
        call, digest = self._calls.get(tool_call_id), result.digest()
        before = self._verdicts.get(tool_call_id)
        if before is not None:
            if before[0] == digest:
                return Accepted(tool_call_id, before[1])
            return Rejection(tool_call_id, RejectionReason.ALREADY_DELIVERED, "Another result came first.")
        if call is None:
            return Rejection(tool_call_id, RejectionReason.UNKNOWN_CALL, "No such tool call is open.")
        if call.holder is not session:
            return Rejection(tool_call_id, RejectionReason.NOT_LEASED, "The tool call is leased to another session.")
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
        """Returns when `tick` is due next, on the steady clock; None without deadlines."""
        return self._deadlines.next()

    def tick(self) -> None:
        """Handles every deadline that is due."""
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

    async def restore(self, specs: Iterable[RolloutSpec], session: Callable[[str, str | None], Session]) -> None:
        """Restores these open rollouts' tools and calls from the journal.

        `session` returns a lost session by its id and the namespace of what it holds.
        """
        stored = await self._store.load()
        for session_id, selector, tools in stored.offers:
            self._offers.setdefault(session(session_id, selector.namespace), {})[selector] = tools
        for spec in specs:
            tools = stored.rollouts.get(spec.rollout_id, ())
            self._rollouts[spec.rollout_id] = RolloutTools(spec, {tool.name: tool for tool in tools})
        for record in stored.calls:
            rollout = self._rollouts.get(record.rollout_id)
            if rollout is not None:
                rollout.made = max(rollout.made, record.index + 1)
                self._restore_call(rollout, record, session)

    def _restore_call(
        self, rollout: RolloutTools, record: ToolCallRecord, session: Callable[[str, str | None], Session]
    ) -> None:
        tool = rollout.tools.get(record.name)
        unread = record.result is not None and not record.answer_sent
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
            # At most the full timeout from now: the clock may have been set back.
            expires=min(record.expires, self._clock.wall() + self.limits.call_timeout_s),
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
            call.holder = session(record.session_id, rollout.spec.namespace)
            call.holder.tool_calls[call.id] = call
        else:
            self._serve(call)

    # Private ---------------------------------------------------------------------------------------------------------

    def _keep(self, call: ToolCall) -> None:
        self._calls[call.id] = call
        call.rollout.calls[call.key] = call
        self._set_deadline("expire", call, max(0.0, call.expires - self._clock.wall()))

    def _serve(self, call: ToolCall) -> None:
        """Gives a call to a connected session that offers its tool, or queues it until there is one."""
        ready = [
            session
            for session, offers in self._offers.items()
            if not (session.lost or session.ended)
            and any(call.tool in tools and selector.matches(call.rollout.spec) for selector, tools in offers.items())
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
        """Ends a call, unless it has ended or has a result."""
        if call.state.terminal or call.claimed:
            return
        call.ended_at = self._clock.wall()
        self._store.end_call(call, state, reason)
        holder = call.holder
        self._finish(call, state, reason)
        if holder is not None and state is not CallState.FAILED:
            holder.notify_tool_call_cancelled(call, reason)

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
