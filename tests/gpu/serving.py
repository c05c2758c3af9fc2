"""The real service with the real vLLM, and what it must agree with: one forward pass of the numpy engine's decoder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from tests.support import vllm_models as models

from penstock.client import Completion, Penstock, Sampling, connect
from penstock_inference.testing import one_pass, open_inference, random_tensors, write_model

TOLERANCE: Final = 3e-2
"""Of a logprob. Kernels of GPUs may round float32 to 10 bits in products; another policy's logprobs differ by more."""
TOKENS: Final = 24

Config = Mapping[str, Any]


@asynccontextmanager
async def engine(
    folder: Path,
    config: Config = models.CONFIG,
    *,
    options: Mapping[str, str] | None = None,
    cache: int = 256 << 20,
    **settings: Any,
) -> AsyncIterator[Penstock]:
    """A service with vLLM on the policy with seed 0, and its client; `options` are the engine's, `cache` is bytes."""
    write_model(folder / "model", config, policy(0, config))
    models.tokenizer_files().write(folder / "model")
    opening = open_inference(
        folder / "model",
        folder / "state",
        engine="vllm",
        max_concurrency=16,
        kv_cache_bytes=cache,
        max_context_tokens=4096,
        engine_options={"dtype": "float32", "block_size": "32"} | dict(options or {}),
        **settings,
    )
    async with opening as opened, connect({"inference": opened.address}) as ps:
        yield ps


def policy(seed: int, config: Config = models.CONFIG) -> models.Tensors:
    """Weights with all layers at work."""
    return random_tensors(config, seed)


async def sample(
    ps: Penstock, prompt: np.ndarray, tensor_start: int = 0, adapter: str = "", **sampling: Any
) -> Completion:
    """A completion of TOKENS tokens."""
    asked = Sampling(temperature=1.0, max_tokens=TOKENS, min_tokens=TOKENS, **sampling)
    return await ps.inference.generate(prompt, asked, tensor_start=tensor_start, adapter=adapter)


async def assert_sampled_by(
    ps: Penstock, seed: int, version: int, config: Config = models.CONFIG, count: int = 12
) -> None:
    """Completions of different lengths at once: each logprob is that of the policy with this seed."""
    prompts = [np.arange(20 + number, 60 + 5 * number) for number in range(count)]
    for prompt, done in zip(prompts, await asyncio.gather(*(sample(ps, prompt) for prompt in prompts)), strict=True):
        assert done.token_ids is not None and done.logprobs is not None and done.token_ids.size == TOKENS
        whole = np.concatenate([prompt, done.token_ids]).astype(np.int32)
        expected, _ = one_pass(config, policy(seed, config), whole)
        assert np.abs(expected[prompt.size - 1 :] - done.logprobs).max() < TOLERANCE
        assert {span.policy_version for span in done.versions} == {version}
