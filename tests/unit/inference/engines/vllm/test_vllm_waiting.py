"""How vLLM's processes wait on a CPU, without vLLM."""

from __future__ import annotations

from penstock_inference.engines.vllm.waiting import sleeping_at_times


def test_one_poll_in_many_is_followed_by_a_sleep() -> None:
    """The others yield as before."""
    yields: list[int] = []
    look = sleeping_at_times(lambda: yields.append(len(yields)), every=4)
    for _ in range(3):
        look()
    assert len(yields) == 3
    look()
    assert len(yields) == 3
    for _ in range(4):
        look()
    assert len(yields) == 6
