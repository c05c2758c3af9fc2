"""Alternatives (top-k logprobs) of sampled tokens: from the answer to the journal, the sample and the agent."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from tests.integration.interception.conftest import tokens_completion
from tests.integration.interception.dialects.test_chat import ASK
from tests.integration.interception.test_sources import DEFAULT_INFERENCE, PROXY, from_caller, inference, said, upstream

from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.inference.v1 import inference_service_pb2, inference_service_pb2_grpc
from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.interception.v1 import interception_pb2
from penstock_codec import Codec
from penstock_codec.tokenizer_files import TokenizerFiles
from penstock_inference.testing import open_inference, random_config, random_tensors, write_model

__all__ = ["inference"]

GATE = interception_pb2.MODE_INTERCEPTION_GATE
NEVER = float("-inf")


def with_top(
    completion: completion_pb2.Completion, ids: list[list[int]], values: list[list[float]]
) -> completion_pb2.Completion:
    """The completion with these rows of alternatives."""
    span = completion.span
    span.top_count = len(ids[0])
    span.top_token_ids = np.asarray(ids, "<i4").tobytes()
    span.top_logprobs = np.asarray(values, "<f4").tobytes()
    return completion


def result(call: pb.ModelCall, completion: completion_pb2.Completion) -> pb.CallResult:
    return pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, completion=completion)


def rows(message: Any) -> tuple[list[list[int]], list[list[float]]]:
    """The alternatives of a span or of a sample."""
    count = message.top_count
    ids, values = np.frombuffer(message.top_token_ids, "<i4"), np.frombuffer(message.top_logprobs, "<f4")
    return ids.reshape(-1, count).tolist(), values.reshape(-1, count).tolist()


def digest(span: completion_pb2.TokenSpan) -> bytes:
    return hashlib.sha256(span.top_token_ids + span.top_logprobs).digest()


async def ask(client: openai.AsyncOpenAI, **options: Any) -> Any:
    return (await client.chat.completions.create(model="m", messages=ASK, **options)).choices[0]


@asynccontextmanager
async def numpy_engine(directory: Path, files: TokenizerFiles) -> AsyncIterator[Any]:
    """A real engine over a random model with the tiny tokenizer."""
    config = random_config("qwen3", vocab_size=Codec.load(files).vocab_size, eos_token_id=files.stop_token_ids[0])
    model = write_model(directory / "model", config, random_tensors(config))
    files.write(model)
    async with open_inference(model, directory / "inference") as opened:
        yield opened


@pytest.mark.requirement("R82", "R106")
async def test_a_trainers_alternatives_reach_record_and_sample(serving: Any) -> None:
    """As delivered; after a restart too, and only for readers that ask for them."""
    ids, values = [[5, 6], [2, 7], [3, -1]], [[-1.0, -2.5], [-0.25, NEVER], [-0.5, NEVER]]
    async with serving() as service:
        rollout, trainer = await service.open("r"), await service.trainer()
        asked = asyncio.create_task(ask(rollout.client(), logprobs=True, top_logprobs=2))
        call = await trainer.call()
        assert call.sampling.top_logprobs == 2
        acknowledged = await trainer.deliver(result(call, with_top(tokens_completion([5, 6, 2]), ids, values)))
        assert list(acknowledged.accepted_call_ids) == [call.call_id], acknowledged
        await asked
    async with serving() as service:
        span = (await service.intercept.GetCall(pb.GetCallRequest(call_id=call.call_id))).call.completion.span
        assert rows(span) == (ids, values) and span.top_sha256 == digest(span)
        whole = await service.capture("r", include_top=True)
        assert whole.calls[0].completion.span == span
        assert rows(whole.samples[0]) == (ids, values)
        bare = await service.capture("r")
        kept, sample = bare.calls[0].completion.span, bare.samples[0]
        assert (kept.top_count, kept.top_sha256) == (2, span.top_sha256)
        assert not (kept.top_token_ids or kept.top_logprobs or sample.top_token_ids or sample.top_count)
        assert bare.chain_sha256 == whole.chain_sha256 and not bare.calls[0].normalisations


@pytest.mark.requirement("R84", "R106")
async def test_a_sample_has_a_row_for_each_trained_token(service: Any) -> None:
    """Turns with fewer alternatives, or without, are filled up."""
    rollout, trainer = await service.open(), await service.trainer()
    client, turns, size = rollout.client(), [*ASK], trainer.completion("ok").span.count
    for count in (1, 0, 3):
        asked = asyncio.create_task(client.chat.completions.create(model="m", messages=turns))
        call = await trainer.call()
        completion = trainer.completion("ok")
        if count:
            best = [[4, 5, 6][:count]] * size
            completion = with_top(completion, best, [[-0.5, -1.0, -2.0][:count]] * size)
        await trainer.deliver(result(call, completion))
        answer = (await asked).choices[0].message.content
        turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]
    captured = await service.capture(rollout.rollout_id, include_top=True)
    (sample,) = captured.samples
    assert sample.loss_mask.count(1) == 3 * size and sample.top_count == 3
    filled = [[4, -1, -1]] * size + [[-1, -1, -1]] * size + [[4, 5, 6]] * size
    assert rows(sample)[0] == filled
    assert [[value != NEVER for value in row] for row in rows(sample)[1]] == [[t >= 0 for t in row] for row in filled]


GOOD = [[5, 6], [2, 7]], [[-1.0, -2.0], [-1.0, -2.0]]
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "ids too short": ({"top_token_ids": b"123"}, "top_token_ids"),
    "logprobs of another count": ({"top_logprobs": np.zeros(2, "<f4").tobytes()}, "top_logprobs"),
    "logprobs missing": ({"top_logprobs": b""}, "top_logprobs"),
    "rows of one more": ({"top_count": 3}, "top_token_ids top_logprobs"),
    "rows without a count": ({"top_count": 0}, "top_count"),
    "too many in a row": ({"top_count": 21}, "top_count"),
    "an id beyond the vocabulary": ({"top_token_ids": np.array([5, 6, 2, 10**6], "<i4").tobytes()}, "top_token_ids"),
    "a negative id": ({"top_token_ids": np.array([5, 6, 2, -2], "<i4").tobytes()}, "top_token_ids"),
    "a filler with a logprob": ({"top_token_ids": np.array([5, 6, 2, -1], "<i4").tobytes()}, "top_logprobs"),
    "a rising row": ({"top_logprobs": np.array([-2, -1, -1, -2], "<f4").tobytes()}, "top_logprobs"),
    "a logprob above 0": ({"top_logprobs": np.array([1, -1, -1, -2], "<f4").tobytes()}, "top_logprobs"),
    "not a number": ({"top_logprobs": np.array([-1, np.nan, -1, -2], "<f4").tobytes()}, "top_logprobs"),
    "raw and excluded": (
        {"top_logprobs": np.array([-1, -np.inf, -1, -2], "<f4").tobytes(), "logprobs_mode": "LOGPROBS_MODE_RAW"},
        "top_logprobs",
    ),
}


@pytest.mark.requirement("R29", "R83", "R106")
@pytest.mark.parametrize(("change", "field"), WRONG.values(), ids=WRONG)
async def test_wrong_alternatives_are_invalid_by_their_field(service: Any, change: dict[str, Any], field: str) -> None:
    """The call stays with the trainer, which may answer again."""
    rollout, trainer = await service.open(), await service.trainer()
    asked = asyncio.create_task(ask(rollout.client()))
    call = await trainer.call()
    completion = with_top(tokens_completion([5, 2]), *GOOD)
    completion.span.MergeFrom(completion_pb2.TokenSpan(**change))
    if change == {"top_count": 0}:
        completion.span.ClearField("top_count")
    if change == {"top_logprobs": b""}:
        completion.span.ClearField("top_logprobs")
    acknowledged = await trainer.deliver(result(call, completion))
    (rejected,) = acknowledged.rejected
    assert rejected.reason == pb.ResultRejected.REASON_INVALID
    assert [text.split(":")[0] for text in rejected.violations] == [f"completion.span.{name}" for name in field.split()]
    await trainer.deliver(result(call, with_top(tokens_completion([5, 2]), *GOOD)))
    await asked


@pytest.mark.requirement("R34", "R106")
async def test_an_answer_with_other_alternatives_is_another_answer(service: Any) -> None:
    """The same answer twice is accepted twice."""
    rollout, trainer = await service.open(), await service.trainer()
    asked = asyncio.create_task(ask(rollout.client()))
    call = await trainer.call()
    answer = result(call, with_top(tokens_completion([5, 2]), *GOOD))
    assert (await trainer.deliver(answer)).accepted_call_ids
    assert (await trainer.deliver(answer)).accepted_call_ids
    other = result(call, with_top(tokens_completion([5, 2]), GOOD[0], [[-1.0, -3.0], [-1.0, -2.0]]))
    assert (await trainer.deliver(other)).rejected[0].reason == pb.ResultRejected.REASON_ALREADY_DELIVERED
    await asked


@pytest.mark.requirement("R63", "R106")
@pytest.mark.parametrize("mode", [GATE, PROXY], ids=["delegated", "proxied"])
async def test_the_engines_alternatives_are_recorded(
    start: Any, tokenizer_dir: Path, tmp_path: Path, mode: interception_pb2.Mode.ValueType
) -> None:
    """What the agent, or a delegation, asks the inference service for is in the call and in the sample."""
    async with numpy_engine(tmp_path, TokenizerFiles.from_directory(tokenizer_dir)) as engine:
        service = await start(inference_address=engine.address)
        rollout = await service.open(mode=mode, source=DEFAULT_INFERENCE)
        asks_for_top = {"logprobs": True, "top_logprobs": 3} if mode == PROXY else {}
        asked = asyncio.create_task(ask(rollout.client(), max_tokens=3, seed=1, **asks_for_top))
        if mode == GATE:
            trainer = await service.trainer()
            call = await trainer.call()
            delegation = pb.Delegation(sampling_override=chat_pb2.Sampling(top_logprobs=3))
            await trainer.deliver(pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, delegation=delegation))
        choice = await asked
        kept = (await service.capture(rollout.rollout_id, include_top=True)).calls[0]
        span = kept.completion.span
        assert (kept.sampling_requested.top_logprobs, kept.completion.sampling_used.top_logprobs) == (3, 3)
        stub = inference_service_pb2_grpc.InferenceServiceStub(engine.channel)
        request = inference_service_pb2.GenerateRequest(
            request_id="again", token_ids=kept.prompt_suffix_token_ids, sampling=kept.sampling_requested
        )
        done = [event async for event in stub.Generate(request)][-1].done.completion.span
        assert span.count and rows(span) == rows(done)
        if mode == PROXY:
            shown = [[item.logprob for item in token.top_logprobs] for token in choice.logprobs.content]
            assert shown == rows(span)[1]


@pytest.mark.requirement("R63", "R106")
async def test_an_engine_without_alternatives_refuses_them_by_name(start: Any, inference: Any) -> None:
    """A script has no distribution; the call fails instead of dropping what was asked for."""
    service = await start(inference_address=await inference({"strict": False, "turns": [{"reply": "hello"}]}))
    rollout = await service.open(mode=PROXY, source=DEFAULT_INFERENCE)
    with pytest.raises(openai.APIStatusError):
        await ask(rollout.client(), logprobs=True, top_logprobs=2)
    call = (await service.capture(rollout.rollout_id)).calls[0]
    assert (call.sampling_requested.top_logprobs, call.end_reason) == (2, "FIELD_INVALID")


@pytest.mark.requirement("R30", "R106")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_agent_gets_the_alternatives_that_it_asked_for(service: Any, stream: bool) -> None:
    """No more than that; what was excluded is left out."""
    rollout, trainer = await service.open(), await service.trainer()
    client, options = rollout.client(), {"model": "m", "messages": ASK, "logprobs": True, "top_logprobs": 2}

    async def asking() -> Any:
        if not stream:
            return (await client.chat.completions.create(**options)).choices[0]
        async with client.chat.completions.stream(**options) as events:
            return (await events.get_final_completion()).choices[0]

    asked = asyncio.create_task(asking())
    call = await trainer.call()
    ids = [[5, 6, 7], [2, 7, 8], [3, -1, -1]]
    values = [[-1.0, -2.0, -3.0], [-0.25, NEVER, NEVER], [-0.5, NEVER, NEVER]]
    await trainer.deliver(result(call, with_top(tokens_completion([5, 6, 2]), ids, values)))
    content = (await asked).logprobs.content
    shown = [[(bytes(item.bytes), item.logprob) for item in token.top_logprobs] for token in content]
    texts = {token: service.codec.decode([token]).encode() for token in (2, 3, 5, 6)}
    assert shown == [[(texts[5], -1.0), (texts[6], -2.0)], [(texts[2], -0.25)], [(texts[3], -0.5)]]
    assert [token.logprob for token in content] == [-0.5] * 3


@pytest.mark.requirement("R33", "R106")
async def test_a_call_notes_the_alternatives_that_its_answer_lacks(service: Any) -> None:
    """The trainer need not have them; the record says so."""
    rollout, trainer = await service.open(), await service.trainer()
    asked = asyncio.create_task(ask(rollout.client(), logprobs=True, top_logprobs=4))
    call = await trainer.call()
    await trainer.deliver(result(call, with_top(tokens_completion([5, 2]), *GOOD)))
    await asked
    kept = (await service.capture(rollout.rollout_id)).calls[0]
    assert list(kept.normalisations) == ["top_logprobs asks for 4 alternatives; the answer has 2"]


@pytest.mark.requirement("R65", "R106")
async def test_alternatives_without_logprobs_are_refused(service: Any) -> None:
    """As OpenAI does; the call is not made."""
    rollout = await service.open()
    with pytest.raises(openai.BadRequestError, match="top_logprobs") as caught:
        await ask(rollout.client(), top_logprobs=5)
    assert (caught.value.param, caught.value.code) == ("top_logprobs", "invalid_value")
    assert not (await service.capture(rollout.rollout_id)).calls


@pytest.mark.requirement("R82", "R106")
async def test_an_upstreams_alternatives_are_recorded_by_id(start: Any) -> None:
    """From servers that return token ids; their rows are sorted, and filled up where they are short."""

    def answer(_: Any, body: dict[str, Any]) -> dict[str, Any]:
        value = said("ok")
        if body["top_logprobs"] and body["return_tokens_as_token_ids"]:
            tables = [{"token_id:5": -2.0, "token_id:6": -1.0}, {"token_id:2": 0.0001}]
            content = [
                {"token": f"token_id:{token}", "logprob": -0.5, "bytes": None}
                | {"top_logprobs": [{"token": t, "logprob": v, "bytes": None} for t, v in table.items()]}
                for token, table in zip((5, 2), tables, strict=True)
            ]
            value["choices"][0] |= {"token_ids": [5, 2], "logprobs": {"content": content}}
            value["prompt_token_ids"] = [1, 2, 3]
        return value

    service = await start(caller_endpoints=True)
    async with upstream(answer, owner="vllm") as (url, seen):
        override = chat_pb2.Sampling(top_logprobs=2)
        rollout = await service.open(mode=PROXY, source=from_caller(url), sampling_override=override)
        await ask(rollout.client())
    assert (seen[0][1]["logprobs"], seen[0][1]["top_logprobs"]) == (True, 2)
    captured = await service.capture(rollout.rollout_id, include_top=True)
    assert rows(captured.calls[0].completion.span) == ([[6, 5], [2, -1]], [[-1.0, -2.0], [0.0, NEVER]])
