"""The real service on a free port, over small random models."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.inference.v1 import inference_service_pb2_grpc as rpc
from penstock_chassis.channel import error_from_rpc
from penstock_inference.testing import open_inference, random_config, random_tensors, write_model

Open = Callable[..., Any]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A random Qwen3 without a tokenizer, and without a stop token: it goes on until it is told to end."""
    config = random_config("qwen3", max_position_embeddings=4096, eos_token_id=None)
    return write_model(tmp_path / "tiny", config, random_tensors(config))


@pytest.fixture
def served(tmp_path: Path) -> Open:
    """`async with served(model_dir, engine=..., tokens=...) as stub`; the settings are the service's own."""

    @asynccontextmanager
    async def open_(model_dir: Path, tokens: Any = None, **settings: Any) -> AsyncIterator[Any]:
        async with open_inference(model_dir, tmp_path / "state", tokens=tokens, **settings) as opened:
            stub = rpc.InferenceServiceStub(opened.channel)
            stub.address = opened.address  # type: ignore[attr-defined]
            yield stub

    return open_


@pytest.fixture
def failure() -> Callable[[grpc.aio.AioRpcError], Any]:
    """The typed error behind a failed call."""
    return error_from_rpc
