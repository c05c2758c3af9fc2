"""A terminal episode, in which a policy types commands into a sandbox itself: its spec, its steps, and its rules.

Plain data and one small state machine. Invariants: an episode ends exactly once, and the first end counts (R78). No
step begins after its answer or its end. A step id identifies one action for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from penstock.driver.v1 import terminal_service_pb2
from penstock_chassis.auth import DEFAULT_NAMESPACE
from penstock_chassis.errors import AlreadyExists, FailedPrecondition, ResourceExhausted
from penstock_driver.domain.ports import NO_PACKAGES, Command, CommandResult, Packages, SandboxTerms
from penstock_driver.domain.rollout import Failure, Limits, Reward, Task

MAX_COMMANDS: Final = 240
"""Commands per episode. The sandbox service remembers the latest 256 processes of a sandbox, and can kill what a
command left running only as long as it remembers that command.
"""

DEFAULT_OUTPUT: Final = 64 << 10
MAX_OUTPUT: Final = 1 << 20
"""Maximum bytes of each stream in an observation."""
MAX_PENDING_BYTES: Final = 8 << 20
"""Maximum bytes of an episode's steps that run or wait for their turn. A larger step is accepted alone."""
STEP_BYTES: Final = 4 << 10
"""What a pending step costs beside its request."""


@dataclass(frozen=True, slots=True)
class TerminalSpec:
    """Everything that the driver needs for one episode; times in seconds, `output_limit` in bytes.

    `request` is the client's own. Episodes with equal `environment_key` and backend start from one prepared state.
    """

    task: Task
    sandbox: SandboxTerms
    limits: Limits
    request: terminal_service_pb2.OpenTerminalRequest = field(repr=False)
    environment_key: str
    command_s: float = 120.0
    output_limit: int = DEFAULT_OUTPUT
    max_commands: int = MAX_COMMANDS
    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: str = DEFAULT_NAMESPACE
    packages: Packages = NO_PACKAGES


@dataclass(frozen=True, slots=True)
class Answer:
    """The policy's final answer."""

    text: str


Action: TypeAlias = Command | Answer
"""What a step does."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step that is asked for; `digest` identifies its action. `request` is the client's own, without the terminal."""

    step_id: str
    action: Action
    digest: str
    request: terminal_service_pb2.StepRequest = field(repr=False)


@dataclass(frozen=True, slots=True)
class Observation:
    """The result of a step: a command's result, or the end of the episode with its outcome."""

    result: CommandResult | None = None
    ended: bool = False
    reward: Reward | None = None
    failure: Failure | None = None


@dataclass(slots=True)
class EpisodeProgress:
    """The state of an episode: its steps so far, whether it was answered, whether it has ended."""

    max_commands: int = MAX_COMMANDS
    steps: dict[str, str] = field(default_factory=dict)
    """Digests of the requested actions, by step id."""
    answered: bool = False
    ended: bool = False

    @property
    def is_open(self) -> bool:
        """Whether a final answer may be given."""
        return not (self.answered or self.ended)

    def knows(self, step_id: str, digest: str) -> bool:
        """Whether the step was begun; AlreadyExists (STEP_ID_REUSED) if its action was another one."""
        if step_id not in self.steps:
            return False
        if self.steps[step_id] != digest:
            raise step_reused()
        return True

    def begin(self, step_id: str, digest: str, *, is_answer: bool) -> int:
        """Begin a new step and return its number, from 1.

        FailedPrecondition (EPISODE_ENDED), ResourceExhausted (STEP_LIMIT), ValueError for a step that was begun.
        """
        if step_id in self.steps:
            raise ValueError(f"step {step_id} was started before")
        if not self.is_open:
            raise episode_ended()
        if not is_answer and len(self.steps) >= self.max_commands:
            message = f"the episode has used its {self.max_commands} commands: send the final answer"
            raise ResourceExhausted(message, reason="STEP_LIMIT")
        self.steps[step_id] = digest
        self.answered = is_answer
        return len(self.steps)

    def end(self) -> bool:
        """End the episode; False if it had ended before."""
        is_first, self.ended = not self.ended, True
        return is_first


def episode_ended() -> FailedPrecondition:
    """The error for a step after the end."""
    return FailedPrecondition("the episode has ended or was answered: open another one", reason="EPISODE_ENDED")


def steps_pending() -> ResourceExhausted:
    """The error for a step beyond the bytes that may be pending."""
    message = "the steps that run or wait are too large together: wait for one of them to end"
    return ResourceExhausted(message, reason="STEPS_PENDING", retry_after_s=1.0)


def step_reused() -> AlreadyExists:
    """The error for a step id that was used for another action."""
    return AlreadyExists("this step_id was used for another action", reason="STEP_ID_REUSED")
