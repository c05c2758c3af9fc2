"""Budgets as plain values: what forbids another call, what a call may still sample, how a rate lets calls through."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_interception.domain.budgets import Budgets, CallRate, Spent, exhausted, tokens_left
from penstock_interception.gate.budgets import MAX_DELAY_S, Bucket


@pytest.mark.requirement("R88")
@pytest.mark.parametrize(
    ("budgets", "spent", "age", "name"),
    [
        (Budgets(), Spent(10**6, 10**9, 10**9, 10**12), 10**9, ""),
        (Budgets(max_calls=2), Spent(2), 0, "max_calls"),
        (Budgets(max_calls=2), Spent(1), 0, ""),
        (Budgets(max_prompt_tokens=100), Spent(1, 100, 5), 0, "max_prompt_tokens"),
        (Budgets(max_prompt_tokens=101), Spent(1, 100, 5), 0, ""),
        (Budgets(max_completion_tokens=5), Spent(1, 100, 5), 0, "max_completion_tokens"),
        (Budgets(max_total_tokens=10), Spent(1, 6, 4), 0, "max_total_tokens"),
        (Budgets(max_request_bytes=100), Spent(1, request_bytes=93), 0, ""),
        (Budgets(max_request_bytes=100), Spent(1, request_bytes=94), 0, "max_request_bytes"),
        (Budgets(wall_time_s=3), Spent(), 3, "wall_time"),
    ],
)
def test_a_budget_that_is_used_up_is_named(budgets: Budgets, spent: Spent, age: float, name: str) -> None:
    """Budgets over calls, tokens, bytes and wall time, for a call whose body has 7 bytes."""
    assert exhausted(budgets, spent, age, 7) == name


@pytest.mark.requirement("R35")
@given(st.integers(1, 200) | st.none(), st.integers(1, 200) | st.none(), st.integers(0, 150), st.integers(0, 150))
def test_call_gets_between_one_token_and_the_budgets_rest(
    completions: int | None, total: int | None, prompt: int, sampled: int
) -> None:
    """The last admitted call is cut short, not refused, and the tightest budget is named."""
    budgets = Budgets(max_completion_tokens=completions, max_total_tokens=total)
    left, name = tokens_left(budgets, Spent(1, prompt, sampled))
    bounds = {}
    if completions is not None:
        bounds["max_completion_tokens"] = max(1, completions - sampled)
    if total is not None:
        bounds["max_total_tokens"] = max(1, total - prompt - sampled)
    assert left == min(bounds.values(), default=None)
    assert bounds.get(name) == left


@pytest.mark.requirement("R13", "R88")
@given(
    st.integers(1, 20),
    st.floats(0.01, 3600.0),
    st.integers(1, 20),
    st.lists(st.floats(0.0, 100.0), min_size=1, max_size=200),
)
def test_rate_passes_at_most_its_burst_and_refill(calls: int, period: float, burst: int, gaps: list[float]) -> None:
    """Whatever the times of arrival; who is refused is told a delay that SDKs obey."""
    now = 1000.0
    bucket = Bucket(CallRate(calls, period, burst), now)
    taken = 0
    for gap in gaps:
        now += gap
        wait = bucket.wait(now)
        assert 0.0 <= wait <= MAX_DELAY_S
        if not wait:
            bucket.take(now)
            taken += 1
        assert taken <= burst + (now - 1000.0) * calls / period + 1e-3 * len(gaps)


@pytest.mark.requirement("R26")
@given(st.integers(1, 20), st.floats(0.1, 100.0), st.integers(1, 20))
def test_refused_callers_return_one_by_one_and_are_admitted(calls: int, period: float, burst: int) -> None:
    """As many as a burst holds are each told their own time, at which a call is free for them."""
    bucket = Bucket(CallRate(calls, period, burst), 0.0)
    for _ in range(burst):
        assert bucket.wait(0.0) == 0.0
        bucket.take(0.0)
    times = [bucket.wait(0.0) for _ in range(burst)]
    for time in times:
        if time < MAX_DELAY_S:
            assert bucket.wait(time) == 0.0
            bucket.take(time)
    obeyed = [time for time in times if time < MAX_DELAY_S]
    assert obeyed == sorted(set(obeyed))
