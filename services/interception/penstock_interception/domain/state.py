"""The gate's mutable state: rollouts, their calls, trainers' sessions and the queues between them.

All sessions with the same selector share a `SelectorQueue`. A rollout knows its matching queues, and a queue knows its
sessions with credit: a call finds a session, and a session its next call, without a scan. A queue holds exactly the
calls that may be leased now: QUEUED, prompt made, not paused.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from penstock_chassis.errors import FailedPrecondition
from penstock_codec.chat import Message, Sampling
from penstock_interception.domain.agent_keys import AgentKey
from penstock_interception.domain.calls import (
    NO_FACTS,
    Answerer,
    CallRequest,
    CallState,
    ModelFacts,
    Prompt,
    RolloutModel,
    RolloutSpec,
    RolloutState,
    Source,
    Totals,
)
from penstock_interception.domain.completions import Completion, Failure
from penstock_interception.domain.host_tools import CallKey, HostTool, ToolResult
from penstock_interception.domain.recordings import Recording
from penstock_interception.domain.sent_prompts import SentPrompts
from penstock_interception.graph.values import Plan

if TYPE_CHECKING:
    from opentelemetry.trace import Span


@dataclass(slots=True)
class CallTrace:
    """The spans of a traced call. `step` is the current child span."""

    whole: Span
    step: Span | None = None


@dataclass(slots=True, eq=False)
class ToolCall:
    """One host tool call: QUEUED (no session yet) or LEASED (to a session), then in a terminal state."""

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
    origin: bytes = b""
    """The serialised ReplayOrigin of a replayed result."""

    @property
    def claimed(self) -> bool:
        """Whether a result was accepted; nothing else can then end the call."""
        return self.result is not None


@dataclass(slots=True, eq=False)
class RolloutTools:
    """An open rollout's tools, and its calls that are open or whose result was not read yet."""

    spec: RolloutSpec
    tools: dict[str, HostTool]
    made: int = 0
    calls: OrderedDict[CallKey, ToolCall] = field(default_factory=OrderedDict)

    @property
    def id(self) -> str:
        return self.spec.rollout_id


CALL_OVERHEAD_BYTES = 512


DEFAULT_MESSAGE_BYTES = 4 << 20
"""What gRPC's libraries accept unless they are given another limit."""

CALL_BYTES = 48 << 20
"""Limit of one call on the wire; the transport's limit is 64 MiB. A larger call omits what its view asked for, and
fails if it is still larger.
"""


DEFAULT_CREDIT_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Selector:
    """Selects rollouts' calls: a rollout matches if it meets every condition that is set.

    `namespace` None = rollouts of all namespaces.
    """

    run_id: str | None = None
    group_id: str | None = None
    rollout_ids: frozenset[str] = frozenset()
    labels: frozenset[tuple[str, str]] = frozenset()
    namespace: str | None = None
    policy_ids: frozenset[str] = frozenset()

    def matches(self, spec: RolloutSpec) -> bool:
        """Returns whether such a rollout matches: with `policy_ids`, whether it has a call that may match."""
        return (
            (self.run_id is None or self.run_id == spec.run_id)
            and (self.group_id is None or self.group_id == spec.group_id)
            and (not self.rollout_ids or spec.rollout_id in self.rollout_ids)
            and self.labels.issubset(spec.labels)
            and self.namespace in (None, spec.namespace)
            and (not self.policy_ids or any(model.policy_id in self.policy_ids for model in spec.models))
        )

    def wants(self, call: Call) -> bool:
        """Returns whether this call of a rollout that matches is selected."""
        return not self.policy_ids or call.policy_id in self.policy_ids


@dataclass(frozen=True, slots=True)
class Credits:
    """How much a session may hold: leased, unanswered calls, and their bytes."""

    calls: int
    bytes: int = DEFAULT_CREDIT_BYTES


