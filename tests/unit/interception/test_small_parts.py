"""Deadlines, budgets, joining and the ring of changes, each by itself."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_interception.calls import CallState
from penstock_interception.changes import Changes
from penstock_interception.deadlines import Deadlines
from penstock_interception.ingress.chat import ChatCompletions
from penstock_interception.ingress.dialect import BadRequest
from penstock_interception.ingress.joining import identify
from penstock_interception.ingress.responses import Responses


@given(st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(0, 100)), max_size=300), st.integers(0, 100))
def test_deadlines_come_in_order_and_once_and_only_the_last_one_set_counts(
    steps: list[tuple[int, int | None]], now: int
) -> None:
    """R23: the heap agrees with a dictionary, and stays bounded by what is live."""
    deadlines: Deadlines[int] = Deadlines()
    model: dict[int, int] = {}
    for key, at in steps:
        if at is None:
            deadlines.drop(key)
            model.pop(key, None)
        else:
            deadlines.set(key, at)
            model[key] = at
        assert len(deadlines) == len(model)
        assert len(deadlines._heap) <= 2 * len(model) + 66
    assert deadlines.next() == min(model.values(), default=None)
    came = list(deadlines.due(now))
    assert sorted(came) == sorted(key for key, at in model.items() if at <= now)
    assert [model[key] for key in came] == sorted(model[key] for key in came)


def test_a_sooner_deadline_is_announced() -> None:
    """Whoever sleeps until the next deadline is told when another one comes first."""
    told: list[int] = []
    deadlines: Deadlines[str] = Deadlines(lambda: told.append(1))
    deadlines.set("a", 10)
    deadlines.set("b", 20)
    deadlines.set("c", 5)
    assert len(told) == 2


def test_a_deadline_that_takes_the_place_of_a_dropped_one_wakes_nobody() -> None:
    """R32: each call has a deadline and drops it; whoever sleeps until the first of them is left to sleep."""
    told: list[int] = []
    deadlines: Deadlines[str] = Deadlines(lambda: told.append(1))
    deadlines.set("first", 10)
    assert deadlines.next() == 10
    deadlines.drop("first")
    deadlines.set("second", 11)
    assert len(told) == 1
    assert deadlines.next() == 11
    deadlines.set("third", 10.5)
    assert len(told) == 2 and list(deadlines.due(10.5)) == ["third"]


def test_requests_are_recognised_by_key_or_by_body() -> None:
    """R34: the key wins over the body; a retry count above 0 says that it is a retry."""
    plain = identify(ChatCompletions(), {}, b"body")
    assert plain == identify(ChatCompletions(), {"x-stainless-retry-count": "0"}, b"body")
    assert identify(ChatCompletions(), {"x-stainless-retry-count": "2"}, b"body").says_retry
    assert identify(ChatCompletions(), {"idempotency-key": "k"}, b"body").by_key
    assert plain.retry_key != identify(Responses(), {}, b"body").retry_key
    with pytest.raises(BadRequest):
        identify(ChatCompletions(), {"idempotency-key": "k" * 257}, b"body")


def test_a_body_that_a_client_writes_anew_for_the_same_request_is_the_same() -> None:
    """R34: Codex orders its client_metadata differently each time; a body that is no JSON stands for itself."""
    one = b'{"input": "hi", "client_metadata": {"turn": "1", "thread": "2"}}'
    two = b'{"client_metadata": {"thread": "2", "turn": "1"}, "input": "hi"}'
    first, second = identify(Responses(), {}, one), identify(Responses(), {}, two)
    assert first.retry_key == second.retry_key and first.body_sha256 != second.body_sha256
    assert first.retry_key != identify(Responses(), {}, b'{"input": "ho"}').retry_key
    for odd in (b"{", b"[]", b'{"input": ' + b"[" * 1000 + b"]" * 1000 + b"}"):
        assert identify(Responses(), {}, odd).retry_key


async def test_a_reader_that_fell_behind_the_ring_is_told() -> None:
    """R26: changes that are no longer kept are an error, not a gap."""
    changes = Changes(100, kept=4)
    call: Any = SimpleNamespace(rollout=None, state=CallState.QUEUED)
    assert changes.after(100) == ()
    for _ in range(6):
        changes.call_changed(call)
    assert changes.after(100) is None
    kept = changes.after(102)
    assert kept is not None and [change.sequence for change in kept] == [103, 104, 105, 106]
    waiting = asyncio.create_task(changes.wait(106, 60))
    await asyncio.sleep(0)
    changes.call_changed(call)
    assert await waiting


async def test_who_waits_for_ends_is_not_woken_by_what_comes_before_them() -> None:
    """A watch of ends sleeps through a call's way, and misses none that came while it looked."""
    changes = Changes(100)
    call: Any = SimpleNamespace(rollout=None, state=CallState.QUEUED)
    ends = asyncio.create_task(changes.wait(100, 60, ended_only=True))
    every = asyncio.create_task(changes.wait(100, 60))
    await asyncio.sleep(0)
    changes.call_changed(call)
    assert await every and not ends.done()
    call.state = CallState.DELIVERED
    changes.call_changed(call)
    assert await ends and await changes.wait(101, 60, ended_only=True)
    assert not await changes.wait(102, 0, ended_only=True)


@given(st.integers(1, 1100), st.integers(0, 3000), st.integers(0, 3000))
def test_what_came_after_is_told_in_order_and_at_most_so_many_at_once(kept: int, count: int, back: int) -> None:
    """From either end of the ring the answer is the same: what a list of all changes would say."""
    changes = Changes(0, kept=kept)
    call: Any = SimpleNamespace(rollout=None, state=CallState.QUEUED)
    for _ in range(count):
        changes.call_changed(call)
    sequence = max(0, count - back)
    found = changes.after(sequence)
    if count - sequence > kept:
        assert found is None
    else:
        expected = list(range(sequence + 1, count + 1))[:1024]
        assert found is not None and [change.sequence for change in found] == expected
