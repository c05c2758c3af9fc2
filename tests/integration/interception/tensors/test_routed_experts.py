"""Routed experts: from a mixture-of-experts engine, or a trainer, to the journal and the sample, token by token."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from tests.integration.interception.conftest import Service, tokens_completion
from tests.integration.interception.test_sources import ASK, DEFAULT_INFERENCE, PROXY

from penstock.analysis.verify_chain import verify
from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.interception.v1 import interception_pb2
from penstock.tables import rows as tables
from penstock.trajectory.v1 import trajectory_pb2
from penstock.values.token_tensors import Part, TokenTensor, joined, read
from penstock_codec import Codec
from penstock_codec.tokenizer_files import TokenizerFiles
from penstock_inference.testing import one_pass, open_inference, random_config, random_tensors, write_model

TURNS = 10
EXPERTS = chat_pb2.Sampling(token_tensors=["routed_experts"])


@asynccontextmanager
async def numpy_engine(directory: Path, files: TokenizerFiles, family: str) -> AsyncIterator[tuple[str, Any]]:
    """A real engine over a random model with the tiny tokenizer: its address, and the model."""
    stop = files.stop_token_ids[0]
    config = random_config(
        family, vocab_size=Codec.load(files).vocab_size, eos_token_id=stop, max_position_embeddings=4096
    )
    tensors = random_tensors(config)
    model = write_model(directory / "model", config, tensors)
    files.write(model)
    async with open_inference(model, directory / "inference") as opened:
        yield opened.address, (config, tensors)


async def tensors_of(service: Any, sample: trajectory_pb2.Sample, calls: Any) -> tuple[TokenTensor, ...]:
    """A sample's tensors, joined from those that GetCall returns of its calls."""
    parts = []
    for call in calls:
        whole = (await service.intercept.GetCall(pb.GetCallRequest(call_id=call.call_id))).call
        own = [read(tensor) for tensor in whole.completion.tensors]
        parts.append(Part(whole.prompt_shared_count, own, whole.policy_id))
    found = joined(parts, sample.policy_id)
    assert [(one.start, one.shape, hashlib.sha256(one.data).digest()) for one in found] == [
        (one.start, tuple(one.shape), one.sha256) for one in sample.tensors
    ]
    return found


@pytest.mark.requirement("R82", "R132")
async def test_ten_turns_have_the_ids_logprobs_and_experts_of_one_forward_pass(
    start: Any, tokenizer_dir: Path, tmp_path: Path
) -> None:
    """Each call asks for the rows that earlier ones lack, and the sample has one for each token but the last."""
    files = TokenizerFiles.from_directory(tokenizer_dir)
    async with numpy_engine(tmp_path, files, "qwen3_moe") as (address, model):
        service = await start(inference_address=address)
        # A random model seldom ends its turn: half of the tokens do.
        stops = [token for token in range(model[0]["vocab_size"]) if token % 2]
        override = chat_pb2.Sampling(token_tensors=["routed_experts"], stop_token_ids=stops, max_tokens=64, seed=3)
        rollout = await service.open(mode=PROXY, source=DEFAULT_INFERENCE, sampling_override=override)
        client, turns = rollout.client(), [*ASK]
        for _ in range(TURNS):
            message = (await client.chat.completions.create(model="m", messages=turns)).choices[0].message
            turns += [{"role": "assistant", "content": message.content or ""}, {"role": "user", "content": "go on"}]
        await service.close(rollout.rollout_id)
        captured = await service.capture(rollout.rollout_id)
        (sample,) = captured.samples
        assert len(captured.calls) == len(sample.turns) == TURNS and captured.grade == trajectory_pb2.GRADE_EXACT
        assert not any(tensor.data for call in captured.calls for tensor in call.completion.tensors)
        for before, after in zip(captured.calls, captured.calls[1:], strict=False):
            assert after.prompt_shared_count == before.prompt_count + before.completion.span.count
            assert [one.start for one in after.completion.tensors] == [after.prompt_shared_count - 1]
        (tensor,) = await tensors_of(service, sample, captured.calls)
        ids, mask = np.frombuffer(sample.input_ids, "<i4"), np.frombuffer(sample.loss_mask, np.bool_)
        logprobs, experts = one_pass(model[0], model[1], ids)
        assert mask.sum() == sum(call.completion.span.count for call in captured.calls)
        np.testing.assert_array_equal(np.frombuffer(sample.logprobs, "<f4")[mask], logprobs[mask[1:]])
        assert (tensor.start, tensor.dtype, tensor.shape) == (0, "uint8", (ids.size - 1, 2, 2))
        np.testing.assert_array_equal(np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape), experts)