@dataclass(frozen=True, slots=True)
class View:
    """What this session is sent of a call besides its tokens, and the largest message that it accepts, in bytes."""

    messages: bool = False
    body: bool = False
    media: bool = False
    max_message_bytes: int = DEFAULT_MESSAGE_BYTES

    def size_of(self, call: Call, omitted: int = 0) -> int:
        """Estimates the bytes of the call on the wire, without `omitted` tokens of its prompt."""
        plan = call.plan
        prompt = 0 if plan is None else plan.prompt_ids.nbytes - omitted * plan.prompt_ids.itemsize
        messages = self.messages or (plan is not None and not plan.exact)  # without tokens the prompt goes as text
        media = self.media and plan is not None and bool(plan.media)
        return CALL_OVERHEAD_BYTES + prompt + len(call.request.body) * (int(messages or media) + int(self.body))


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """What a session is opened with.

    `has` are the calls that a resuming trainer already has; its other held calls are sent again. None means all of
    them. `lease_s`: the seconds that the leases of a unary request last; None: as long as the session. `lease_request`
    identifies that request when it is repeated; "": it is not to be recognised. `sent_prompts`: prompts that
    calls need not carry again; None: each call carries its whole prompt.
    """

    selector: Selector
    credit: Credits
    identity: str = ""
    view: View = View()
    versions: Mapping[str, int] = field(default_factory=dict)
    """The newest version of each policy; "" = the only trained one of each rollout."""
    has: Container[str] | None = None
    lease_s: float | None = None
    lease_request: str = ""
    sent_prompts: SentPrompts | None = None


@dataclass(slots=True)
class Outbox:
    """Pending messages for a session, drained as a whole."""

    calls: list[Call] = field(default_factory=list)
    cancelled: dict[str, list[str]] = field(default_factory=dict)
    closed: list[str] = field(default_factory=list)
    # In order: the number of open calls for a pause, None for its end.
    pauses: list[int | None] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    tool_calls_cancelled: dict[str, list[str]] = field(default_factory=dict)


