"""The inference client against a service that follows a script."""

from hashlib import sha256
from typing import Any

import grpc
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from tests.unit.client.conftest import Fakes, Refusal

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.client import (
    Adapter,
    DataLoss,
    FailedPrecondition,
    FinishReason,
    InvalidArgument,
    Message,
    PauseMode,
    Penstock,
    Prompt,
    Role,
    Sampling,
)
from penstock.client.inference.safetensors import CHUNK_BYTES, TensorFile
from penstock.inference.v1 import inference_service_pb2 as pb


def done(ids: list[int], logprobs: list[float]) -> pb.GenerateResponse:
    span = completion_pb2.TokenSpan(
        token_ids=np.array(ids, "<i4").tobytes(),
        logprobs=np.array(logprobs, "<f4").tobytes(),
        count=len(ids),
        logprobs_mode=completion_pb2.LOGPROBS_MODE_PROCESSED,
    )
    completion = completion_pb2.Completion(
        span=span, finish_reason=chat_pb2.FINISH_REASON_STOP, stop_token_id=2, engine="numpy"
    )
    return pb.GenerateResponse(done=pb.GenerateDone(completion=completion))


@pytest.mark.requirement("R82", "R86")
async def test_a_completion_is_generated_from_token_ids_with_a_seed(fakes: Fakes, ps: Penstock) -> None:
    """Ids and logprobs of the engine, unchanged; R86: what was asked for arrives as it was asked."""
    fakes.queue("Generate", [pb.GenerateResponse(started=pb.GenerateStarted(policy_version=1)), done([4, 2], [-1, 0])])
    completion = await ps.inference.generate(np.array([1, 2, 3]), Sampling(temperature=0.0), seed=9, min_version=1)
    assert completion.token_ids is not None and completion.token_ids.tolist() == [4, 2]
    assert completion.logprobs is not None and completion.logprobs.tolist() == [-1.0, 0.0]
    assert (completion.finish_reason, completion.stop_token_id) == (FinishReason.STOP, 2)
    (request,) = fakes.requests["Generate"]
    assert np.frombuffer(request.token_ids, "<i4").tolist() == [1, 2, 3]
    assert (request.sampling.seed, request.sampling.temperature, request.stream) == (9, 0.0, False)
    assert request.sampling.HasField("temperature") and not request.sampling.HasField("top_p")
    assert request.version.min_version == 1


async def test_a_calls_own_sampling_can_be_passed_on_with_its_prompt(fakes: Fakes, ps: Penstock) -> None:
    """The prompt says whether to think, so an engine has no such field; a conversation is rendered with the wish."""
    sampling = Sampling(top_p=0.5, thinking=False, thinking_budget_tokens=2000)
    for prompt, thinks in (([1, 2], False), (Prompt(messages=[Message.of(Role.USER, "?")]), True)):
        fakes.queue("Generate", [done([4], [-1])])
        await ps.inference.generate(prompt, sampling)
        request = fakes.requests["Generate"][-1]
        assert request.sampling.top_p == 0.5
        assert request.sampling.HasField("thinking") is request.sampling.HasField("thinking_budget_tokens") is thinks


@pytest.mark.parametrize("ids", [[-1], [2**31], [1.5], [[1]], "text"])
async def test_invalid_token_ids_are_refused_unsent(ps: Penstock, ids: Any) -> None:
    """Bad input gets a typed error before anything is started."""
    with pytest.raises(InvalidArgument):
        await ps.inference.generate(ids)


async def test_weights_go_out_as_one_safetensors_file_in_chunks_with_its_digest(fakes: Fakes, ps: Penstock) -> None:
    """A push is atomic and checked: begin, chunks of at most 1 MiB, commit with the digest of all of them."""
    fakes.queue("UpdateWeights", pb.UpdateWeightsResponse(policy_version=5))
    tensors: dict[str, Any] = {
        "w": np.arange(700_000, dtype=np.float32).reshape(1000, 700).T,  # not contiguous
        "s": np.float32(2.5).reshape(()),
        "e": np.zeros((0, 3), np.float16),
        "b": np.arange(4, dtype=">i8"),
    }
    update = await ps.inference.update_weights(5, tensors)
    assert (update.policy_version, update.load) == (5, None)
    begin, *chunks, commit = fakes.requests["UpdateWeights"][0]
    data = b"".join(frame.chunk for frame in chunks)
    assert all(len(frame.chunk) <= CHUNK_BYTES for frame in chunks) and len(chunks) == 3
    assert begin.begin.size_bytes == len(data)
    assert begin.begin.sha256 == commit.commit.sha256 == sha256(data).digest()
    loaded = safetensors.numpy.load(data)
    assert {name: value.tolist() for name, value in loaded.items()} == {k: v.tolist() for k, v in tensors.items()}


