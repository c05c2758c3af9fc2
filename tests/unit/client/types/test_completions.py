"""Completions from a trainer's own engine."""

from __future__ import annotations

import pytest

from penstock.client import Completion, FinishReason, InvalidArgument


@pytest.mark.requirement("R83")
def test_a_word_that_no_enum_has_is_refused_with_those_that_it_has() -> None:
    """OpenAI's servers say "length", Anthropic's "max_tokens"."""
    assert Completion.of_tokens([1], [-1.0], finish_reason="length").finish_reason is FinishReason.LENGTH
    with pytest.raises(InvalidArgument, match=r"finish_reason must be one of .*'length'.*, not 'max_tokens'"):
        Completion.of_tokens([1], [-1.0], finish_reason="max_tokens")
    with pytest.raises(InvalidArgument, match=r"logprobs_mode must be one of .*'raw'"):
        Completion.of_tokens([1], [-1.0], logprobs_mode="rough")
