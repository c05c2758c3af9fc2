"""Work that many ask for and that is done once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock_chassis.single_flight import SingleFlight


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


async def test_those_who_ask_together_share_one_run_and_later_ones_its_result() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    work = Work()
    asking = [asyncio.create_task(flights.get("a", work)) for _ in range(5)]
    await turns()
    work.go.set()
    assert await asyncio.gather(*asking) == [1] * 5
    assert await flights.get("a", work) == 1
    assert await flights.get("b", work) == 2


async def test_a_failure_is_told_to_all_who_waited_and_not_remembered() -> None:
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


async def test_what_is_forgotten_or_too_old_to_keep_is_made_again() -> None:
    flights: SingleFlight[str, int] = SingleFlight(keep=2)
    work = Work()
    work.go.set()
    assert [await flights.get(key, work) for key in "aab"] == [1, 1, 2]
    flights.forget("a")
    assert await flights.get("a", work) == 3
    assert await flights.get("c", work) == 4
    assert [await flights.get(key, work) for key in "ac"] == [3, 4]
    assert await flights.get("b", work) == 5
