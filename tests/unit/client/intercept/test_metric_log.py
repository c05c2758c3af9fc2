"""Metrics that are logged in the background: in order, in bounded requests, and never dropped without an error."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
import pytest

from penstock.client import ConfigurationError, InvalidArgument, MetricLog, Penstock, ResourceExhausted, Unavailable
from penstock.client.intercept import metric_log as module
from penstock.client.rollouts.runs import _merged
from penstock.client.transport.rpc import Backoff
from penstock.driver.v1 import run_service_pb2 as pb

Steps = Sequence[pb.StepMetrics]


class Driver:
    """Keeps what it is sent; raises the errors that are queued; answers only while it is `open`."""

    def __init__(self, *errors: Exception) -> None:
        self.requests: list[Steps] = []
        self.errors = list(errors)
        self.open = asyncio.Event()
        self.open.set()

    async def send(self, steps: Steps) -> None:
        await self.open.wait()
        if self.errors:
            raise self.errors.pop(0)
        self.requests.append(steps)

    @property
    def values(self) -> list[tuple[int, str, float]]:
        """What it has, in order."""
        steps = [one for request in self.requests for one in request]
        return [(one.step, name, value) for one in steps for name, value in one.values.items()]


async def test_all_that_was_logged_is_sent_in_order_when_the_block_ends() -> None:
    driver = Driver()
    driver.open.clear()
    async with MetricLog("r", driver.send) as log:
        for step in range(1100):
            await log.log({"loss": np.float32(step)}, step=step)
        driver.open.set()
    assert driver.values == [(step, "loss", float(step)) for step in range(1100)]
    assert all(len(request) <= 1024 for request in driver.requests) and len(driver.requests) <= 3


async def test_no_request_has_more_values_than_a_driver_takes() -> None:
    driver = Driver()
    driver.open.clear()
    async with MetricLog("r", driver.send) as log:
        for step in range(50):
            await log.log({f"m{index}": 1.0 for index in range(128)}, step=step)
        driver.open.set()
    assert max(sum(len(one.values) for one in request) for request in driver.requests) <= 4096
    assert len(driver.values) == 6_400


async def test_a_full_queue_makes_the_trainer_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING", 4)
    driver = Driver()
    driver.open.clear()
    log = MetricLog("r", driver.send)
    for step in range(4):
        await log.log({"loss": 1.0}, step=step)
    waiting = asyncio.ensure_future(log.log({"loss": 1.0}, step=4))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    driver.open.set()
    await waiting
    await log.close()
    assert [step for step, _, _ in driver.values] == [0, 1, 2, 3, 4]


async def test_an_absent_driver_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backoff, "next", lambda self, error=None: 0.0)
    busy = ResourceExhausted("many ask", reason="METRIC_LIMIT", retry_after=0.0)
    driver = Driver(Unavailable("away", reason="X"), busy, Unavailable("away", reason="X"))
    log = MetricLog("r", driver.send)
    await log.log({"loss": 1.0}, step=1)
    await log.flush()
    assert driver.values == [(1, "loss", 1.0)]
    await log.close()


async def test_an_error_that_stays_reaches_the_trainer_at_its_next_step_and_at_the_end() -> None:
    driver = Driver(ResourceExhausted("the run has 2,000,000 points", reason="METRIC_LIMIT"))
    log = MetricLog("r", driver.send)
    await log.log({"loss": 1.0}, step=1)
    for attempt in (log.flush(), log.log({"loss": 1.0}, step=2), log.close()):
        with pytest.raises(ResourceExhausted, match="2,000,000"):
            await attempt


async def test_a_driver_that_stays_away_fails_the_end_but_hides_no_earlier_error() -> None:
    with pytest.raises(Unavailable):
        async with MetricLog("r", Driver(Unavailable("away", reason="X")).send) as log:
            await log.log({"loss": 1.0}, step=1)
            log._is_closing = True  # as if the end had come before the first attempt
    with pytest.raises(ZeroDivisionError):
        async with MetricLog("r", Driver(ResourceExhausted("full", reason="METRIC_LIMIT")).send) as log:
            await log.log({"loss": 1.0}, step=1)
            raise ZeroDivisionError


@pytest.mark.parametrize(
    ("values", "step", "field"),
    [
        ({"loss": math.nan}, 1, "values[loss]"),
        ({"loss": math.inf, "kl": 1.0}, 1, "values[loss]"),
        ({"a b": 1.0}, 1, "values[a b]"),
        ({"loss": "high"}, 1, "values[loss]"),
        ({}, 1, "values"),
        ({"loss": 1.0}, -1, "step"),
    ],
)
async def test_a_wrong_value_is_refused_at_once_and_the_log_goes_on(
    values: dict[str, float], step: int, field: str
) -> None:
    driver = Driver()
    async with MetricLog("r", driver.send) as log:
        with pytest.raises(InvalidArgument) as refused:
            await log.log(values, step=step)
        assert [one.field for one in refused.value.violations] == [field]
        await log.log({"loss": 0.5}, step=2)
    assert driver.values == [(2, "loss", 0.5)]


async def test_a_time_needs_its_zone() -> None:
    log = MetricLog("r", Driver().send)
    with pytest.raises(InvalidArgument, match="time zone"):
        await log.log({"loss": 1.0}, step=1, time=datetime(2026, 1, 1))  # noqa: DTZ001 - that is what is refused
    await log.log({"loss": 1.0}, step=1, time=datetime(2026, 1, 1, tzinfo=UTC))
    await log.close()


async def test_a_session_of_no_run_logs_nothing(ps: Penstock) -> None:
    with pytest.raises(ConfigurationError, match="run_id"):
        await ps.intercept(group_id="g").log({"loss": 1.0}, step=1)


def test_of_two_drivers_points_the_later_one_counts() -> None:
    one = pb.MetricPoints(name="loss", steps=[1, 2, 5], values=[1.0, 2.0, 5.0], times=[10, 20, 50])
    other = pb.MetricPoints(name="loss", steps=[2, 3, 5], values=[2.5, 3.5, 5.5], times=[30, 30, 40])
    merged = _merged([one, other])
    assert merged.steps.tolist() == [1, 2, 3, 5]
    assert merged.values.tolist() == [1.0, 2.5, 3.5, 5.0]
    assert merged.times.dtype == np.dtype("datetime64[us]") and len(merged) == 4
