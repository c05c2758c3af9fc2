"""Models that every engine here loads: random Qwen3 that never stop, written on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock_codec import tiny_tokenizer
from penstock_inference.testing import random_config, random_tensors, write_model

VOCABULARY: Final = 512
CONTEXT: Final = 512
PROMPT_TOKENS: Final = 100
Tensors = dict[str, NDArray[np.float32]]

_SMALL: Final[dict[str, Any]] = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
_LARGE: Final[dict[str, Any]] = {
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


def small(directory: Path) -> Path:
    """0.9 M parameters: what an engine does beside computing shows."""
    return _written(directory, _SMALL)[0]


def large(directory: Path) -> tuple[Path, Tensors]:
    """83 M parameters, 333 MB, and its tensors: for what depends on their bytes."""
    return _written(directory, _LARGE)


def prompts(count: int, seed: int) -> list[NDArray[np.int32]]:
    """Prompts that have nothing in common, so that no cache helps anybody."""
    random = np.random.default_rng(seed)
    return list(random.integers(20, 400, (count, PROMPT_TOKENS), dtype=np.int32))


def _written(directory: Path, sizes: dict[str, Any]) -> tuple[Path, Tensors]:
    files = tiny_tokenizer.build(["some text to read"] * 3)
    config = random_config(
        "qwen3",
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, **sizes},
        architectures=["Qwen3ForCausalLM"],
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        torch_dtype="float32",
        # A completion is as long as it is asked for, in every engine.
        eos_token_id=None,
        bos_token_id=None,
    )
    tensors = random_tensors(config)
    write_model(directory, config, tensors)
    files.write(directory)
    (directory / "generation_config.json").unlink()
    return directory, tensors
