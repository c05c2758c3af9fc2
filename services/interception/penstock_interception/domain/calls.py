"""Rollouts and calls at the gate, as plain data. Only the gate changes `state`; the interceptor and the telemetry write
other fields of a call: its connections, notes, overridden sampling, running work and trace.

A call is QUEUED -> LEASED (to a trainer) or DISPATCHED (to the rollout's model source) -> DELIVERED | FAILED |
CANCELLED | EXPIRED. It returns from LEASED to QUEUED when its holder is gone. The last four states are terminal;
`Call.ended` is set exactly then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal, TypeAlias

from penstock_chassis.auth import DEFAULT_NAMESPACE
from penstock_codec import ControlTokens
from penstock_codec.chat import Sampling
from penstock_codec.fast_dataclass import quick
from penstock_interception.domain.agent_keys import KeyTerms
from penstock_interception.domain.budgets import Budgets, RunBudgets, Spent
from penstock_interception.domain.folded_bodies import FoldedBody
from penstock_interception.graph.values import CallClass, Plan


class Mode(StrEnum):
    """How an agent's calls are answered and captured."""

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
    QUEUED = "queued"
    LEASED = "leased"
    DISPATCHED = "dispatched"
    DELIVERED = "delivered"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    terminal: bool
    """Whether the state is final."""

    def __init__(self, value: str) -> None:
        self.terminal = value not in ("queued", "leased", "dispatched")


class Answerer(StrEnum):
    """The component that answered a call."""

    TRAINER = "trainer"
    INFERENCE = "inference"
    UPSTREAM = "upstream"


class RolloutState(StrEnum):
    """Whether a rollout's agent may make calls."""

    OPEN = "open"
    EXHAUSTED = "exhausted"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """Parsers between text and tokens, by name; "" means the default of the source or its template."""

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
    """A tokenizer that the operator configured, without an engine: for trainers that run their own."""

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
    """An endpoint that the caller chose. Its key is kept in memory only, outside this value (`Rollout.caller_key`)."""

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
    """The policy versions that may answer: `min_version` or newer, and at most `max_staleness` behind the newest."""

    min_version: int | None = None
    max_staleness: int | None = None


@dataclass(frozen=True, slots=True)
class CallRule:
    """The calls that a model answers: of these positions and turns, [from, until), and classes; as the message."""

    from_index: int = 0
    until_index: int | None = None
    from_turn: int = 0
    until_turn: int | None = None
    call_classes: tuple[CallClass, ...] = ()

    def selects(self, index: int, turn: int, call_class: CallClass) -> bool:
        """Returns whether a call matches each condition."""
        return (
            self.from_index <= index
            and (self.until_index is None or index < self.until_index)
            and self.from_turn <= turn
            and (self.until_turn is None or turn < self.until_turn)
            and (not self.call_classes or call_class in self.call_classes)
        )


@dataclass(frozen=True, slots=True)
class RolloutModel:
    """One of several models that answer a rollout's calls; as the message of this name, with its defaults filled in.

    `source` None = the rollout's. `rule` None = all calls that no model before it takes.
    """

    name: str
    policy_id: str
    source: Source | None = None
    trained: bool = True
    bounds: PolicyBounds = PolicyBounds()
    rule: CallRule | None = None
    delegated: bool = False
    """In gate mode, the source answers at once."""


@quick
@dataclass(frozen=True, slots=True)
class BranchPoint:
    """The call of another rollout at which a rollout leaves it; as the message of this name."""

    parent_rollout_id: str
    call_id: str
    call_index: int = 0
    answer_given: bool = False
    train_prefix: bool = False
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """The whole OpenRollout request except the caller's key. Two equal specs are the same request."""

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
    token_terms: KeyTerms = KeyTerms()  # noqa: RUF009 - immutable
    namespace: str = DEFAULT_NAMESPACE
    driver_id: str = ""
    """The driver that leases it; empty = it has no lease."""
    keep_capture: bool = False
    """Whether the capture is kept beyond the retention until its driver has stored it."""
    attempt: int = 1
    branched_from: BranchPoint | None = None
    """Set for a branch of another rollout."""
    judge_of: str = ""
    """The rollout whose verifier calls; empty = an agent calls, or a user asks."""
    user_of: str = ""
    """The rollout whose agent's user asks its model; empty = an agent or a verifier calls."""
    models: tuple[RolloutModel, ...] = ()
    """Empty = one model, the rollout's own."""

    @property
    def belongs_to(self) -> str:
        """The rollout beside which it is, as its judge or its user: it answers each body once. Empty = none."""
        return self.judge_of or self.user_of

    @property
    def session_id(self) -> str:
        """The session at the engine: of this attempt alone, so that none goes on where another one stopped."""
        return self.rollout_id if self.attempt <= 1 else f"{self.rollout_id}#{self.attempt}"

    @property
    def run_key(self) -> str | None:
        """The rollout's run among those of all namespaces; None without a run. A namespace has no slash."""
        return None if self.run_id is None else f"{self.namespace}/{self.run_id}"

    @property
    def request_key(self) -> str:
        """The request's id among those of all namespaces. A namespace has no slash."""
        return f"{self.namespace}/{self.request_id}"


