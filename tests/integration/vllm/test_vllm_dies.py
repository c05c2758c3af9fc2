"""vLLM's processes die, as they do."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from tests.integration.vllm.conftest import Served
from tests.support import vllm_models as models

from penstock.inference.v1 import inference_service_pb2 as pb
from penstock_chassis.errors import PenstockError

pytestmark = pytest.mark.asyncio(loop_scope="session")

Failure = Callable[[grpc.aio.AioRpcError], PenstockError]


async def all_of(service: Served, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """What a caller hears."""
    return [event async for event in service.stub.Generate(request)]


@pytest.mark.requirement("R22", "R43", "R87")
async def test_calls_in_flight_at_an_engines_death_are_served_after_recovery(service: Served, failure: Failure) -> None:
    """Each token once; UNAVAILABLE with RetryInfo for who comes meanwhile or cannot be continued."""
    version = await service.push(models.random_policy(12))
    greedy = {"temperature": 0, "max_tokens": 16, "min_tokens": 16}
    before = (await service.complete(service.request(**greedy))).span
    long = {"max_tokens": 1200, "min_tokens": 1200}
    seeded = asyncio.ensure_future(all_of(service, service.endless(seed=5)))
    running = [
        asyncio.ensure_future(all_of(service, service.request(stream=stream, **long)))
        for stream in (True, False)
        for _ in range(9)  # more than may run at once
    ]
    await service.until(lambda stats: stats.running == 16)
    (engine_core,) = [child for child in multiprocessing.active_children() if "EngineCore" in child.name]
    assert engine_core.pid is not None
    os.kill(engine_core.pid, signal.SIGKILL)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await seeded
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    error = failure(caught.value)
    assert error.reason == "ENGINE_DIED" and error.retry_after_s
    (trouble,) = service.troubles(3600.0)
    assert trouble.reason == "ENGINE_DEAD" and "restarting" in trouble.message
    calls: list[Callable[[], Any]] = [
        lambda: service.complete(service.request()),
        lambda: service.stub.Score(pb.ScoreRequest(token_ids=np.array([20, 21], "<i4").tobytes(), start=1)),
        lambda: service.stub.Pause(pb.PauseRequest(mode=pb.PAUSE_MODE_KEEP)),
    ]
    for attempt in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await attempt()
        assert failure(caught.value).reason == "ENGINE_DIED"
    for call in running:
        events = await call
        span = events[-1].done.completion.span
        assert span.count == 1200
        assert [(v.policy_version, v.start, v.end) for v in span.versions] == [(version, 0, 1200)]
        if len(events) > 1:
            assert b"".join(event.delta.span.token_ids for event in events) == span.token_ids
    after = (await service.complete(service.request(**greedy))).span
    assert after.token_ids == before.token_ids
    assert [v.policy_version for v in after.versions] == [version]
    assert not list(service.troubles(3600.0))
