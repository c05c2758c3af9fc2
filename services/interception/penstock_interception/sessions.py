"""Trainers at the gate: sessions, their credits, and lanes that bring calls to them without looking at every session.

All sessions with the same selector share a `Lane`. A rollout knows the lanes that match it and a lane the sessions that
have credit, so a call finds its session, and a session its next call, without a scan. A lane's queue holds exactly the
calls that may be leased now: QUEUED, prompt made, not held back by anybody.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock_interception.calls import Call, Opening, Rollout

if TYPE_CHECKING:
    from penstock_interception.tools.model import ToolCall

CALL_OVERHEAD_BYTES = 512
CALL_BYTES = 48 << 20
"""The most that one call takes on the wire, below the transport's limit of 64 MiB: it goes without what its view asked
for where it would be larger, and fails where it is larger all the same.
"""
DEFAULT_CREDIT_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Selector:
    """Which rollouts' calls are wanted: those that match every condition that is set."""

    run_id: str | None = None
    group_id: str | None = None
    rollout_ids: frozenset[str] = frozenset()
    labels: frozenset[tuple[str, str]] = frozenset()

    def matches(self, opening: Opening) -> bool:
        """Whether a rollout opened so is wanted."""
        return (
            (self.run_id is None or self.run_id == opening.run_id)
            and (self.group_id is None or self.group_id == opening.group_id)
            and (not self.rollout_ids or opening.rollout_id in self.rollout_ids)
            and self.labels.issubset(opening.labels)
        )


@dataclass(frozen=True, slots=True)
class Credits:
    """How much a session can hold: calls leased and not answered, and their bytes."""

    calls: int
    bytes: int = DEFAULT_CREDIT_BYTES


@dataclass(frozen=True, slots=True)
class View:
    """What a call carries to this session beside its tokens."""

    messages: bool = False
    body: bool = False

    def size_of(self, call: Call) -> int:
        """About how many bytes the call is on the wire."""
        plan = call.plan
        prompt = 0 if plan is None else plan.prompt_ids.nbytes
        messages = self.messages or (plan is not None and not plan.exact)  # what has no tokens goes as text
        return CALL_OVERHEAD_BYTES + prompt + len(call.arrival.body) * (int(messages) + int(self.body))


@dataclass(slots=True)
class Outbox:
    """What a session is to be told, drained as a whole."""

    calls: list[Call] = field(default_factory=list)
    cancelled: dict[str, list[str]] = field(default_factory=dict)
    closed: list[str] = field(default_factory=list)
    # In order: the open calls at the moment of a pause, None for its end.
    pauses: list[int | None] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    tool_calls_cancelled: dict[str, list[str]] = field(default_factory=dict)


