"""The numpy engine's forward pass against the papers' formulas."""

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, Unsupported
from penstock_inference.engines.checkpoint import parse_safetensors
from penstock_inference.engines.numpy.decoder import Chunk, Decoder, KVCache
from penstock_inference.engines.numpy.model import ModelConfig, Weights
from penstock_inference.testing import FAMILIES, random_config, random_tensors, write_model

NONE = np.empty(0, np.int64)


def reference_logits(
    config: Mapping[str, Any], tensors: Mapping[str, NDArray[np.float32]], ids: NDArray[np.int32]
) -> NDArray[np.float64]:
    """Logits (tokens, vocab) of one sequence in float64, naively: no cache, no batch, one query at a time."""
    t = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    length = len(ids)

    def norm(x: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        scaled: NDArray[np.float64] = x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * t[name]
        return scaled

    def linear(x: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        product: NDArray[np.float64] = x @ t[name + ".weight"].T + t.get(name + ".bias", np.float64(0))
        return product

    def rotate(x: NDArray[np.float64]) -> NDArray[np.float64]:
        # A pair (i, i + dim / 2) is a complex number turned by position * theta ** (-2 i / dim).
        pairs = x[..., : dim // 2] + 1j * x[..., dim // 2 :]
        turn = np.arange(length)[:, None] * config["rope_theta"] ** (-2 * np.arange(dim // 2) / dim)
        turned = pairs * np.exp(1j * turn)[:, None, :]
        return np.concatenate([turned.real, turned.imag], -1)

    def dense(x: NDArray[np.float64], prefix: str) -> NDArray[np.float64]:
        gate = linear(x, prefix + "gate_proj")
        return linear(gate / (1 + np.exp(-gate)) * linear(x, prefix + "up_proj"), prefix + "down_proj")

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
        if p + "mlp.gate.weight" not in t:
            x = x + dense(h, p + "mlp.")
            continue
        scores = linear(h, p + "mlp.gate")
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        mixture = np.zeros_like(x)
        for i in range(length):
            best = sorted(range(config["num_experts"]), key=lambda e: -share[i, e])[: config["num_experts_per_tok"]]
            whole = share[i, best].sum() if config["norm_topk_prob"] else 1.0
            for e in best:
                mixture[i] += share[i, e] / whole * dense(h[i], f"{p}mlp.experts.{e}.")
        x = x + mixture
    head_name = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    logits: NDArray[np.float64] = norm(x, "model.norm.weight") @ t[head_name].T
    return logits


def build(raw: Mapping[str, Any]) -> tuple[ModelConfig, dict[str, NDArray[np.float32]], Weights]:
    config = ModelConfig.from_dict(raw)
    tensors = random_tensors(raw, seed=1)
    return config, tensors, Weights.build(config, tensors)


@pytest.mark.requirement("R82")
@pytest.mark.parametrize(
    "raw",
    [
        *(random_config(family) for family in FAMILIES),
        random_config("llama", attention_bias=True, num_key_value_heads=4),
        random_config("qwen3", num_key_value_heads=1, tie_word_embeddings=False, rope_theta=1e6),
        random_config("llama", rope_theta=1.0, rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
        random_config(
            "qwen3_moe", norm_topk_prob=False, num_hidden_layers=4, mlp_only_layers=[1], decoder_sparse_step=2
        ),
    ],
    ids=[*FAMILIES, "llama-bias", "qwen3-one-kv-head", "llama-rope-parameters", "moe-in-one-of-four-layers"],
)
def test_logits_equal_those_of_a_naive_float64_forward_pass(raw: dict[str, Any]) -> None:
    """Logprobs are those of the model, for every family."""
    config, tensors, weights = build(raw)
    ids = np.random.default_rng(2).integers(0, config.vocab_size, 150).astype(np.int32)
    decoder, cache = Decoder(config, 256), KVCache(config, 2, 256)
    hidden = decoder.forward(weights, cache, np.empty(0, np.int32), NONE, NONE, [Chunk(1, 0, ids)])
    reference = raw | {"rope_theta": raw.get("rope_parameters", raw)["rope_theta"]}
    assert np.abs(decoder.logits(weights, hidden) - reference_logits(reference, tensors, ids)).max() < 1e-4


@pytest.mark.requirement("R82")
@pytest.mark.parametrize("family", FAMILIES)
def test_token_has_equal_bits_decoded_in_a_batch_and_prefilled_alone(family: str) -> None:
    """How tokens are batched, chunked or cached does not show in any number."""
    config, _, weights = build(random_config(family))
    random = np.random.default_rng(3)
    decoder = Decoder(config, 256)
    lengths = [3, 64, 65, 130, 200]
    sequences = [random.integers(0, config.vocab_size, n).astype(np.int32) for n in lengths]
    alone = []
    for ids in sequences:
        cache = KVCache(config, 1, 256)
        alone.append(decoder.forward(weights, cache, np.empty(0, np.int32), NONE, NONE, [Chunk(0, 0, ids)])[-1])
    # The same tokens: prompts in two uneven chunks beside each other, the last token of each decoded in one batch.
    cache = KVCache(config, len(lengths), 256)
    slots = random.permutation(len(lengths))
    for cut in (0, 1):
        chunks = []
        for ids, slot in zip(sequences, slots, strict=True):
            middle = max(1, ids.size // 3)
            start, stop = (0, middle) if cut == 0 else (middle, ids.size - 1)
            if stop > start:
                chunks.append(Chunk(int(slot), start, ids[start:stop]))
        decoder.forward(weights, cache, np.empty(0, np.int32), NONE, NONE, chunks)
    last = np.array([ids[-1] for ids in sequences], np.int32)
    together = decoder.forward(weights, cache, last, np.array(lengths) - 1, slots, [])
    for single, batched in zip(alone, together, strict=True):
        np.testing.assert_array_equal(single, batched)


@pytest.mark.requirement("R82")
@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_weights_load_from_every_published_dtype(dtype: str, tmp_path: Any) -> None:
    """What is on disk is what is computed with."""
    raw = random_config("qwen2")
    _config, tensors, _ = build(raw)
    if dtype == "bfloat16":
        # Cut each float32 to its upper half, and write the file by hand: numpy has no bfloat16.
        header, body = {}, b""
        for name, tensor in tensors.items():
            half = (tensor.view(np.uint32) >> 16).astype("<u2")
            span = [len(body), len(body) + half.nbytes]
            header[name] = {"dtype": "BF16", "shape": list(half.shape), "data_offsets": span}
            body += half.tobytes()
            tensors[name] = (half.astype(np.uint32) << 16).view(np.float32)
        text = json.dumps(header).encode()
        data = struct.pack("<Q", len(text)) + text + body
    else:
        tensors = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
        data = save(tensors)
    directory = write_model(tmp_path, raw, {})
    (directory / "model.safetensors").write_bytes(data)
    loaded = Weights.from_directory(ModelConfig.from_directory(directory), directory)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(loaded.tensors[name], tensor.astype(np.float32))


@pytest.mark.requirement("R63")
def test_updating_some_tensors_keeps_the_others() -> None:
    """A partial update changes what it names and nothing else."""
    config, tensors, weights = build(random_config("qwen3"))
    name = "model.layers.1.self_attn.k_proj.weight"
    merged = weights.merged(config, {name: tensors[name] * 2})
    np.testing.assert_array_equal(merged.tensors[name], tensors[name] * 2)
    for other in tensors.keys() - {name}:
        np.testing.assert_array_equal(merged.tensors[other], weights.tensors[other])


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop("model.norm.weight"), "TENSOR_MISSING"),
        (lambda t: t.update({"model.extra.weight": np.zeros(3, np.float32)}), "TENSOR_UNKNOWN"),
        (lambda t: t.update({"model.norm.weight": np.zeros(3, np.float32)}), "TENSOR_SHAPE"),
        (lambda t: t.update({"model.norm.weight": np.full(48, np.nan, np.float32)}), "TENSOR_NOT_FINITE"),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_the_tensor_named(change: Any, reason: str) -> None:
    """A model never loads half."""
    config, tensors, _ = build(random_config())
    change(tensors)
    with pytest.raises((FailedPrecondition, InvalidArgument)) as caught:
        Weights.build(config, tensors)
    assert caught.value.reason == reason
    assert caught.value.violations[0].field.startswith("model.")


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral"},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
        {"use_sliding_window": True},
        {"hidden_act": "gelu"},
        {"mlp_bias": True},
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused_by_name(changes: dict[str, Any]) -> None:
    """Never a silent downgrade."""
    with pytest.raises(Unsupported) as caught:
        ModelConfig.from_dict(random_config("llama") | changes)
    assert caught.value.reason == "MODEL_UNSUPPORTED"


@pytest.mark.requirement("R63")
def test_a_large_model_is_refused_with_a_pointer_to_vllm() -> None:
    config = ModelConfig.from_dict(random_config(hidden_size=1024, intermediate_size=4096, num_hidden_layers=12))
    with pytest.raises(FailedPrecondition, match="vllm"):
        config.check_size()


@pytest.mark.requirement("R33")
@pytest.mark.parametrize("data", [b"", b"\x00" * 7, b"\xff" * 64, save({"a": np.zeros(3, np.int64)})])
def test_a_malformed_or_foreign_safetensors_file_is_refused(data: bytes) -> None:
    """Malformed input is a typed error."""
    with pytest.raises(InvalidArgument) as caught:
        parse_safetensors(data)
    assert caught.value.reason == "WEIGHTS_INVALID"
