"""The ring of changes: who watches misses nothing, or is told so."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_interception.domain.calls import CallState
from penstock_interception.gate.events import CallEvents


@pytest.mark.requirement("R26")
async def test_reader_behind_the_ring_learns_of_the_gap() -> None:
    """Changes that are no longer kept are an error, not a gap."""
    changes = CallEvents(100, kept=4)
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


async def test_waiter_for_ends_is_not_woken_by_earlier_events() -> None:
    """A watch of ends sleeps through a call's way, and misses none that came while it looked."""
    changes = CallEvents(100)
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
def test_later_events_come_in_order_and_bounded_batches(kept: int, count: int, back: int) -> None:
    """From either end of the ring the answer is the same: what a list of all changes would say."""
    changes = CallEvents(0, kept=kept)
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
