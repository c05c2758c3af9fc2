"""Rollouts and calls at the gate, as plain data. Only `gate.py` changes their state.

A call is QUEUED -> LEASED (to a trainer) or DISPATCHED (to the rollout's model source) -> DELIVERED | FAILED |
CANCELLED | EXPIRED, and back from LEASED to QUEUED when the one who held it is gone. The last four are terminal;
`Call.ended` is set exactly then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, TypeAlias

from penstock_codec import ControlTokens
from penstock_codec.chat import Message, Sampling
from penstock_codec.quick import quick
from penstock_interception.budgets import Budgets, RunBudgets, Spent
from penstock_interception.completions import Completion, Failure
from penstock_interception.graph.model import CallClass, Plan
from penstock_interception.tokens import Grant, TokenTerms

if TYPE_CHECKING:
    from penstock_interception.observing import CallTrace
    from penstock_interception.sessions import Lane, Session


class Mode(StrEnum):
    """Who answers an agent's calls, and what is captured."""

    BLACK_BOX = "black_box"
    TRANSPARENT_PROXY = "transparent_proxy"
    INTERCEPTION_GATE = "interception_gate"


class Dialect(StrEnum):
    """The wire dialect of an agent's call."""

    CHAT_COMPLETIONS = "chat_completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    GENERATE_CONTENT = "generate_content"


class CallState(StrEnum):
    """Where a call stands."""

    QUEUED = "queued"
    LEASED = "leased"
    DISPATCHED = "dispatched"
    DELIVERED = "delivered"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    terminal: bool
    """Whether it never changes again."""

    def __init__(self, value: str) -> None:
        self.terminal = value not in ("queued", "leased", "dispatched")


class Answerer(StrEnum):
    """Who answered a call."""

    TRAINER = "trainer"
    INFERENCE = "inference"
    UPSTREAM = "upstream"


class RolloutState(StrEnum):
    """Whether a rollout's agent may call."""

    OPEN = "open"
    EXHAUSTED = "exhausted"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """How text becomes tokens and back: a parser's name, "" for what the source or its template says."""

    parser: str = ""
    control_tokens: ControlTokens = ControlTokens.PLAIN


@dataclass(frozen=True, slots=True)
class InferenceRef:
    """An inference service that the operator configured; "" is the default one."""

    name: str = ""
    adapter: str = ""
    kind: Literal["inference"] = "inference"
    codec: CodecChoice = CodecChoice()


@dataclass(frozen=True, slots=True)
class TokenizerRef:
    """A tokenizer that the operator configured, without an engine: for trainers with their own."""

    name: str
    kind: Literal["tokenizer"] = "tokenizer"
    codec: CodecChoice = CodecChoice()


@dataclass(frozen=True, slots=True)
class NamedUpstream:
    """An OpenAI-compatible endpoint that the operator configured, with the operator's key."""

    name: str
    model: str = ""
    kind: Literal["upstream"] = "upstream"


@dataclass(frozen=True, slots=True)
class CallerUpstream:
    """An endpoint of the caller's choice. Its key lives in memory only, outside this value (`Rollout.caller_key`)."""

    base_url: str
    model: str = ""
    kind: Literal["caller"] = "caller"


Source: TypeAlias = InferenceRef | TokenizerRef | NamedUpstream | CallerUpstream


@dataclass(frozen=True, slots=True)
class AgentHints:
    """How to recognise an agent's auxiliary calls and sessions, from its spec."""

    title_system_prompts: tuple[str, ...] = ()
    compaction_system_prompts: tuple[str, ...] = ()
    session_headers: tuple[str, ...] = ()
    volatile_line_patterns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PolicyBounds:
    """Which weights may answer: `min_version` or newer; at most `max_staleness` older than the newest announced."""

    min_version: int | None = None
    max_staleness: int | None = None


