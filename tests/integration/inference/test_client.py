"""The Python client against the real service: what a trainer does with an engine."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.client import EngineStats, PauseMode, Score, ToScore, connect
from penstock.client.errors import FailedPrecondition, InvalidArgument, Unsupported
from penstock.client.types.chat import Completion, FinishReason, Sampling
from penstock.values import token_tensors
from penstock_inference.testing import random_config, random_tensors, write_model

Open = Callable[..., Any]

PROMPT = np.arange(3, 23)


def ids(completion: Completion) -> tuple[int, ...]:
    assert completion.token_ids is not None
    return tuple(completion.token_ids.tolist())


@pytest.mark.requirement("R82", "R87")
async def test_a_trainer_samples_pushes_and_samples_again(served: Open, model_dir: Path) -> None:
    """Tokens, logprobs and versions arrive as the engine has them."""
    sampling = Sampling(max_tokens=12, temperature=0.8, seed=3)
    new = random_tensors(random_config("qwen3", max_position_embeddings=4096, eos_token_id=None), seed=4)
    async with served(model_dir) as stub, connect({"inference": stub.address}) as ps:
        info = await ps.inference.info()
        before = await ps.inference.generate(PROMPT, sampling)
        whole = np.concatenate([PROMPT, ids(before)])
        scored = await ps.inference.score(whole, PROMPT.size, temperature=0.8)
        update = await ps.inference.update_weights(1, new)
        assert (await ps.inference.update_weights(1, new)).policy_version == 1
        after = await ps.inference.generate(PROMPT, sampling, min_version=1)
        with pytest.raises(FailedPrecondition) as caught:
            await ps.inference.generate(PROMPT, sampling, exact_version=0)
        group = await asyncio.gather(*(ps.inference.generate(PROMPT, sampling, seed=seed) for seed in range(8)))
    assert info.engine == "numpy" and info.policy_version == 0
    np.testing.assert_array_equal(scored, before.logprobs)
    assert update.policy_version == 1 and caught.value.reason == "POLICY_VERSION_UNAVAILABLE"
    assert ids(after) != ids(before)
    assert len({ids(one) for one in group}) > 1


@pytest.mark.requirement("R63", "R132")
async def test_routed_experts_come_whole_or_in_pieces(
    served: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the engine has them; a model without experts refuses them by name, before anything starts."""
    config = random_config("qwen3_moe")
    model = write_model(tmp_path / "moe", config, random_tensors(config))
    sampling = Sampling(max_tokens=6, seed=3, token_tensors=("routed_experts",))
    async with served(model) as stub, connect({"inference": stub.address}) as ps:
        assert (await ps.inference.info()).token_tensors == ("routed_experts",)
        whole = await ps.inference.generate(PROMPT, sampling)
        with pytest.raises(InvalidArgument) as too_far:
            await ps.inference.generate(PROMPT, sampling, tensor_start=PROMPT.size + 1)
        monkeypatch.setattr(token_tensors, "PIECE_BYTES", 30)
        pieces = await ps.inference.generate(PROMPT, sampling, tensor_start=4)
        *_, streamed = [part async for part in ps.inference.stream(PROMPT, sampling)]
    (experts,) = whole.tensors
    assert experts.rows is not None and experts.shape == (PROMPT.size + len(whole) - 1, 2, 2)
    (cut,), (same,) = pieces.tensors, streamed.tensors
    assert cut.rows is not None and cut.start == 4 and cut.rows.tolist() == experts.rows[4:].tolist()
    assert same.rows is not None and same.rows.tolist() == experts.rows.tolist()
    dense = random_config("qwen3")
    async with (
        served(write_model(tmp_path / "dense", dense, random_tensors(dense))) as stub,
        connect({"inference": stub.address}) as ps,
    ):
        with pytest.raises(InvalidArgument) as refused:
            await ps.inference.generate(PROMPT, sampling)
    fields = [[violation.field for violation in error.value.violations] for error in (too_far, refused)]
    assert fields == [["tensor_start"], ["sampling.token_tensors"]]


