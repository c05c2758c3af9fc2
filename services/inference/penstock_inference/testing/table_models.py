"""Models that are a table of what follows what, for tests and trials: an agent's model without any training.

The layers add nothing to the residual stream, and the head knows a few tokens' successors, with their probabilities;
after any other token it knows nothing. A call of a tool is one token, so that it has one successor. Such a model runs
through all of an engine's and a trainer's code, and learns: gradients reach its table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from penstock_codec import tiny_tokenizer
from penstock_codec.chat import Message
from penstock_codec.codec import Codec
from penstock_codec.tokenizer_files import TokenizerFiles
from penstock_inference.testing import random_config, random_tensors, write_model

CERTAINTY: Final = 24.0
"""The logit of a successor with probability 1; those of other tokens are near 0."""
_VOCAB: Final = 512
_WIDTH: Final = 128
_STOP: Final = tiny_tokenizer.SPECIAL_TOKENS.index(tiny_tokenizer.TURN_END)


@dataclass(frozen=True, slots=True)
class CallingModel:
    """A Qwen3 that answers every message by one call of a tool, or by one text.

    Attributes:
        tool: the tool's name.
        arguments: the call's.
        share: of the answers that are the call, above 0 and below 1.
        otherwise: the text of the other answers; empty = an empty answer.
        context: most tokens of prompt and answer.
    """

    tool: str
    arguments: Mapping[str, Any]
    share: float = 0.5
    otherwise: str = ""
    context: int = 2048

    @property
    def call(self) -> str:
        """The text between the marks of a call."""
        return json.dumps({"name": self.tool, "arguments": dict(self.arguments)})

    def tokenizer_files(self, texts: Sequence[str] = ("some text to read",) * 3) -> TokenizerFiles:
        """ChatML of at most 510 tokens, trained on `texts`, with the call and the other answer as one token each."""
        files = tiny_tokenizer.build(texts, _VOCAB - 2)
        tokenizer = Tokenizer.from_str(files.tokenizer_json.decode())
        tokenizer.add_tokens([text for text in (self.call, self.otherwise) if text])
        return TokenizerFiles(
            tokenizer.to_str().encode(), files.chat_template, files.stop_token_ids, dict(files.special_tokens)
        )

    def write(self, directory: Path, texts: Sequence[str] = ("some text to read",) * 3) -> Path:
        """Writes the model's directory, for an engine and for Transformers; returns it."""
        files = self.tokenizer_files(texts)
        config = random_config(
            "qwen3",
            architectures=["Qwen3ForCausalLM"],
            vocab_size=_VOCAB,
            hidden_size=_WIDTH,
            intermediate_size=128,
            head_dim=32,
            max_position_embeddings=self.context,
            tie_word_embeddings=False,
            torch_dtype="float32",
            eos_token_id=_STOP,
        )
        write_model(directory, config, self._tensors(config, Codec.load(files)))
        files.write(directory)
        return directory

    def _tensors(self, config: Mapping[str, Any], codec: Codec) -> dict[str, NDArray[np.float32]]:
        tensors = random_tensors(config)
        for name in tensors:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensors[name][:] = 0
            elif name.endswith("norm.weight"):
                tensors[name][:] = 1
        prompt_end = int(codec.render([Message.user("hi")], [])[-1])
        opening, call, closing = codec.encode(f"<tool_call>{self.call}</tool_call>").tolist()
        [other] = codec.encode(self.otherwise).tolist() if self.otherwise else [_STOP]
        table: dict[int, dict[int, float]] = {
            prompt_end: {opening: self.share, other: 1 - self.share},
            opening: {call: 1},
            call: {closing: 1},
            closing: {_STOP: 1},
        }
        if other != _STOP:
            table[other] = {_STOP: 1}
        # Rows of a Hadamard matrix are orthogonal: no token has a part in another's successors. Those of the table's
        # tokens are theirs alone; the others share what is left.
        basis = np.ones((1, 1))
        while len(basis) < _WIDTH:
            basis = np.block([[basis, basis], [basis, -basis]])
        own = len(table)
        embeddings = basis[own + np.arange(_VOCAB) % (_WIDTH - own)]
        head = np.zeros((_VOCAB, _WIDTH))
        for row, (token, successors) in zip(basis, table.items(), strict=False):
            embeddings[token] = row
            for following, probability in successors.items():
                head[following] += (CERTAINTY + math.log(probability)) / _WIDTH * row
        changed = {"model.embed_tokens.weight": embeddings, "lm_head.weight": head}
        return tensors | {name: array.astype(np.float32) for name, array in changed.items()}
