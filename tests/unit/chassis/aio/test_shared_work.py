"""Work that several callers share is done once and told to each from its beginning."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from penstock_chassis.aio.shared_work import SharedWork


@pytest.mark.requirement("R57")
async def test_a_late_caller_gets_every_event_and_the_result() -> None:
    release = asyncio.Event()

    async def work(tell: Callable[[int], None]) -> str:
        tell(1)
        await release.wait()
        tell(2)
        return "done"

    shared = SharedWork(work)
    early = asyncio.create_task(_collect(shared))
    await asyncio.sleep(0)
    release.set()
    assert await early == [1, 2]
    assert await _collect(shared) == [1, 2]
    assert await shared.result() == "done"


@pytest.mark.requirement("R22")
async def test_a_caller_that_gives_up_stops_nothing() -> None:
    release = asyncio.Event()

    async def work(tell: Callable[[int], None]) -> str:
        await release.wait()
        return "done"

    shared: SharedWork[int, str] = SharedWork(work)
    waiting = asyncio.create_task(shared.result())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    release.set()
    assert await shared.result() == "done"


@pytest.mark.requirement("R58")
async def test_a_failure_comes_to_all_after_the_events() -> None:

    async def work(tell: Callable[[int], None]) -> str:
        tell(1)
        raise ValueError("broken")

    shared = SharedWork(work)
    for _ in range(2):
        assert await _collect(shared) == [1]
        with pytest.raises(ValueError, match="broken"):
            await shared.result()


async def _collect(shared: SharedWork[int, str]) -> list[int]:
    return [event async for event in shared.events()]
