"""The difference of two texts: true, and bounded."""

from __future__ import annotations

import re
from difflib import Match, SequenceMatcher

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_driver.rollouts.workdir import edits
from penstock_driver.rollouts.workdir.edits import Effort, hunks

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


@pytest.mark.requirement("R80")
@given(LINES, LINES, st.booleans(), st.booleans(), st.sampled_from([0, 5, 4_000_000]))
def test_hunks_turn_one_text_into_the_other_whatever_effort_there_is(
    one: list[str], other: list[str], ends: bool, other_ends: bool, steps: int
) -> None:
    """Bounded work; a difference that is cut short is a longer one and still true."""
    before = "\n".join(one) + ("\n" if ends else "")
    after = "\n".join(other) + ("\n" if other_ends else "")
    lines = list(hunks(before, after, Effort(steps)))
    assert applied(before, lines) == after
    assert bool(lines) == (before != after)


@pytest.mark.requirement("R80")
def test_texts_that_have_nothing_in_common_cost_no_more_than_the_effort() -> None:
    """What an agent leaves cannot keep the driver busy."""
    effort = Effort(1000)
    lines = list(hunks("x\n" * 50_000, "y\n" * 50_000, effort))
    assert len(lines) == 100_001
    assert effort.steps == 0


@pytest.mark.requirement("R80")
def test_a_search_that_the_effort_does_not_cover_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search compares each line with its equals in the other text: 150 lines with 180 equals each here."""
    searched: list[tuple[int, ...]] = []
    search = SequenceMatcher.find_longest_match

    def spied(self: SequenceMatcher[str], *at: int) -> Match:
        searched.append(at)
        return search(self, *at)

    monkeypatch.setattr(SequenceMatcher, "find_longest_match", spied)
    before, after = "1\n" + "a\n" * 150 + "2\n", "3\n" + "a\n" * 180 + "4\n"
    list(hunks(before, after, Effort(20_000)))
    assert not searched
    list(hunks(before, after, Effort(30_000)))
    assert searched


def test_a_text_of_many_equal_lines_has_a_short_difference() -> None:
    """Such as columns of zeros: what did not change is not shown as removed and added."""
    before = ["0\n"] * 900
    after = [*before[:10], "1\n", *before[11:890], "2\n", *before[891:]]
    assert len(list(hunks("".join(before), "".join(after), Effort()))) == 18


def test_a_text_of_which_hundreds_of_lines_changed_has_a_short_difference() -> None:
    """The lines between the changes are found."""
    before = [f"{index}\n" for index in range(1500)]
    after = [f"{line[:-1]} changed\n" if index % 3 == 0 else line for index, line in enumerate(before)]
    assert sum(line[0] in "+-" for line in hunks("".join(before), "".join(after), Effort())) == 1000
