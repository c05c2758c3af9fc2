"""A codec for a small ChatML model, and completions sampled one byte a token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from penstock_codec import Codec, tiny_tokenizer
from penstock_codec.chat import FinishReason, Sampling
from penstock_interception.graph import LogprobsMode, Plan, Sampled, VersionSpan

TEXTS = ["You are a shell agent. Read the note, then write the file. List the files, please.\n"] * 4


@pytest.fixture(scope="session")
def codec() -> Codec:
    return Codec.load(tiny_tokenizer.build(TEXTS))


@pytest.fixture(scope="session")
def sample(codec: Codec) -> Callable[..., Sampled]:
    """A completion of `text`: sample(plan, text, finish=None, version=0)."""

    def make(plan: Plan, text: str, finish: FinishReason | None = None, version: int = 0) -> Sampled:
        ids = np.asarray(tiny_tokenizer.bytewise(text), dtype=np.int32)
        parsed = codec.parse(ids, prompt_ids=plan.prompt_ids, finish_reason=finish)
        return Sampled(
            message=parsed.message,
            finish_reason=parsed.finish_reason,
            token_ids=ids,
            logprobs=np.linspace(-1, 0, ids.size, dtype=np.float32),
            logprobs_mode=LogprobsMode.PROCESSED,
            versions=(VersionSpan(version, 0, int(ids.size)),) if ids.size else (),
            sampling_used=Sampling(temperature=1.0, stop=("x",), stop_token_ids=(2,)),
            engine="numpy",
            engine_version="1",
        )

    return make
