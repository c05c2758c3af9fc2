"""A rollout: what defines it, where it stands, how it ends, and the events that tell it.

Plain data and one small state machine. Invariants: within an attempt phases only move forward, and ENDED is reached
exactly once; every failure names who caused it, and only what says nothing about the policy may be tried again; an
outcome without a failure means that the agent ended by itself with a success code and that the verifier, if there is
one, gave a reward; "not graded" is `reward is None`, never zero (R74).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Final, TypeAlias

from penstock_driver.events import AgentEvent
from penstock_driver.launches import AgentChoice, FileToWrite
from penstock_driver.ports import CallSpent, Command, Exit, SandboxTerms
from penstock_driver.registry import Agent


class Phase(IntEnum):
    """Where a rollout stands, in order; a phase may be passed over."""

    QUEUED = 1
    PREPARING = 2
    CONFIGURING = 3
    SETTING_UP = 4
    RUNNING = 5
    VERIFYING = 6
    COLLECTING = 7
    ENDED = 8


class Cause(StrEnum):
    """Of what kind a failure is: what a trainer does about it."""

    INFRASTRUCTURE = "INFRASTRUCTURE"
    TASK = "TASK"
    AGENT = "AGENT"
    TIMEOUT = "TIMEOUT"
    BUDGET = "BUDGET"
    VERIFIER = "VERIFIER"
    MODEL = "MODEL"
    CANCELLED = "CANCELLED"


class Party(StrEnum):
    """Who made a rollout fail: the one to look at."""

    AGENT = "AGENT"
    TASK = "TASK"
    VERIFIER = "VERIFIER"
    SANDBOX = "SANDBOX"
    GATE = "GATE"
    ENGINE = "ENGINE"
    OPERATOR = "OPERATOR"
    BUDGET = "BUDGET"
    DRIVER = "DRIVER"


PARTY_OF: Final = {
    Cause.TASK: Party.TASK,
    Cause.AGENT: Party.AGENT,
    Cause.TIMEOUT: Party.AGENT,
    Cause.BUDGET: Party.BUDGET,
    Cause.VERIFIER: Party.VERIFIER,
    Cause.MODEL: Party.ENGINE,
    Cause.CANCELLED: Party.OPERATOR,
}
"""Of every cause that has one party; a failure of the infrastructure says which part of it failed."""

_SAYS_NOTHING_OF_THE_POLICY: Final = (Cause.INFRASTRUCTURE, Cause.MODEL)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rollout did not complete; `reason` is stable and UPPER_SNAKE, `message` is for people.

    `part` is given with INFRASTRUCTURE and only then. ValueError for a failure that contradicts itself.
    """

    cause: Cause
    reason: str
    message: str
    retriable: bool
    phase: Phase
    part: Party | None = None

    def __post_init__(self) -> None:
        if (self.cause is Cause.INFRASTRUCTURE) is (self.part is None):
            raise ValueError(f"{self.reason}: which part failed is said of the infrastructure, and of nothing else")
        if self.retriable and self.cause not in _SAYS_NOTHING_OF_THE_POLICY:
            raise ValueError(f"{self.reason}: what the policy or its task did is not tried again")

    @property
    def caused_by(self) -> Party:
        """Who made it."""
        return self.part or PARTY_OF[self.cause]

    @property
    def is_gradable(self) -> bool:
        """Whether what the agent left may still be graded: the policy acted, and was cut off or crashed."""
        return self.cause in (Cause.AGENT, Cause.TIMEOUT, Cause.BUDGET)


class RolloutFailed(Exception):
    """Ends a rollout's course; carries the failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Reward:
    """Finite and in [range_min, range_max]."""

    value: float
    range_min: float
    range_max: float
    components: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AgentExit:
    """The end of the agent's process and the last lines of its standard error."""

    exit: Exit
    stderr_tail: bytes


@dataclass(frozen=True, slots=True)
class Changes:
    """What was taken over from the agent's sandbox into a fresh fork, and how much was not (see `changes`)."""

    entries: int
    size_bytes: int
    removed: int
    left_out: int
    left_out_paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Grading:
    """How a rollout was graded: the verifier's commands that ran, `total` being those that it has."""

    fresh_fork: bool
    total: int
    commands: tuple[CommandFinished, ...] = ()
    changes: Changes | None = None
    restored: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rollout ended."""

    failure: Failure | None = None
    reward: Reward | None = None
    agent_exit: AgentExit | None = None
    grading: Grading | None = None

    def is_result(self, verified: bool) -> bool:
        """Whether a group counts it: it has a reward or, where there is no verifier, it completed."""
        return self.reward is not None if verified else self.failure is None


@dataclass(frozen=True, slots=True)
class Verifier:
    """How a reward is made, after the agent and all that it started are dead."""

    commands: tuple[Command, ...]
    files: tuple[FileToWrite, ...] = ()
    reward_by_file: bool = False
    range_min: float = 0.0
    range_max: float = 1.0
    command_timeout_s: float = 120.0
    fresh_fork: bool | None = None
    """Where it works: in a fresh fork, or in the agent's sandbox; None until that is chosen, as the backend can."""
    restore: tuple[str, ...] = ()
    """Patterns of paths that are put back into the prepared state first, see `restoring`."""
    changes_below: tuple[str, ...] = ()
    """In a fresh fork: directories whose changes are taken over, empty for the working directory."""
    component_ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)


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


