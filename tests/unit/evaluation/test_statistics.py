"""pass@k and its intervals, against enumeration and simulation."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.evaluation.statistics import bounded_mean, estimate, mean, pass_at_k, wilson


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_choices_with_a_pass(case: tuple[int, int, int]) -> None:
    """Issue 6, point 6: the estimator of Chen et al. is exact, for whatever n, c and k."""
    attempts, passed, k = case
    outcomes = [index < passed for index in range(attempts)]
    choices = list(itertools.combinations(outcomes, k))
    assert pass_at_k(attempts, passed, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize(("attempts", "passed", "k"), [(3, 4, 1), (3, 1, 4), (3, 1, 0), (0, 0, 1)])
def test_inestimable_statistics_are_refused(attempts: int, passed: int, k: int) -> None:
    """Issue 6, point 6: pass@k needs k attempts; nothing is made up for those that are missing."""
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(attempts, passed, k)


_COUNTS = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=4),
    st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))),
    max_size=12,
)


@given(_COUNTS, st.integers(1, 8))
def test_estimate_lies_in_its_interval_within_0_and_1(counts: dict[str, tuple[int, int]], k: int) -> None:
    """Issue 6, point 6: intervals stay intervals where all tasks agree, where there is one, where there is none."""
    found = estimate(counts, k)
    enough = {task: pair for task, pair in counts.items() if pair[0] >= k}
    assert (found is None) == (not enough)
    if found is not None:
        assert 0.0 <= found.low <= found.value + 1e-12
        assert found.value - 1e-12 <= found.high <= 1.0
        assert found.high - found.low > 0.0
        assert (found.tasks, found.attempts) == (len(enough), sum(pair[0] for pair in enough.values()))


def test_agreement_of_few_tasks_proves_little() -> None:
    """Issue 6, point 6: five attempts at each of three tasks, all passed, are three observations and not fifteen."""
    few = estimate(dict.fromkeys("abc", (5, 5)), 1)
    many = estimate({str(name): (5, 5) for name in range(100)}, 1)
    assert few is not None
    assert many is not None
    assert few.value == many.value == 1.0
    assert few.low == pytest.approx(wilson(1.0, 3)[0])
    assert few.low < 0.5 < 0.95 < many.low


def test_interval_of_pass_at_1_covers_the_truth_as_stated() -> None:
    """Issue 6, point 6: 95 % means 95 %, with tasks that differ from one another."""
    dice = random.Random(5)
    truth, held, runs = 0.5, 0, 2000
    for _ in range(runs):
        counts = {}
        for task in range(20):
            chance = dice.betavariate(1.0, 1.0)
            counts[str(task)] = (4, sum(dice.random() < chance for _ in range(4)))
        found = estimate(counts, 1)
        assert found is not None
        held += found.low <= truth <= found.high
    assert 0.92 < held / runs < 0.98


@pytest.mark.requirement("R74")
def test_a_mean_has_half_a_width_and_nothing_has_none() -> None:
    """Without a reward there is no mean, which is not zero."""
    assert mean([]) is None
    assert mean([0.25]) == mean([0.25] * 3) == (0.25, None)
    found = mean([0.0, 1.0])
    assert found is not None
    assert found == pytest.approx((0.5, 1.96 * 0.5), abs=1e-3)


_REWARDS = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=4), st.lists(st.floats(-2.0, 3.0), max_size=6), max_size=8
)


@given(_REWARDS)
def test_the_interval_of_a_mean_reward_stays_within_the_range_of_rewards(rewards: dict[str, list[float]]) -> None:
    """A reward between 0 and 1 that is 0.5 give or take 0.98 is no statement about it."""
    found = bounded_mean(rewards, -2.0, 3.0)
    assert (found is None) == (not any(rewards.values()))
    if found is not None:
        assert -2.0 <= found.low <= found.value <= found.high <= 3.0


def test_interval_of_binary_rewards_is_that_of_pass_at_1() -> None:
    """One method for both, so that they do not contradict each other."""
    rewards = {"a": [1.0, 1.0], "b": [0.0, 0.0], "c": [1.0, 0.0]}
    found, rate = bounded_mean(rewards, 0.0, 1.0), estimate({"a": (2, 2), "b": (2, 0), "c": (2, 1)}, 1)
    assert found is not None and rate is not None
    assert (found.value, found.low, found.high) == pytest.approx((rate.value, rate.low, rate.high))
    scaled = bounded_mean({task: [10 * value - 5 for value in values] for task, values in rewards.items()}, -5.0, 5.0)
    assert scaled is not None
    assert (scaled.low, scaled.high) == pytest.approx((10 * rate.low - 5, 10 * rate.high - 5))
    two = bounded_mean({"a": [1.0], "b": [0.0]}, 0.0, 1.0)
    assert two is not None and 0.0 < two.low < 0.1 and 0.9 < two.high < 1.0
    alike = bounded_mean({"a": [2.0], "b": [2.0]}, 2.0, 2.0)
    assert alike is not None and (alike.low, alike.value, alike.high) == (2.0, 2.0, 2.0)


@pytest.mark.requirement("R149")
def test_equal_values_have_no_width_and_equal_tasks_count_once_each() -> None:
    """The rounded mean of equal values shows no variance where there is none."""
    for size in range(2, 65):
        for hundredths in range(101):
            value = hundredths / 100
            assert mean([value] * size) == (value, None)
            found = bounded_mean({str(task): [value, value] for task in range(size)}, 0.0, 1.0)
            assert found is not None
            assert (found.low, found.high) == pytest.approx(wilson(value, size), abs=1e-12)


def test_tasks_that_agree_but_for_rounding_show_no_variance() -> None:
    """The mean of three rewards of 0.1 is not 0.1: attempts are no more evidence for that."""
    few = bounded_mean({"a": [0.1], "b": [0.1]}, 0.0, 1.0)
    many = bounded_mean({"a": [0.1] * 3, "b": [0.1]}, 0.0, 1.0)
    far = bounded_mean({"a": [1e6 + 0.1] * 3, "b": [1e6 + 0.1]}, 1e6, 1e6 + 1.0)
    assert few is not None and many is not None and far is not None
    assert (many.low, many.high) == pytest.approx((few.low, few.high), abs=1e-9)
    assert (far.low - 1e6, far.high - 1e6) == pytest.approx((few.low, few.high), abs=1e-6)


def test_differences_that_are_equal_but_for_rounding_have_no_interval() -> None:
    """From 0 to 1 in 3 and from 2 to 3 in 3 are one difference, though not one float."""
    first, second = pass_at_k(3, 1, 1) - pass_at_k(3, 0, 1), pass_at_k(3, 3, 1) - pass_at_k(3, 2, 1)
    assert first != second
    found = mean([first, second])
    assert found is not None and found[1] is None and found[0] == pytest.approx(1 / 3)
