"""The service inside a test, and small random models of every family that the numpy engine computes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from penstock_chassis.auth import Role, Token
from penstock_chassis.server import Service
from penstock_chassis.testing import serve
from penstock_inference.app import build
from penstock_inference.engines.numpy.decoder import Chunk, Decoder, KVCache
from penstock_inference.engines.numpy.engine import NumpyEngine as NumpyEngine
from penstock_inference.engines.numpy.model import ModelConfig, Weights
from penstock_inference.engines.numpy.sampling import Distribution
from penstock_inference.engines.scripted.engine import ScriptedEngine as ScriptedEngine
from penstock_inference.settings import InferenceSettings

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True, slots=True)
class OpenInference:
    """A running inference service."""

    address: str
    channel: grpc.aio.Channel
    """Carries the operator's token where there is one."""
    service: Service


@asynccontextmanager
async def open_inference(
    model_dir: Path,
    state_dir: Path,
    *,
    tokens: Mapping[Role, str] | None = None,
    more: Iterable[Token] = (),
    **settings: Any,
) -> AsyncIterator[OpenInference]:
    """Opens what the settings name and serves it on a free port, as the service's own process does.

    Args:
        model_dir: the model's directory, as of `write_model`; with the engine `none` or `scripted` its tokenizer alone.
        state_dir: where the service may write.
        tokens: the tokens of the roles; None treats every caller as operator.
        more: tokens of other namespaces.
        settings: further settings by name, such as ``engine="scripted"``.

    Raises:
        PenstockError: the engine or the model cannot be opened.
    """
    loaded = InferenceSettings(model_dir=model_dir, state_dir=state_dir, anonymous=True, **settings)
    async with (
        build(loaded) as service,
        serve(*service.registrations, roles=service.roles, tokens=tokens, more=more) as (address, channel),
    ):
        yield OpenInference(address, channel, service)


def random_config(family: str = "qwen3", **changes: Any) -> dict[str, Any]:
    """The config.json of a small model: grouped queries, sizes that do not fill a tile, tied except for Llama."""
    mixture: dict[str, Any] = {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    }
    return (
        {
            "model_type": family,
            "vocab_size": 101,
            "hidden_size": 48,
            "intermediate_size": 72,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 512,
            "tie_word_embeddings": family != "llama",
            "hidden_act": "silu",
            "eos_token_id": 2,
        }
        | (mixture if family == "qwen3_moe" else {})
        | changes
    )


def random_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Weights by published name, large enough that the distribution over tokens is far from uniform."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in ModelConfig.from_dict(config).tensor_shapes().items():
        if name.endswith("norm.weight"):
            tensors[name] = (1 + 0.1 * random.standard_normal(shape)).astype(np.float32)
        else:
            scale = 0.5 if "embed" in name else 0.1 if name.endswith("bias") else 1.5 / shape[-1] ** 0.5
            tensors[name] = (scale * random.standard_normal(shape)).astype(np.float32)
    return tensors


def one_pass(
    config: Mapping[str, Any], tensors: Mapping[str, NDArray[np.float32]], ids: NDArray[np.int32]
) -> tuple[NDArray[np.float32], NDArray[Any] | None]:
    """Returns a single forward pass of the numpy engine's decoder over n tokens, without its scheduler and its cache.

    Returns:
        The logprobs of all tokens but the first, float32, (n - 1,), at temperature 1; the experts of all but the last,
        (n - 1, layers, experts per token), None of a dense model.
    """
    parsed, none = ModelConfig.from_dict(config), np.empty(0, np.int64)
    weights, decoder, cache = Weights.build(parsed, tensors), Decoder(parsed, ids.size), KVCache(parsed, 1, ids.size)
    hidden = decoder.forward(weights, cache, np.empty(0, np.int32), none, none, [Chunk(0, 0, ids)])
    # As many lanes as the scheduler has, so that sums associate alike.
    wide = np.full((ids.size - 1, -(-parsed.vocab_size // 16) * 16), -np.inf)
    wide[:, : parsed.vocab_size] = decoder.logits(weights, hidden[:-1])
    logprobs = Distribution(wide).logprobs(ids[1:].astype(np.int64)).astype(np.float32)
    return logprobs, None if cache.routes is None else cache.routes[0, : ids.size - 1]


def write_model(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, NDArray[np.float32]]) -> Path:
    """Write a model directory without a tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    (directory / "model.safetensors").write_bytes(save(dict(tensors)))
    return directory
