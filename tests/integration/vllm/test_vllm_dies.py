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


async def test_a_dead_engine_fails_everybody_by_type_and_comes_back_with_its_weights(
    service: Served, failure: Failure
) -> None:
    """R43, R87: UNAVAILABLE with RetryInfo for who runs, waits and comes; then the version in force, as it was."""
    version = await service.push(models.random_policy(12))
    greedy = {"temperature": 0, "max_tokens": 16, "min_tokens": 16}
    before = (await service.complete(service.request(**greedy))).span
    running = [
        asyncio.ensure_future(service.complete(service.request(stream=stream, max_tokens=1900, min_tokens=1900)))
        for stream in (True, False)
        for _ in range(9)  # more than may run at once
    ]
    await service.until(lambda stats: stats.running == 16)
    (engine_core,) = [child for child in multiprocessing.active_children() if "EngineCore" in child.name]
    assert engine_core.pid is not None
    os.kill(engine_core.pid, signal.SIGKILL)
    for call in running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        error = failure(caught.value)
        assert error.reason == "ENGINE_DIED" and error.retry_after_s
    calls: list[Callable[[], Any]] = [
        lambda: service.complete(service.request()),
        lambda: service.stub.Score(pb.ScoreRequest(token_ids=np.array([20, 21], "<i4").tobytes(), start=1)),
        lambda: service.stub.Pause(pb.PauseRequest(mode=pb.PAUSE_MODE_KEEP)),
    ]
    for attempt in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await attempt()
        assert failure(caught.value).reason == "ENGINE_DIED"
    after = None
    while after is None:
        try:
            after = (await service.complete(service.request(**greedy))).span
        except grpc.aio.AioRpcError as again:
            error = failure(again)
            assert error.reason == "ENGINE_DIED" and error.retry_after_s is not None
            await asyncio.sleep(error.retry_after_s)
    assert after.token_ids == before.token_ids
    assert [v.policy_version for v in after.versions] == [version]