class Session:
    """One trainer's connection, or one unary request for calls."""

    def __init__(
        self,
        session_id: str,
        queue: SelectorQueue,
        identity: str,
        credit: Credits,
        view: View,
        sent_prompts: SentPrompts | None = None,
    ) -> None:
        self.id = session_id
        self.queue = queue
        self.identity = identity
        self.credit = credit
        self.view = view
        self.sent_prompts = sent_prompts
        # Leases of a unary request expire after this many seconds; None: they last as long as the session.
        self.lease_s: float | None = None
        self.lease_request = ""
        self.held: dict[str, Call] = {}
        self.held_bytes = 0
        # Host tool calls that it holds and has not answered.
        self.tool_calls: dict[str, ToolCall] = {}
        self.lost = False
        self.ended = False
        # Its last answer, on the wall clock.
        self.answered_at: float | None = None
        self.taken_over = False
        self.resumed = False
        # Position among the ready sessions of its selector queue; -1 if not ready.
        self.ready_serial = -1
        self._outbox = Outbox()
        self._wake = asyncio.Event()

    @property
    def namespace(self) -> str | None:
        """The namespace whose calls it receives; None = all of them."""
        return self.queue.selector.namespace

    @property
    def has_credit(self) -> bool:
        """Whether it may get another call, if that is small enough."""
        if self.lost or self.ended:
            return False
        return len(self.held) < self.credit.calls and (self.held_bytes < self.credit.bytes or not self.held)

    def takes(self, call: Call) -> bool:
        """Whether its credit allows this call. A session without calls takes one of any size."""
        return self.has_credit and (not self.held or self.held_bytes + self._size_of(call) <= self.credit.bytes)

    def _size_of(self, call: Call) -> int:
        return self.view.size_of(call, 0 if self.sent_prompts is None else self.sent_prompts.omitted(call.plan))

    def hold(self, call: Call) -> None:
        """Charges a leased call to the session's credit."""
        call.size = self._size_of(call)
        self.held[call.id] = call
        self.held_bytes += call.size

    def release(self, call: Call) -> None:
        """Returns a call's credit; does nothing for a call that it does not hold."""
        if self.held.pop(call.id, None) is not None:
            self.held_bytes -= call.size

    def send(self, call: Call) -> None:
        """Adds a leased call to the outbox."""
        self._outbox.calls.append(call)
        self._wake.set()

    def notify_cancelled(self, call: Call, reason: str) -> None:
        self._outbox.cancelled.setdefault(reason, []).append(call.id)
        self._wake.set()

    def notify_closed(self, rollout_id: str) -> None:
        if self.sent_prompts is not None:
            self.sent_prompts.forget(rollout_id)
        self._outbox.closed.append(rollout_id)
        self._wake.set()

    def notify_paused(self, open_calls: int) -> None:
        """Notifies the session of a pause, after the calls that were leased before it."""
        self._outbox.pauses.append(open_calls)
        self._wake.set()

    def notify_resumed(self) -> None:
        """Notifies the session that the pause has ended."""
        self._outbox.pauses.append(None)
        self._wake.set()

    def send_tool_call(self, call: ToolCall) -> None:
        """Adds a host tool call to the outbox."""
        self._outbox.tool_calls.append(call)
        self._wake.set()

    def notify_tool_call_cancelled(self, call: ToolCall, reason: str) -> None:
        """Notifies the session that a host tool call was cancelled."""
        self._outbox.tool_calls_cancelled.setdefault(reason, []).append(call.id)
        self._wake.set()

    def end(self) -> None:
        """Ends the session and wakes its waiter."""
        self.ended = True
        self._wake.set()

    def wake(self) -> None:
        """Wakes the waiter, so that the rpc layer can send messages of its own."""
        self._wake.set()

    async def wait(self) -> None:
        """Waits until there is something to send, or the session has ended. For one consumer."""
        await self._wake.wait()
        self._wake.clear()

    def drain_calls(self) -> list[Call]:
        """Removes and returns the calls that were leased but never sent."""
        calls, self._outbox.calls = self._outbox.calls, []
        return calls

    def drain(self) -> Outbox:
        """Removes and returns all pending messages. Calls that the session no longer holds are left out."""
        box, self._outbox = self._outbox, Outbox()
        box.calls = [call for call in box.calls if call.holder is self]
        box.tool_calls = [call for call in box.tool_calls if call.holder is self]
        return box


