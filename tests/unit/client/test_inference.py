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
from penstock.client import DataLoss, FailedPrecondition, FinishReason, InvalidArgument, Penstock, Sampling
from penstock.client.safetensors import CHUNK_BYTES, TensorFile
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


async def test_a_completion_is_generated_from_token_ids_with_a_seed(fakes: Fakes, ps: Penstock) -> None:
    """R82: ids and logprobs of the engine, unchanged; R86: what was asked for arrives as it was asked."""
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


@pytest.mark.parametrize("ids", [[-1], [2**31], [1.5], [[1]], "text"])
async def test_what_is_no_token_ids_is_refused_before_it_is_sent(ps: Penstock, ids: Any) -> None:
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


async def test_a_push_whose_answer_was_lost_is_made_again_and_one_that_was_refused_is_not(
    fakes: Fakes, ps: Penstock
) -> None:
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