@quick
@dataclass(frozen=True, slots=True)
class Prompt:
    """A call's position in its rollout's graph; kept after the plan with its tokens is dropped."""

    count: int
    shared_count: int
    call_class: CallClass
    branch_id: str
    parent_call_id: str | None

    @classmethod
    def of(cls, plan: Plan) -> Prompt:
        """Extracts the position from a plan."""
        return cls(
            int(plan.prompt_ids.size), plan.shared_prefix_len, plan.call_class, plan.branch_id, plan.parent_call_id
        )


@quick
@dataclass(frozen=True, slots=True)
class CallRequest:
    """An agent's request as the ingress received it."""

    dialect: Dialect
    body: bytes
    body_sha256: bytes
    retry_key: str
    stream: bool
    # As requested by the agent, with the rollout's overrides applied.
    sampling: Sampling
    model_requested: str
    tools_sha256: bytes = b""
    normalisations: tuple[str, ...] = ()
    agent_session: tuple[tuple[str, str], ...] = ()
    # Length of the body, which is dropped from memory, and in black box mode never stored.
    body_bytes: int = 0
    # The budget that lowered `max_tokens` to its remainder; "" if none did.
    bounded_by: str = ""
    # The W3C trace context that the agent sent; "" if untraced.
    trace_parent: str = ""
    # The body as it is stored, apart from its images; None = as it is.
    folded: FoldedBody | None = None

    def without_body(self) -> CallRequest:
        """Returns a copy with an empty body. Runs for every call; `dataclasses.replace` is several times slower."""
        return CallRequest(
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
    """Facts about a rollout's model. Stored with the rollout, so that a restart needs no other service."""

    model: str = ""
    tokenizer_sha256: str = ""
    template_sha256: str = ""
    parser: str = ""
    control_tokens: ControlTokens = ControlTokens.PLAIN
    vocabulary_size: int | None = None
    max_context_tokens: int | None = None
    # Whether the upstream returns token ids of prompt and completion, and logprobs, on request.
    returns_tokens: bool = False
    # Whether the upstream takes sampling fields beyond its API's, as vLLM and SGLang do.
    extended_sampling: bool = False
    # Hex SHA-256 of the rule that says how many tokens an image takes; "" without one.
    processor_sha256: str = ""
    # Whether who answers takes images: an engine, or a trainer.
    images: bool = False
    # Of the rollout's models, in their order: None where one has no source of its own.
    of_models: tuple[ModelFacts | None, ...] = ()

    @property
    def codec(self) -> CodecChoice:
        """The parsers between text and tokens."""
        return CodecChoice(self.parser, self.control_tokens)


NO_FACTS: Final = ModelFacts()

MOST_FAILURE_KINDS: Final = 30
"""Failure reasons that a rollout's totals count separately: trainers invent reasons. All others share two entries."""


@dataclass(slots=True)
class Failures:
    """Number of calls that failed for this reason, or for several if ""; `retriable`: a retry may help."""

    reason: str
    retriable: bool
    calls: int = 0
    # Those that came after the rollout's last answer.
    calls_since_answer: int = 0


@dataclass(slots=True)
class Totals:
    """Counts over a rollout's calls, and the reason of its last failed call."""

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
    # Bytes of the sampled tokens' alternatives, which an agent may ask for.
    top_bytes: int = 0
    # Requests refused by an exhausted budget; they do not count as calls.
    refused: int = 0
    # One entry per reason and `retriable`.
    failures: list[Failures] = field(default_factory=list)
    # Expired calls that came after the rollout's last answer, and the number of calls that had come when it came.
    expired_since_answer: int = 0
    calls_at_answer: int = 0
    # Those of the calls that were answered from a recording: their run has paid for them already.
    replayed: Spent = field(default_factory=Spent)

    @property
    def open(self) -> int:
        """Calls that have not ended."""
        return self.calls - self.delivered - self.failed - self.cancelled - self.expired

    @property
    def spent(self) -> Spent:
        """The part that budgets limit."""
        return Spent(self.calls, self.prompt_tokens, self.completion_tokens, self.request_bytes)

    @property
    def spent_of_run(self) -> Spent:
        """The part that budgets of a run limit: without what was replayed."""
        spent = self.spent
        spent.take(self.replayed)
        return spent
