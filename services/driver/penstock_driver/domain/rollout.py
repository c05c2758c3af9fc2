"""A rollout: its spec, its phases, its outcome and its events.

Plain data and one small state machine; messages are only kept and forwarded. Invariants: within an attempt phases only
move forward, and ENDED is reached exactly once. Every failure names its cause; only failures unrelated to the policy
may be retried. An outcome without a failure means that the agent ended by itself with a success code and that the
verifier, if any, gave a reward. "Not graded" is `reward is None`, never zero (R74).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Final, TypeAlias

from penstock.driver.v1 import rollout_pb2
from penstock.interception.v1 import rollout_gate_service_pb2
from penstock.sandbox.v1 import sandbox_pb2
from penstock.trajectory.v1 import trajectory_pb2
from penstock_chassis.auth import DEFAULT_NAMESPACE
from penstock_driver.agents.launch import AgentChoice, FileToWrite
from penstock_driver.agents.output_events import AgentEvent
from penstock_driver.agents.registry import Agent
from penstock_driver.domain.pauses import RolloutPaused, RolloutResumed
from penstock_driver.domain.ports import NO_PACKAGES, CallSpent, Command, CommandResult, Exit, Packages, SandboxTerms
from penstock_driver.domain.users import User, UserTurn

_AS_THE_AGENTS: Final = SandboxTerms()


class Phase(IntEnum):
    """The phases of a rollout, in order; a phase may be skipped.

    Setup runs in PREPARING, once for all rollouts of its content. Each of them has its commands' events, marked
    SETTING_UP, in its own PREPARING (`Attempt`); only one whose setup failed enters SETTING_UP, and ends there.
    """

    QUEUED = 1
    PREPARING = 2
    CONFIGURING = 3
    SETTING_UP = 4
    RUNNING = 5
    VERIFYING = 6
    COLLECTING = 7
    ENDED = 8


class Cause(StrEnum):
    """The kind of a failure, which decides what a trainer does about it."""

    INFRASTRUCTURE = "INFRASTRUCTURE"
    TASK = "TASK"
    AGENT = "AGENT"
    TIMEOUT = "TIMEOUT"
    BUDGET = "BUDGET"
    VERIFIER = "VERIFIER"
    MODEL = "MODEL"
    CANCELLED = "CANCELLED"


class Component(StrEnum):
    """The component at fault: where to look first."""

    AGENT = "AGENT"
    TASK = "TASK"
    VERIFIER = "VERIFIER"
    SANDBOX = "SANDBOX"
    GATE = "GATE"
    ENGINE = "ENGINE"
    OPERATOR = "OPERATOR"
    BUDGET = "BUDGET"
    DRIVER = "DRIVER"


COMPONENT_OF: Final = {
    Cause.TASK: Component.TASK,
    Cause.AGENT: Component.AGENT,
    Cause.TIMEOUT: Component.AGENT,
    Cause.BUDGET: Component.BUDGET,
    Cause.VERIFIER: Component.VERIFIER,
    Cause.MODEL: Component.ENGINE,
    Cause.CANCELLED: Component.OPERATOR,
}
"""The component at fault for each cause that has only one; an infrastructure failure names its own."""

_SAYS_NOTHING_OF_THE_POLICY: Final = (Cause.INFRASTRUCTURE, Cause.MODEL)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rollout did not complete; `reason` is stable and UPPER_SNAKE, `message` is for people.

    `component` is set with INFRASTRUCTURE, and only then. ValueError for a failure that contradicts itself.
    """

    cause: Cause
    reason: str
    message: str
    retriable: bool
    phase: Phase
    component: Component | None = None

    def __post_init__(self) -> None:
        if (self.cause is Cause.INFRASTRUCTURE) is (self.component is None):
            raise ValueError(f"{self.reason}: only infrastructure failures name a component")
        if self.retriable and self.cause not in _SAYS_NOTHING_OF_THE_POLICY:
            raise ValueError(f"{self.reason}: failures of the policy or its task are not retriable")

    @property
    def caused_by(self) -> Component:
        """The component at fault."""
        return self.component or COMPONENT_OF[self.cause]

    @property
    def is_gradable(self) -> bool:
        """Whether the agent's work may still be graded: the policy acted, and was cut off or crashed."""
        return self.cause in (Cause.AGENT, Cause.TIMEOUT, Cause.BUDGET)


