"""Readers of events resume where they were, and learn when they fell behind."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_chassis.aio.broadcast import Broadcast, FellBehind, Signal
from penstock_chassis.testing import in_virtual_time


@given(published=st.integers(0, 30), keep=st.integers(1, 20), start=st.integers(0, 5), most=st.integers(1, 10))
def test_reader_gets_every_event_in_order_or_learns_of_a_gap(published: int, keep: int, start: int, most: int) -> None:
    ring: Broadcast[int] = Broadcast(keep=keep, start=start)
    numbers = [ring.publish(start + number) for number in range(1, published + 1)]
    assert numbers == list(range(start + 1, start + published + 1))
    assert ring.oldest_resumable == start + max(0, published - keep)
    for seen in range(start - 1, ring.last + 2):
        found = ring.after(seen, most)
        if seen < ring.oldest_resumable:
            assert found is None
        else:
            assert found is not None
            assert list(found) == list(range(seen + 1, ring.last + 1))[:most]


async def test_late_reader_gets_all_events_and_ends_with_the_ring() -> None:
    ring: Broadcast[int] = Broadcast(keep=None)

    async def read() -> list[int]:
        return [event async for event in ring.read(0)]

    ring.publish(1)
    early = asyncio.create_task(read())
    await asyncio.sleep(0)
    ring.publish(2)
    ring.close()
    assert [await early, await read()] == [[1, 2], [1, 2]]


async def test_a_reader_that_fell_behind_gets_an_error() -> None:
    ring: Broadcast[int] = Broadcast(keep=2)
    for number in range(4):
        ring.publish(number)
    with pytest.raises(FellBehind):
        await anext(aiter(ring.read(0)))


async def test_a_change_between_two_waits_is_not_missed() -> None:
    signal = Signal()
    seen = signal.number
    signal.notify()
    assert await signal.wait(seen)


async def test_all_waiters_are_woken_and_none_is_kept() -> None:
    signal = Signal()
    waiting = [asyncio.create_task(signal.wait(0)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    signal.notify()
    assert await asyncio.gather(*waiting[1:]) == [True, True]
    assert not signal._waiting


def test_a_wait_without_a_change_ends_at_its_limit() -> None:
    async def run() -> tuple[bool, float]:
        return await Signal().wait(0, 3.0), asyncio.get_running_loop().time()

    assert in_virtual_time(run()) == (False, 3.0)


async def test_listeners_are_called_at_each_change_until_they_are_forgotten() -> None:
    signal, heard = Signal(), list[str]()

    def one() -> None:
        heard.append("one")
        signal.forget(one)  # while the others are being called

    def other() -> None:
        heard.append("other")

    signal.call_on_change(one)
    signal.call_on_change(other)
    signal.notify()
    signal.notify()
    signal.forget(other)
    signal.forget(other)
    signal.notify()
    assert heard == ["one", "other", "other"]
