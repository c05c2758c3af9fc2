"""Work that many ask for and that is done once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock_chassis.aio.single_flight import SingleFlight


class Work:
    """Counts its runs; each waits for `go` and then answers its number, or fails."""

    def __init__(self) -> None:
        self.runs = 0
        self.cancelled = 0
        self.go = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> int:
        self.runs += 1
        number = self.runs
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error:
            raise self.error
        return number


async def turns(count: int = 5) -> None:
    """Let everything that is ready run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_concurrent_callers_share_one_run_and_later_ones_its_result() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    work = Work()
    asking = [asyncio.create_task(flights.get("a", work)) for _ in range(5)]
    await turns()
    work.go.set()
    assert await asyncio.gather(*asking) == [1] * 5
    assert await flights.get("a", work) == 1
    assert await flights.get("b", work) == 2


async def test_failure_reaches_all_waiters_and_is_not_cached() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    work = Work()
    work.error = RuntimeError("no")
    asking = [asyncio.create_task(flights.get("a", work)) for _ in range(3)]
    await turns()
    work.go.set()
    results: list[Any] = await asyncio.gather(*asking, return_exceptions=True)
    assert [str(result) for result in results] == ["no"] * 3
    work.error = None
    assert await flights.get("a", work) == 2


async def test_only_the_last_one_to_leave_stops_the_work() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    work = Work()
    first, second = (asyncio.create_task(flights.get("a", work)) for _ in range(2))
    await turns()
    first.cancel()
    await turns()
    assert (work.runs, work.cancelled) == (1, 0)
    second.cancel()
    await turns()
    assert (work.runs, work.cancelled) == (1, 1)
    work.go.set()
    assert await flights.get("a", work) == 2


async def test_a_result_is_given_out_as_long_as_it_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    flights: SingleFlight[str, int] = SingleFlight(fresh_s=2.0)
    work = Work()
    work.go.set()
    loop, ahead = asyncio.get_running_loop(), 0.0
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + ahead)
    assert await flights.get("a", work) == 1
    ahead = 1.0
    assert await flights.get("a", work) == 1
    ahead = 3.0
    assert await flights.get("a", work) == 2


async def test_forgotten_or_expired_results_are_made_again() -> None:
    flights: SingleFlight[str, int] = SingleFlight(keep=2)
    work = Work()
    work.go.set()
    assert [await flights.get(key, work) for key in "aab"] == [1, 1, 2]
    flights.forget("a")
    assert await flights.get("a", work) == 3
    assert await flights.get("c", work) == 4
    assert [await flights.get(key, work) for key in "ac"] == [3, 4]
    assert await flights.get("b", work) == 5


async def test_uncancellable_work_outlives_its_callers_and_needs_room_to_be_cached() -> None:
    flights: SingleFlight[str, int] = SingleFlight(keep=0, finish=True)
    work = Work()
    leaving, staying = (asyncio.create_task(flights.get("a", work)) for _ in range(2))
    await turns()
    for caller in (leaving, staying):
        caller.cancel()
    await turns()
    joining = asyncio.create_task(flights.get("a", work))
    await turns()
    assert (work.runs, work.cancelled) == (1, 0)
    work.go.set()
    assert await joining == 1
    assert await flights.get("a", work) == 2


async def test_work_begins_after_the_cleanup_of_cancelled_work() -> None:
    """Nor beside the first's clean-up when a second has come and left meanwhile."""
    flights: SingleFlight[str, int] = SingleFlight()
    cleaning, clean, running = asyncio.Event(), asyncio.Event(), 0

    async def work() -> int:
        nonlocal running
        running += 1
        try:
            if running == 1 and not cleaning.is_set():
                await asyncio.Event().wait()
            return running
        finally:
            if not cleaning.is_set():
                cleaning.set()
                await clean.wait()
            running -= 1

    for _ in range(2):
        leaving = asyncio.create_task(flights.get("a", work))
        await turns()
        leaving.cancel()
        await turns()
    assert cleaning.is_set() and running == 1
    joining = asyncio.create_task(flights.get("a", work))
    await turns()
    assert not joining.done() and running == 1
    assert await flights.get("b", work) == 2
    clean.set()
    assert await joining == 1
    assert not flights._cancelled


async def test_closing_cancels_what_runs() -> None:
    flights: SingleFlight[str, int] = SingleFlight(keep=0, finish=True)
    work = Work()
    caller = asyncio.create_task(flights.get("a", work))
    await turns()
    await flights.aclose()
    assert work.cancelled == 1
    with pytest.raises(asyncio.CancelledError):
        await caller