class RolloutFailed(Exception):
    """Ends a rollout's attempt; carries the failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class TurnReward:
    """The reward of what the model answered to one call.

    `token_values` are little-endian float32, one for each sampled token; empty = none. A verifier names the call by its
    `call_index`, its position among the rollout's calls from 0; `call_id` is empty until it is looked up.
    """

    value: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    token_values: bytes = b""
    call_index: int = -1
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class Reward:
    """Finite and in [range_min, range_max], which do not bound `turns`."""

    value: float
    range_min: float
    range_max: float
    components: Mapping[str, float] = field(default_factory=dict)
    turns: tuple[TurnReward, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentExit:
    """The end of the agent's process and the last lines of its standard error."""

    exit: Exit
    stderr_tail: bytes


@dataclass(frozen=True, slots=True)
class Changes:
    """How much was copied from the agent's sandbox into a fresh fork, and how much was left out (see `overlay`)."""

    entries: int
    size_bytes: int
    removed: int
    left_out: int
    left_out_paths: tuple[str, ...] = ()


FIRST_GRADE: Final = "first"
"""The name of the grade that a rollout ended with, among further ones."""


@dataclass(frozen=True, slots=True)
class Grading:
    """How a rollout was graded: the verifier commands that ran, and their `total` number."""

    fresh_fork: bool
    total: int
    commands: tuple[CommandFinished, ...] = ()
    changes: Changes | None = None
    restored: int = 0
    verifier_sha256: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rollout ended."""

    failure: Failure | None = None
    reward: Reward | None = None
    agent_exit: AgentExit | None = None
    grading: Grading | None = None

    def is_result(self, verified: bool) -> bool:
        """Whether a group counts it: it has a reward or, without a verifier, completed."""
        return self.reward is not None if verified else self.failure is None


@dataclass(frozen=True, slots=True)
class CopiedPath:
    """A file or directory that a verifier gets whole; names that match `exclude` are left out of a directory."""

    path: str
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verifier:
    """How the reward is computed, after the agent and all processes that it started are dead."""

    commands: tuple[Command, ...]
    files: tuple[FileToWrite, ...] = ()
    reward_by_file: bool = False
    range_min: float = 0.0
    range_max: float = 1.0
    command_timeout_s: float = 120.0
    fresh_fork: bool | None = None
    """Whether it runs in a fresh fork or in the agent's sandbox; None until chosen by the backend's capabilities."""
    restore: tuple[str, ...] = ()
    """Patterns of paths that are restored to the prepared state first, see `restore`."""
    changes_below: tuple[str, ...] = ()
    """In a fresh fork: directories whose changes are copied, empty for the working directory, or none if there are
    `copies`.
    """
    component_ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    sandbox: SandboxTerms = _AS_THE_AGENTS
    """Image, its user, and resources of the sandbox in which it runs, where they are not the agent's."""
    copies: tuple[CopiedPath, ...] = ()
    """In a fresh fork: what is copied whole from the agent's sandbox."""
    collect: tuple[Command, ...] = ()
    """Run in the agent's sandbox before it is read, whatever their ends."""
    judge: rollout_gate_service_pb2.OpenRolloutRequest | None = field(default=None, hash=False, repr=False)
    """The terms at the gate of the model that the last command may ask; None for none. Messages have no hash."""

    @property
    def has_own_sandbox(self) -> bool:
        """Whether it runs in a fork of another state than the agent's."""
        return self.sandbox != _AS_THE_AGENTS

    @property
    def takes_changes(self) -> bool:
        """Whether a fresh fork gets the agent's changes, and not only what is copied whole."""
        return bool(self.changes_below) or not self.copies

    @property
    def needs_fork(self) -> str:
        """The first of its fields, but for `changes_below`, by which it needs a fresh fork; empty if there is none."""
        named = {
            "image": self.sandbox.image,
            "user": self.sandbox.user,
            "resources": self.has_own_sandbox,
            "copies": self.copies,
            "collect": self.collect,
            "judge": self.judge,
        }
        return next((name for name, given in named.items() if given), "")


