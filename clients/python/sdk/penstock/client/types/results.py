"""The state, events and outcome of rollouts and groups. All values; times are UTC."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, TypeAlias

from penstock.client.errors import PenstockError
from penstock.client.types.trajectories import BranchPoint, Call, Reward, Trajectory
from penstock.values import OpenEnum

_STEP_LABEL: Final = "step"
"""Label of a rollout with the number of its training step."""
_STEP_DIGITS: Final = 9


class Phase(OpenEnum):
    """A rollout's phase; ENDED is terminal."""

    QUEUED = "queued"
    PREPARING = "preparing"
    CONFIGURING = "configuring"
    SETTING_UP = "setting_up"
    RUNNING = "running"
    VERIFYING = "verifying"
    COLLECTING = "collecting"
    ENDED = "ended"


class FailureCause(OpenEnum):
    """The kind of a failure. INFRASTRUCTURE and MODEL say nothing about the policy: keep them out of a baseline."""

    INFRASTRUCTURE = "infrastructure"
    TASK = "task"
    AGENT = "agent"
    TIMEOUT = "timeout"
    BUDGET = "budget"
    VERIFIER = "verifier"
    MODEL = "model"
    CANCELLED = "cancelled"


POLICY_CAUSES: Final = frozenset({FailureCause.AGENT, FailureCause.TIMEOUT, FailureCause.BUDGET})
"""Failures that the policy may have caused: with a reward they are learned from. All others are not its fault."""


class Party(OpenEnum):
    """The component at fault for a failed rollout. ENGINE is the source of the answers, the trainer included."""

    AGENT = "agent"
    TASK = "task"
    VERIFIER = "verifier"
    SANDBOX = "sandbox"
    GATE = "gate"
    ENGINE = "engine"
    OPERATOR = "operator"
    BUDGET = "budget"
    DRIVER = "driver"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rollout did not complete. `reason` is stable UPPER_SNAKE. `caused_by` None: an older driver."""

    cause: FailureCause
    reason: str
    message: str
    retriable: bool
    phase: Phase | None
    caused_by: Party | None = None


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended. `reason` is exited, signaled, timed_out, killed, oom, sandbox_lost or start_failed.

    `code` is 0 to 255, `signal` a POSIX number; `duration` in seconds. `stdout_bytes` and `stderr_bytes` are the total
    output, kept or not.
    """

    reason: str
    code: int | None
    signal: int | None
    message: str
    duration: float
    stdout_bytes: int = 0
    stderr_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether it exited by itself with 0."""
        return self.reason == "exited" and self.code == 0

    def __str__(self) -> str:
        if self.reason == "exited":
            return f"exit {self.code}"
        tail = f" {self.signal}" if self.signal is not None else f": {self.message}" if self.message else ""
        return self.reason + tail


@dataclass(frozen=True, slots=True)
class VerifierCommand:
    """A verifier command that ran, with the ends of its outputs (1 KiB of each)."""

    exit: Exit
    stdout_tail: bytes
    stderr_tail: bytes


@dataclass(frozen=True, slots=True)
class Changes:
    """The agent's changes that a fresh fork applied; `left_out_paths` are the first 32 of those left out."""

    entries: int
    size_bytes: int
    removed: int
    left_out: int
    left_out_paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Grading:
    """How a rollout was graded: `passed` of `total` verifier commands. `changes` with a fresh fork only.

    `restored` counts the paths that the verifier's `restore` put back or removed. `commands` are the first 64.
    """

    fresh_fork: bool
    passed: int
    total: int
    commands: tuple[VerifierCommand, ...]
    restored: int
    changes: Changes | None
    verifier_sha256: str = ""
    """In hex, equal for equal verifiers; empty from a driver of an earlier version."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rollout ended. No `failure` = it completed; no `reward` = not graded, which is not zero."""

    failure: Failure | None = None
    reward: Reward | None = None
    agent_exit: Exit | None = None
    agent_stderr: bytes = field(default=b"", repr=False)
    grading: Grading | None = None
    """Set when a verifier began, whether or not it produced a reward."""

    @property
    def completed(self) -> bool:
        """Whether it ended without a failure."""
        return self.failure is None


@dataclass(frozen=True, slots=True)
class Home:
    """Names of the services that have a rollout or an episode, and the agent's sandbox; empty = not known yet."""

    driver: str = ""
    gate: str = ""
    sandbox_service: str = ""
    sandbox_id: str = ""


