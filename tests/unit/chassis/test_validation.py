"""What a service finds wrong with settings, specs and options, in words about the field."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, Field, ValidationError, field_validator

from penstock_chassis.validation import violations_of


class Settings(BaseModel):
    """One of each."""

    count: int = Field(1, ge=1)
    turns: tuple[str, ...] = Field(("one",), min_length=1)
    name: str = Field("a", max_length=3)
    mode: str = "gate"

    @field_validator("mode")
    @classmethod
    def _known(cls, value: str) -> str:
        if value != "gate":
            raise ValueError(f"{value!r} is not one of: gate")
        return value


@pytest.mark.requirement("R18", "R48")
@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        ({"count": 0}, "options.count", "must be greater than or equal to 1"),
        ({"count": "x"}, "options.count", "must be a valid integer, unable to parse string as an integer"),
        ({"turns": ()}, "options.turns", "must have at least 1 item, and has 0"),
        ({"name": "long"}, "options.name", "must have at most 3 characters"),
        ({"mode": "proxy"}, "options.mode", "'proxy' is not one of: gate"),
        ([], "options", "must be a valid dictionary or instance of Settings"),
    ],
)
def test_problem_is_a_sentence_about_its_field_without_the_value(given: object, field: str, words: str) -> None:
    """Names the field and what it must be; none of a library's own phrases."""
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate(given)
    (violation,) = violations_of(caught.value, "options", "options.")
    assert (violation.field, violation.description) == (field, words)
