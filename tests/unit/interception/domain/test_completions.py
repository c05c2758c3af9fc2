"""The digest of an answer, by which one that is delivered twice is known, also after an upgrade; what none may have."""

from __future__ import annotations

import hashlib
from dataclasses import replace

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
    Usage,
)
from penstock_interception.domain.completions import Completion, Timings, Tokens, violations_of
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


@pytest.mark.requirement("R83", "R88")
@pytest.mark.parametrize(
    "usage",
    [Usage(-1, 0), Usage(0, -1), Usage(2**31, 0), Usage(0, 2**63 - 1), Usage(0, 0, -1), Usage(0, 0, None, 2**31)],
)
def test_an_answers_token_counts_are_counts(usage: Usage) -> None:
    """Budgets and totals add them up: a negative one would give tokens back, and a sum must fit its message."""
    (found,) = violations_of(replace(answer_of((TextPart("a"),)), usage=usage))
    assert found.startswith("completion.usage:")
    assert not violations_of(replace(answer_of((TextPart("a"),)), usage=Usage(2**31 - 1, 0, 1, None)))


@pytest.mark.requirement("R83")
@pytest.mark.parametrize("seconds", [2.0**63, -(2.0**63)])
def test_an_answers_timings_fit_a_duration(seconds: float) -> None:
    """One that does not made the whole capture unreadable; a clock that was set back is no reason to refuse."""
    (found,) = violations_of(replace(answer_of((TextPart("a"),)), timings=Timings(decode_s=seconds)))
    assert found.startswith("completion.timings:")
    assert not violations_of(replace(answer_of((TextPart("a"),)), timings=Timings(0.5, -0.1, 2.0)))


def answer_of(parts: tuple[Part, ...]) -> Completion:
    return Completion(message=Message(Role.ASSISTANT, parts), finish_reason=FinishReason.STOP)
