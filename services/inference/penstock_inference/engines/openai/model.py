"""Reads the model directory of a model that a foreign server runs: no weights, and only the files that exist."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from penstock_chassis.errors import FailedPrecondition
from penstock_codec.errors import CodecError
from penstock_codec.tokenizer_files import TokenizerFiles
from penstock_inference.engines.stops import load_tokenizer


class Model:
    """A model's tokenizer, vocabulary size (None: unknown), own stop tokens, and longest context (0: unknown)."""

    def __init__(self, config: dict[str, Any], tokenizer: Tokenizer | None, stop_token_ids: tuple[int, ...]) -> None:
        self.tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids
        known = 0 if tokenizer is None else tokenizer.get_vocab_size()
        self.vocab_size: int | None = max(_whole(config, "vocab_size"), known) or None
        self.max_context = _whole(config, "max_position_embeddings")

    @classmethod
    def read(cls, directory: Path) -> Model:
        """Raises FailedPrecondition (MODEL_UNREADABLE)."""
        tokenizer = load_tokenizer(directory / "tokenizer.json")
        config: Any = {}
        path = directory / "config.json"
        if path.is_file():
            try:
                config = json.loads(path.read_text("utf-8"))
            except (OSError, ValueError) as error:
                raise FailedPrecondition(f"config.json cannot be read: {error}", reason="MODEL_UNREADABLE") from error
        config = config if isinstance(config, dict) else {}
        inner = config.get("text_config")
        config = {**config, **inner} if isinstance(inner, dict) else config
        stops = config.get("eos_token_id")
        stop_ids = tuple(stops) if isinstance(stops, list) else () if stops is None else (stops,)
        if tokenizer is not None:
            with suppress(CodecError):  # without a chat template, only config.json's are known
                stop_ids = tuple(TokenizerFiles.from_directory(directory).stop_token_ids)
        return cls(config, tokenizer, stop_ids)


def _whole(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and value > 0 else 0