@dataclass(frozen=True, slots=True)
class Opening:
    """Everything that OpenRollout said, the caller's key apart. Two equal openings are the same request."""

    request_id: str
    rollout_id: str
    mode: Mode
    source: Source = InferenceRef()
    group_id: str | None = None
    run_id: str | None = None
    labels: tuple[tuple[str, str], ...] = ()
    dialects: tuple[Dialect, ...] = ()
    budgets: Budgets = Budgets()  # noqa: RUF009 - immutable
    model_name: str = ""
    hints: AgentHints = AgentHints()
    policy: PolicyBounds = PolicyBounds()
    task_id: str | None = None
    group_index: int | None = None
    sampling_override: Sampling = Sampling()  # noqa: RUF009 - immutable
    run_budgets: RunBudgets | None = None
    token_terms: TokenTerms = TokenTerms()  # noqa: RUF009 - immutable


@quick
@dataclass(frozen=True, slots=True)
class Prompt:
    """Where a call stands in its rollout's graph: kept when the plan with its tokens is not."""

    count: int
    shared_count: int
    call_class: CallClass
    branch_id: str
    parent_call_id: str | None

    @classmethod
    def of(cls, plan: Plan) -> Prompt:
        """The facts of a plan."""
        return cls(
            int(plan.prompt_ids.size), plan.shared_prefix_len, plan.call_class, plan.branch_id, plan.parent_call_id
        )


@quick
@dataclass(frozen=True, slots=True)
class Arrival:
    """What the ingress knows of a call when it comes in."""

    dialect: Dialect
    body: bytes
    body_sha256: bytes
    retry_key: str
    stream: bool
    # As the agent asked, after the rollout's overrides.
    sampling: Sampling
    model_requested: str
    tools_sha256: bytes = b""
    normalisations: tuple[str, ...] = ()
    agent_session: tuple[tuple[str, str], ...] = ()
    # Of the body, which is not kept in memory, nor anywhere in black box mode.
    body_bytes: int = 0
    # The budget that lowered `max_tokens` to what was left of it; "" when none did.
    bounded_by: str = ""
    # W3C trace context that the agent sent; "" where nothing is traced.
    trace_parent: str = ""

    def without_body(self) -> Arrival:
        """The same with an empty body. Each call asks for it, and `dataclasses.replace` costs several times as much."""
        return Arrival(
            self.dialect,
            b"",
            self.body_sha256,
            self.retry_key,
            self.stream,
            self.sampling,
            self.model_requested,
            self.tools_sha256,
            self.normalisations,
            self.agent_session,
            self.body_bytes,
            self.bounded_by,
            self.trace_parent,
        )


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of the model that a rollout talks to. Kept with the rollout, so that a restart needs nobody."""

    model: str = ""
    tokenizer_sha256: str = ""
    template_sha256: str = ""
    parser: str = ""
    control_tokens: ControlTokens = ControlTokens.PLAIN
    vocabulary_size: int | None = None
    max_context_tokens: int | None = None
    # An upstream that tells the token ids of prompt and completion, and logprobs, when it is asked.
    tells_tokens: bool = False

    @property
    def codec(self) -> CodecChoice:
        """How text becomes tokens and back."""
        return CodecChoice(self.parser, self.control_tokens)


@dataclass(slots=True)
class Totals:
    """Counts over a rollout's calls, and why the one that failed last did."""

    calls: int = 0
    delivered: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    last_failure_reason: str = ""
    last_failure_retriable: bool = False
    last_unanswered: bool = False
    request_bytes: int = 0
    # Requests that a used-up budget refused: they are no calls.
    refused: int = 0

    @property
    def open(self) -> int:
        """Calls that are not ended."""
        return self.calls - self.delivered - self.failed - self.cancelled - self.expired

    @property
    def spent(self) -> Spent:
        """What of it budgets count."""
        return Spent(self.calls, self.prompt_tokens, self.completion_tokens, self.request_bytes)