@dataclass(frozen=True, slots=True)
class Export:
    """Where a driver stored an ended rollout: the files `LOCATION.TABLE.parquet`, and when (UTC)."""

    location: str
    time: datetime | None


@dataclass(frozen=True, slots=True)
class Pause:
    """How a rollout is held, by `handle.pause`. It ends by itself at `end_time` (UTC).

    `sandbox_frozen` False: its agent does not run, or the backend cannot freeze it; then it runs up to its next call.
    """

    reason: str
    start_time: datetime | None
    end_time: datetime | None
    sandbox_frozen: bool


@dataclass(frozen=True, slots=True)
class Grade:
    """A further grade of an ended rollout, made from its end state. No `reward` = its verifier gave none: `failure`."""

    name: str
    time: datetime | None
    reward: Reward | None
    failure: Failure | None
    grading: Grading | None


@dataclass(frozen=True, slots=True)
class Rollout:
    """A rollout as the driver reported it."""

    rollout_id: str
    group_id: str | None
    index: int
    phase: Phase
    outcome: Outcome | None
    agent: str
    agent_spec_sha256: str
    task_id: str
    labels: Mapping[str, str]
    create_time: datetime | None
    end_time: datetime | None
    phase_times: Mapping[Phase, float]
    """Seconds spent in each phase so far, in all attempts."""
    last_sequence: int
    attempts: int = 1
    """Number of attempts; `outcome` is the last attempt's."""
    namespace: str = "default"
    home: Home | None = None
    """Where the last attempt runs or ran; None from a driver of an earlier version."""
    export: Export | None = None
    """Where the driver stored it; None while that is pending, and from a driver that exports nothing."""
    pause: Pause | None = None
    """Set while it is paused."""
    branched_from: BranchPoint | None = None
    """Where it leaves the rollout of which it is a branch; None = it is none."""
    grades: tuple[Grade, ...] = ()
    """Further grades, oldest first; the first one is in `outcome`."""


@dataclass(frozen=True, slots=True)
class Regraded:
    """An ended rollout that was to be graded again: with its further grade, or with the error of that."""

    rollout: Rollout
    grade: Grade | None
    error: PenstockError | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """A group as the driver reported it."""

    group_id: str
    size: int
    spares: int
    quorum: int
    rollout_ids: tuple[str, ...]
    ended_count: int
    ended: bool
    complete: bool
    result_rollout_ids: tuple[str, ...]
    create_time: datetime | None
    end_time: datetime | None
    namespace: str = "default"
    home: str = ""
    """Name of the driver that has it; empty: an older one."""
    paused_count: int = 0
    """How many of its rollouts are paused."""
    branched_from: BranchPoint | None = None
    """The call of which its rollouts are branches; None = it was created by itself."""

    @property
    def surplus_rollout_ids(self) -> tuple[str, ...]:
        """Ids of the group's rollouts beyond its `size`, by index; empty while it runs, and without spares.

        First of all those count that are its results, then the others by their index: a group that lacks results still
        has `size` members.
        """
        if not self.ended:
            return ()
        others = [rollout_id for rollout_id in self.rollout_ids if rollout_id not in self.result_rollout_ids]
        return tuple(others[max(0, self.size - len(self.result_rollout_ids)) :])


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """A rollout's summary, as yielded by `ps.rollouts.watch`: its phase, and sums over its model calls so far.

    The sums cover all attempts and may lack the agent's last moment; the trajectory is complete. `min_version` and
    `max_version` are policy versions of the answers; None = unknown, or the rollout has several models.
    """

    rollout_id: str
    group_id: str | None
    index: int
    run_id: str | None
    task_id: str
    agent: str
    labels: Mapping[str, str]
    phase: Phase
    create_time: datetime | None
    end_time: datetime | None
    failure: Failure | None
    reward: Reward | None
    calls: int
    prompt_tokens: int
    completion_tokens: int
    min_version: int | None
    max_version: int | None
    attempts: int
    namespace: str = "default"
    home: Home | None = None
    """Where the last attempt runs or ran; None from a driver of an earlier version."""
    export: Export | None = None
    """Where the driver stored it; None while that is pending, and from a driver that exports nothing."""
    paused: bool = False

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.phase is Phase.ENDED

    @property
    def step(self) -> int | None:
        """The number of its training step, from its label `step`; None without one, or if that is no number of at most
        nine digits.
        """
        text = self.labels.get(_STEP_LABEL, "")
        return int(text) if text.isascii() and text.isdigit() and len(text) <= _STEP_DIGITS else None


