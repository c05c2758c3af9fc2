"""The figures of `python -m benchmarks prefix-tree`, by rollouts that are counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.replaying.prefix_trees import section
from tests.unit.analysis.trajectory_cases import sample, trajectory

from penstock.adapters.trainers import select


@pytest.mark.requirement("R74")
def test_tokens_are_counted_by_call_by_sample_and_by_tree() -> None:
    """Two samples of ten tokens in two turns, alike but for the last three."""
    first, second = (sample(name, [(4, 2, True), (1, 3, True)]) for name in ("a", "b"))
    second.input_ids[7:] += 50
    made = section("both", [select([trajectory("r", [first]), trajectory("s", [second], reward=0.0)])])
    by_call, by_sample, tree, tight, loose = made.rows[:5]
    assert [by_call.value, by_sample.value, tree.value] == [2 * (6 + 10), 2 * 10, 7 + 3 + 3]
    assert [row.also["rows"] for row in made.rows[:5]] == [4, 2, 1, 2, 1]
    assert (tight.value, loose.value) == (20, 13)
    pairs = np.array([2 * (21 + 55), 2 * 55, 28 + 2 * (8 + 9 + 10)])
    assert [row.also["pairs"] for row in (by_call, by_sample, tree)] == (pairs / pairs[1]).tolist()
