"""Small random models and a naive reference forward pass in float64, written without a look at the engine's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

FAMILIES = ("llama", "qwen2", "qwen3")


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """The contents of a small model's config.json: grouped queries, odd sizes, tied embeddings but for Llama."""
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


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, NDArray[np.float32]]:
    """Weights large enough that the distribution over tokens is far from uniform."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes.items():
        if name.endswith("norm.weight"):
            tensors[name] = (1 + 0.1 * random.standard_normal(shape)).astype(np.float32)
        else:
            scale = 1.0 if "embed" in name else 0.1 if name.endswith("bias") else 1.5 / shape[-1] ** 0.5
            tensors[name] = (scale * random.standard_normal(shape)).astype(np.float32)
    return tensors


def write_model(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, NDArray[np.float32]]) -> Path:
    """A model directory without a tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(save(dict(tensors)))
    return directory


def reference_logits(
    config: Mapping[str, Any], tensors: Mapping[str, NDArray[np.float32]], ids: NDArray[np.int32]
) -> NDArray[np.float64]:
    """Logits (tokens, vocab) of one sequence, by the papers' formulas, in float64 and without any cache."""
    t = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    length = len(ids)

    def norm(x: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        scaled: NDArray[np.float64] = x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * t[name]
        return scaled

    def linear(x: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        return x @ t[name + ".weight"].T + t.get(name + ".bias", 0.0)

    def rotate(x: NDArray[np.float64]) -> NDArray[np.float64]:
        # A pair (i, i + dim / 2) is a complex number turned by position * theta ** (-2 i / dim).
        pairs = x[..., : dim // 2] + 1j * x[..., dim // 2 :]
        turn = np.arange(length)[:, None] * config["rope_theta"] ** (-2 * np.arange(dim // 2) / dim)
        turned = pairs * np.exp(1j * turn)[:, None, :]
        return np.concatenate([turned.real, turned.imag], -1)

    x = t["model.embed_tokens.weight"][ids]
    for n in range(config["num_hidden_layers"]):
        p = f"model.layers.{n}."
        h = norm(x, p + "input_layernorm.weight")
        q = linear(h, p + "self_attn.q_proj").reshape(length, heads, dim)
        k = linear(h, p + "self_attn.k_proj").reshape(length, kv_heads, dim)
        v = linear(h, p + "self_attn.v_proj").reshape(length, kv_heads, dim)
        if p + "self_attn.q_norm.weight" in t:
            q, k = norm(q, p + "self_attn.q_norm.weight"), norm(k, p + "self_attn.k_norm.weight")
        q, k = rotate(q), rotate(k)
        out = np.zeros((length, heads, dim))
        for head in range(heads):
            kv = head // (heads // kv_heads)
            for i in range(length):
                scores = q[i, head] @ k[: i + 1, kv].T / np.sqrt(dim)
                share = np.exp(scores - scores.max())
                out[i, head] = share / share.sum() @ v[: i + 1, kv]
        x = x + linear(out.reshape(length, -1), p + "self_attn.o_proj")
        h = norm(x, p + "post_attention_layernorm.weight")
        gate = linear(h, p + "mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, p + "mlp.up_proj"), p + "mlp.down_proj")
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return norm(x, "model.norm.weight") @ t[head].T
