"""New policies and adapters while vLLM serves."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import numpy as np
import pytest
from tests.integration.vllm.conftest import Served, first_tokens, push_frames, tokens_of
from tests.support import vllm_models as models
from tests.support.waiting import eventually

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.inference.v1 import inference_service_pb2 as pb
from penstock_chassis.errors import PenstockError

pytestmark = pytest.mark.asyncio(loop_scope="session")

Failure = Callable[[grpc.aio.AioRpcError], PenstockError]
TOLERANCE = 5e-3
PROMPT = range(20, 60)
GREEDY = {"temperature": 0, "max_tokens": 24, "min_tokens": 24}


async def greedy(service: Served, adapter: str = "") -> tuple[bytes, Any]:
    request = service.request(PROMPT, **GREEDY)
    request.adapter = adapter
    span = (await service.complete(request)).span
    return span.token_ids, np.frombuffer(span.logprobs, "<f4")


def spans(completion: completion_pb2.Completion) -> list[tuple[int, int, int]]:
    return [(v.policy_version, v.start, v.end) for v in completion.span.versions]


@pytest.mark.requirement("R87")
async def test_a_push_in_the_middle_of_a_completion_shows_in_its_spans(service: Served) -> None:
    """Each token has the version that sampled it, in the deltas and in the end; what follows is all new."""
    old = await service.push(models.random_policy(5))
    request = service.endless()
    call = aiter(service.stub.Generate(request))
    events = await first_tokens(call)
    new = await service.push(models.random_policy(6))
    after = await service.complete(service.request())
    events += await tokens_of(call, new)
    assert await service.abort(request) == 1
    events += [event async for event in call]
    done = events[-1].done.completion
    (first, start, middle), (second, again, end) = spans(done)
    assert (first, second, start, middle, end) == (old, new, 0, again, done.span.count) and 0 < middle < end
    told = [(v.policy_version, v.end - v.start) for e in events[1:-1] for v in e.delta.span.versions]
    assert sum(count for version, count in told if version == old) == middle
    assert spans(after) == [(new, 0, 16)]


@pytest.mark.requirement("R87")
@pytest.mark.parametrize("mode", [pb.PAUSE_MODE_WAIT, pb.PAUSE_MODE_ABORT])
async def test_a_push_may_wait_for_what_runs_or_end_it(service: Served, mode: Any) -> None:
    """Strictly on-policy, where a trainer wants it."""
    old = await service.push(models.random_policy(5))
    waited = mode == pb.PAUSE_MODE_WAIT
    request = service.request(stream=True, max_tokens=600, min_tokens=600) if waited else service.endless()
    call = aiter(service.stub.Generate(request))
    events = await first_tokens(call)
    await service.push(models.random_policy(6), mode=mode)
    events += [event async for event in call]
    done = events[-1].done.completion
    assert [version for version, _, _ in spans(done)] == [old]
    reasons = {True: chat_pb2.FINISH_REASON_LENGTH, False: chat_pb2.FINISH_REASON_ABORT}
    assert done.finish_reason == reasons[waited] and (done.span.count == 600) is waited


@pytest.mark.requirement("R63")
async def test_pushed_by_chunks_by_parts_and_by_path_is_the_same_policy(service: Served) -> None:
    """However weights come, the same come into force."""
    policy = models.random_policy(7)
    await service.push(policy)
    ids, logprobs = await greedy(service)

    await service.push(models.random_policy(8))
    assert (await greedy(service))[0] != ids
    half = len(policy) // 2
    for part in (list(policy.items())[:half], list(policy.items())[half:]):
        await service.push(dict(part), format=pb.WEIGHT_FORMAT_SAFETENSORS_PARTIAL)
    parts_ids, parts_logprobs = await greedy(service)
    assert parts_ids == ids and np.abs(parts_logprobs - logprobs).max() < TOLERANCE

    await service.push(models.random_policy(8))
    directory = service.directory / "weights" / "step-7"
    directory.mkdir(parents=True)
    for n, part in enumerate((list(policy.items())[:half], list(policy.items())[half:])):
        (directory / f"{n}.safetensors").write_bytes(models.file(dict(part)))
    version = service.version()
    fields: dict[str, Any] = {"policy_version": version, "format": pb.WEIGHT_FORMAT_SAFETENSORS, "path": "step-7"}
    for _ in range(2):  # a repetition is a success
        assert (await service.stub.UpdateWeights(push_frames(b"", **fields))).policy_version == version
    path_ids, path_logprobs = await greedy(service)
    assert path_ids == ids and np.abs(path_logprobs - logprobs).max() < TOLERANCE


@pytest.mark.requirement("R22", "R26")
@pytest.mark.parametrize(
    ("flaw", "reason"),
    [
        ("digest", "DIGEST_MISMATCH"),
        ("garbage", "WEIGHTS_INVALID"),
        ("missing", "TENSOR_MISSING"),
        ("unknown", "TENSOR_UNKNOWN"),
        ("shape", "TENSOR_SHAPE"),
        ("nan", "TENSOR_NOT_FINITE"),
        ("version", "POLICY_VERSION_NOT_NEWER"),
        ("elsewhere", "PATH_REFUSED"),
        ("absent", "PATH_REFUSED"),
    ],
)
async def test_a_push_that_fails_changes_nothing_and_keeps_nobody_out(
    service: Served, failure: Failure, flaw: str, reason: str
) -> None:
    """Whole or not at all."""
    in_force = await service.push(models.random_policy(5))
    before = (await greedy(service))[0]
    other = models.random_policy(6)
    name = "model.layers.0.mlp.gate_proj.weight"
    broken: dict[str, models.Tensors] = {
        "missing": {key: other[key] for key in other if key != name},
        "unknown": other | {"model.layers.9.mlp.gate_proj.weight": other[name]},
        "shape": other | {name: other[name][:-1]},
        "nan": other | {name: other[name] * np.float32("nan")},
    }
    path = {"elsewhere": "../model", "absent": "nothing"}.get(flaw, "")
    data = b"" if path else b"x" * 1000 if flaw == "garbage" else models.file(broken.get(flaw, other))
    version = in_force if flaw == "version" else in_force + 1
    fields = {"policy_version": version, "format": pb.WEIGHT_FORMAT_SAFETENSORS, "path": path}
    sha256 = hashlib.sha256(b"other").digest() if flaw == "digest" else None
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.stub.UpdateWeights(push_frames(data, sha256=sha256, **fields))
    assert failure(caught.value).reason == reason
    assert (await service.stub.GetInfo(pb.GetInfoRequest())).policy_version == in_force
    assert (await greedy(service))[0] == before
    await service.push(models.random_policy(5))
    assert not [*(service.directory / "state").glob("*/push-*")]


def adapter_frames(
    name: str, version: int, data: bytes, config: str = models.ADAPTER_CONFIG_JSON, path: str = "", **begin: Any
) -> AsyncIterator[pb.LoadAdapterRequest]:
    async def frames() -> AsyncIterator[pb.LoadAdapterRequest]:
        start = pb.LoadAdapterRequest.AdapterBegin(
            name=name, policy_version=version, adapter_config_json="" if path else config, path=path, **begin
        )
        yield pb.LoadAdapterRequest(begin=start)
        if not path:
            yield pb.LoadAdapterRequest(chunk=data)
        digest = b"" if path else hashlib.sha256(data).digest()
        yield pb.LoadAdapterRequest(commit=pb.LoadAdapterRequest.AdapterCommit(sha256=digest))

    return frames()


async def names(service: Served) -> list[tuple[str, int, int]]:
    answer = await service.stub.ListAdapters(pb.ListAdaptersRequest())
    return [(adapter.name, adapter.policy_version, adapter.rank) for adapter in answer.adapters]


@pytest.mark.requirement("R63", "R87")
@pytest.mark.usefixtures("adapters")
async def test_adapter_samples_as_if_merged_beside_the_base_weights(service: Served) -> None:
    """A completion by an adapter has its version, its logprobs are its own, and the base is untouched."""
    policy, lora = models.random_policy(9), models.adapter(1)
    await service.push(policy)
    base = (await greedy(service))[0]
    loaded = await service.stub.LoadAdapter(adapter_frames("style", 11, models.file(lora)))
    assert (loaded.adapter.name, loaded.adapter.policy_version, loaded.adapter.rank) == ("style", 11, models.RANK)
    try:
        ids, _ = await greedy(service, "style")
        assert ids != base and (await greedy(service))[0] == base
        request = service.request(PROMPT, min_tokens=0)
        request.adapter = "style"
        done = await service.complete(request)
        assert spans(done) == [(11, 0, done.span.count)]
        whole = np.asarray(PROMPT, "<i4").tobytes() + done.span.token_ids
        score = pb.ScoreRequest(token_ids=whole, start=len(PROMPT), adapter="style")
        scored = await service.stub.Score(score)
        sampled, by_adapter = (np.frombuffer(found.logprobs, "<f4") for found in (done.span, scored))
        assert scored.policy_version == 11 and np.abs(by_adapter - sampled).max() < TOLERANCE
        await service.push(models.merged(policy, lora))
        score.adapter = ""
        by_merged = np.frombuffer((await service.stub.Score(score)).logprobs, "<f4")
        assert np.abs(by_merged - by_adapter).max() < TOLERANCE
    finally:
        await service.stub.UnloadAdapter(pb.UnloadAdapterRequest(name="style"))
    assert await names(service) == []


@pytest.mark.requirement("R87")
@pytest.mark.usefixtures("adapters")
async def test_a_newer_adapter_takes_over_while_the_older_finishes_its_own(service: Served) -> None:
    """A completion is by one version of an adapter; the next is by the next."""
    await service.push(models.random_policy(9))
    await service.stub.LoadAdapter(adapter_frames("style", 1, models.file(models.adapter(1))))
    try:
        request = service.endless()
        request.adapter = "style"
        call = aiter(service.stub.Generate(request))
        events = await first_tokens(call)
        for _ in range(2):  # a repetition is a success
            await service.stub.LoadAdapter(adapter_frames("style", 2, models.file(models.adapter(2))))
        newer = service.request()
        newer.adapter = "style"
        newer.version.min_version = 2
        assert spans(await service.complete(newer)) == [(2, 0, 16)]
        assert await service.abort(request) == 1
        events += [event async for event in call]
        done = events[-1].done.completion
        assert spans(done) == [(1, 0, done.span.count)]
        assert await names(service) == [("style", 2, models.RANK)]
    finally:
        await service.stub.UnloadAdapter(pb.UnloadAdapterRequest(name="style"))
    assert not [*(service.directory / "state").glob("*/adapter-*")]


@pytest.mark.requirement("R49", "R87")
@pytest.mark.usefixtures("adapters")
async def test_a_replaced_adapter_that_vllm_has_evicted_is_read_again_for_a_request_that_waits(service: Served) -> None:
    """Two adapters run, which is as many as may; without the files of the one that waits vLLM's core died."""
    running = []
    for number, name in enumerate(("style", "tone")):
        await service.stub.LoadAdapter(adapter_frames(name, 1, models.file(models.adapter(number + 1))))
        request = service.endless()
        request.adapter = name
        call = aiter(service.stub.Generate(request))
        await first_tokens(call)
        running.append((request, call))
    try:
        await service.stub.LoadAdapter(adapter_frames("style", 2, models.file(models.adapter(3))))
        second = service.request()
        second.adapter = "style"
        waiting = asyncio.create_task(service.complete(second))
        await service.until(lambda stats: stats.running == 3)
        for version in (3, 4):  # vLLM keeps four, and the two that run are the last that it evicts
            await service.stub.LoadAdapter(adapter_frames("style", version, models.file(models.adapter(version))))
        request, call = running[0]
        assert not waiting.done() and await service.abort(request) == 1
        assert spans(await waiting) == [(2, 0, 16)]
        await service.abort(running[1][0])
        for _, call in running:
            assert spans([event async for event in call][-1].done.completion)[0][0] == 1
    finally:
        for name in ("style", "tone"):
            await service.stub.UnloadAdapter(pb.UnloadAdapterRequest(name=name))
    state = service.directory / "state"
    await eventually(lambda: not [*state.glob("*/adapter-*"), *state.glob("*/*/adapter-*")], "no file stays")


