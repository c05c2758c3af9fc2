"""The exact paired permutation test of two evaluations, against enumeration."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tests.unit.evaluation.test_attempts import attempt

from penstock.cli.views.evaluation import differences, table
from penstock.evaluation import Summary, permutation, summarise
from penstock.evaluation.compare import compare
from penstock.evaluation.permutation import sign_flips

_DIFFERENCES = st.lists(
    st.tuples(st.integers(-12, 12), st.integers(1, 12)).map(lambda pair: Fraction(*pair)), min_size=1, max_size=6
)


def enumerated(differences: list[Fraction]) -> float:
    """By its definition: every assignment of signs."""
    observed = abs(sum(differences, Fraction()))
    signs = list(itertools.product((1, -1), repeat=len(differences)))
    sums = [sum((a * b for a, b in zip(row, differences, strict=True)), Fraction()) for row in signs]
    return sum(abs(total) >= observed for total in sums) / len(signs)


@settings(max_examples=50)
@given(_DIFFERENCES)
def test_p_is_the_share_of_signs_that_give_as_much(differences: list[Fraction]) -> None:
    """Ties count, however the numbers of attempts differ."""
    assert sign_flips(differences) == pytest.approx(enumerated(differences), rel=1e-12)


@settings(max_examples=50)
@given(_DIFFERENCES)
def test_the_way_of_counting_changes_nothing(differences: list[Fraction]) -> None:
    """Few differences without a common measure are enumerated, where their table would be too large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(permutation, "_MOST_SUMS", 0)
        assert sign_flips(differences) == pytest.approx(enumerated(differences), rel=1e-12)


def test_an_inexact_result_is_none() -> None:
    """Many differences of which each has an own denominator: nothing is made up."""
    primes = [number for number in range(100, 400) if all(number % other for other in range(2, 20))]
    assert sign_flips([Fraction(1, prime) for prime in primes]) is None
    assert sign_flips([]) is None


@pytest.mark.parametrize(("tasks", "p"), [(1, 1.0), (5, 1 / 16), (10, 1 / 512), (400, 2.0**-399)])
def test_p_of_tasks_that_all_got_better_is_known(tasks: int, p: float) -> None:
    """Only all and none of the signs give as much; unchanged tasks say nothing."""
    assert sign_flips([Fraction(1, 4)] * tasks + [Fraction(0)] * 7) == pytest.approx(p)


def test_evaluations_that_do_not_differ_are_seldom_called_different() -> None:
    """An exact test at 5 % errs in at most 5 of 100, which the normal interval of few tasks does not keep."""
    rng = random.Random(1)
    found = []
    for _ in range(200):
        pairs = [
            (sum(rng.random() < 0.5 for _ in range(2)), sum(rng.random() < 0.5 for _ in range(2))) for _ in range(8)
        ]
        found.append(sign_flips([Fraction(after - before, 2) for before, after in pairs]))
    assert sum(p is not None and p <= 0.05 for p in found) <= 0.05 * 200 + 2 * (0.05 * 0.95 * 200) ** 0.5


def shown(item: object) -> str:
    console = Console(width=200)
    with console.capture() as caught:
        console.print(item)
    return caught.get()


def evaluation(rewards: dict[str, list[float]]) -> Summary:
    made = [attempt(name, index, reward) for name, own in rewards.items() for index, reward in enumerate(own)]
    return summarise(made, list(rewards), 2)


def test_a_comparison_has_p_for_people_and_programs() -> None:
    """Five tasks of five got better: 1 in 16 by chance."""
    before = evaluation({name: [0.0, 0.0] for name in "abcde"})
    after = evaluation({name: [0.0, 1.0] for name in "abcde"})
    found = compare(before, after)
    assert found.as_dict()["p"] == found.p == pytest.approx(1 / 16)
    assert "p 0.0625  exact permutation test over 5 tasks" in shown(differences(found, "x", "y"))
    nothing = compare(before, evaluation({"z": [1.0]}))
    assert nothing.p is None and "test" not in shown(differences(nothing, "x", "y"))


def test_the_table_of_one_task_says_what_its_interval_is_over() -> None:
    """Ten attempts at one task are no evidence about others."""
    note = "one task: the intervals are over its attempts"
    assert note in shown(table(evaluation({"a": [0.0, 1.0]})))
    assert note not in shown(table(evaluation({"a": [0.0, 1.0], "b": [1.0, 1.0]})))
