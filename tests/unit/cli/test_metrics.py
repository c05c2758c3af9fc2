"""The course of a metric, drawn in characters."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cli.commands.metrics import course

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize(
    ("values", "drawn"),
    [([0, 7], "▁█"), ([7, 0], "█▁"), ([3, 3, 3], "▁▁▁"), (range(8), "▁▂▃▄▅▆▇█"), ([0.0], "▁"), ([0, 0, 7, 7], "▁▁██")],
)
def test_values_are_bars_from_the_least_to_the_greatest(values: list[float], drawn: str) -> None:
    assert course(np.array(values, np.float64)) == drawn


@settings(max_examples=40)
@given(st.lists(FINITE, min_size=1, max_size=100))
def test_any_finite_values_fit_the_width(values: list[float]) -> None:
    assert len(course(np.array(values), 24)) == min(24, len(values))