@pytest.mark.requirement("R33", "R65")
@pytest.mark.usefixtures("adapters")
async def test_an_adapter_that_does_not_fit_is_refused(service: Served, failure: Failure) -> None:
    """By name, rank, version, number and content; what was loaded stays."""
    good = models.file(models.adapter(1))
    wide = json.dumps(models.ADAPTER_CONFIG | {"r": 64})
    await service.stub.LoadAdapter(adapter_frames("one", 5, good))
    directory = service.directory / "adapters" / "two"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(models.ADAPTER_CONFIG_JSON)
    (directory / "adapter_model.safetensors").write_bytes(good)
    await service.stub.LoadAdapter(adapter_frames("two", 5, b"", path="two"))
    try:
        for frames, reason in (
            (adapter_frames("one", 5, models.file(models.adapter(2))), "POLICY_VERSION_NOT_NEWER"),
            (adapter_frames("three", 1, good), "ADAPTER_LIMIT"),
            (adapter_frames("one", 6, good, config=wide), "ADAPTER_INVALID"),
            (adapter_frames("one", 6, good, config="{}"), "ADAPTER_INVALID"),
            (adapter_frames("one", 6, b"garbage"), "ADAPTER_INVALID"),
            (adapter_frames("", 6, good), "FIELD_INVALID"),
            (adapter_frames("one", 6, b"", path="../model"), "PATH_REFUSED"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await service.stub.LoadAdapter(frames)
            assert failure(caught.value).reason == reason
        assert await names(service) == [("one", 5, models.RANK), ("two", 5, models.RANK)]
        assert (await greedy(service, "one"))[0] == (await greedy(service, "two"))[0]
    finally:
        for name in ("one", "two"):
            await service.stub.UnloadAdapter(pb.UnloadAdapterRequest(name=name))


async def start_transfer(service: Served, **fields: Any) -> str:
    """A transfer from files under `transfer`; its id."""
    directory = service.directory / "transfer"
    directory.mkdir(exist_ok=True)
    for seed in (13, 14):
        (directory / f"{seed}.safetensors").write_bytes(models.file(models.random_policy(seed)))
    options = json.dumps({"directory": str(directory)})
    await service.stub.InitTransfer(pb.InitTransferRequest(backend="files", options_json=options))
    request = pb.StartTransferRequest(request_id="t", policy_version=service.version(), **fields)
    answers = [await service.stub.StartTransfer(request) for _ in range(2)]  # a repetition is no other transfer
    assert answers[0].transfer_id == answers[1].transfer_id
    return str(answers[0].transfer_id)


@pytest.mark.requirement("R63", "R87")
async def test_a_trainer_may_move_weights_itself(service: Served, failure: Failure) -> None:
    """The four calls run through vLLM's own protocol; a transfer that is given up leaves the old weights."""
    await service.push(models.random_policy(13))
    expected = (await greedy(service))[0]
    in_force = await service.push(models.random_policy(14))
    before = (await greedy(service))[0]
    for commit, version, ids in ((False, in_force, before), (True, None, expected)):
        transfer = await start_transfer(service)
        descriptor = json.dumps({"file": "13.safetensors"})
        await service.stub.TransferTensors(pb.TransferTensorsRequest(transfer_id=transfer, descriptor_json=descriptor))
        finish = pb.FinishTransferRequest(transfer_id=transfer, commit=commit)
        done = [await service.stub.FinishTransfer(finish) for _ in range(2)]  # idempotent
        assert done[0] == done[1]
        assert done[0].policy_version == (version or in_force + 2)
        found = await greedy(service)
        assert found[0] == ids
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.stub.UpdateWeights(
            push_frames(b"x", policy_version=in_force + 3, format=pb.WEIGHT_FORMAT_SAFETENSORS_PARTIAL)
        )
    assert failure(caught.value).reason == "WEIGHTS_LOST"
    await service.push(models.random_policy(5))


@pytest.mark.requirement("R26", "R33")
async def test_a_transfer_refuses_what_does_not_belong_to_it(service: Served, failure: Failure) -> None:
    """Typed, and the engine goes on."""
    in_force = await service.push(models.random_policy(5))
    transfer = await start_transfer(service)
    calls: tuple[tuple[Callable[[], Any], str], ...] = (
        (
            lambda: service.stub.StartTransfer(pb.StartTransferRequest(request_id="u", policy_version=900)),
            "UPDATE_IN_PROGRESS",
        ),
        (
            lambda: service.stub.TransferTensors(pb.TransferTensorsRequest(transfer_id="other", descriptor_json="{}")),
            "NO_TRANSFER",
        ),
        (
            lambda: service.stub.TransferTensors(pb.TransferTensorsRequest(transfer_id=transfer, descriptor_json="5")),
            "FIELD_INVALID",
        ),
        (lambda: service.stub.FinishTransfer(pb.FinishTransferRequest(transfer_id="other")), "NO_TRANSFER"),
        (lambda: service.stub.InitTransfer(pb.InitTransferRequest(backend="nccl")), "CAPABILITY_MISSING"),
    )
    try:
        for call, reason in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call()
            assert failure(caught.value).reason == reason
    finally:
        await service.stub.FinishTransfer(pb.FinishTransferRequest(transfer_id=transfer))
    assert (await service.stub.GetInfo(pb.GetInfoRequest())).policy_version == in_force
    assert (await service.complete(service.request())).span.count == 16


async def test_sleep_needs_what_this_machine_lacks(service: Served, failure: Failure) -> None:
    """A declared capability, never a silent downgrade."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.stub.Sleep(pb.SleepRequest(level=1))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert failure(caught.value).reason == "CAPABILITY_MISSING"
