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
