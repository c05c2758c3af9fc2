"""A run's metrics at a real driver: what it acknowledged is there after a kill -9, and everything wrong is refused."""

from __future__ import annotations

import asyncio
import math
import secrets

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from tests.integration.driver.stack import TOKEN, Stack

from penstock.client import InvalidArgument, Penstock
from penstock.driver.v1 import run_service_pb2 as pb
from penstock.driver.v1 import run_service_pb2_grpc as pb_grpc
from penstock_chassis.channel import connect as channel
from penstock_chassis.channel import error_from_rpc


async def test_what_was_acknowledged_is_there_after_each_kill(penstock: Penstock, stack: Stack) -> None:
    """Between two writes, and while one is under way."""
    run = secrets.token_hex(4)
    for step in range(3):
        await penstock.runs.log(run, {"loss": 1.0 / (step + 3), "kl": 1e-17}, step=step)
        under_way = asyncio.ensure_future(penstock.runs.log(run, {"under-way": float(step)}, step=step))
        await asyncio.to_thread(stack.driver.kill)
        await asyncio.to_thread(stack.driver.start)
        await under_way
    found = {metric.name: metric for metric in await penstock.runs.metrics(run)}
    assert list(found) == ["kl", "loss", "under-way"]
    assert found["loss"].values.tolist() == [1.0 / 3, 1.0 / 4, 1.0 / 5]
    assert found["kl"].values.tolist() == [1e-17] * 3
    assert found["under-way"].steps.tolist() == [0, 1, 2]


async def test_a_session_logs_its_runs_metrics(penstock: Penstock) -> None:
    run = secrets.token_hex(4)
    async with penstock.intercept(run_id=run) as session:
        for step in range(200):
            await session.log({"loss": step / 7}, step=step)
        await session.log({"loss": -1.0}, step=3)
    (metric,) = await penstock.runs.metrics(run)
    assert metric.values.tolist() == [-1.0 if step == 3 else step / 7 for step in range(200)]
    (thinned,) = await penstock.runs.metrics(run, max_points=10)
    assert len(thinned) <= 10 and thinned.values.min() == -1.0 and thinned.steps[-1] == 199
    assert await penstock.runs.delete_metrics(run, from_step=100) == 100
    assert await penstock.runs.delete_metrics(run, names=["loss"]) == 100
    assert await penstock.runs.metrics(run) == []


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (pb.LogMetricsRequest(run_id="r"), ["steps"]),
        (pb.LogMetricsRequest(run_id="r", steps=[pb.StepMetrics(step=1)]), ["steps[0].values"]),
        (
            pb.LogMetricsRequest(
                run_id="r", steps=[pb.StepMetrics(step=1, values={"a": 1}), pb.StepMetrics(values={"b": math.nan})]
            ),
            ["steps[1].values[b]"],
        ),
        (
            pb.LogMetricsRequest(run_id="r", steps=[pb.StepMetrics(step=-1, values={"a": -math.inf})]),
            ["steps[0].step", "steps[0].values[a]"],
        ),
        (
            pb.LogMetricsRequest(run_id="r", steps=[pb.StepMetrics(values={"x" * 129: 1})]),
            [f"steps[0].values[{'x' * 64}...]"],
        ),
        (
            pb.LogMetricsRequest(run_id="r", steps=[pb.StepMetrics(values={f"m{i}": 1 for i in range(129)})]),
            ["steps[0].values"],
        ),
        (
            pb.LogMetricsRequest(
                run_id="r", steps=[pb.StepMetrics(step=s, values={f"m{i}": 1 for i in range(128)}) for s in range(33)]
            ),
            ["steps"],
        ),
        (pb.LogMetricsRequest(run_id="a b", steps=[pb.StepMetrics(values={"a": 1})]), ["run_id"]),
        (
            pb.LogMetricsRequest(run_id="r", steps=[pb.StepMetrics(values={"a": 1}, time=Timestamp(seconds=-1))]),
            ["steps[0].time"],
        ),
    ],
)
async def test_what_the_driver_refuses_names_its_field_and_stores_nothing(
    penstock: Penstock, stack: Stack, request_: pb.LogMetricsRequest, fields: list[str]
) -> None:
    async with channel(stack.driver.address, TOKEN) as opened:
        stub = pb_grpc.RunServiceStub(opened)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.LogMetrics(request_)
    error = error_from_rpc(caught.value)
    assert error.reason == "FIELD_INVALID"
    assert [violation.field for violation in error.violations] == fields
    assert await penstock.runs.metrics("r") == []


async def test_a_list_of_an_impossible_thinning_is_refused(penstock: Penstock) -> None:
    for most in (2, 10_001, -1):
        with pytest.raises(InvalidArgument, match="max_points"):
            await penstock.runs.metrics("r", max_points=most)
