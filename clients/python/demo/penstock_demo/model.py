"""The policy: a two-layer Qwen3-style decoder in JAX, its three losses, and its export as a Hugging Face directory.

Parameters are one flat dict under the names that a Hugging Face checkpoint uses, so exporting them is writing them
down, and pushing them to the inference service is sending the same dict. Shapes are padded to a handful of sizes:
XLA compiles each size once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save

from penstock_codec import TokenizerFiles

# Whatever else this machine has: the model is too small to be worth a transfer.
jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]

Params = dict[str, jax.Array]
MAX_ADVANTAGE = 5.0  # of a token, in nats


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of the decoder. The defaults are 0.13 M parameters."""

    vocab_size: int
    hidden: int = 64
    layers: int = 2
    heads: int = 2
    head_dim: int = 32
    ffn: int = 192
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    max_length: int = 1024

    def to_hf(self, eos_token_id: int) -> dict[str, object]:
        """The config.json that a Qwen3 loader expects."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "max_position_embeddings": self.max_length,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "torch_dtype": "float32",
            "eos_token_id": eos_token_id,
        }


class Batch(NamedTuple):
    """Padded sequences, arrays of shape [n, t]; column 0 of `mask` is 0 because nothing predicts the first token."""

    ids: jax.Array  # int32 token ids
    mask: jax.Array  # float32, 1 where the model chose the token
    old_logprobs: jax.Array  # float32, what the engine reported when it sampled; 0 where mask is 0
    advantages: jax.Array  # float32


class AdamState(NamedTuple):
    """Adam's two moments and its step count."""

    step: jax.Array
    mean: Params
    square: Params


def init(config: ModelConfig, seed: int) -> Params:
    """Random weights, float32, in the layout of a checkpoint (output rows first)."""
    rng = np.random.default_rng(seed)
    width = config.heads * config.head_dim

    def normal(rows: int, columns: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.normal(0.0, scale * columns**-0.5, (rows, columns)), jnp.float32)

    params = {"model.embed_tokens.weight": normal(config.vocab_size, config.hidden)}
    params["model.norm.weight"] = jnp.ones(config.hidden)
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        for name in ("q", "k", "v"):
            params[f"{prefix}self_attn.{name}_proj.weight"] = normal(width, config.hidden)
        params[f"{prefix}self_attn.o_proj.weight"] = normal(config.hidden, width, 0.5)
        params[f"{prefix}self_attn.q_norm.weight"] = jnp.ones(config.head_dim)
        params[f"{prefix}self_attn.k_norm.weight"] = jnp.ones(config.head_dim)
        params[f"{prefix}mlp.gate_proj.weight"] = normal(config.ffn, config.hidden)
        params[f"{prefix}mlp.up_proj.weight"] = normal(config.ffn, config.hidden)
        params[f"{prefix}mlp.down_proj.weight"] = normal(config.hidden, config.ffn, 0.5)
        params[f"{prefix}input_layernorm.weight"] = jnp.ones(config.hidden)
        params[f"{prefix}post_attention_layernorm.weight"] = jnp.ones(config.hidden)
    return params


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-second, first], axis=-1) * sin


