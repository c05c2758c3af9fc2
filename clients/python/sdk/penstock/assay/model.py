"""What an assay is made of: trials of a task, and what they show. All values; times are seconds, sizes bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a trial does with a task."""

    SOLUTION = "solution"
    NOTHING = "nothing"
    MUTANT = "mutant"
    """The solution without one of its changes."""
    ORDER = "order"
    """The solution, graded by pytest in the reverse order."""
    ATTACK = "attack"
    """No work, but something that a careless verifier rewards."""
    VIEW = "view"
    """No work: reads all that an agent can read."""


class Severity(StrEnum):
    """Whether a finding keeps a task from passing."""

    DEFECT = "defect"
    WARNING = "warning"


class Code(StrEnum):
    """What is wrong with a task. docs/guides/assay.md describes each."""

    VERIFIER_MISSING = "VERIFIER_MISSING"
    SOLUTION_MISSING = "SOLUTION_MISSING"
    SETUP_FAILS = "SETUP_FAILS"
    SOLUTION_FAILS = "SOLUTION_FAILS"
    SOLUTION_UNSTABLE = "SOLUTION_UNSTABLE"
    NETWORK_NEEDED = "NETWORK_NEEDED"
    NOTHING_REWARDED = "NOTHING_REWARDED"
    CHANGE_NOT_READ = "CHANGE_NOT_READ"
    CHANGE_UNTESTED = "CHANGE_UNTESTED"
    LINES_UNTESTED = "LINES_UNTESTED"
    NOT_MUTATED = "NOT_MUTATED"
    ORDER_DEPENDENT = "ORDER_DEPENDENT"
    REWARD_FORGED = "REWARD_FORGED"
    ANSWER_IN_VIEW = "ANSWER_IN_VIEW"
    ANSWER_IN_GIT = "ANSWER_IN_GIT"
    OTHER_COMMITS = "OTHER_COMMITS"
    BYTECODE_DIFFERS = "BYTECODE_DIFFERS"
    VERIFIER_IN_VIEW = "VERIFIER_IN_VIEW"
    VIEW_NOT_READ = "VIEW_NOT_READ"
    TRIAL_FAILED = "TRIAL_FAILED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong with a task; `evidence` is text of the sandbox, shortened."""

    code: Code
    severity: Severity
    message: str
    evidence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One rollout of an assay.

    `reward` None: not graded, and `failure` says why. `infrastructure`: it says nothing about the task. `reports` are
    the lines that the script reported, `diff` is the change of the working directory, None where it was not kept;
    `progress` has the driver's last messages, shortened, which say why.
    """

    kind: Kind
    name: str
    reward: float | None
    failure: str = ""
    phase: str = ""
    infrastructure: bool = False
    output: str = ""
    reports: tuple[str, ...] = ()
    diff: str | None = None
    progress: str = ""
    seconds: float = 0.0
    setup_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Assay:
    """The result of one task. `size_bytes` and `files` are of the prepared working directory; None = not read."""

    task_id: str
    digest: str
    findings: tuple[Finding, ...]
    trials: tuple[Trial, ...]
    setup_seconds: float
    seconds: float
    size_bytes: int | None = None
    files: int | None = None
    backend: str = ""

    @property
    def defects(self) -> Sequence[Finding]:
        """What keeps it from passing."""
        return [finding for finding in self.findings if finding.severity is Severity.DEFECT]

    @property
    def passed(self) -> bool:
        """Whether it may be trained on."""
        return not self.defects
