"""Several engines behind the real service."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from safetensors.numpy import save
from tests.support.services import replicas
from tests.support.waiting import GUARD_S

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.inference.v1 import inference_service_pb2 as pb
from penstock_chassis.errors import InvalidArgument, PenstockError
from penstock_inference.engines.base import EngineOptions
from penstock_inference.replicas.devices import open_replicas, shares
from penstock_inference.settings import InferenceSettings
from penstock_inference.testing import random_tensors

Open = Callable[..., Any]
Failure = Callable[[grpc.aio.AioRpcError], PenstockError]

ENDLESS = 4000
"""Tokens of a generation that a test ends: most of the model's context. The replica goes on while a test waits."""


@pytest.fixture
async def stub(served: Open, model_dir: Path) -> AsyncIterator[Any]:
    """A service with two replicas."""
    async with AsyncExitStack() as stack:
        yield await stack.enter_async_context(served(model_dir, replicas=2, log_level="error", max_concurrency=8))


def request(name: str, session: str = "", tokens: int = 16, **fields: Any) -> pb.GenerateRequest:
    """A greedy generation."""
    return pb.GenerateRequest(
        request_id=name,
        session_id=session,
        token_ids=np.arange(10, 40, dtype="<i4").tobytes(),
        sampling=chat_pb2.Sampling(temperature=0, max_tokens=tokens, **fields.pop("sampling", {})),
        **fields,
    )


async def complete(stub: Any, wanted: pb.GenerateRequest) -> completion_pb2.Completion:
    """Its completion."""
    events = [event async for event in stub.Generate(wanted)]
    done: completion_pb2.Completion = events[-1].done.completion
    return done


async def until(stub: Any, reached: Callable[[pb.WatchStatsResponse], bool]) -> pb.WatchStatsResponse:
    """The first statistics for which `reached` holds; TimeoutError where none is."""
    async with asyncio.timeout(GUARD_S):
        async for stats in stub.WatchStats(pb.WatchStatsRequest(interval=Duration(nanos=100_000_000))):
            if reached(stats):
                return stats  # type: ignore[no-any-return]
    raise AssertionError("the statistics ended")


def busy(stats: pb.WatchStatsResponse) -> list[str]:
    """Replicas with something to do."""
    return [replica.name for replica in stats.replicas if replica.load_tokens]


def is_back(stats: pb.WatchStatsResponse) -> bool:
    """Whether all run, and one has been started again. A killed one is live until its socket has closed."""
    return all(each.live for each in stats.replicas) and any(each.restarts for each in stats.replicas)


async def push(stub: Any, version: int, tensors: Any) -> pb.UpdateWeightsResponse:
    """A whole policy."""
    data = save(tensors)

    async def frames() -> AsyncIterator[pb.UpdateWeightsRequest]:
        yield pb.UpdateWeightsRequest(
            begin=pb.UpdateWeightsRequest.UpdateBegin(policy_version=version, format=pb.WEIGHT_FORMAT_SAFETENSORS)
        )
        for start in range(0, len(data), 1 << 19):
            yield pb.UpdateWeightsRequest(chunk=data[start : start + (1 << 19)])
        yield pb.UpdateWeightsRequest(commit=pb.UpdateWeightsRequest.UpdateCommit(sha256=hashlib.sha256(data).digest()))

    return await stub.UpdateWeights(frames())  # type: ignore[no-any-return]


@pytest.mark.requirement("R43")
async def test_replicas_are_one_service_with_the_room_of_all(stub: Any) -> None:
    """And each is visible by its name."""
    info = await stub.GetInfo(pb.GetInfoRequest())
    assert (info.engine, info.policy_version, info.paused) == ("numpy", 0, False)
    assert not info.capabilities.transfer_backends
    stats = await until(stub, lambda _: True)
    assert [(each.name, each.live, each.restarts) for each in stats.replicas] == [("r0", True, 0), ("r1", True, 0)]