def hidden_states(
    params: Params,
    config: ModelConfig,
    ids: jax.Array,
    positions: jax.Array | None = None,
    visible: jax.Array | None = None,
) -> jax.Array:
    """The decoder without its output layer: int32 ids [n, t] to float32 [n, t, hidden].

    `positions` [t], each below t, and `visible`, bool [t, t] by query and key, hold for all rows; None = a row is one
    sequence.
    """
    n, t = ids.shape
    inverse = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    angles = np.outer(np.arange(t), inverse)
    cos = jnp.asarray(np.tile(np.cos(angles), 2), jnp.float32)
    sin = jnp.asarray(np.tile(np.sin(angles), 2), jnp.float32)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    if visible is None:
        visible = jnp.asarray(np.tril(np.ones((t, t), bool)))
    x = params["model.embed_tokens.weight"][ids]
    for layer in range(config.layers):
        weights = {k.split(".", 3)[3]: v for k, v in params.items() if k.startswith(f"model.layers.{layer}.")}
        h = _rms_norm(x, weights["input_layernorm.weight"], config.norm_eps)

        def heads(name: str, h: jax.Array = h, weights: Params = weights) -> jax.Array:
            y = (h @ weights[f"self_attn.{name}_proj.weight"].T).reshape(n, t, config.heads, config.head_dim)
            if name != "v":
                y = _rms_norm(y, weights[f"self_attn.{name}_norm.weight"], config.norm_eps)
            return y.transpose(0, 2, 1, 3)

        q, k, v = _rotate(heads("q"), cos, sin), _rotate(heads("k"), cos, sin), heads("v")
        scores = jnp.where(visible, q @ k.transpose(0, 1, 3, 2) * config.head_dim**-0.5, -1e30)
        attended = (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(n, t, -1)
        x = x + attended @ weights["self_attn.o_proj.weight"].T
        h = _rms_norm(x, weights["post_attention_layernorm.weight"], config.norm_eps)
        gate = jax.nn.silu(h @ weights["mlp.gate_proj.weight"].T)
        x = x + (gate * (h @ weights["mlp.up_proj.weight"].T)) @ weights["mlp.down_proj.weight"].T
    return _rms_norm(x, params["model.norm.weight"], config.norm_eps)


def token_logprobs(params: Params, config: ModelConfig, ids: jax.Array) -> jax.Array:
    """log p(ids[t] | ids[<t]) at temperature 1, float32 [n, t]; column 0 is 0."""
    logits = hidden_states(params, config, ids[:, :-1]) @ params["model.embed_tokens.weight"].T
    chosen = jnp.take_along_axis(logits, ids[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(chosen - jax.nn.logsumexp(logits, axis=-1), ((0, 0), (1, 0)))


def supervised_loss(params: Params, config: ModelConfig, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Mean negative log-likelihood of the masked tokens, and 0."""
    nll = -(token_logprobs(params, config, batch.ids) * batch.mask).sum() / batch.mask.sum()
    return nll, jnp.zeros(())


def grpo_loss(params: Params, config: ModelConfig, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The clipped policy-gradient loss, averaged over tokens, with a clip range that is wider upwards (DAPO).

    Also answers the largest difference between our logprob of a sampled token and the engine's.
    """
    difference = (token_logprobs(params, config, batch.ids) - batch.old_logprobs) * batch.mask
    ratio = jnp.exp(jnp.clip(difference, -20.0, 20.0))
    objective = jnp.minimum(ratio * batch.advantages, jnp.clip(ratio, 0.8, 1.28) * batch.advantages)
    loss = -(objective * batch.mask).sum() / jnp.maximum(batch.mask.sum(), 1.0)
    return loss, jnp.abs(difference).max()


def reverse_kl_loss(params: Params, config: ModelConfig, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """An estimate of the KL divergence from a teacher, KL(policy || teacher), per token, with its policy gradient.

    An advantage is the teacher's logprob of a token minus the engine's. It is brought up to date by what the policy has
    moved since, and bounded: one token that the teacher would never say must not outweigh all others. A token counts as
    the policy would sample it now, at most e times. Also answers what `grpo_loss` does.
    """
    logprobs = token_logprobs(params, config, batch.ids)
    moved = jax.lax.stop_gradient((logprobs - batch.old_logprobs) * batch.mask)
    advantages = jnp.clip(batch.advantages - moved, -MAX_ADVANTAGE, MAX_ADVANTAGE)
    weights = jnp.exp(jnp.clip(moved, -20.0, 1.0)) * advantages * batch.mask
    # The value is the estimate; the gradient is of the logprobs alone, also where the weight is at its bound.
    objective = weights * (1.0 + logprobs - jax.lax.stop_gradient(logprobs))
    return -objective.sum() / jnp.maximum(batch.mask.sum(), 1.0), jnp.abs(moved).max()


def adam_init(params: Params) -> AdamState:
    """Zero moments."""
    zeros = {name: jnp.zeros_like(value) for name, value in params.items()}
    return AdamState(jnp.zeros((), jnp.int32), zeros, zeros)


def _adam(params: Params, state: AdamState, grads: Params, rate: jax.Array) -> tuple[Params, AdamState]:
    """One step with the global norm clipped to 1.

    eps is 1e-5, not 1e-8: near convergence the gradients are tiny, and a small eps blows them up to full steps.
    """
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in grads.values()))
    grads = {k: g / jnp.maximum(norm, 1.0) for k, g in grads.items()}
    step = state.step + 1
    mean = {k: 0.9 * state.mean[k] + 0.1 * g for k, g in grads.items()}
    square = {k: 0.95 * state.square[k] + 0.05 * g * g for k, g in grads.items()}
    mean_scale, square_scale = 1 - 0.9**step, 1 - 0.95**step
    new = {
        k: p - rate * (mean[k] / mean_scale) / (jnp.sqrt(square[k] / square_scale) + 1e-5) for k, p in params.items()
    }
    return new, AdamState(step, mean, square)


@partial(jax.jit, static_argnames=("config", "loss"))
def train(
    params: Params, state: AdamState, batches: Batch, rates: jax.Array, *, config: ModelConfig, loss: str
) -> tuple[Params, AdamState, tuple[jax.Array, jax.Array]]:
    """One Adam step per batch: arrays of shape [steps, n, t] and learning rates [steps].

    `loss` is "supervised", "grpo" or "reverse_kl"; also answers what that loss answered, for each step.
    """
    function = {"supervised": supervised_loss, "grpo": grpo_loss, "reverse_kl": reverse_kl_loss}[loss]

    def step(
        carry: tuple[Params, AdamState], inputs: tuple[Batch, jax.Array]
    ) -> tuple[tuple[Params, AdamState], tuple[jax.Array, jax.Array]]:
        params, state = carry
        batch, rate = inputs
        values, grads = jax.value_and_grad(function, has_aux=True)(params, config, batch)
        return _adam(params, state, grads, rate), values

    (params, state), values = jax.lax.scan(step, (params, state), (batches, rates))
    return params, state, values


def export(params: Params, config: ModelConfig, files: TokenizerFiles, directory: Path) -> None:
    """Write a model directory that the inference service, or any Hugging Face loader, reads."""
    files.write(directory)
    (directory / "config.json").write_text(json.dumps(config.to_hf(files.stop_token_ids[0]), indent=2) + "\n")
    tensors = {name: np.asarray(value) for name, value in params.items()}
    # Not save_file, whose files only their owner can read: a service may run as another user.
    (directory / "model.safetensors").write_bytes(save(tensors))


def use_compilation_cache(directory: Path) -> None:
    """Keep what XLA compiles: a second run starts seconds earlier."""
    jax.config.update("jax_compilation_cache_dir", str(directory))  # type: ignore[no-untyped-call]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)  # type: ignore[no-untyped-call]