class SelectorQueue:
    """The sessions of one selector and the calls queued for them."""

    def __init__(self, selector: Selector) -> None:
        self.selector = selector
        self.sessions: dict[str, Session] = {}
        self.rollouts: dict[str, Rollout] = {}
        # Sessions of this selector that have paused it.
        self.paused_by: set[str] = set()
        # The newest announced version of each policy; "" = the only trained one of each rollout.
        self.newest: dict[str, int] = {}
        self._queue: OrderedDict[str, Call] = OrderedDict()
        self._ready: list[tuple[int, int, Session]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def waiting(self) -> int:
        """The queued calls that match this selector, paused ones included."""
        if not self.selector.policy_ids:
            return sum(len(rollout.queued) for rollout in self.rollouts.values())
        return sum(self.selector.wants(call) for one in self.rollouts.values() for call in one.queued.values())

    @property
    def newest_version(self) -> int | None:
        """The newest announced version, of whichever policy; None = none was announced."""
        return max(self.newest.values(), default=None)

    def put(self, call: Call, *, first: bool = False) -> None:
        """Queues a call, at the front with `first` (a call that was leased before)."""
        self._queue[call.id] = call
        if first:
            self._queue.move_to_end(call.id, last=False)

    def drop(self, call: Call) -> bool:
        """Removes a call from the queue, if present; returns whether another is now the first."""
        first = call is self.next_call()
        self._queue.pop(call.id, None)
        return first and bool(self._queue)

    def next_call(self) -> Call | None:
        """Returns the longest-waiting call without removing it."""
        return next(iter(self._queue.values()), None)

    def refresh(self, session: Session) -> None:
        """Updates the session's place among the ready sessions: its credit or its calls have changed."""
        session.ready_serial = -1
        if session.has_credit and session.id in self.sessions:
            self._serial += 1
            session.ready_serial = self._serial
            heapq.heappush(self._ready, (len(session.held), self._serial, session))
            if len(self._ready) > 2 * len(self.sessions) + 64:
                self._ready = [entry for entry in self._ready if entry[1] == entry[2].ready_serial]
                heapq.heapify(self._ready)

    def next_session(self, call: Call, avoid: Session | None = None, *, first: bool = False) -> Session | None:
        """Returns the session that takes the call: of those with room for it, the one that holds the fewest calls;
        among equals, the one that was ready first.

        Never returns `avoid`, nor a session without room for the first call of the queue, for which it must become
        free; `first`: the call goes ahead of that.
        """
        ready, aside, found = self._ready, [], None
        head = None if first else self.next_call()
        while ready and found is None:
            _, serial, session = ready[0]
            if serial != session.ready_serial or not session.has_credit:
                heapq.heappop(ready)
            elif session is avoid or not session.takes(call) or (head is not None and not session.takes(head)):
                aside.append(heapq.heappop(ready))
            else:
                found = session
        for entry in aside:
            heapq.heappush(ready, entry)
        return found


HOLD: Final = "hold"
"""In `Rollout.paused_by`, where it is no session's id."""


@dataclass(slots=True, eq=False)
class Rollout:
    spec: RolloutSpec
    created: float
    facts: ModelFacts = NO_FACTS
    state: RolloutState = RolloutState.OPEN
    closed: float | None = None
    close_reason: str = ""
    exhausted_budget: str = ""
    totals: Totals = field(default_factory=Totals)
    # By id, oldest first; the first is the key that the rollout was opened with.
    keys: dict[bytes, AgentKey] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    # Digests of images that are known to be in the journal.
    images: set[bytes] = field(default_factory=set)
    # Bytes of the images of all admitted calls, by digest.
    image_bytes: dict[bytes, int] = field(default_factory=dict)
    by_retry_key: dict[str, Call] = field(default_factory=dict)
    queued: dict[str, Call] = field(default_factory=dict)
    queues: list[SelectorQueue] = field(default_factory=list)
    # Sessions that have paused this rollout, and HOLD. While there are any, nothing is leased or dispatched, and its
    # clock stands.
    paused_by: set[str] = field(default_factory=set)
    paused_since: float | None = None
    paused_s: float = 0.0
    caller_key: str | None = None
    # The pending writes that open and delete it.
    opened: asyncio.Future[list[int]] | None = None
    deleted: asyncio.Future[list[int]] | None = None
    # Some of its answers could not be read back from the journal.
    damaged: bool = False
    # The driver has stored its capture: `keep_capture` is over.
    stored: bool = False
    # The answers of an earlier attempt, for the same prompts; None = it has none.
    recording: Recording | None = None
    # The gate was started again while it was open.
    restored: bool = False
    # Its calls and graph are only on disk until they are needed, like those of most closed rollouts.
    evicted: bool = False

    @property
    def id(self) -> str:
        """The rollout's identifier, chosen by the client."""
        return self.spec.rollout_id

    @property
    def is_held(self) -> bool:
        """Whether its calls are held until that is revoked, whatever sessions do."""
        return HOLD in self.paused_by

    @property
    def is_kept(self) -> bool:
        """Whether it is closed, and its capture waits to be stored elsewhere."""
        return self.spec.keep_capture and not self.stored and self.state is RolloutState.CLOSED

    def age_s(self, now: float) -> float:
        """Seconds since it was opened, without its pauses."""
        paused = now - self.paused_since if self.paused_since is not None else 0.0
        return now - self.created - self.paused_s - paused

    def check_open(self) -> None:
        """Refuses requests for a rollout that was closed after their key was checked: while their body came, say.

        Raises FailedPrecondition: ROLLOUT_CLOSED.
        """
        if self.state is RolloutState.CLOSED:
            raise FailedPrecondition("The rollout is closed.", reason="ROLLOUT_CLOSED")

    def open_calls(self) -> list[Call]:
        """The rollout's calls that have not ended."""
        return [call for call in self.calls if not call.state.terminal] if self.totals.open else []


@dataclass(slots=True, eq=False)
class Call:
    """One model call. A waiting call holds no thread; its body is dropped from memory when it ends."""

    id: str
    rollout: Rollout
    index: int
    request: CallRequest
    received: float
    expires: float
    # As requested, limited by the budgets and the context.
    sampling: Sampling
    ended: asyncio.Future[None]
    state: CallState = CallState.QUEUED
    prompt: Prompt | None = None
    # The prompt's tokens; dropped when the call ends, since the graph then has them.
    plan: Plan | None = None
    # The digest of the accepted answer, and the commit that makes it durable.
    accepted_digest: bytes | None = None
    committed: asyncio.Future[list[int]] | None = None
    completion: Completion | None = None
    failure: Failure | None = None
    message: Message | None = None
    injected: bool = False
    answerer: Answerer | None = None
    chain_index: int | None = None
    end_reason: str = ""
    chain_sha256: bytes = b""
    leased_at: float | None = None
    ended_at: float | None = None
    leases: int = 0
    lease_id: str = ""
    lease_s: float | None = None
    # The unary request that it is leased to, which may be repeated; "": none that is recognised.
    lease_request: str = ""
    min_policy_version: int | None = None
    holder: Session | None = None
    # Answered by the call's model source, not by a trainer.
    delegated: bool = False
    # Digest of the tools that its answer may call; empty: none. Not in the journal, which has the body of an open call.
    callable_sha256: bytes = b""
    # Position of its model in the rollout's; None: not chosen yet, or the rollout has one model.
    model: int | None = None
    # The policy that shall answer, or did; "" with one model.
    policy_id: str = ""
    attached: int = 0
    http_attempts: int = 1
    # Whether the agent confirmed that it received the whole answer.
    answer_sent: bool = False
    # Whether its insert was submitted to the journal, where writes keep their order; it need not be on disk yet.
    submitted: bool = False
    size: int = 0
    # Whether its run has been charged for it; not yet while a recording may answer it.
    is_charged: bool = True
    # The task of the service's own answer; cancelled when the call ends otherwise.
    work: asyncio.Task[None] | asyncio.Task[bool] | None = None
    # When an answer was first rejected for its old weights.
    stale_since: float | None = None
    # Its spans, if traced.
    trace: CallTrace | None = None

    @property
    def of_model(self) -> RolloutModel | None:
        """The model that it was chosen for; None with one model."""
        return None if self.model is None else self.rollout.spec.models[self.model]

    @property
    def source(self) -> Source:
        """The model source that answers it, unless a trainer does."""
        model = self.of_model
        return self.rollout.spec.source if model is None or model.source is None else model.source

    @property
    def thinks_as_agent_asks(self) -> bool:
        """Whether neither the rollout's owner nor a trainer has said whether it is to think."""
        override = self.rollout.spec.sampling_override.thinking
        return override is None and self.sampling.thinking == self.request.sampling.thinking

    @property
    def facts(self) -> ModelFacts:
        """The facts of `source`."""
        facts, position = self.rollout.facts, self.model
        own = facts.of_models[position] if position is not None and position < len(facts.of_models) else None
        return facts if own is None else own

    @property
    def offered(self) -> bool:
        """Whether its prompt is made, so that it can be answered."""
        return self.plan is not None

    @property
    def claimed(self) -> bool:
        """Whether an answer was accepted; nothing else can then end the call."""
        return self.accepted_digest is not None

    def claim(self, digest: bytes, committed: asyncio.Future[list[int]]) -> None:
        """Accepts an answer: from now on nothing but the end of its commit ends the call."""
        self.accepted_digest, self.committed = digest, committed
