"""What an endpoint's answer may say in the format of Chat Completions."""

from __future__ import annotations

from typing import Any

import pytest

from penstock_codec.chat import MOST_TOKENS, Usage
from penstock_codec.openai_chat import read_usage


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
