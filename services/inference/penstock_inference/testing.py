"""A small random model of any family the numpy engine computes, written on the spot: for tests and check-ups."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from penstock_inference.engines.numpy.model import ModelConfig

FAMILIES = ("llama", "qwen2", "qwen3")


def random_config(family: str = "qwen3", **changes: Any) -> dict[str, Any]:
    """The contents of a small model's config.json: grouped queries, sizes that fill no tile, tied but for Llama."""
    return {
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
    } | changes


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


def write_model(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, NDArray[np.float32]]) -> Path:
    """A model directory without a tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    (directory / "model.safetensors").write_bytes(save(dict(tensors)))
    return directory
