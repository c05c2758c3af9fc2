"""The real service with the real vLLM on a CPU: one for all tests, because starting it takes half a minute.

Run by `make test-vllm`, which has an environment of its own. Tests share the engine and so never assume which policy is
in force: one that needs a certain policy pushes it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration
from tests.support import vllm_files_backend
from tests.support import vllm_models as models
from vllm.platforms import current_platform

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.inference.v1 import inference_service_pb2 as pb
from penstock.inference.v1 import inference_service_pb2_grpc as rpc
from penstock_chassis.channel import error_from_rpc
from penstock_chassis.errors import PenstockError
from penstock_chassis.operations import Troubles, no_troubles
from penstock_chassis.telemetry import logging
from penstock_inference.testing import open_inference

# Compiling kernels for a model of this size costs minutes and gains nothing.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

# Tracebacks with all locals take longer to print than anything here.
logging.configure("warning", "json")

CHUNK = 256 * 1024
ON_CPU = current_platform.device_type == "cpu"


@dataclass
class Served:
    """The service, and what tests do with it all the time."""

    stub: Any
    directory: Path
    """Under which paths of weights and adapters are taken."""
    address: str
    versions: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    names: Iterator[int] = field(default_factory=itertools.count)
    troubles: Troubles = no_troubles
    """What operators are told."""

    def version(self) -> int:
        """The next policy version."""
        return next(self.versions)

    def request(self, prompt: Any = range(20, 60), stream: Any = False, **sampling: Any) -> pb.GenerateRequest:
        """A generation under a name of its own."""
        return pb.GenerateRequest(
            request_id=f"r{next(self.names)}",
            token_ids=np.asarray(prompt, "<i4").tobytes(),
            sampling=chat_pb2.Sampling(**({"max_tokens": 16, "min_tokens": 16} | sampling)),
            stream=stream,
        )

    def endless(self, **fields: Any) -> pb.GenerateRequest:
        """A streamed generation that goes on until somebody ends it."""
        return self.request(stream=True, max_tokens=models.ENDLESS, min_tokens=models.ENDLESS, **fields)

    async def abort(self, *requests: pb.GenerateRequest) -> int:
        """Ends generations; how many there were."""
        ids = pb.AbortRequest.RequestIds(request_ids=[request.request_id for request in requests])
        return int((await self.stub.Abort(pb.AbortRequest(requests=ids))).aborted_count)

    async def complete(self, request: pb.GenerateRequest) -> completion_pb2.Completion:
        """Its completion."""
        events = [event async for event in self.stub.Generate(request)]
        done: completion_pb2.Completion = events[-1].done.completion
        return done

    async def until(self, reached: Callable[[Any], bool]) -> Any:
        """The first of the engine's statistics for which `reached` holds."""
        interval = Duration(nanos=100_000_000)
        async for stats in self.stub.WatchStats(pb.WatchStatsRequest(interval=interval)):
            if reached(stats):
                return stats
        raise AssertionError("the statistics ended")

    async def push(self, tensors: models.Tensors, **begin: Any) -> int:
        """A policy, as chunks; its version."""
        fields = {"policy_version": self.version(), "format": pb.WEIGHT_FORMAT_SAFETENSORS} | begin
        answer = await self.stub.UpdateWeights(push_frames(models.file(tensors), **fields))
        assert answer.policy_version == fields["policy_version"]
        return int(answer.policy_version)


def push_frames(data: bytes, *, sha256: bytes | None = None, **begin: Any) -> AsyncIterator[pb.UpdateWeightsRequest]:
    """The frames of a push."""

    async def frames() -> AsyncIterator[pb.UpdateWeightsRequest]:
        yield pb.UpdateWeightsRequest(begin=pb.UpdateWeightsRequest.UpdateBegin(**begin))
        for start in range(0, len(data), CHUNK):
            yield pb.UpdateWeightsRequest(chunk=data[start : start + CHUNK])
        digest = (sha256 or hashlib.sha256(data).digest()) if data else b""
        yield pb.UpdateWeightsRequest(commit=pb.UpdateWeightsRequest.UpdateCommit(sha256=digest))

    return frames()


async def events_until(
    events: AsyncIterator[pb.GenerateResponse], reached: Callable[[pb.GenerateResponse], bool]
) -> list[pb.GenerateResponse]:
    """The next events of a generation, up to the first for which `reached` holds."""
    told = [await anext(events)]
    while not reached(told[-1]):
        told.append(await anext(events))
    return told


async def first_tokens(events: AsyncIterator[pb.GenerateResponse]) -> list[pb.GenerateResponse]:
    """The next events of a generation, up to the next tokens."""
    return await events_until(events, lambda event: event.HasField("delta"))


async def tokens_of(events: AsyncIterator[pb.GenerateResponse], version: int) -> list[pb.GenerateResponse]:
    """The next events of a generation, up to the first tokens by this policy version."""
    return await events_until(
        events, lambda event: version in (each.policy_version for each in event.delta.span.versions)
    )


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """One engine with room for two adapters, and a means of transfer."""
    directory = tmp_path_factory.mktemp("vllm")
    vllm_files_backend.install(directory / "plugins")
    # vLLM's processes inherit it.
    sys.path.append(str(directory / "plugins"))
    opening = open_inference(
        models.write(directory / "model"),
        directory / "state",
        weights_dir=directory / "weights",
        adapters_dir=directory / "adapters",
        engine="vllm",
        max_concurrency=16,
        kv_cache_bytes=256 << 20,
        engine_options={
            "dtype": "float32",
            "enforce_eager": "true",
            "block_size": "32",
            "max_adapters": "2" if ON_CPU else "0",
            "max_adapter_rank": "8",
            "transfer_backend": "files",
        },
    )
    async with opening as opened:
        stub = rpc.InferenceServiceStub(opened.channel)
        yield Served(stub, directory, opened.address, troubles=opened.service.troubles)


@pytest.fixture
def adapters() -> None:
    """Skips where vLLM's kernels for adapters take no float32, which the service here has."""
    if not ON_CPU:
        pytest.skip("adapters need 16 bits on a GPU: see the check `adapters`")


@pytest.fixture
def failure() -> Callable[[grpc.aio.AioRpcError], PenstockError]:
    """The typed error behind a failed call."""
    return error_from_rpc
