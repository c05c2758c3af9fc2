"""The judge of `python -m tests.trainers`: what a trainer may get wrong, it finds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.trainers.driven import Learned, differences

from penstock.adapters.trainers.plugins.rollouts import AgentRollouts
from penstock.client import InvalidArgument, Task

MASK = [False, False, True, True, False, True]
GOOD = Learned.of([1, 2, 3, 4, 5, 6], MASK, [9.0, 9.0, -0.5, -0.25, 9.0, -0.125], 1.0)
ANSWERS = [((3, -0.5), (4, -0.25)), ((6, -0.125),)]


def test_equal_sequences_have_no_difference() -> None:
    """Logprobs of what is not trained do not count."""
    assert differences([GOOD], [GOOD], ANSWERS) == []


@pytest.mark.parametrize(
    "learned",
    [
        [],
        [GOOD, GOOD],
        [replace(GOOD, ids=(1, 2, 3, 4, 5, 7))],
        [replace(GOOD, mask=(False, True, *GOOD.mask[2:]))],
        [replace(GOOD, mask=(*GOOD.mask[:5], False))],
        [replace(GOOD, logprobs=(0.0, *GOOD.logprobs[:5]))],
        [replace(GOOD, reward=0.0)],
    ],
    ids=["absent", "twice", "another id", "context trained", "answer masked", "logprobs shifted", "another reward"],
)
def test_difference_is_found(learned: list[Learned]) -> None:
    """Each by itself."""
    assert differences(learned, [GOOD], ANSWERS)


@pytest.mark.parametrize(
    ("given", "named"), [({"tries": 0}, "tries"), ({"tries": 17}, "tries"), ({"tasks": {}}, "tasks")]
)
def test_options_of_a_plugin_are_checked_before_anything_starts(given: dict[str, object], named: str) -> None:
    """By the field's name."""
    with pytest.raises(InvalidArgument, match=named):
        AgentRollouts(**{"tasks": {"t": Task(task_id="t", instruction="Do it.")}, "agent": "shell", **given})  # type: ignore[arg-type]


def test_unknown_option_of_a_plugin_is_named() -> None:
    """Before the tasks are read."""
    with pytest.raises(InvalidArgument, match="sampels"):
        AgentRollouts.load("absent", "shell", sampels=1)