OF_A_JUDGE: Final = ".judge"


def judge_id(rollout_id: str) -> str:
    """The id at the gate of a rollout's judge; no rollout has an id with this end."""
    return f"{rollout_id}{OF_A_JUDGE}"


@dataclass(frozen=True, slots=True)
class Task:
    """What the agent shall do; `files` are put into the working directory before setup."""

    task_id: str
    instruction: str
    files: tuple[FileToWrite, ...] = ()
    setup: tuple[Command, ...] = ()
    verifier: Verifier | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    keep_diff: bool = False
    keep_files: bool = False


MAKE_S: Final = 900.0
"""Deadline of calls that create a sandbox: a provider may have to start a machine and upload files."""
CARRY_S: Final = 150.0
"""Limit on saving the paths to restore, and on copying the agent's changes; a sandbox's lease has room for each."""
DIFF_S: Final = 30.0
"""Limit on each of the two readings of the working directory for `keep_diff` and `keep_files`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long each part may take, in seconds."""

    prepare_s: float = 900.0
    setup_s: float = 300.0
    agent_s: float = 900.0
    verify_s: float = 600.0

    @property
    def sandbox_s(self) -> float:
        """How long a sandbox may be needed: everything that happens in it, and a margin for the calls between (R61)."""
        return self.agent_s + self.verify_s + 2 * CARRY_S + 2 * DIFF_S + 30.0


class Replay(StrEnum):
    """What a further attempt does with the answers of the last one."""

    OFF = "off"
    UNTIL_DIVERGENCE = "until_divergence"
    EXACT = "exact"


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """Everything that the driver needs to run one rollout; `gate_terms` as in `ports.OpenRequest`.

    `request` is the client's own spec, from which the stored one is made. Rollouts with equal `environment_key`, and
    the same agent and backend, start from one prepared state.
    """

    agent: Agent
    choice: AgentChoice
    task: Task
    limits: Limits
    sandbox: SandboxTerms
    gate_terms: rollout_gate_service_pb2.OpenRolloutRequest = field(repr=False)
    request: rollout_pb2.RolloutSpec = field(repr=False)
    environment_key: str
    run_id: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    max_attempts: int = 1
    replay: Replay = Replay.UNTIL_DIVERGENCE
    repeatable: bool = False
    """Whether the sandbox in which its agent works is repeatable."""
    namespace: str = DEFAULT_NAMESPACE
    packages: Packages = NO_PACKAGES
    agent_network: sandbox_pb2.Allowlist | None = field(default=None, hash=False)
    """What the agent may reach beside the gate, and the verifier at all; None for nothing. Messages have no hash."""
    verifier_network: sandbox_pb2.Allowlist | None = field(default=None, hash=False)
    reports_changes: bool = False
    """Whether its backend reports what changed in a sandbox."""
    keep_end_state: bool | None = None
    """Whether the agent's changes are kept; None = if they are read to be graded in a fresh fork."""
    verifier_sha256: str = ""
    """Of its verifier, in hex; empty without one."""
    user: User | None = None
    """Who sends its agent further instructions."""

    def at(self, index: int) -> RolloutSpec:
        """The spec of one rollout of a group: its seed is the group's plus its index."""
        if self.choice.seed is None or index == 0:
            return self
        return replace(self, choice=replace(self.choice, seed=self.choice.seed + index))

    def of_branch(self, seed: int | None, index: int) -> RolloutSpec:
        """The spec of one branch: its parent's, with a seed of its own if its creator gave one.

        The gate sets that seed, and the agent has its parent's: an agent with another one would make other requests.
        """
        if seed is None:
            return self
        terms = rollout_gate_service_pb2.OpenRolloutRequest()
        terms.CopyFrom(self.gate_terms)
        terms.sampling_override.seed = seed + index
        return replace(self, gate_terms=terms)


TAIL_BYTES: Final = 4096
"""Bytes from the end of each of a command's outputs that its event carries."""