@dataclass(slots=True, eq=False)
class Rollout:
    """One rollout at the gate."""

    opening: Opening
    created: float
    facts: ModelFacts = ModelFacts()
    state: RolloutState = RolloutState.OPEN
    closed: float | None = None
    close_reason: str = ""
    exhausted_budget: str = ""
    totals: Totals = field(default_factory=Totals)
    # By id, oldest first; the first is the opening's.
    grants: dict[bytes, Grant] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    by_retry_key: dict[str, Call] = field(default_factory=dict)
    queued: dict[str, Call] = field(default_factory=dict)
    lanes: list[Lane] = field(default_factory=list)
    # Sessions that hold this rollout's calls back; while there are any, nothing is leased or dispatched and time stands
    # still.
    holds: set[str] = field(default_factory=set)
    held_since: float | None = None
    paused_s: float = 0.0
    caller_key: str | None = None
    # The writes that open and delete it, while they are under way.
    opened: asyncio.Future[list[int]] | None = None
    deleted: asyncio.Future[list[int]] | None = None
    # Not all of its answers could be read back from the journal.
    damaged: bool = False
    # Its calls and graph are on disk only, until somebody asks for them: so it is with most closed rollouts.
    shelved: bool = False

    @property
    def id(self) -> str:
        """The client's identifier of the rollout."""
        return self.opening.rollout_id

    def age_s(self, now: float) -> float:
        """Seconds since it was opened, those not counted in which its calls were held."""
        held = now - self.held_since if self.held_since is not None else 0.0
        return now - self.created - self.paused_s - held

    @property
    def labels(self) -> Mapping[str, str]:
        """As a mapping."""
        return dict(self.opening.labels)


@dataclass(slots=True, eq=False)
class Call:
    """One model call. A waiting one holds no thread; its body is dropped from memory when it ends."""

    id: str
    rollout: Rollout
    index: int
    arrival: Arrival
    received: float
    expires: float
    # What was asked for, bounded by the budgets and the context.
    sampling: Sampling
    ended: asyncio.Future[None]
    state: CallState = CallState.QUEUED
    prompt: Prompt | None = None
    # The prompt itself; dropped when the call ends, since the graph has its tokens then.
    plan: Plan | None = None
    # The answer that came first, from the moment it was accepted, and the commit that makes it durable.
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
    min_policy_version: int | None = None
    holder: Session | None = None
    # The rollout's model source answers it, not a trainer.
    delegated: bool = False
    attached: int = 0
    http_attempts: int = 1
    # Whether the answer's last byte was written to a connection that was still open.
    told: bool = False
    # Whether it is in the journal: from the end of its admission on.
    journalled: bool = False
    size: int = 0
    # Runs while the service itself answers the call; cancelled when the call ends by other means.
    work: asyncio.Task[None] | None = None
    # When an answer was refused first because its weights were too old.
    stale_since: float | None = None
    # Its spans, where it is traced.
    trace: CallTrace | None = None

    @property
    def offered(self) -> bool:
        """Whether its prompt is made, so that somebody can answer it."""
        return self.plan is not None

    @property
    def claimed(self) -> bool:
        """Whether an answer was accepted: nothing else can end it any more."""
        return self.accepted_digest is not None


def count_ended(call: Call, totals: Totals) -> None:
    """Adds a call that has ended to the totals of its rollout."""
    name = call.state.value
    setattr(totals, name, getattr(totals, name) + 1)
    if call.state is CallState.FAILED and call.failure is not None:
        totals.last_failure_reason = call.failure.reason
        totals.last_failure_retriable = call.failure.retriable
    if call.state is not CallState.CANCELLED:
        may_pass = call.failure is None or call.failure.retriable
        totals.last_unanswered = call.state is not CallState.DELIVERED and may_pass
    prompt, completion = tokens_of(call)
    totals.prompt_tokens += prompt
    totals.completion_tokens += completion


def tokens_of(call: Call) -> tuple[int, int]:
    """Tokens of prompt and completion of a call, as budgets count them: 0 unless it was delivered."""
    completion = call.completion
    if call.state is not CallState.DELIVERED or completion is None:
        return 0, 0
    if completion.usage is not None:
        return completion.usage.prompt_tokens, completion.count
    return call.prompt.count if call.prompt is not None else 0, completion.count