CARRY_S: Final = 150.0
"""How long keeping what is to be restored may take, and taking over the agent's changes; a sandbox's lease has room for
each."""
DIFF_S: Final = 30.0
"""How long reading the working directory for `keep_diff` and `keep_files` may take, each of the two times."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long each part may take, in seconds."""

    prepare_s: float = 900.0
    setup_s: float = 300.0
    agent_s: float = 900.0
    verify_s: float = 600.0

    @property
    def sandbox_s(self) -> float:
        """How long a sandbox may be needed: all that happens in it, and a margin for the calls between (R61)."""
        return self.agent_s + self.verify_s + 2 * CARRY_S + 2 * DIFF_S + 30.0


@dataclass(frozen=True, slots=True)
class RolloutOrder:
    """Everything that the driver needs to run one rollout; `gate_terms` as in `ports.GateOrder`."""

    agent: Agent
    choice: AgentChoice
    task: Task
    limits: Limits
    sandbox: SandboxTerms
    gate_terms: bytes = field(repr=False)
    run_id: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    max_attempts: int = 1
    tells_changes: bool = False
    """Whether its backend tells what changed in a sandbox."""


TAIL_BYTES: Final = 4096
"""How much of the end of each of a command's outputs its event carries."""

# Events ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PhaseChanged:
    """The rollout entered a phase; `previous_s` is how long the one before it took, None for the first."""

    phase: Phase
    previous_s: float | None = None


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """An attempt, counted from 1, failed in a way that may pass, and the rollout begins anew."""

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


@dataclass(frozen=True, slots=True)
class CallFinished:
    """A model call ended; `call` and `spent` as in `ports.CallEnded`."""

    call: bytes
    spent: CallSpent = field(default_factory=CallSpent)


@dataclass(frozen=True, slots=True)
class ArtifactCollected:
    """A file that was fetched."""

    name: str
    content: bytes
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Progress:
    """A line about work that goes on, for people."""

    message: str


Happening: TypeAlias = (
    PhaseChanged
    | CommandFinished
    | AgentEvent
    | AgentExit
    | CallFinished
    | ArtifactCollected
    | Progress
    | AttemptFailed
    | Outcome
)


@dataclass(slots=True)
class Course:
    """Where a rollout stands: the state machine, with the time spent in each phase, of all attempts together."""

    phase: Phase = Phase.QUEUED
    attempt: int = 1
    entered: float = field(default_factory=time.monotonic)
    seconds: dict[Phase, float] = field(default_factory=dict)

    def enter(self, phase: Phase) -> float:
        """Move forward and return how long the phase before took; ValueError for a move that is none."""
        if phase <= self.phase:
            raise ValueError(f"a rollout does not go from {self.phase.name} to {phase.name}")
        return self._move(phase)

    def begin_anew(self) -> None:
        """Back to where nothing is prepared, for the next attempt; ValueError for a rollout that has ended."""
        if self.phase is Phase.ENDED:
            raise ValueError("a rollout that has ended is not begun anew")
        self.attempt += 1
        self._move(Phase.QUEUED)

    def _move(self, phase: Phase) -> float:
        now = time.monotonic()
        took = now - self.entered
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + took
        self.phase, self.entered = phase, now
        return took

    def times(self) -> dict[Phase, float]:
        """Seconds in each phase so far, the present one included."""
        if self.phase is Phase.ENDED:
            return dict(self.seconds)
        before = self.seconds.get(self.phase, 0.0)
        return self.seconds | {self.phase: before + time.monotonic() - self.entered}


def failed(
    cause: Cause, reason: str, message: str, phase: Phase, *, retriable: bool = False, part: Party | None = None
) -> RolloutFailed:
    """The exception that ends a rollout, or this attempt at it."""
    return RolloutFailed(Failure(cause, reason, message, retriable, phase, part))


def with_failure(outcome: Outcome, failure: Failure) -> Outcome:
    """The outcome with a failure, unless it has one: the first cause stays (R49)."""
    return outcome if outcome.failure else replace(outcome, failure=failure)