@pytest.mark.requirement("R43")
async def test_a_session_is_answered_by_the_replica_that_has_its_cache(stub: Any) -> None:
    """Every turn of a conversation, also one that is long in flight; others go where there is room."""
    long = asyncio.create_task(complete(stub, request("long", "one", ENDLESS)))
    (first,) = busy(await until(stub, lambda stats: bool(busy(stats))))
    other = asyncio.create_task(complete(stub, request("other", "two", ENDLESS)))
    await until(stub, lambda stats: len(busy(stats)) == 2)
    before = await until(stub, lambda _: True)
    turn = await complete(stub, request("turn", "one"))
    assert turn.usage.prompt_tokens == 30
    loads = {each.name: each.load_tokens for each in before.replicas}
    second = asyncio.create_task(complete(stub, request("turn-2", "one", ENDLESS)))
    after = await until(stub, lambda stats: any(each.load_tokens > loads[each.name] for each in stats.replicas))
    assert [each.name for each in after.replicas if each.load_tokens > loads[each.name]] == [first]
    await stub.Abort(pb.AbortRequest(all=True))
    for call in (long, other, second):
        assert (await call).finish_reason == chat_pb2.FINISH_REASON_ABORT


async def stopped_amid(stub: Any, name: str) -> asyncio.Future[pb.GenerateResponse]:
    """The end of a generation that stands still, since its replica does."""
    ending: asyncio.Future[pb.GenerateResponse]

    def begun_or_ended(stats: pb.WatchStatsResponse) -> bool:
        return ending.done() or busy(stats) == [name]

    for number in range(10):
        ending = asyncio.ensure_future(anext(aiter(stub.Generate(request(f"killed-{number}", "s", 1500)))))
        await until(stub, begun_or_ended)
        replicas.stop(name)
        # Asked once it stands still: it may have ended while the test did not look.
        if busy(await until(stub, lambda _: True)) == [name]:
            return ending
        replicas.go_on(name)
        await ending
    raise AssertionError("each generation ended before its replica stood still")


@pytest.mark.requirement("R22", "R43")
@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_whose_replica_is_killed_ends_as_if_nothing_had_happened(stub: Any, stream: bool) -> None:
    """With the same tokens, each told once; then the replica is back."""
    alone = await complete(stub, request("alone", "s", 1500))
    (name,) = [
        each.name for each in (await until(stub, lambda s: s.sampled_tokens > 0)).replicas if each.sampled_tokens
    ]
    told: list[pb.GenerateResponse] = []
    if stream:
        events = aiter(stub.Generate(request("killed", "s", 1500, stream=True)))
        told += [await anext(events) for _ in range(3)]
        replicas.kill(name)
        told += [event async for event in events]
    else:
        ending = await stopped_amid(stub, name)
        replicas.kill(name)
        told.append(await ending)
    done = told[-1].done.completion
    assert done.span.token_ids == alone.span.token_ids
    if stream:
        assert b"".join(event.delta.span.token_ids for event in told) == alone.span.token_ids
        assert sum(event.HasField("started") for event in told) == 1
    np.testing.assert_allclose(
        np.frombuffer(done.span.logprobs, "<f4"), np.frombuffer(alone.span.logprobs, "<f4"), atol=1e-4
    )
    back = await until(stub, is_back)
    assert {each.name: each.restarts for each in back.replicas}[name] == 1


@pytest.mark.requirement("R43", "R87")
async def test_seeded_stream_fails_typed_when_its_replica_dies(stub: Any, failure: Failure) -> None:
    """Its rest would be by other randomness than a caller may count on."""
    wanted = pb.GenerateRequest(
        request_id="seeded",
        token_ids=np.arange(10, 40, dtype="<i4").tobytes(),
        sampling=chat_pb2.Sampling(seed=3, max_tokens=ENDLESS),
        stream=True,
    )
    events = aiter(stub.Generate(wanted))
    for _ in range(3):
        await anext(events)
    (name,) = busy(await until(stub, lambda stats: bool(busy(stats))))
    replicas.kill(name)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in events:
            pass
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    error = failure(caught.value)
    assert error.reason == "ENGINE_DIED" and error.retry_after_s and error.metadata["replica"] == name


