"""The digest of an answer, by which one that is delivered twice is known, also after an upgrade; what none may have."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_codec.chat import (
    FinishReason,
    ImagePart,
    Message,
    Part,
    ReasoningPart,
    Role,
    TextPart,
    ToolCallPart,
    ToolResultPart,
)
from penstock_interception.domain.completions import Completion, Tokens, violations_of
from penstock_interception.graph.values import LogprobsMode, VersionSpan

spans = st.builds(VersionSpan, st.integers(0, 2**40), st.integers(0, 9), st.integers(0, 9))
texts = st.none() | st.text(max_size=9)
messages = st.none() | st.text(max_size=9).map(Message.assistant)


@pytest.mark.requirement("R34")
@given(
    st.lists(spans, max_size=3),
    messages,
    st.none() | st.sampled_from(FinishReason),
    st.none() | st.integers(0, 9),
    texts,
)
def test_an_answers_digest_is_of_what_its_parts_look_like(
    versions: list[VersionSpan],
    message: Message | None,
    reason: FinishReason | None,
    stop_id: int | None,
    text: str | None,
) -> None:
    """Journals hold digests, so what they are made of does not change."""
    ids, logprobs = np.arange(3, dtype=np.int32), np.full(3, -0.5, dtype=np.float32)
    tokens = Tokens(ids, logprobs, LogprobsMode.RAW, tuple(versions))
    answer = Completion(tokens, None, message, reason, stop_id, text)
    state = hashlib.sha256(ids.tobytes() + b"l" + logprobs.tobytes() + repr(tuple(versions)).encode())
    state.update(repr((message, reason, stop_id, text)).encode())
    assert answer.digest() == state.digest()


@pytest.mark.requirement("R83")
@pytest.mark.parametrize("part", [ImagePart.inline(b"png", "image/png"), ToolResultPart("c1", "done")])
def test_an_answer_has_only_parts_that_a_model_writes(part: Part) -> None:
    """However many others it has, one violation says which is the first."""
    written = (TextPart("a"), ReasoningPart("b"), ToolCallPart("c1", "bash", "{}"))
    assert violations_of(answer_of(written)) == []
    assert violations_of(answer_of((*written, *[part] * 1000))) == [
        "completion.message.parts[3]: must be a text, reasoning or a tool call"
    ]


def answer_of(parts: tuple[Part, ...]) -> Completion:
    return Completion(message=Message(Role.ASSISTANT, parts), finish_reason=FinishReason.STOP)