@pytest.mark.requirement("R132", "R133")
async def test_a_policys_experts_are_those_of_its_own_pass_though_a_teacher_took_over(
    start: Any, tokenizer_dir: Path, tmp_path: Path
) -> None:
    """The teacher, which has none, answers the calls 1 and 3: the student's next call has the rows of its tokens too.

    Those of the last turn nobody has.
    """
    files = TokenizerFiles.from_directory(tokenizer_dir)
    async with (
        numpy_engine(tmp_path / "student", files, "qwen3_moe") as (address, model),
        numpy_engine(tmp_path / "teacher", files, "qwen3") as (teacher, _),
    ):
        service = await start(inference_address=address, inference={"teacher": {"address": teacher}})
        stops = [token for token in range(model[0]["vocab_size"]) if token % 2]
        override = chat_pb2.Sampling(token_tensors=["routed_experts"], stop_token_ids=stops, max_tokens=64, seed=3)
        source = interception_pb2.ModelSource(inference=interception_pb2.ModelSource.Inference(name="teacher"))
        models = [
            interception_pb2.RolloutModel(
                policy_id="teacher",
                source=source,
                trained=False,
                calls=interception_pb2.CallRule(from_index=index, until_index=index + 1),
            )
            for index in (1, 3)
        ]
        models.append(interception_pb2.RolloutModel(policy_id="student"))
        rollout = await service.open(mode=PROXY, source=DEFAULT_INFERENCE, sampling_override=override, models=models)
        client, turns = rollout.client(), [*ASK]
        for _ in range(4):
            message = await ask(client, turns)
            turns += [{"role": "assistant", "content": message.content or ""}, {"role": "user", "content": "go on"}]
        await service.close(rollout.rollout_id)
        captured = await service.capture(rollout.rollout_id)
        (sample,), calls = captured.samples, captured.calls
        assert [call.policy_id for call in calls] == ["student", "teacher"] * 2
        assert not calls[1].sampling_requested.token_tensors and not calls[1].completion.tensors
        (found,) = calls[2].completion.tensors
        assert found.start == calls[1].prompt_shared_count - 1, "it asks for what the student lacks"
        (joint,) = await tensors_of(service, sample, calls)
        _, experts = one_pass(model[0], model[1], np.frombuffer(sample.input_ids, "<i4"))
        known = calls[3].prompt_shared_count - 1
        assert experts is not None and (joint.start, joint.shape[0]) == (0, known)
        np.testing.assert_array_equal(np.frombuffer(joint.data, np.uint8).reshape(joint.shape), experts[:known])
        exported = list(tables.turns(captured)), list(tables.sequences(captured))
        assert verify(*exported).problems == []


def tensor(start: int, rows: NDArray[Any], **changes: Any) -> completion_pb2.TokenTensor:
    made = completion_pb2.TokenTensor(
        name="routed_experts", dtype=rows.dtype.name, start=start, shape=rows.shape, data=rows.tobytes()
    )
    made.MergeFrom(completion_pb2.TokenTensor(**changes))
    return made


def answer(call: pb.ModelCall, *tensors: completion_pb2.TokenTensor, ids: tuple[int, ...] = (5, 6, 2)) -> pb.CallResult:
    completion = tokens_completion(ids)
    completion.tensors.extend(tensors)
    return pb.CallResult(call_id=call.call_id, lease_id=call.lease_id, completion=completion)


