"""Forms of completions, as callers write them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_chassis.errors import InvalidArgument
from penstock_inference.domain.response_format import MAX_CHOICES, MAX_LENGTH, FormatKind, ResponseFormat

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"type": "json_object"}, (FormatKind.JSON_OBJECT, "", ())),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {"type": "object"}}},
            (FormatKind.JSON_SCHEMA, '{"type": "object"}', ()),
        ),
        ({"type": "regex", "regex": "a+"}, (FormatKind.REGEX, "a+", ())),
        ({"type": "choice", "choice": ["a", "b"]}, (FormatKind.CHOICE, "", ("a", "b"))),
        ({"type": "grammar", "grammar": 'root ::= "a"'}, (FormatKind.GRAMMAR, 'root ::= "a"', ())),
    ],
)
def test_a_form_is_read_and_kept_as_it_was_written(
    value: Any, expected: tuple[FormatKind, str, tuple[str, ...]]
) -> None:
    """As the OpenAI API writes it, and three types more."""
    text = json.dumps(value)
    form = ResponseFormat.parse(text)
    assert form is not None and (form.kind, form.text, form.choices) == expected and form.json_text == text


@pytest.mark.requirement("R64")
def test_free_text_is_no_form() -> None:
    """It is as if nothing had been asked for."""
    assert ResponseFormat.parse('{"type": "text"}') is None


@pytest.mark.requirement("R33")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 100_000,
        "null",
        "{}",
        '{"type": 5}',
        '{"type": "json_schema", "json_schema": {"schema": []}}',
        '{"type": "json_schema", "schema": {}}',
        '{"type": "regex", "regex": " "}',
        '{"type": "choice", "choice": []}',
        '{"type": "choice", "choice": ["a", ""]}',
        json.dumps({"type": "choice", "choice": ["a"] * (MAX_CHOICES + 1)}),
        json.dumps({"type": "grammar", "grammar": "x" * MAX_LENGTH}),
    ],
)
def test_invalid_format_is_refused_by_field(text: str) -> None:
    """Typed, with the field."""
    with pytest.raises(InvalidArgument) as caught:
        ResponseFormat.parse(text)
    assert caught.value.reason == "FIELD_INVALID"
    assert caught.value.violations[0].field == "sampling.response_format_json"


@pytest.mark.requirement("R33")
@given(st.text() | JSON.map(json.dumps) | st.dictionaries(st.just("type"), st.sampled_from(FormatKind)).map(str))
def test_any_text_is_a_form_or_refused(text: str) -> None:
    """Agents write them."""
    try:
        form = ResponseFormat.parse(text)
    except InvalidArgument:
        return
    assert form is None or form.kind in FormatKind
