"""Which metrics can be logged: the rules that clients and the driver share."""

from __future__ import annotations

import math
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.values import metrics

LETTERS = string.ascii_letters + string.digits + "_./-"
NAMES = st.text(LETTERS, min_size=1, max_size=128)
STEPS = st.integers(0, metrics.MOST_STEP)
FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(step=STEPS, values=st.dictionaries(NAMES, FINITE, min_size=1, max_size=8))
def test_finite_numbers_under_plain_names_are_accepted(step: int, values: dict[str, float]) -> None:
    assert list(metrics.problems(step, values)) == []


@given(
    values=st.dictionaries(NAMES, FINITE, max_size=4),
    name=NAMES,
    value=st.sampled_from([math.nan, math.inf, -math.inf]),
)
def test_a_number_that_is_not_finite_is_refused_by_its_name(values: dict[str, float], name: str, value: float) -> None:
    ((field, problem),) = metrics.problems(3, values | {name: value})
    assert field.startswith(f"values[{name[:64]}")
    assert "finite" in problem


@settings(max_examples=30)
@given(name=st.text(max_size=200).filter(lambda text: not (0 < len(text) <= 128 and set(text) <= set(LETTERS))))
def test_any_other_name_is_refused_and_shown_in_part(name: str) -> None:
    ((field, _),) = metrics.problems(0, {name: 1.0})
    assert len(field) <= len("values[...]") + 64
    assert metrics.name_problem(name)


@given(step=st.one_of(st.integers(max_value=-1), st.integers(min_value=metrics.MOST_STEP + 1)))
def test_a_step_that_not_every_client_can_read_is_refused(step: int) -> None:
    assert [field for field, _ in metrics.problems(step, {"loss": 1.0})] == ["step"]


@pytest.mark.parametrize("count", [0, metrics.MOST_NAMES + 1])
def test_a_step_has_one_to_128_values(count: int) -> None:
    assert [field for field, _ in metrics.problems(0, {f"m{index}": 0.0 for index in range(count)})] == ["values"]


@pytest.mark.parametrize("run_id", ["", "x" * 64, "-x", "a b", "run\n"])
def test_a_run_is_named_as_rollouts_name_it(run_id: str) -> None:
    assert metrics.run_problem(run_id)
    assert not metrics.run_problem("team/run-7.b_2")
