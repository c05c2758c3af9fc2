"""The gate's domain in one process, over its real journal: for tests of one interleaving, or of all of them."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from penstock_codec import Codec, tiny_tokenizer
from penstock_codec.chat import FinishReason
from penstock_codec.tokenizer_files import TokenizerFiles
from penstock_interception.domain.completions import Completion, Tokens
from penstock_interception.graph import LogprobsMode
from penstock_interception.graph.values import VersionSpan
from penstock_interception.sources.codecs import CodecCache
from penstock_interception.testing import OpenGate, open_gate


@cache
def tokenizer() -> Path:
    """The tiny tokenizer's files, made once."""
    directory = Path(tempfile.mkdtemp(prefix="penstock-tiny-"))
    tiny_tokenizer.build(["list the files"]).write(directory)
    return directory


@cache
def codec() -> Codec:
    """Its codec."""
    return Codec.load(TokenizerFiles.from_directory(tokenizer()))


@cache
def _codecs() -> CodecCache:
    """Its codec once more, as sources keep it: it is the same for all gates of a test."""
    return CodecCache(tokenizer(), ThreadPoolExecutor(1))


def completion(
    text: str, *, mode: LogprobsMode = LogprobsMode.PROCESSED, times: int = 1, version: int | None = None
) -> Completion:
    """What an engine would have sampled for a text, so many times over."""
    ids = np.asarray([*list(codec().encode(text)) * times, codec().end_of_turn_id], np.int32)
    versions = (VersionSpan(version, 0, ids.size),) if version is not None else ()
    tokens = Tokens(ids, np.full(ids.size, -0.5, np.float32), mode, versions)
    return Completion(tokens, finish_reason=FinishReason.STOP)


@asynccontextmanager
async def inner_gate(directory: Path, **options: Any) -> AsyncIterator[OpenGate]:
    """A gate on what is in `directory`; `options` are those of `open_gate`."""
    async with open_gate(directory, tokenizer(), codecs=_codecs(), **options) as gate:
        yield gate
