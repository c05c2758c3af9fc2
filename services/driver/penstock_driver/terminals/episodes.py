"""A terminal episode: what defines it, its steps, and the rules of its course.

Plain data and one small state machine. Invariants: an episode ends exactly once, and whoever ends it first says how
(R78); after its answer, and after its end, no step begins; a step id stands for one action for good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

from penstock_chassis.errors import AlreadyExists, FailedPrecondition, ResourceExhausted
from penstock_driver.ports import Command, CommandResult, SandboxTerms
from penstock_driver.rollouts import CommandFinished, Failure, Limits, Outcome, Reward, Task
from penstock_driver.terminals.shell import DEFAULT_OUTPUT

MAX_COMMANDS: Final = 240
"""Commands of an episode: the sandbox service knows the latest 256 processes of a sandbox, and what a command left
running can be killed for as long as it is known."""


@dataclass(frozen=True, slots=True)
class TerminalOrder:
    """Everything that the driver needs for one episode; times in seconds, `output_limit` in bytes."""

    task: Task
    sandbox: SandboxTerms
    limits: Limits
    command_s: float = 120.0
    output_limit: int = DEFAULT_OUTPUT
    max_commands: int = MAX_COMMANDS
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """The policy's final answer."""

    text: str


Action: TypeAlias = Command | Answer
"""What a step does."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What a step gives: a command's result, or the end of the episode, with what came of it."""

    result: CommandResult | None = None
    ended: bool = False
    reward: Reward | None = None
    failure: Failure | None = None


class Forms(Protocol):
    """The wire's forms of what is kept."""

    def order(self, data: bytes) -> TerminalOrder:
        """The order that was kept of an open episode."""

    def action(self, data: bytes) -> Action:
        """A step's action."""

    def observation(self, step_id: str, observation: Observation) -> bytes:
        """What a step gave."""

    def outcome(self, outcome: Outcome) -> bytes:
        """How an episode ended."""

    def commands(self, commands: Sequence[CommandFinished]) -> bytes:
        """Commands of setup or verifier."""


@dataclass(slots=True)
class EpisodeCourse:
    """Where an episode stands: which steps it has had, whether it was answered, whether it has ended."""

    max_commands: int = MAX_COMMANDS
    steps: dict[str, str] = field(default_factory=dict)
    """Digests of what was asked, by step id."""
    answered: bool = False
    ended: bool = False

    @property
    def is_open(self) -> bool:
        """Whether a final answer may be given."""
        return not (self.answered or self.ended)

    def knows(self, step_id: str, digest: str) -> bool:
        """Whether the step was begun; AlreadyExists (STEP_ID_REUSED) if it was something else."""
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
            raise ValueError(f"step {step_id} was begun before")
        if not self.is_open:
            raise episode_ended()
        if not is_answer and len(self.steps) >= self.max_commands:
            message = f"the episode had its {self.max_commands} commands: only a final answer is taken now"
            raise ResourceExhausted(message, reason="STEP_LIMIT")
        self.steps[step_id] = digest
        self.answered = is_answer
        return len(self.steps)

    def end(self) -> bool:
        """End it; whether this was the end, and not one before."""
        is_first, self.ended = not self.ended, True
        return is_first


def episode_ended() -> FailedPrecondition:
    """The error of a step that comes after the end."""
    return FailedPrecondition("the episode has ended or was answered: no step comes after it", reason="EPISODE_ENDED")


def step_reused() -> AlreadyExists:
    """The error of a step id that stands for something else."""
    return AlreadyExists("this step_id stood for another action before", reason="STEP_ID_REUSED")