@dataclass(frozen=True, slots=True)
class RolloutChanges:
    """Changes among the watched rollouts: current summaries, and ids of those that were deleted or no longer match.

    After a driver was away, `gone` names what it has no more: also a rollout that ended meanwhile and is beyond
    `ended_limit`. When a driver leaves the installation, it names all of its rollouts.

    `complete`: all initial summaries have been sent. `away`: names of the drivers that do not answer now; what is known
    of their rollouts may be out of date.
    """

    rollouts: tuple[RolloutSummary, ...] = ()
    gone: tuple[str, ...] = ()
    complete: bool = False
    away: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PhaseChanged:
    """The rollout entered a phase; `previous_duration` is the previous phase's in seconds, None for the first."""

    phase: Phase
    previous_duration: float | None = None


@dataclass(frozen=True, slots=True)
class AgentExited:
    """The agent's process has ended, and all its descendants are dead; `stderr_tail` are its last lines."""

    exit: Exit
    stderr_tail: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """An attempt, counted from 1, failed transiently: the rollout starts again, within `max_attempts`."""

    attempt: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class RolloutPaused:
    """The rollout is paused from now on, for at most so many seconds."""

    reason: str
    max_duration: float | None


@dataclass(frozen=True, slots=True)
class RolloutResumed:
    """A pause of so many seconds ended: `reason` is RESUMED, PAUSE_EXPIRED or DRAINING."""

    paused_time: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class UserTurn:
    """What the user decided after an end of the agent, counted from 1 within an attempt: the next `instruction`, or an
    `end_reason`: SCRIPT_ENDED, USER_ENDED, MAX_INSTRUCTIONS, USER_BUDGET, USER_REFUSED, AGENT_FAILED, AGENT_TIMED_OUT.
    `agent_message` is what it saw.
    """

    index: int
    agent_message: str
    instruction: str
    end_reason: str


@dataclass(frozen=True, slots=True)
class CommandFinished:
    """A setup or verifier command ended; the tails are the last 4 KiB of its output."""

    phase: Phase
    index: int
    command: str
    exit: Exit
    stdout_tail: bytes
    stderr_tail: bytes


@dataclass(frozen=True, slots=True)
class AgentEvent:
    """An event reported by the agent. `kind` is assistant, reasoning, tool_call, tool_result, error, done or other."""

    kind: str
    data: Mapping[str, Any]
    raw_line: bytes


@dataclass(frozen=True, slots=True)
class CallFinished:
    """A model call ended; without tokens and bodies.

    `recorded_count`: calls that are recorded for the attempt to replay; 0 = none, or unknown. `replayed_count`: those
    that have answered one until then.
    """

    call: Call
    recorded_count: int = 0
    replayed_count: int = 0


@dataclass(frozen=True, slots=True)
class ArtifactCollected:
    """A file was collected."""

    name: str
    content: bytes = field(repr=False)
    truncated: bool
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Progress:
    """A progress message for people."""

    message: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The rollout ended: always its last event."""

    outcome: Outcome


EventPayload: TypeAlias = (
    PhaseChanged
    | CommandFinished
    | AgentEvent
    | AgentExited
    | CallFinished
    | ArtifactCollected
    | Progress
    | AttemptFailed
    | RolloutPaused
    | RolloutResumed
    | UserTurn
    | Ended
)
"""The content of an event."""


@dataclass(frozen=True, slots=True)
class RolloutEvent:
    """One event of a rollout; `sequence` counts from 1 without gaps."""

    sequence: int
    rollout_id: str
    time: datetime | None
    payload: EventPayload


@dataclass(frozen=True, slots=True, eq=False)
class RolloutResult:
    """An ended rollout, with its trajectory if requested and available."""

    rollout: Rollout
    outcome: Outcome
    trajectory: Trajectory | None = None
    surplus: bool | None = None
    """Whether its group has its `size` rollouts without it (`Group.surplus_rollout_ids`), as `group.results()` says;
    None = not known, as long as the group runs, or it has none."""

    @property
    def rollout_id(self) -> str:
        """The rollout's id."""
        return self.rollout.rollout_id

    @property
    def reward(self) -> Reward | None:
        """The reward; None = not graded, which is not zero."""
        return self.outcome.reward

    @property
    def failure(self) -> Failure | None:
        """The failure; None = the rollout completed."""
        return self.outcome.failure
