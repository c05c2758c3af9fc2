"""Engines over small random models, opened in the test's own event loop."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock_inference.engines.base import EngineOptions
from penstock_inference.engines.numpy import ModelConfig, NumpyEngine, Weights
from penstock_inference.testing import random_config, random_tensors

OpenEngine = Callable[..., Awaitable[NumpyEngine]]


@pytest.fixture
async def open_engine() -> AsyncIterator[OpenEngine]:
    """Opens numpy engines over random weights: `open_engine(family, seed, config={...}, max_concurrency=...)`."""
    async with AsyncExitStack() as stack:

        async def open_(
            family: str = "qwen3", seed: int = 0, config: dict[str, Any] | None = None, **options: Any
        ) -> NumpyEngine:
            raw = random_config(family, **(config or {}))
            parsed = ModelConfig.from_dict(raw)
            defaults = EngineOptions(model_dir=Path(), model_name="test", max_context_tokens=512)
            engine = NumpyEngine(parsed, Weights.build(parsed, random_tensors(raw, seed)), replace(defaults, **options))
            engine.start()
            return await stack.enter_async_context(engine)

        yield open_