class Session:
    """One trainer's connection, or one unary request for calls."""

    def __init__(self, session_id: str, lane: Lane, identity: str, credit: Credits, view: View) -> None:
        self.id = session_id
        self.lane = lane
        self.identity = identity
        self.credit = credit
        self.view = view
        # Leases of a unary request end by themselves after this many seconds; None: they last as long as the session.
        self.lease_s: float | None = None
        self.held: dict[str, Call] = {}
        self.held_bytes = 0
        # Host tool calls that it was given and has not answered.
        self.tool_calls: dict[str, ToolCall] = {}
        self.lost = False
        self.ended = False
        # When it answered last, on the wall clock.
        self.answered_at: float | None = None
        self.taken_over = False
        self.resumed = False
        # Position among the lane's ready sessions; -1 = not ready.
        self.ready_serial = -1
        self._outbox = Outbox()
        self._wake = asyncio.Event()

    @property
    def has_credit(self) -> bool:
        """Whether it may get another call. One call always goes, however large it is."""
        if self.lost or self.ended:
            return False
        return len(self.held) < self.credit.calls and (self.held_bytes < self.credit.bytes or not self.held)

    def hold(self, call: Call) -> None:
        """Counts a leased call against the credit."""
        call.size = self.view.size_of(call)
        self.held[call.id] = call
        self.held_bytes += call.size

    def release(self, call: Call) -> None:
        """Gives a call's credit back; safe for a call that it does not hold."""
        if self.held.pop(call.id, None) is not None:
            self.held_bytes -= call.size

    def send(self, call: Call) -> None:
        """Puts a leased call into the outbox."""
        self._outbox.calls.append(call)
        self._wake.set()

    def tell_cancelled(self, call: Call, reason: str) -> None:
        """Says that a call needs no answer any more."""
        self._outbox.cancelled.setdefault(reason, []).append(call.id)
        self._wake.set()

    def tell_closed(self, rollout_id: str) -> None:
        """Says that a rollout is closed."""
        self._outbox.closed.append(rollout_id)
        self._wake.set()

    def tell_paused(self, open_calls: int) -> None:
        """Says that nothing is leased any more; what was leased before is told before."""
        self._outbox.pauses.append(open_calls)
        self._wake.set()

    def tell_resumed(self) -> None:
        """Says that calls flow again."""
        self._outbox.pauses.append(None)
        self._wake.set()

    def send_tool_call(self, call: ToolCall) -> None:
        """Puts a host tool call into the outbox."""
        self._outbox.tool_calls.append(call)
        self._wake.set()

    def tell_tool_call_cancelled(self, call: ToolCall, reason: str) -> None:
        """Says that a host tool call needs no result any more."""
        self._outbox.tool_calls_cancelled.setdefault(reason, []).append(call.id)
        self._wake.set()

    def end(self) -> None:
        """Ends whoever waits on this session."""
        self.ended = True
        self._wake.set()

    def wake(self) -> None:
        """Lets whoever waits look again, for what the rpc layer itself has to send."""
        self._wake.set()

    async def wait(self) -> None:
        """Waits until there is something to send, or the session has ended. For one consumer."""
        await self._wake.wait()
        self._wake.clear()

    def drain_calls(self) -> list[Call]:
        """Calls that were leased but never sent."""
        calls, self._outbox.calls = self._outbox.calls, []
        return calls

    def drain(self) -> Outbox:
        """Everything there is to send now. A call that is no longer held (cancelled meanwhile) is left out."""
        box, self._outbox = self._outbox, Outbox()
        box.calls = [call for call in box.calls if call.holder is self]
        box.tool_calls = [call for call in box.tool_calls if call.holder is self]
        return box


class Lane:
    """The sessions of one selector and the calls that wait for them."""

    def __init__(self, selector: Selector) -> None:
        self.selector = selector
        self.sessions: dict[str, Session] = {}
        self.rollouts: dict[str, Rollout] = {}
        # Sessions of this lane that hold its calls back.
        self.paused_by: set[str] = set()
        self.newest_version: int | None = None
        self._queue: OrderedDict[str, Call] = OrderedDict()
        self._ready: list[tuple[int, int, Session]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, call: Call, *, first: bool = False) -> None:
        """Queues a call; `first` for one that was leased before."""
        self._queue[call.id] = call
        if first:
            self._queue.move_to_end(call.id, last=False)

    def drop(self, call: Call) -> None:
        """Takes a call out of the queue, if it is there."""
        self._queue.pop(call.id, None)

    def next_call(self) -> Call | None:
        """The call that waits longest, left in the queue."""
        return next(iter(self._queue.values()), None)

    def refresh(self, session: Session) -> None:
        """Notes whether a session can take a call, and how many it holds."""
        session.ready_serial = -1
        if session.has_credit and session.id in self.sessions:
            self._serial += 1
            session.ready_serial = self._serial
            heapq.heappush(self._ready, (len(session.held), self._serial, session))
            if len(self._ready) > 2 * len(self.sessions) + 64:
                self._ready = [entry for entry in self._ready if entry[1] == entry[2].ready_serial]
                heapq.heapify(self._ready)

    def next_session(self, avoid: Session | None = None) -> Session | None:
        """The session with credit that holds the fewest calls, the one that waits longest among equals.

        Another one than `avoid`.
        """
        ready, aside = self._ready, None
        while ready:
            if ready[0][1] != ready[0][2].ready_serial or not ready[0][2].has_credit:
                heapq.heappop(ready)
            elif ready[0][2] is avoid:
                aside = heapq.heappop(ready)
            else:
                break
        found = ready[0][2] if ready else None
        if aside is not None:
            heapq.heappush(ready, aside)
        return found
