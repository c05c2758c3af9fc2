"""A generation at an endpoint that is aborted as it ends."""

from __future__ import annotations

import numpy as np
import pytest

from penstock_inference.engines.base import FinishReason, GenerateRequest, Sampling
from penstock_inference.engines.openai.in_flight import Flight


@pytest.mark.requirement("R40", "R49")
async def test_aborted_request_after_an_empty_end_is_over() -> None:
    """It raised, and whoever waited for it waited for ever, with its place at the endpoint."""
    request = GenerateRequest("r", np.array([1], np.int32), Sampling(max_tokens=4))
    flight = Flight(request, 10, False, None, frozenset(), 0.0)
    flight.take({"choices": [{"token_ids": [], "finish_reason": "stop"}]})
    assert flight.abort()
    assert flight.ended.is_set()
    assert flight.done().finish_reason is FinishReason.ABORT


@pytest.mark.requirement("R88")
@pytest.mark.parametrize("count", [2, 2**63, 10**30])
async def test_no_more_tokens_are_cached_than_a_prompt_has(count: int) -> None:
    """What the endpoint counts goes into sums that all callers read, and no message has room for it."""
    request = GenerateRequest("r", np.array([1], np.int32), Sampling(max_tokens=4))
    flight = Flight(request, 10, False, None, frozenset(), 0.0)
    flight.take({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": count}}})
    assert flight.cached == 1