@pytest.mark.requirement("R132")
async def test_a_teacher_scores_one_sequence_or_many(served: Open, model_dir: Path) -> None:
    """With the likeliest tokens; a batch ends with its first failure, or gives each its own."""
    good = [ToScore(np.arange(3, 12 + n), n + 1, top_logprobs=n) for n in range(3)]
    bad = ToScore(PROMPT, 1, exact_version=7)
    async with served(model_dir) as stub, connect({"inference": stub.address}) as ps:
        alone = [await ps.inference.score_top(one.token_ids, one.start, one.top_logprobs) for one in good]
        plain = await ps.inference.score(PROMPT, 5)
        batch = await ps.inference.score_batch([*good, ToScore(PROMPT, 5)])
        each = {index: answer async for index, answer in ps.inference.score_each([bad, good[2]])}
        with pytest.raises(FailedPrecondition) as caught:
            await ps.inference.score_batch([good[0], bad])
    for one, other in zip(alone, batch, strict=False):
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
    assert batch[0].top_token_ids is None and len(batch[0].logprobs) == 8
    assert batch[2].top_token_ids is not None and batch[2].top_token_ids.shape == (8, 2)
    assert batch[2].top_logprobs is not None and (np.diff(batch[2].top_logprobs) <= 0).all()
    np.testing.assert_array_equal(batch[3].logprobs, plain)
    assert isinstance(each[0], FailedPrecondition) and isinstance(each[1], Score)
    assert each[0].reason == caught.value.reason == "POLICY_VERSION_UNAVAILABLE"


@pytest.mark.requirement("R26", "R63", "R87")
async def test_a_trainer_pauses_watches_and_pushes_by_path(served: Open, model_dir: Path, tmp_path: Path) -> None:
    """Every pause mode, the load while it holds, weights from the operator's directory."""
    directory = tmp_path / "weights"
    directory.mkdir()
    tensors = random_tensors(random_config("qwen3", max_position_embeddings=4096, eos_token_id=None), seed=4)
    save_file(tensors, directory / "step-1.safetensors")
    sampling = Sampling(max_tokens=2000, temperature=0.8, seed=3)
    async with served(model_dir, weights_dir=directory) as stub, connect({"inference": stub.address}) as ps:

        async def until(reached: Callable[[EngineStats], bool]) -> EngineStats:
            async for stats in ps.inference.watch_stats(0.1):
                if reached(stats):
                    return stats
            raise AssertionError("the statistics ended")

        for mode, reason in ((PauseMode.KEEP, FinishReason.LENGTH), (PauseMode.ABORT, FinishReason.ABORT)):
            call = asyncio.ensure_future(ps.inference.generate(PROMPT, sampling))
            await until(lambda stats: stats.running == 1)
            assert await ps.inference.pause(mode) == (mode is PauseMode.KEEP)
            assert (await ps.inference.info()).paused
            late = asyncio.ensure_future(ps.inference.generate(PROMPT, Sampling(max_tokens=3)))
            await until(lambda stats: stats.waiting == 1)
            await ps.inference.resume()
            assert (await call).finish_reason is reason and len(await late) == 3
        update = await ps.inference.update_weights_from(1, "step-1.safetensors", mode=PauseMode.WAIT)
        by_path = await ps.inference.generate(PROMPT, Sampling(max_tokens=12, seed=3), exact_version=1)
        await ps.inference.update_weights(2, tensors)
        by_chunks = await ps.inference.generate(PROMPT, Sampling(max_tokens=12, seed=3), exact_version=2)
        with pytest.raises(InvalidArgument) as refused:
            await ps.inference.update_weights_from(3, "../elsewhere")
    assert update.policy_version == 1 and ids(by_path) == ids(by_chunks)
    assert refused.value.reason == "PATH_REFUSED"


@pytest.mark.requirement("R26", "R63")
async def test_unsupported_features_of_the_engine_are_named(served: Open, model_dir: Path) -> None:
    """CAPABILITY_MISSING before anything starts."""
    form = Sampling(max_tokens=3, response_format_json='{"type": "json_object"}')
    async with served(model_dir) as stub, connect({"inference": stub.address}) as ps:
        calls: list[tuple[Awaitable[Any], str]] = [
            (ps.inference.generate(PROMPT, form), "structured_output"),
            (ps.inference.load_adapter("a", 1, {"w": np.zeros(3, np.float32)}, {"r": 4}), "adapters"),
            (ps.inference.init_transfer("nccl"), "external_transfer"),
            (ps.inference.start_transfer(1), "external_transfer"),
            (ps.inference.sleep(), "sleep"),
        ]
        for call, capability in calls:
            with pytest.raises(Unsupported) as caught:
                await call
            assert (caught.value.reason, caught.value.metadata["capability"]) == ("CAPABILITY_MISSING", capability)
        info = await ps.inference.info()
    assert not info.transfer_backends and "response_format_json" not in info.sampling_fields
