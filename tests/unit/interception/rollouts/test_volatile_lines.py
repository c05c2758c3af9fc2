"""Lines of a prompt that change from call to call and mean nothing are blanked before they are tokenised."""

from __future__ import annotations

import pytest

from penstock_chassis.errors import InvalidArgument
from penstock_codec.chat import Message
from penstock_interception.domain.requests import BLANKED, blank_volatile
from penstock_interception.rollouts.conversations import _compile


@pytest.mark.requirement("R85")
def test_a_matching_line_is_blanked_and_the_rest_stays() -> None:
    asked = (Message.system("You are an agent.\nx-billing: 17\nBe short."), Message.user("x-billing: mine"))
    blanked, changed = blank_volatile(asked, _compile(["^x-billing: [0-9]+$"]))
    assert changed
    assert blanked == (Message.system(f"You are an agent.\n{BLANKED}\nBe short."), asked[1])


@pytest.mark.requirement("R85")
def test_text_that_no_pattern_matches_is_left_as_it_is() -> None:
    asked = (Message.user("hello"),)
    assert blank_volatile(asked, _compile(["^never$"])) == (asked, False)


@pytest.mark.requirement("R32", "R33")
@pytest.mark.parametrize("pattern", ["(", "(?=ahead)", r"(a)\1"])
def test_nonlinear_expressions_are_refused_by_position(pattern: str) -> None:
    """A pattern that could take exponential time over an agent's text cannot be given."""
    with pytest.raises(InvalidArgument) as refused:
        _compile(["fine", pattern])
    assert refused.value.reason == "FIELD_INVALID"
    assert [violation.field for violation in refused.value.violations] == ["hints.volatile_line_patterns[1]"]
