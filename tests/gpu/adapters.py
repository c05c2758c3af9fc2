"""Adapters, whose kernels on a GPU take 16 bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.gpu import serving
from tests.support import vllm_models as models

PROMPT = np.arange(20, 60)
ROUNDED = 0.2
"""Of a logprob: bfloat16 has 8 bits, and vLLM samples and scores with batches of different shapes."""


@pytest.mark.requirement("R63", "R87")
async def test_adapters_are_sampled_and_scored_beside_the_base_weights(tmp_path: Path) -> None:
    """Each has a version and logprobs of its own: those of scoring what it sampled, and not those of the base."""
    options = {"dtype": "bfloat16", "enforce_eager": "true", "max_adapters": "2", "max_adapter_rank": "8"}
    async with serving.engine(tmp_path, options=options) as ps:
        for number, name in enumerate(("one", "two"), 1):
            await ps.inference.load_adapter(name, number, models.adapter(number), models.ADAPTER_CONFIG)
        for number, name in enumerate(("", "one", "two")):
            done = await serving.sample(ps, PROMPT, adapter=name)
            assert done.token_ids is not None and done.logprobs is not None
            assert {span.policy_version for span in done.versions} == {number}
            whole = np.concatenate([PROMPT, done.token_ids]).astype(np.int32)
            for other in ("", "one", "two"):
                scored = await ps.inference.score(whole, PROMPT.size, adapter=other)
                assert (np.abs(scored - done.logprobs).max() < ROUNDED) == (other == name), (name, other)
        for name in ("one", "two"):
            await ps.inference.unload_adapter(name)
        assert await ps.inference.adapters() == []