async def test_push_with_a_lost_answer_is_repeated_unlike_a_refused_one(fakes: Fakes, ps: Penstock) -> None:
    """The version and digest in force are a success; anything else is the caller's to decide."""
    fakes.queue(
        "UpdateWeights",
        Refusal(grpc.StatusCode.UNAVAILABLE),
        pb.UpdateWeightsResponse(policy_version=2),
        Refusal(grpc.StatusCode.FAILED_PRECONDITION, "POLICY_VERSION_NOT_NEWER"),
    )
    tensors = {"w": np.zeros(3, np.float32)}
    await ps.inference.update_weights(2, tensors)
    first, second, *_ = fakes.requests["UpdateWeights"]
    assert [f.SerializeToString() for f in first] == [f.SerializeToString() for f in second]
    with pytest.raises(FailedPrecondition) as caught:
        await ps.inference.update_weights(2, tensors)
    assert caught.value.reason == "POLICY_VERSION_NOT_NEWER"


async def test_tokenizer_files_are_put_together_and_their_digests_checked(fakes: Fakes, ps: Penstock) -> None:
    """A file that did not arrive as it was sent is an error and not a tokenizer."""
    good = sha256(b"ab").digest()
    part = pb.GetTokenizerResponse
    fakes.queue(
        "GetTokenizer",
        [part(file_name="t.json", chunk=b"a"), part(file_name="t.json", chunk=b"b", sha256=good)],
        [part(file_name="t.json", chunk=b"x", sha256=good)],
    )
    assert await ps.inference.tokenizer() == {"t.json": b"ab"}
    with pytest.raises(DataLoss):
        await ps.inference.tokenizer()


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__" and name.isprintable()),
        npst.arrays(
            st.sampled_from([np.float64, np.float32, np.float16, np.int64, np.int32, np.int8, np.uint8, np.bool_]),
            npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_any_tensors_are_read_back_by_the_reference_implementation(tensors: dict[str, Any]) -> None:
    """What goes out is what the safetensors package reads, bit for bit."""
    file = TensorFile.of(tensors)
    data = b"".join(file.chunks())
    assert len(data) == file.size_bytes and sha256(data).digest() == file.sha256
    loaded = safetensors.numpy.load(data)
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert loaded[name].tobytes() == np.ascontiguousarray(tensor).tobytes()


@pytest.mark.requirement("R63")
async def test_adapter_is_sent_as_peft_saves_it_and_adapters_are_paged(fakes: Fakes, ps: Penstock) -> None:
    """Name, version, configuration, tensors and the mode for what it replaces; an answer that was lost is asked
    for again."""
    fakes.queue(
        "LoadAdapter",
        Refusal(grpc.StatusCode.UNAVAILABLE),
        pb.LoadAdapterResponse(adapter=pb.Adapter(name="style", policy_version=3, rank=4, namespace="default")),
        pb.LoadAdapterResponse(adapter=pb.Adapter(name="style", policy_version=4, rank=4, namespace="default")),
    )
    tensors = {"a.lora_A.weight": np.ones((4, 8), np.float32)}
    loaded = await ps.inference.load_adapter("style", 3, tensors, {"r": 4}, mode=PauseMode.WAIT)
    assert loaded == Adapter("style", 3, 4)
    begin, chunk, commit = fakes.requests["LoadAdapter"][1]
    assert (begin.begin.name, begin.begin.policy_version, begin.begin.mode) == ("style", 3, pb.PAUSE_MODE_WAIT)
    assert begin.begin.adapter_config_json == '{"r": 4}'
    assert sha256(chunk.chunk).digest() == commit.commit.sha256
    assert (await ps.inference.load_adapter_from("style", 4, "step-4")).policy_version == 4
    begin, commit = fakes.requests["LoadAdapter"][2]
    assert begin.begin.path == "step-4" and not begin.begin.adapter_config_json and not commit.commit.sha256
    fakes.queue(
        "ListAdapters",
        pb.ListAdaptersResponse(adapters=[pb.Adapter(name="a", rank=1)], next_page_token="a"),
        pb.ListAdaptersResponse(adapters=[pb.Adapter(name="b", rank=2)]),
    )
    assert [adapter.name for adapter in await ps.inference.adapters()] == ["a", "b"]
    assert [request.page_token for request in fakes.requests["ListAdapters"]] == ["", "a"]
    fakes.queue("UnloadAdapter", pb.UnloadAdapterResponse())
    await ps.inference.unload_adapter("style")
    assert fakes.requests["UnloadAdapter"][0].name == "style"


@pytest.mark.requirement("R63")
async def test_weights_may_be_named_by_path(fakes: Fakes, ps: Penstock) -> None:
    """No chunk is sent, and no digest."""
    fakes.queue("UpdateWeights", pb.UpdateWeightsResponse(policy_version=7))
    assert (await ps.inference.update_weights_from(7, "step-7", partial=True, mode="abort")).policy_version == 7
    begin, commit = fakes.requests["UpdateWeights"][0]
    assert (begin.begin.path, begin.begin.mode) == ("step-7", pb.PAUSE_MODE_ABORT)
    assert begin.begin.format == pb.WEIGHT_FORMAT_SAFETENSORS_PARTIAL and not begin.begin.HasField("sha256")
    assert not commit.commit.sha256


@pytest.mark.requirement("R26")
async def test_a_transfer_that_is_not_committed_is_given_up(fakes: Fakes, ps: Penstock) -> None:
    """A trainer that fails in the middle leaves the old weights, and its own error."""
    fakes.queue("InitTransfer", pb.InitTransferResponse())
    await ps.inference.init_transfer("nccl", {"port": 1})
    fakes.queue("StartTransfer", *(pb.StartTransferResponse(transfer_id=name) for name in "ab"))
    fakes.queue("TransferTensors", pb.TransferTensorsResponse())
    fakes.queue(
        "FinishTransfer",
        pb.FinishTransferResponse(policy_version=2),
        Refusal(grpc.StatusCode.FAILED_PRECONDITION, "NO_TRANSFER"),
    )
    async with await ps.inference.start_transfer(2, mode="wait", idle_timeout=5) as transfer:
        await transfer.tensors([{"names": ["w"]}])
        assert (await transfer.commit()).policy_version == 2
    with pytest.raises(ZeroDivisionError):
        async with await ps.inference.start_transfer(3):
            raise ZeroDivisionError
    assert fakes.requests["InitTransfer"][0].options_json == '{"port": 1}'
    first = fakes.requests["StartTransfer"][0]
    assert (first.policy_version, first.mode, first.idle_timeout.seconds) == (2, pb.PAUSE_MODE_WAIT, 5)
    assert first.request_id != fakes.requests["StartTransfer"][1].request_id
    assert fakes.requests["TransferTensors"][0].descriptor_json == '[{"names": ["w"]}]'
    finished = [(request.transfer_id, request.commit) for request in fakes.requests["FinishTransfer"]]
    assert finished == [("a", True), ("b", False)]


@pytest.mark.requirement("R63")
async def test_pauses_and_sleeps_say_how(fakes: Fakes, ps: Penstock) -> None:
    """The mode arrives as it was given; a word that is none is refused before it is sent."""
    fakes.queue("Pause", *[pb.PauseResponse(in_flight_count=n) for n in range(3)])
    assert [await ps.inference.pause(mode) for mode in PauseMode] == [0, 1, 2]
    assert [request.mode for request in fakes.requests["Pause"]] == [
        pb.PAUSE_MODE_ABORT,
        pb.PAUSE_MODE_WAIT,
        pb.PAUSE_MODE_KEEP,
    ]
    with pytest.raises(InvalidArgument):
        await ps.inference.pause("freeze")
    fakes.queue("Sleep", pb.SleepResponse())
    fakes.queue("Wake", pb.WakeResponse())
    await ps.inference.sleep(2)
    await ps.inference.wake()
    assert fakes.requests["Sleep"][0].level == 2


@pytest.mark.requirement("R26")
async def test_the_load_is_watched_until_it_is_left(fakes: Fakes, ps: Penstock) -> None:
    """What waits and what runs is visible."""
    fakes.queue("WatchStats", [pb.WatchStatsResponse(running=n, waiting=3, cache_use=0.5) for n in range(3)])
    async for stats in ps.inference.watch_stats(0.25):
        if stats.running == 1:
            break
    assert (stats.waiting, stats.cache_use) == (3, 0.5)
    assert fakes.requests["WatchStats"][0].interval.nanos == 250_000_000
