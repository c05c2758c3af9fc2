"""The Python client against the real service: what a trainer does with an engine."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.client import connect
from penstock.client.chat import Completion, Sampling
from penstock.client.errors import FailedPrecondition
from penstock_inference.testing import random_config, random_tensors

Open = Callable[..., Any]

PROMPT = np.arange(3, 23)


def ids(completion: Completion) -> tuple[int, ...]:
    assert completion.token_ids is not None
    return tuple(completion.token_ids.tolist())


async def test_a_trainer_samples_pushes_and_samples_again(served: Open, model_dir: Path) -> None:
    """R82, R87: tokens, logprobs and versions arrive as the engine has them."""
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
