"""The difference of two texts: true, and bounded."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from penstock_driver import edits
from penstock_driver.edits import Effort, hunks

LINES = st.lists(st.sampled_from(["a", "b", "c", "", "d\f", "e\u2028"]), max_size=40)
HEADING = re.compile(r"@@ -(\d+),(\d+) \+(\d+),(\d+) @@\n")


def applied(before: str, lines: list[str]) -> str:
    """`before` with the hunks applied to it, as patch(1) does."""
    old = edits._lines(before)
    made: list[str] = []
    at = 0
    for index, line in enumerate(lines):
        heading = HEADING.fullmatch(line)
        if heading:
            start = int(heading[1]) - (int(heading[2]) > 0)
            made += old[at:start]
            at = start
            continue
        if line.startswith("\\"):
            continue
        text = line[1:]
        if index + 1 < len(lines) and lines[index + 1].startswith("\\"):
            text = text.removesuffix("\n")
        if line[0] in " -":
            assert old[at] == text
            at += 1
        if line[0] in " +":
            made.append(text)
    return "".join(made + old[at:])


@given(LINES, LINES, st.booleans(), st.booleans(), st.sampled_from([0, 5, 4_000_000]))
def test_hunks_turn_one_text_into_the_other_whatever_effort_there_is(
    one: list[str], other: list[str], ends: bool, other_ends: bool, steps: int
) -> None:
    """R80: bounded work; a difference that is cut short is a longer one and still true."""
    before = "\n".join(one) + ("\n" if ends else "")
    after = "\n".join(other) + ("\n" if other_ends else "")
    lines = list(hunks(before, after, Effort(steps)))
    assert applied(before, lines) == after
    assert bool(lines) == (before != after)


def test_texts_that_have_nothing_in_common_cost_no_more_than_the_effort() -> None:
    """R80: what an agent leaves cannot keep the driver busy."""
    effort = Effort(1000)
    lines = list(hunks("x\n" * 50_000, "y\n" * 50_000, effort))
    assert len(lines) == 100_001
    assert effort.steps > -2 * edits.MAX_EDITS