def rows(count: int, first: int = 0, dtype: str = "uint8") -> NDArray[Any]:
    """Rows of 2 layers with 1 expert, each another one."""
    return np.arange(first, first + 2 * count).reshape(count, 2, 1).astype(dtype)


async def ask(client: openai.AsyncOpenAI, turns: Any = ASK) -> Any:
    return (await client.chat.completions.create(model="m", messages=turns)).choices[0].message


@pytest.mark.requirement("R34", "R132")
async def test_a_trainers_experts_outlive_a_restart_and_identify_its_answer(serving: Any) -> None:
    """In pieces or whole; another routing is another answer, and the chain covers it."""
    async with serving() as service:
        rollout, trainer = await service.open("r"), await service.trainer()
        asked = asyncio.create_task(ask(rollout.client()))
        call = await trainer.call()
        count = len(call.prompt_token_ids) // 4 + 2
        whole, half = rows(count), count // 2
        pieces = tensor(half, whole[half:]), tensor(0, whole[:half])
        assert (await trainer.deliver(answer(call, *pieces))).accepted_call_ids
        assert (await trainer.deliver(answer(call, tensor(0, whole)))).accepted_call_ids, "the same answer"
        other = (await trainer.deliver(answer(call, tensor(0, rows(count, 1))))).rejected
        assert other[0].reason == pb.ResultRejected.REASON_ALREADY_DELIVERED
        await asked
    async with serving() as service:
        kept = (await service.intercept.GetCall(pb.GetCallRequest(call_id=call.call_id))).call.completion.tensors
        assert [(one.start, list(one.shape), one.data) for one in kept] == [(0, [count, 2, 1], whole.tobytes())]
        captured = await service.capture("r")
        (described,) = captured.samples[0].tensors
        assert (described.data, described.sha256) == (b"", hashlib.sha256(whole.tobytes()).digest())
        assert captured.calls[0].chain_sha256 and captured.calls[0].completion.tensors[0] == described


@pytest.mark.requirement("R132")
async def test_a_later_call_fills_what_an_earlier_one_left_out(service: Any) -> None:
    """The row of the parent's last token comes with the child; types are widened; where nobody has one, is a gap."""
    rollout, trainer = await service.open(), await service.trainer()
    client, turns = rollout.client(), [*ASK]
    asked = asyncio.create_task(ask(client, turns))
    first = await trainer.call()
    known = len(first.prompt_token_ids) // 4
    text = (await trainer.deliver(answer(first, tensor(2, rows(known, 100))))).accepted_call_ids
    assert text
    turns += [{"role": "assistant", "content": (await asked).content}, {"role": "user", "content": "go on"}]
    asked = asyncio.create_task(ask(client, turns))
    second = await trainer.call()
    total = len(second.prompt_token_ids) // 4 + 3
    assert second.shared_prefix_count == known + 3
    # It has rows from the second token on, of which those that the first call has are not used.
    await trainer.deliver(answer(second, tensor(1, rows(total - 2, 300, "uint16"))))
    await asked
    captured = await service.capture(rollout.rollout_id)
    (sample,) = captured.samples
    (found,) = await tensors_of(service, sample, captured.calls)
    expected = rows(total - 2, 300, "uint16")
    expected[1 : 1 + known] = rows(known, 100)
    assert (found.start, found.dtype) == (1, "uint16")
    np.testing.assert_array_equal(np.frombuffer(found.data, "<u2").reshape(found.shape), expected)


