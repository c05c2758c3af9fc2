"""A model that uses its tool now and then, and the services that run its rollouts, for the real TRL.

Run by `make test-trl`, which has an environment of its own.

The model is a table of what follows what: its layers add nothing to the residual stream, and its head knows a few
tokens' successors. Where it has to answer, it calls its tool or falls silent, with about the same probability.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from penstock.local.stack import LocalStack
from penstock_codec import tiny_tokenizer
from penstock_codec.chat import Message
from penstock_codec.codec import Codec
from penstock_codec.tokenizer_files import TokenizerFiles
from penstock_inference.testing import random_config, random_tensors, write_model

VOCAB, WIDTH = 512, 128
CERTAINTY = 24.0
"""The logit of the tokens that come next; the others' are near 0."""
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "trl" / "train.py"
CALL = '{"name": "bash", "arguments": {"command": "echo yes >> said.txt"}}'
STOP = tiny_tokenizer.SPECIAL_TOKENS.index(tiny_tokenizer.TURN_END)


def tokenizer_files() -> TokenizerFiles:
    """ChatML, with the arguments of the call as one token, so that each token has its successors."""
    files = tiny_tokenizer.build(["some text to read"] * 3)
    tokenizer = Tokenizer.from_str(files.tokenizer_json.decode())
    tokenizer.add_tokens([CALL])
    return TokenizerFiles(
        tokenizer.to_str().encode(), files.chat_template, files.stop_token_ids, dict(files.special_tokens)
    )


def undecided_policy(config: dict[str, Any], codec: Codec) -> dict[str, np.ndarray]:
    """Weights of the model that calls its tool in about half of its answers."""
    tensors = random_tensors(config)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name][:] = 0
        elif name.endswith("norm.weight"):
            tensors[name][:] = 1
    # Rows of a Hadamard matrix are orthogonal: a token says nothing about another's successors. Those of a few tokens
    # are all that is needed; the others share what is left.
    basis = np.ones((1, 1))
    while len(basis) < WIDTH:
        basis = np.block([[basis, basis], [basis, -basis]])
    prompt_end = int(codec.render([Message.user("hi")], [])[-1])
    opening, call, closing = codec.encode(f"<tool_call>{CALL}</tool_call>").tolist()
    embeddings = basis[16 + np.arange(VOCAB) % (WIDTH - 16)]
    head = np.zeros((VOCAB, WIDTH))
    successors = [(prompt_end, opening), (prompt_end, STOP), (opening, call), (call, closing), (closing, STOP)]
    for place, (token, pairs) in enumerate(itertools.groupby(successors, key=lambda pair: pair[0])):
        embeddings[token] = basis[place]
        for _, following in pairs:
            head[following] += CERTAINTY / WIDTH * basis[place]
    changed = {"model.embed_tokens.weight": embeddings, "lm_head.weight": head}
    return tensors | {name: array.astype(np.float32) for name, array in changed.items()}


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, for the engine and for Transformers."""
    folder = tmp_path_factory.mktemp("model")
    files = tokenizer_files()
    config = random_config(
        "qwen3",
        architectures=["Qwen3ForCausalLM"],
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=128,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=STOP,
    )
    write_model(folder, config, undecided_policy(config, Codec.load(files)))
    files.write(folder)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalStack]:
    """All four services, with the engine that needs nothing but numpy."""
    async with LocalStack(model_dir=model_dir, state_dir=tmp_path_factory.mktemp("state")) as made:
        yield made


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The program of examples/trl, as a module."""
    spec = importlib.util.spec_from_file_location("examples_trl_train", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
