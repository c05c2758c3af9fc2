"""From the trials of a task to what is wrong with it."""

import re
from collections.abc import Iterator, Sequence
from typing import Final

from penstock.assay.model import Code, Finding, Severity, Trial
from penstock.assay.reversed_tests import was_not_loaded
from penstock.client.tasks.task import Task
from penstock.client.types.results import Phase

UNTESTED_SHARE: Final = 0.1
"""From this share of statements on that nobody misses, a verifier does not test the solution."""
_SAME: Final = 1e-9
_EVIDENCE: Final = 600
_NO_NETWORK: Final = re.compile(
    r"could not resolve|name or service not known|temporary failure in name resolution|network is unreachable"
    r"|getaddrinfo|nodename nor servname|EAI_AGAIN|Failed to establish a new connection|no route to host"
    r"|connection refused|could not connect to|could not fetch url",
    re.IGNORECASE,
)


def top_of(task: Task) -> float:
    """Returns the highest reward of a task."""
    return 1.0 if task.verifier is None or task.verifier.range is None else task.verifier.range[1]


def bottom_of(task: Task) -> float:
    """Returns the lowest reward of a task."""
    return 0.0 if task.verifier is None or task.verifier.range is None else task.verifier.range[0]


def is_top(task: Task, trial: Trial) -> bool:
    """Whether a trial got all of the reward."""
    return trial.reward is not None and trial.reward >= top_of(task) - _SAME


def failed_trials(trials: Sequence[Trial]) -> Iterator[Finding]:
    """Yields a defect for trials that the infrastructure ended: nothing is known then."""
    lost = [trial for trial in trials if trial.infrastructure]
    if lost:
        text = f"{len(lost)} of {len(trials)} trials failed for a reason that is not the task's: {lost[0].failure}"
        yield _defect(Code.TRIAL_FAILED, text)


def of_solution(task: Task, trials: Sequence[Trial]) -> Iterator[Finding]:
    """Yields what the trials of the unchanged solution show."""
    unprepared = next((trial for trial in trials if trial.phase in (Phase.PREPARING, Phase.SETTING_UP)), None)
    bad = [trial for trial in trials if not trial.infrastructure and not is_top(task, trial)]
    if unprepared is not None:
        yield _defect(Code.SETUP_FAILS, f"the task cannot be prepared: {unprepared.failure}", unprepared.output)
    elif bad and len(bad) == len(trials):
        yield _defect(Code.SOLUTION_FAILS, f"the solution gets {_reward(bad[0])}, not {top_of(task):g}", bad[0].output)
    elif bad:
        good = f"{len(trials) - len(bad)} of {len(trials)} trials"
        text = f"the solution gets {top_of(task):g} in {good}, else {_reward(bad[0])}"
        yield _defect(Code.SOLUTION_UNSTABLE, text, bad[0].output)
    for trial in [*([unprepared] if unprepared is not None else []), *bad]:
        if found := _NO_NETWORK.search(trial.output + trial.failure):
            text = "setup or verifier ask for a network, which they do not have"
            yield _defect(Code.NETWORK_NEEDED, text, _around(trial.output + trial.failure, found.start()))
            return


def of_nothing(task: Task, trials: Sequence[Trial]) -> Iterator[Finding]:
    """Yields a defect if an agent that does nothing gets more than the lowest reward."""
    for trial in trials:
        if trial.reward is not None and trial.reward > bottom_of(task) + _SAME:
            text = f"doing nothing gets {_reward(trial)}, not {bottom_of(task):g}"
            yield _defect(Code.NOTHING_REWARDED, text, trial.output)
            return


def of_change(trial: Trial, untried: Sequence[str]) -> Iterator[Finding]:
    """Yields a defect if the solution's change could not be read: much is not tried then.

    Args:
        trial: of the solution, whose change was to be kept.
        untried: names of the attacks that need the change.
    """
    if trial.diff is None:
        kinds = ["mutated solutions", *([f"the attacks {', '.join(untried)}"] if untried else [])]
        text = (
            "the change that the solution makes to the working directory could not be read: nothing was searched for"
            f" its lines, and {' and '.join(kinds)} were not tried"
        )
        yield _defect(Code.CHANGE_NOT_READ, text, trial.progress)


def of_mutants(task: Task, trials: Sequence[tuple[Trial, bool, str]]) -> Iterator[Finding]:
    """Yields which changes of the solution its verifier does not test.

    Args:
        task: the task.
        trials: of each mutant, with whether it is of a whole block, and its lines.
    """
    known = [item for item in trials if not item[0].infrastructure]
    blocks = [(trial, shown) for trial, is_block, shown in known if is_block and is_top(task, trial)]
    statements = [item for item in known if not item[1]]
    missed = [(trial, shown) for trial, _, shown in statements if is_top(task, trial)]
    for trial, shown in blocks:
        yield _defect(Code.CHANGE_UNTESTED, f"the whole reward without a change: {trial.name}", shown)
    if missed:
        names = "; ".join(trial.name for trial, _ in missed)
        text = f"the whole reward without {len(missed)} of {len(statements)} statements: {names}"
        weak = len(missed) >= UNTESTED_SHARE * len(statements)
        yield Finding(
            code=Code.LINES_UNTESTED,
            severity=Severity.DEFECT if weak else Severity.WARNING,
            message=text,
            evidence="\n".join(shown for _, shown in missed)[:_EVIDENCE],
        )


def of_order(task: Task, trial: Trial) -> Iterator[Finding]:
    """Yields a defect if the reward depends on the order of the tests."""
    if not trial.infrastructure and not is_top(task, trial) and not was_not_loaded(trial.output):
        text = f"with its tests in the reverse order the solution gets {_reward(trial)}, not {top_of(task):g}"
        yield _defect(Code.ORDER_DEPENDENT, text, trial.output)


def of_attack(trial: Trial, tries: str, nothing: float) -> Iterator[Finding]:
    """Yields a defect if an attack gets more than doing nothing does."""
    if trial.reward is not None and trial.reward > nothing + _SAME:
        text = f"{trial.name} gets {_reward(trial)} without any work: {tries}"
        yield _defect(Code.REWARD_FORGED, text, trial.output)


def _reward(trial: Trial) -> str:
    return f"no reward ({trial.failure})" if trial.reward is None else f"{trial.reward:g}"


def _around(text: str, place: int) -> str:
    return text[max(place - 200, 0) : place + 300]


def _defect(code: Code, message: str, evidence: str = "") -> Finding:
    return Finding(code=code, severity=Severity.DEFECT, message=message, evidence=evidence[-_EVIDENCE:])
