"""A tiny Qwen3 that calls a tool, other policies for it, and adapters: made on the spot, for vLLM on a CPU.

The model is a table of what follows what: its layers add nothing to the residual stream, and the output head knows for
a few tokens what comes next. So its greedy answer to any chat is one tool call, while it still runs through all of
vLLM's attention.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save
from tokenizers import Tokenizer

from penstock_codec import tiny_tokenizer
from penstock_codec.chat import Message, Role, TextPart
from penstock_codec.codec import Codec
from penstock_codec.tokenizer_files import TokenizerFiles
from penstock_inference.testing import random_config, random_tensors, write_model

CALL_JSON = '{"name": "bash", "arguments": {"command": "ls"}}'
VOCAB = 512
WIDTH = 128
CERTAINTY = 9.0
"""The logit of the token that comes next; the others' are near 0."""

CONTEXT = 1 << 15
ENDLESS = CONTEXT - 1024
"""Tokens that no machine samples while a test looks on: what waits for such a generation's end has to end it."""

CONFIG: dict[str, Any] = random_config(
    "qwen3",
    architectures=["Qwen3ForCausalLM"],
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=CONTEXT,
    tie_word_embeddings=False,
    torch_dtype="float32",
    eos_token_id=tiny_tokenizer.SPECIAL_TOKENS.index(tiny_tokenizer.TURN_END),
)
Tensors = dict[str, NDArray[np.float32]]


def tokenizer_files() -> TokenizerFiles:
    """ChatML, with the arguments of the call as one token, so that each token has one successor."""
    files = tiny_tokenizer.build(["some text to read"] * 3)
    tokenizer = Tokenizer.from_str(files.tokenizer_json.decode())
    tokenizer.add_tokens([CALL_JSON])
    return TokenizerFiles(
        tokenizer.to_str().encode(), files.chat_template, files.stop_token_ids, dict(files.special_tokens)
    )


def calling_policy(seed: int = 0) -> Tensors:
    """Weights of the model that calls its tool."""
    codec = Codec.load(tokenizer_files())
    tensors = random_tensors(CONFIG, seed)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name][:] = 0
        elif name.endswith("norm.weight"):
            tensors[name][:] = 1
    embeddings = np.random.default_rng(seed).standard_normal((VOCAB, WIDTH)).astype(np.float32)
    embeddings /= np.sqrt((embeddings**2).mean(axis=1, keepdims=True))
    head = 0.05 * np.random.default_rng(seed + 1).standard_normal((VOCAB, WIDTH)).astype(np.float32)
    prompt_end = int(codec.render([Message(Role.USER, (TextPart("hi"),))], [])[-1])
    call = codec.encode(f"<tool_call>{CALL_JSON}</tool_call>").tolist()
    assert len(call) == 3, call
    chain = [prompt_end, *call, CONFIG["eos_token_id"]]
    for now, following in itertools.pairwise(chain):
        head[following] += CERTAINTY / WIDTH * embeddings[now]
    return tensors | {"model.embed_tokens.weight": embeddings, "lm_head.weight": head}


def random_policy(seed: int) -> Tensors:
    """Weights that make no sense, with all layers at work."""
    return random_tensors(CONFIG, seed)


def write(directory: Path) -> Path:
    """The model directory."""
    write_model(directory, CONFIG, calling_policy())
    tokenizer_files().write(directory)
    return directory


def file(tensors: Tensors) -> bytes:
    """As safetensors."""
    return save(tensors)


RANK = 4
ADAPTER_CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": 2 * RANK,
    "target_modules": ["o_proj", "down_proj"],
    "bias": "none",
    "task_type": "CAUSAL_LM",
}
ADAPTER_CONFIG_JSON = json.dumps(ADAPTER_CONFIG)


def adapter(seed: int) -> Tensors:
    """A LoRA adapter that changes what the model says."""
    random = np.random.default_rng(seed)
    tensors: Tensors = {}
    for layer in range(CONFIG["num_hidden_layers"]):
        for module, inputs in (("self_attn.o_proj", 4 * 32), ("mlp.down_proj", CONFIG["intermediate_size"])):
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = (random.standard_normal((RANK, inputs)) / inputs**0.5).astype("f4")
            tensors[f"{name}.lora_B.weight"] = random.standard_normal((WIDTH, RANK)).astype("f4")
    return tensors


def merged(policy: Tensors, lora: Tensors) -> Tensors:
    """The policy with the adapter inside."""
    scale = ADAPTER_CONFIG["lora_alpha"] / RANK
    result = dict(policy)
    for name, down in lora.items():
        if name.endswith("lora_A.weight"):
            stem = name.removesuffix(".lora_A.weight")
            target = stem.removeprefix("base_model.model.") + ".weight"
            result[target] = result[target] + scale * lora[f"{stem}.lora_B.weight"] @ down
    return result