@pytest.mark.requirement("R23")
async def test_an_update_that_does_not_fit_leaves_the_old_policy_on_all(stub: Any, failure: Failure) -> None:
    """Refused by the names at fault, and the right one is then taken by all."""
    before = (await complete(stub, request("before"))).span.token_ids
    tensors = random_tensors(replicas.CONFIG, 5)
    name = next(iter(tensors))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await push(stub, 1, tensors | {name: np.zeros((2, 2), np.float32)})
    assert failure(caught.value).reason == "TENSOR_SHAPE"
    assert (await stub.GetInfo(pb.GetInfoRequest())).policy_version == 0
    assert (await complete(stub, request("after"))).span.token_ids == before
    assert (await push(stub, 1, tensors)).policy_version == 1
    assert (await push(stub, 1, tensors)).policy_version == 1
    answers = [await complete(stub, request(f"new-{n}", f"session-{n}")) for n in range(4)]
    assert {answer.span.versions[0].policy_version for answer in answers} == {1}
    assert len({answer.span.token_ids for answer in answers}) == 1 and answers[0].span.token_ids != before


@pytest.mark.requirement("R22", "R32")
async def test_pause_holds_all_replicas_and_abort_reaches_all(stub: Any) -> None:
    """Whatever replica a request is on."""
    calls = [asyncio.create_task(complete(stub, request(f"c{n}", f"s{n}", ENDLESS))) for n in range(4)]
    await until(stub, lambda stats: stats.running == 4 and len(busy(stats)) == 2)
    await stub.Pause(pb.PauseRequest(mode=pb.PAUSE_MODE_KEEP))
    assert (await stub.GetInfo(pb.GetInfoRequest())).paused
    held = asyncio.create_task(complete(stub, request("held")))
    assert (await stub.Abort(pb.AbortRequest(session_id="s0"))).aborted_count == 1
    await calls[0]
    assert (await stub.Abort(pb.AbortRequest(all=True))).aborted_count >= 3
    for call in calls:
        assert (await call).finish_reason == chat_pb2.FINISH_REASON_ABORT
    await stub.Resume(pb.ResumeRequest())
    await held


@pytest.mark.requirement("R87")
async def test_model_that_does_not_start_stops_the_service_without_leftovers(tmp_path: Path) -> None:
    """With the engine's own reason."""
    (tmp_path / "config.json").write_text("{}", "utf-8")
    options = EngineOptions(tmp_path, "none", work_dir=tmp_path)
    with pytest.raises(PenstockError) as caught:
        await open_replicas("numpy", options, 2, [], "error", "json", 60.0)
    assert caught.value.reason.startswith("MODEL_")
    assert replicas.processes() == {}


@pytest.mark.requirement("R63")
@pytest.mark.parametrize("engine", ["openai", "scripted", "sglang"])
def test_an_engine_without_weights_has_no_replicas(tmp_path: Path, engine: str) -> None:
    """Refused by the setting at fault, before anything starts."""
    arguments = ["--anonymous", "--model-dir", str(tmp_path), "--engine", engine, "--replicas"]
    with pytest.raises(InvalidArgument) as caught:
        InferenceSettings.load([*arguments, "2"])
    assert caught.value.reason == "SETTINGS_INVALID" and caught.value.violations[0].field == "replicas"
    assert InferenceSettings.load([*arguments, "1"]).engine == engine


@pytest.mark.requirement("R43")
def test_devices_are_shared_in_equal_parts_or_as_the_operator_says() -> None:
    """And a list that does not fit the number of replicas is refused by its field."""
    seen = [each["CUDA_VISIBLE_DEVICES"] for each in shares(2, [], ["0", "1", "2", "3", "4"])]
    assert seen == ["0,1", "2,3"]
    assert shares(2, [], ["0"]) == [{}, {}]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in shares(2, ["0", "0"], ["0"])] == ["0", "0"]
    with pytest.raises(InvalidArgument) as caught:
        shares(2, ["0"], [])
    assert caught.value.violations[0].field == "replica_devices"
