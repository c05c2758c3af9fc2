"""What is due, and when somebody must look again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_interception.domain.deadlines import Deadlines


@pytest.mark.requirement("R23")
@given(st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(0, 100)), max_size=300), st.integers(0, 100))
def test_deadlines_come_once_in_order_and_the_last_set_counts(steps: list[tuple[int, int | None]], now: int) -> None:
    """The heap agrees with a dictionary, and stays bounded by what is live."""
    deadlines: Deadlines[int] = Deadlines()
    model: dict[int, int] = {}
    for key, at in steps:
        if at is None:
            deadlines.drop(key)
            model.pop(key, None)
        else:
            deadlines.set(key, at)
            model[key] = at
        assert len(deadlines) == len(model)
        assert len(deadlines._heap) <= 2 * len(model) + 66
    assert deadlines.next() == min(model.values(), default=None)
    came = list(deadlines.due(now))
    assert sorted(came) == sorted(key for key, at in model.items() if at <= now)
    assert [model[key] for key in came] == sorted(model[key] for key in came)


def test_a_sooner_deadline_is_announced() -> None:
    """Whoever sleeps until the next deadline is told when another one comes first."""
    told: list[int] = []
    deadlines: Deadlines[str] = Deadlines(lambda: told.append(1))
    deadlines.set("a", 10)
    deadlines.set("b", 20)
    deadlines.set("c", 5)
    assert len(told) == 2


@pytest.mark.requirement("R32")
def test_a_deadline_that_takes_the_place_of_a_dropped_one_wakes_nobody() -> None:
    """Each call has a deadline and drops it; whoever sleeps until the first of them is left to sleep."""
    told: list[int] = []
    deadlines: Deadlines[str] = Deadlines(lambda: told.append(1))
    deadlines.set("first", 10)
    assert deadlines.next() == 10
    deadlines.drop("first")
    deadlines.set("second", 11)
    assert len(told) == 1
    assert deadlines.next() == 11
    deadlines.set("third", 10.5)
    assert len(told) == 2 and list(deadlines.due(10.5)) == ["third"]