@pytest.mark.requirement("R132", "R133")
async def test_each_policys_sample_has_the_rows_of_its_own_trainer(service: Service) -> None:
    """Two policies of other shapes are trained on one line: neither has a row of the other."""
    models = [
        interception_pb2.RolloutModel(policy_id="proposer", calls=interception_pb2.CallRule(until_index=1)),
        interception_pb2.RolloutModel(policy_id="solver"),
    ]
    rollout, trainer = await service.open(models=models), await service.trainer()
    client, turns, given = rollout.client(), [*ASK], list[NDArray[Any]]()
    for layers in (1, 3):
        asked = asyncio.create_task(ask(client, turns))
        call = await trainer.call()
        count = len(call.prompt_token_ids) // 4 + 2
        given.append(np.full((count, layers, 2), layers, np.uint8))
        assert (await trainer.deliver(answer(call, tensor(0, given[-1])))).accepted_call_ids
        turns += [{"role": "assistant", "content": (await asked).content}, {"role": "user", "content": "go on"}]
    captured = await service.capture(rollout.rollout_id)
    for sample, policy, own in zip(captured.samples, ("proposer", "solver"), given, strict=True):
        (found,) = await tensors_of(service, sample, captured.calls)
        assert (sample.policy_id, found.shape, found.data) == (policy, own.shape, own.tobytes())


GOOD = rows(3)
WRONG: Mapping[str, tuple[completion_pb2.TokenTensor, ...]] = {
    "tensors[0].name": (tensor(0, GOOD, name="sampling_mask"),),
    "tensors[0].start": (tensor(10**6, GOOD),),
    "tensors[0].data": (tensor(0, -rows(3, 1, "int8")),),
    "tensors[1].start": (tensor(0, GOOD), tensor(2, GOOD)),
}


@pytest.mark.requirement("R29", "R132")
async def test_wrong_tensors_are_invalid_by_their_field(service: Any) -> None:
    """The call stays with the trainer, which may answer again."""
    rollout, trainer = await service.open(), await service.trainer()
    asked = asyncio.create_task(ask(rollout.client()))
    call = await trainer.call()
    for count, (field, tensors) in enumerate(WRONG.items(), 1):
        await trainer.send(results=pb.Results(results=[answer(call, *tensors)]))
        (rejected,) = (await trainer.frame("acknowledged", count)).rejected
        assert rejected.reason == pb.ResultRejected.REASON_INVALID
        assert [text.split(":")[0].removeprefix("completion.") for text in rejected.violations] == [field]
    assert (await trainer.deliver(answer(call, tensor(0, GOOD)))).accepted_call_ids
    await asked


@pytest.mark.requirement("R63", "R132")
async def test_an_engine_without_experts_refuses_them_by_name(start: Any, tokenizer_dir: Path, tmp_path: Path) -> None:
    """A dense model has none: the call fails. Without the request it is answered, and nothing is kept."""
    async with numpy_engine(tmp_path, TokenizerFiles.from_directory(tokenizer_dir), "qwen3") as (address, _):
        service = await start(inference_address=address)
        rollout = await service.open(mode=PROXY, source=DEFAULT_INFERENCE, sampling_override=EXPERTS)
        with pytest.raises(openai.APIStatusError):
            await ask(rollout.client())
        (call,) = (await service.capture(rollout.rollout_id)).calls
        assert (list(call.sampling_requested.token_tensors), call.end_reason) == (["routed_experts"], "FIELD_INVALID")
        plain = await service.open(
            mode=PROXY, source=DEFAULT_INFERENCE, sampling_override=chat_pb2.Sampling(max_tokens=3)
        )
        await ask(plain.client())
        captured = await service.capture(plain.rollout_id)
        assert not captured.calls[0].completion.tensors and not captured.samples[0].tensors


@pytest.mark.requirement("R33", "R132")
async def test_a_call_notes_the_experts_that_its_answer_lacks(service: Any) -> None:
    """The trainer need not have them; the record says so."""
    rollout, trainer = await service.open(sampling_override=EXPERTS), await service.trainer()
    asked = asyncio.create_task(ask(rollout.client()))
    call = await trainer.call()
    assert list(call.sampling.token_tensors) == ["routed_experts"]
    await trainer.deliver(answer(call))
    await asked
    kept = (await service.capture(rollout.rollout_id)).calls[0]
    assert list(kept.normalisations)[1:] == ["token_tensors asks for routed_experts; the answer has none"]
