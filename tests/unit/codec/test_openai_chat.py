"""What an endpoint's answer may say in the format of Chat Completions."""

from __future__ import annotations

from typing import Any

import pytest

from penstock_codec.chat import MOST_TOKENS, ReasoningPart, TextPart, ToolCallPart, Usage
from penstock_codec.openai_chat import read_message, read_usage


@pytest.mark.requirement("R88")
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens"])
@pytest.mark.parametrize("count", [-1, MOST_TOKENS + 1, 1e30, 2**64, "9" * 30])
def test_a_token_count_that_cannot_be_is_refused(name: str, count: Any) -> None:
    """Budgets add the counts up, and messages hold the sums."""
    with pytest.raises(ValueError, match="count"):
        read_usage({name: count})


@pytest.mark.requirement("R88")
def test_token_counts_up_to_the_limit_are_read() -> None:
    """An absent count is 0."""
    assert read_usage({"prompt_tokens": MOST_TOKENS}) == Usage(MOST_TOKENS, 0)
    assert read_usage(None) == Usage(0, 0)


@pytest.mark.requirement("R88")
@pytest.mark.parametrize("arguments", [{"arguments": ""}, {"arguments": None}, {}])
def test_a_call_without_arguments_has_none(arguments: dict[str, Any]) -> None:
    """Servers write them in all of these ways; a tool got the text "None" as an argument."""
    call = {"id": "c", "type": "function", "function": {"name": "now", **arguments}}
    assert read_message({"content": None, "tool_calls": [call]}).tool_calls == (ToolCallPart("c", "now", "{}"),)


@pytest.mark.requirement("R88")
@pytest.mark.parametrize("identifier", [{"id": ""}, {"id": None}, {"id": 7}, {}])
def test_calls_without_an_id_get_one_each(identifier: dict[str, Any]) -> None:
    """Agents tell the results of several calls apart by it."""
    call = {**identifier, "type": "function", "function": {"name": "now", "arguments": "{}"}}
    first, second = read_message({"content": None, "tool_calls": [call, call]}).tool_calls
    assert first.id.startswith("call_") and second.id.startswith("call_") and first.id != second.id


@pytest.mark.requirement("R88")
@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ()),
        ("", ()),
        ([], ()),
        ("Answer", (TextPart("Answer"),)),
        ([{"type": "text", "text": "An"}, {"type": "text", "text": "swer"}], (TextPart("An"), TextPart("swer"))),
        (
            [
                {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}, {"type": "text", "text": "m"}]},
                {"type": "text", "text": "Answer"},
            ],
            (ReasoningPart("hmm"), TextPart("Answer")),
        ),
        ([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": ""}], (ReasoningPart("hm"),)),
    ],
)
def test_content_is_read_whole_or_in_parts(content: Any, parts: tuple[Any, ...]) -> None:
    """Mistral's API gives thinking and text as parts; the agent got an empty answer."""
    assert read_message({"content": content}).parts == parts


@pytest.mark.requirement("R88")
@pytest.mark.parametrize(
    "content",
    [
        *(7, {}, {"type": "text", "text": "a"}, ["a"], [None], [{"type": "text"}], [{"type": "text", "text": 7}]),
        *([{"type": "image_url"}], [{"type": "thinking"}], [{"type": "thinking", "thinking": [{"text": 7}]}], [{}]),
    ],
)
def test_content_that_nobody_can_show_is_no_empty_answer(content: Any) -> None:
    """An answer that cannot be read fails as one."""
    with pytest.raises(TypeError):
        read_message({"content": content})
