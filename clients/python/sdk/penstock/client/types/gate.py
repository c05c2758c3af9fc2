"""Values of the gate: its rollouts, their agent keys, changes of calls, its load. Times are UTC or seconds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeAlias

from penstock.client.tasks.spec import Mode, TokenScope
from penstock.client.types.chat import TokenIds
from penstock.client.types.trajectories import Call


@dataclass(frozen=True, slots=True)
class AgentKey:
    """An agent key of a rollout, without its secret.

    Attributes:
        key_id: its id, which is no credential.
        scopes: what it allows; never empty.
        create_time: when it was issued.
        expire_time: when it ends by itself; None = with its rollout.
        revoke_time: when it becomes void by a revocation or a replacement; None = it was not revoked.
    """

    key_id: str
    scopes: tuple[TokenScope, ...]
    create_time: datetime | None
    expire_time: datetime | None
    revoke_time: datetime | None


@dataclass(frozen=True, slots=True)
class IssuedKey:
    """A new agent key: its secret `token`, for the agent only, and its description."""

    token: str = field(repr=False)
    info: AgentKey


@dataclass(frozen=True, slots=True)
class CallFailures:
    """How many calls FAILED for one `reason` (empty = several); `retriable`: a retry may help.

    `calls_since_answer`: those of them that came after the rollout's last answer.
    """

    reason: str
    calls: int
    retriable: bool
    calls_since_answer: int = 0


@dataclass(frozen=True, slots=True)
class CallTotals:
    """Counts of a rollout's calls, by their state; tokens and bytes are sums.

    `refused` are requests that a used-up budget refused; they are no calls. `last_unanswered`: the latest ended call
    failed for a transient reason. `failures`: most frequent reason first, at most 33.
    """

    calls: int
    open: int
    delivered: int
    failed: int
    cancelled: int
    expired: int
    prompt_tokens: int
    completion_tokens: int
    last_failure_reason: str
    last_failure_retriable: bool
    request_bytes: int
    refused: int
    last_unanswered: bool
    failures: tuple[CallFailures, ...]
    expired_since_answer: int = 0
    replayed: int = 0
    """Delivered calls that a recording answered."""


@dataclass(frozen=True, slots=True)
class GateRollout:
    """A rollout at the gate. `state` is open, exhausted (a budget is used up) or closed.

    `exhausted_budget` is the used-up one, for example `max_calls` or `run.max_calls`; empty = none. `paused_time`:
    seconds that pauses held its calls. `keys`: its agent keys, oldest first, void ones included; empty once closed.
    """

    rollout_id: str
    group_id: str | None
    run_id: str | None
    labels: Mapping[str, str]
    mode: Mode
    state: str
    model_name: str
    create_time: datetime | None
    close_time: datetime | None
    totals: CallTotals
    exhausted_budget: str
    paused_time: float
    keys: tuple[AgentKey, ...] = field(repr=False)
    namespace: str = "default"
    home: str = ""
    """Name of the gate that has it; empty: an older gate."""
    close_reason: str = ""
    """Why it was closed: its closer's reason, or the gate's own, such as DRIVER_LOST; empty = it is open."""
    held: bool = False
    """Whether a pause of its rollout holds its calls."""
    divergence: str = ""
    """Where its first call differs from what is recorded there, for people; empty = nowhere, or it has no recording."""
    restored: bool = False
    """Whether its gate was started again while it was open, so that its agent had none for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHints:
    """How the gate recognises an agent's auxiliary calls and its sessions.

    Attributes:
        title_system_prompts: a call whose system prompt contains one of these is a title.
        compaction_system_prompts: the same for a compaction.
        session_headers: request headers that identify the agent's session, lower case.
        volatile_line_patterns: regular expressions (RE2) of prompt lines that change without meaning.
    """

    title_system_prompts: Sequence[str] = ()
    compaction_system_prompts: Sequence[str] = ()
    session_headers: Sequence[str] = ()
    volatile_line_patterns: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class SourceCheck:
    """A model source that can be used: its name for its model (empty = unknown), and the host tools on offer."""

    model_name: str
    host_tools: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedCall:
    """A call as the gate recorded it, with its whole prompt: int32, shape (call.prompt_count,)."""

    call: Call
    prompt_token_ids: TokenIds


@dataclass(frozen=True, slots=True)
class WatchStarted:
    """A watch of calls is established; pass `sequence` as `after` to resume from here."""

    sequence: int


@dataclass(frozen=True, slots=True, eq=False)
class CallChanged:
    """A call was opened or changed its state; `call` has neither tokens nor bodies."""

    sequence: int
    call: Call


@dataclass(frozen=True, slots=True)
class RolloutClosed:
    """A rollout was closed for `reason`, stable UPPER_SNAKE."""

    sequence: int
    rollout_id: str
    reason: str


GateEvent: TypeAlias = WatchStarted | CallChanged | RolloutClosed
"""What a watch of calls yields."""


@dataclass(frozen=True, slots=True)
class GateSession:
    """A trainer's session. `run_id` and `group_id` are its selector's, empty = any.

    `rollouts`: open ones whose calls it may receive. `credit_*`: its window. `held_*`: calls it holds unanswered.
    `queued_calls`: those that wait for its selector. `lost`: its stream broke, and may be resumed. `namespace`: empty =
    of all.
    """

    identity: str
    run_id: str
    group_id: str
    rollouts: int
    credit_calls: int
    credit_bytes: int
    held_calls: int
    held_bytes: int
    queued_calls: int
    lost: bool
    paused: bool
    policy_version: int | None
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class GateLoad:
    """The gate at one moment: counts of open rollouts and of calls by what they wait for.

    `oldest_wait`: seconds that the oldest queued call has waited; None = none waits. `sessions`: those with the most
    calls first, at most 256 of `session_count`. `unreachable_inference`: names of the lists of inference services of
    which none answers now; "default" is the one without a name.
    """

    open_rollouts: int
    queued_calls: int
    paused_calls: int
    leased_calls: int
    dispatched_calls: int
    oldest_wait: float | None
    sessions: tuple[GateSession, ...]
    session_count: int
    unreachable_inference: tuple[str, ...] = ()
