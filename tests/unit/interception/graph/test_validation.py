"""What a delivered completion's numbers must satisfy, looked at by their bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_chassis.errors import InvalidArgument
from penstock_codec.chat import FinishReason, Message
from penstock_interception.graph.validation import check_sampled
from penstock_interception.graph.values import LogprobsMode, Sampled, TopLogprobs

VOCABULARY = 100
ids = st.integers(-3, VOCABULARY + 3) | st.integers(-(2**31), 2**31 - 1)
logprobs = st.floats(width=32) | st.sampled_from([0.0, -0.0, -math.inf, math.inf, math.nan, -1e-45, -3.4e38])


@pytest.mark.requirement("R83")
@given(st.lists(st.tuples(ids, logprobs), max_size=6))
def test_ids_are_of_the_vocabulary_and_logprobs_finite_and_nonpositive(tokens: list[tuple[int, float]]) -> None:
    """Exactly those."""
    wanted = set()
    if any(not 0 <= index < VOCABULARY for index, _ in tokens):
        wanted.add("span.token_ids")
    given_logprobs = np.array([value for _, value in tokens], dtype=np.float32)
    if any(not math.isfinite(value) or value > 0 for value in given_logprobs.tolist()):
        wanted.add("span.logprobs")
    sampled = Sampled(
        Message.assistant("a"),
        FinishReason.STOP,
        np.array([index for index, _ in tokens], dtype=np.int32),
        given_logprobs,
        LogprobsMode.RAW,
    )
    try:
        check_sampled(sampled, VOCABULARY)
    except InvalidArgument as error:
        assert {violation.field for violation in error.violations} == wanted
    else:
        assert not wanted


tables = st.integers(1, 3).flatmap(
    lambda width: st.lists(st.lists(st.tuples(ids, logprobs), min_size=width, max_size=width), min_size=1, max_size=3)
)


@pytest.mark.requirement("R83", "R106")
@given(tables, st.sampled_from(LogprobsMode))
def test_alternatives_are_known_ids_in_order_or_refused(
    table: list[list[tuple[int, float]]], mode: LogprobsMode
) -> None:
    """-1 fills a row up and has no probability; a raw logprob is finite."""
    values = np.array([[value for _, value in row] for row in table], dtype=np.float32)
    top = TopLogprobs(np.array([[index for index, _ in row] for row in table], dtype=np.int32), values)
    pairs = [(index, value) for row, line in zip(table, values.tolist(), strict=True) for (index, _), value in
             zip(row, line, strict=True)]  # fmt: skip
    right = (
        all(-1 <= index < VOCABULARY for index, _ in pairs)
        and all(value <= 0 for _, value in pairs)
        and all(value == -math.inf for index, value in pairs if index < 0)
        and not (mode is LogprobsMode.RAW and any(value == -math.inf for index, value in pairs if index >= 0))
        and all(line == sorted(line, reverse=True) for line in values.tolist())
    )
    sampled = Sampled(Message.assistant("a"), FinishReason.STOP, np.zeros(len(table), np.int32), None, mode, top=top)
    try:
        check_sampled(sampled, VOCABULARY)
    except InvalidArgument as error:
        assert not right and {item.field for item in error.violations} <= {"span.top_token_ids", "span.top_logprobs"}
    else:
        assert right
