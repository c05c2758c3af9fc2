"""From trials to findings."""

from __future__ import annotations

import pytest

from penstock.assay import Code, Kind, Severity, Trial, judging
from penstock.client import Command, Task, Verifier

TASK = Task(task_id="it", instruction="x", verifier=Verifier(commands=[Command(argv=["true"])], range=(-1.0, 2.0)))


def trial(reward: float | None, kind: Kind = Kind.SOLUTION, **values: object) -> Trial:
    return Trial(kind=kind, name="one", reward=reward, **values)  # type: ignore[arg-type]


def codes(findings: object) -> list[Code]:
    return [finding.code for finding in findings]  # type: ignore[attr-defined]


@pytest.mark.requirement("R138")
@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((2.0, 2.0, 2.0), []),
        ((2.0, 1.0, 2.0), [Code.SOLUTION_UNSTABLE]),
        ((None, 2.0), [Code.SOLUTION_UNSTABLE]),
        ((1.0, 1.0), [Code.SOLUTION_FAILS]),
        ((None,), [Code.SOLUTION_FAILS]),
    ],
)
def test_a_solution_must_get_the_highest_reward_each_time(
    rewards: tuple[float | None, ...], expected: list[Code]
) -> None:
    assert codes(judging.of_solution(TASK, [trial(reward) for reward in rewards])) == expected


@pytest.mark.requirement("R138")
def test_nothing_must_get_the_lowest_reward_of_the_range() -> None:
    assert codes(judging.of_nothing(TASK, [trial(-1.0), trial(None)])) == []
    assert codes(judging.of_nothing(TASK, [trial(-1.0), trial(0.0)])) == [Code.NOTHING_REWARDED]


def test_an_attack_must_get_no_more_than_nothing() -> None:
    assert codes(judging.of_attack(trial(0.5), "Tries.", 0.5)) == []
    assert codes(judging.of_attack(trial(None), "Tries.", -1.0)) == []
    assert codes(judging.of_attack(trial(0.6), "Tries.", 0.5)) == [Code.REWARD_FORGED]


def test_an_untested_change_is_a_defect_and_few_statements_a_warning() -> None:
    """One of many statements that nobody misses is ordinary; one of few is not, and never a whole change."""
    caught = [(trial(0.0), False, "") for _ in range(11)]
    (rare,) = judging.of_mutants(TASK, [*caught, (trial(2.0), False, "+x")])
    assert (rare.code, rare.severity) == (Code.LINES_UNTESTED, Severity.WARNING)
    (often,) = judging.of_mutants(TASK, [*caught[:5], (trial(2.0), False, "+x")])
    assert (often.code, often.severity) == (Code.LINES_UNTESTED, Severity.DEFECT)
    (whole,) = judging.of_mutants(TASK, [*caught, (trial(2.0), True, "+x")])
    assert (whole.code, whole.severity, whole.evidence) == (Code.CHANGE_UNTESTED, Severity.DEFECT, "+x")


def test_trials_that_the_infrastructure_ended_prove_nothing() -> None:
    lost = trial(None, failure="SANDBOX_LOST: x", infrastructure=True)
    assert codes(judging.of_solution(TASK, [lost, trial(2.0)])) == []
    assert codes(judging.of_mutants(TASK, [(lost, True, "")])) == []
    assert codes(judging.of_order(TASK, lost)) == []
    assert codes(judging.failed_trials([lost, trial(2.0)])) == [Code.TRIAL_FAILED]
    assert codes(judging.failed_trials([trial(2.0)])) == []


def test_a_failed_trial_that_asked_for_a_network_says_so() -> None:
    output = "curl: (6) Could not resolve host: example.org"
    found = codes(judging.of_solution(TASK, [trial(0.0, output=output)]))
    assert found == [Code.SOLUTION_FAILS, Code.NETWORK_NEEDED]
    found = codes(
        judging.of_solution(TASK, [trial(None, failure="SETUP_FAILED: x", phase="setting_up", output=output)])
    )
    assert found == [Code.SETUP_FAILS, Code.NETWORK_NEEDED]


def test_a_plugin_that_was_not_found_shows_no_order() -> None:
    output = 'ImportError: Error importing plugin "penstock_reversed": No module named'
    assert codes(judging.of_order(TASK, trial(0.0, output=output))) == []
    assert codes(judging.of_order(TASK, trial(0.0, output="1 failed"))) == [Code.ORDER_DEPENDENT]
