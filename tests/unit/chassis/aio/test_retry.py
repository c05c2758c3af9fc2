"""Delays grow, obey RetryInfo and end in time."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_chassis.aio.retry import RETRY_INFO_SPREAD, Backoff, Delays, retry
from penstock_chassis.errors import InvalidArgument, PenstockError, Unavailable
from penstock_chassis.testing import in_virtual_time

PLAIN = Delays(1.0, 8.0)


class Failing:
    """Fails with each of some errors, then answers; notes when it was called."""

    def __init__(self, *errors: PenstockError) -> None:
        self.errors = list(errors)
        self.called_at: list[float] = []

    async def __call__(self) -> str:
        self.called_at.append(asyncio.get_running_loop().time())
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def away(retry_after_s: float | None = None) -> Unavailable:
    return Unavailable("away", reason="AWAY", retry_after_s=retry_after_s)


def test_delays_double_up_to_the_longest_and_start_again_after_a_reset() -> None:
    backoff = Backoff(PLAIN)
    assert [backoff.next() for _ in range(5)] == [1.0, 2.0, 4.0, 8.0, 8.0]
    backoff.reset()
    assert backoff.next() == 1.0


@given(
    first_s=st.floats(0.001, 10.0),
    factor=st.floats(1.0, 100.0),
    low=st.floats(0.0, 1.0),
    high=st.floats(1.0, 2.0),
    wishes=st.lists(st.none() | st.floats(0.0, 100.0), max_size=200),
)
def test_delays_stay_within_jitter_and_respect_retry_info(
    first_s: float, factor: float, low: float, high: float, wishes: list[float | None]
) -> None:
    backoff = Backoff(Delays(first_s, first_s * factor, (low, high)))
    for number, wish in enumerate(wishes):
        base = min(first_s * 2.0 ** min(number, 64), first_s * factor)
        delay = backoff.next(wish)
        assert delay >= max(base * low, wish or 0.0) * (1 - 1e-9)
        assert delay <= max(base * high, (wish or 0.0) * RETRY_INFO_SPREAD) * (1 + 1e-9)


def test_a_call_is_repeated_after_growing_delays() -> None:
    work = Failing(away(), away(), away())
    assert in_virtual_time(retry(work, PLAIN, patience_s=lambda _: math.inf)) == "done"
    assert work.called_at == [0.0, 1.0, 3.0, 7.0]


def test_a_service_that_asks_for_a_longer_delay_gets_it() -> None:
    work = Failing(away(30.0))
    in_virtual_time(retry(work, PLAIN, patience_s=lambda _: math.inf))
    assert 30.0 <= work.called_at[1] <= 30.0 * RETRY_INFO_SPREAD


def test_no_attempt_starts_after_the_patience_with_its_error() -> None:
    work = Failing(*(away() for _ in range(9)))
    with pytest.raises(Unavailable):
        in_virtual_time(retry(work, PLAIN, patience_s=lambda _: 7.5))
    assert work.called_at == [0.0, 1.0, 3.0, 7.0]


def test_an_error_that_does_not_pass_is_raised_at_once() -> None:
    work = Failing(InvalidArgument("no", reason="NO"))
    with pytest.raises(InvalidArgument):
        in_virtual_time(retry(work, PLAIN, patience_s=lambda error: math.inf if isinstance(error, Unavailable) else 0))
    assert work.called_at == [0.0]


def test_the_number_of_attempts_is_limited() -> None:
    work = Failing(*(away() for _ in range(9)))
    delays: list[float] = []
    with pytest.raises(Unavailable):
        in_virtual_time(
            retry(
                work, PLAIN, patience_s=lambda _: math.inf, attempts=3, on_retry=lambda _, delay: delays.append(delay)
            )
        )
    assert (len(work.called_at), delays) == (3, [1.0, 2.0])


def test_a_callers_deadline_ends_a_delay() -> None:
    work = Failing(*(away() for _ in range(9)))

    async def call() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await retry(work, PLAIN, patience_s=lambda _: math.inf)
        return asyncio.get_running_loop().time()

    assert in_virtual_time(call()) == 5.0
    assert len(work.called_at) == 3


async def test_cancellation_ends_the_retries_of_work_whose_clean_up_fails() -> None:
    entered = asyncio.Event()

    async def work() -> None:
        try:
            entered.set()
            await asyncio.Event().wait()
        finally:
            raise RuntimeError("the pool is closed")

    task = asyncio.ensure_future(retry(work, Delays(0.0, 0.0), patience_s=lambda _: math.inf))
    await entered.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
