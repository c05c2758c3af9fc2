"""What a point of `penstock watch`'s reward curve stands for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.unit.cli.test_watch_replay_diff import standing_of, summary

from penstock.cli.views.curve_points import By
from penstock.cli.views.live_table import Standing
from penstock.cli.views.reward_curve import Point
from penstock.client.types.results import Phase
from penstock.client.types.trajectories import Reward
from penstock.evaluation.statistics import wilson


def run(steps: Sequence[int], **changes: object) -> Standing:
    """Eight groups of four binary rewards, two to a step, in a random order of their numbers; version = 10 + step."""
    items = []
    for number in range(len(steps) * 8):
        group = number // 4
        step = steps[group // 2]
        given = {"labels": {"step": str(step)}, "min_version": 10 + step, "max_version": 12 + step, **changes}
        # The share of full rewards grows with the step: 1, 2, 3, ... of eight.
        reward = Reward(float(number % 8 <= step))
        items.append(summary(number, group_id=f"g{group}", reward=reward, **given))
    return standing_of(items)


def mean(passed: int) -> Point:
    low, high = wilson(passed / 8, 8)
    return Point(pytest.approx(low), pytest.approx(passed / 8), pytest.approx(high))  # type: ignore[arg-type]


def test_the_curve_has_a_point_for_each_training_step() -> None:
    """In the order of steps, not of starts; its spread is the mean's interval, as that of binary rewards is 0 to 1."""
    points, caption = run([2, 0, 1, 3]).curve()
    assert points == [mean(1), mean(2), mean(3), mean(4)]
    assert caption == "mean and its 95 % interval by 4 steps, 0 to 3"


def test_without_step_labels_the_curve_has_a_point_for_each_policy_version() -> None:
    """That a rollout began with. A label that is no number is none."""
    for labels in ({}, {"step": "last"}, {"step": "9" * 40}, {"step": "\N{SUPERSCRIPT TWO}"}):
        points, caption = run([1, 0], labels=labels).curve()
        assert points == [mean(1), mean(2)]
        assert caption == "mean and its 95 % interval by 2 policy versions, 10 to 11"


def test_one_version_is_drawn_by_group() -> None:
    """One point says nothing."""
    points, caption = run([1, 1], labels={}).curve()
    assert len(points) == 4 and "4 groups in the order" in caption


def test_what_a_point_stands_for_can_be_chosen() -> None:
    standing = run([0, 1])
    assert "2 policy versions, 10 to 11" in standing.curve(By.VERSION)[1]
    assert "4 groups" in standing.curve(By.GROUP)[1]
    assert "by step 1" in run([1]).curve(By.STEP)[1]
    assert "2 groups" in run([1], labels={}).curve(By.STEP)[1], "what no rollout has is drawn by group"


def test_a_rollout_without_a_reward_is_in_no_point() -> None:
    waiting = summary(99, labels={"step": "7"}, reward=None, phase=Phase.RUNNING)
    standing = standing_of([*run([0, 1]).rollouts(), waiting])
    assert "2 steps, 0 to 1" in standing.curve()[1]
