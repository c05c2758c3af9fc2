"""A codec for a small ChatML model, made on the spot."""

from __future__ import annotations

import pytest

from penstock_codec import Codec, TokenizerFiles, tiny_tokenizer

TEXTS = ["You are a shell agent. Read the note, then write the file: héllo wörld €.\n"] * 4


@pytest.fixture(scope="session")
def files() -> TokenizerFiles:
    return tiny_tokenizer.build(TEXTS)


@pytest.fixture(scope="session")
def codec(files: TokenizerFiles) -> Codec:
    return Codec.load(files)