# Events ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PhaseChanged:
    """The rollout entered a phase; `previous_duration_s` is the duration of the one before, None for the first."""

    phase: Phase
    previous_duration_s: float | None = None


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """An attempt, counted from 1, had a transient failure, and the rollout starts over."""

    attempt: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class CommandFinished:
    """A setup or verifier command ended; the tails are the last 4 KiB of each output."""

    phase: Phase
    index: int
    command: Command
    exit: Exit
    stdout_tail: bytes
    stderr_tail: bytes

    @classmethod
    def of(cls, phase: Phase, index: int, command: Command, result: CommandResult) -> CommandFinished:
        """The event of a command's result, with the tails of its outputs."""
        return cls(phase, index, command, result.exit, result.stdout[-TAIL_BYTES:], result.stderr[-TAIL_BYTES:])


@dataclass(frozen=True, slots=True)
class CallFinished:
    """A model call ended; `call` and `spent` as in `ports.CallEnded`.

    `recorded_count`: the attempt's recorded calls. `replayed_count`: those that have answered one until then.
    """

    call: trajectory_pb2.Call
    spent: CallSpent = field(default_factory=CallSpent)
    recorded_count: int = 0
    replayed_count: int = 0


@dataclass(frozen=True, slots=True)
class ArtifactCollected:
    """A fetched file."""

    name: str
    content: bytes
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Progress:
    """A line about ongoing work, for people."""

    message: str


RolloutEvent: TypeAlias = (
    PhaseChanged
    | CommandFinished
    | AgentEvent
    | AgentExit
    | CallFinished
    | ArtifactCollected
    | Progress
    | AttemptFailed
    | RolloutPaused
    | RolloutResumed
    | UserTurn
    | Outcome
)


_NO_PHASES: Final[Mapping[Phase, float]] = MappingProxyType({})
"""Of every rollout that waits in the queue."""


@dataclass(slots=True)
class RunProgress:
    """A rollout's current phase: the state machine, with the time spent in each phase over all attempts."""

    phase: Phase = Phase.QUEUED
    attempt: int = 1
    entered: float = field(default_factory=time.monotonic)
    seconds: Mapping[Phase, float] = field(default_factory=lambda: _NO_PHASES)

    def enter(self, phase: Phase) -> float:
        """Move forward and return the previous phase's duration; ValueError for an invalid move."""
        if phase <= self.phase:
            raise ValueError(f"a rollout does not go from {self.phase.name} to {phase.name}")
        return self._move(phase)

    def begin_anew(self, *, counted: bool = True) -> None:
        """Return to the state before preparation, for the next attempt; ValueError for a rollout that has ended.

        With `counted` False it is the same attempt again, at another place.
        """
        if self.phase is Phase.ENDED:
            raise ValueError("a rollout that has ended cannot start again")
        self.attempt += counted
        self._move(Phase.QUEUED)

    @classmethod
    def continued(cls, phase: Phase, attempt: int, since: float, seconds: dict[Phase, float]) -> RunProgress:
        """The progress of a rollout that an earlier process ran.

        `since` is when it entered the phase, in seconds since the epoch.
        """
        return cls(phase, attempt, time.monotonic() - max(0.0, time.time() - since), seconds)

    def _move(self, phase: Phase) -> float:
        now = time.monotonic()
        took = now - self.entered
        self.seconds = {**self.seconds, self.phase: self.seconds.get(self.phase, 0.0) + took}
        self.phase, self.entered = phase, now
        return took

    def times(self) -> dict[Phase, float]:
        """Seconds in each phase so far, the current one included."""
        if self.phase is Phase.ENDED:
            return dict(self.seconds)
        before = self.seconds.get(self.phase, 0.0)
        return {**self.seconds, self.phase: before + time.monotonic() - self.entered}


def failed(
    cause: Cause,
    reason: str,
    message: str,
    phase: Phase,
    *,
    retriable: bool = False,
    component: Component | None = None,
) -> RolloutFailed:
    """The exception that ends a rollout, or the current attempt."""
    return RolloutFailed(Failure(cause, reason, message, retriable, phase, component))


def with_failure(outcome: Outcome, failure: Failure) -> Outcome:
    """Return the outcome with a failure, unless it has one: the first cause stays (R49)."""
    return outcome if outcome.failure else replace(outcome, failure=failure)
