"""What is kept about a body with its call is small, however long and many the names are that an agent writes (R23)."""

from __future__ import annotations

import orjson
import pytest

from penstock_interception.domain.calls import Dialect
from penstock_interception.ingress import black_box_filter
from penstock_interception.ingress.black_box import _call_request
from penstock_interception.ingress.dialects.base import Ask, DialectCodec, Route
from penstock_interception.ingress.dialects.chat.dialect import ChatCompletions
from penstock_interception.ingress.dialects.messages.dialect import Messages
from penstock_interception.ingress.dialects.responses.dialect import Responses

MOST_BYTES = 8 << 10
LONG = [f"{index:04}{'x' * 4000}" for index in range(500)]
SAID = [{"role": "user", "content": "go"}]


@pytest.mark.requirement("R23", "R33")
@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (ChatCompletions(), {"messages": SAID, **dict.fromkeys(LONG, 1)}),
        (Messages(), {"model": "m", "max_tokens": 5, "messages": SAID, **dict.fromkeys(LONG, 1)}),
        (Responses(), {"model": "m", "input": "go", **dict.fromkeys(LONG, 1)}),
    ],
    ids=["chat", "messages", "responses"],
)
def test_names_of_ignored_fields_are_cut_and_counted(dialect: DialectCodec, body: dict[str, object]) -> None:
    """The first are told, and how many there are besides."""
    notes = dialect.parse(orjson.dumps(body), Route(Ask.COMPLETION)).normalisations
    assert 0 < len("".join(notes)) < MOST_BYTES
    assert notes[-1].endswith(" more")


@pytest.mark.requirement("R23")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "m", "messages": SAID, "tools": [{"type": name} for name in LONG]}),
        ("/v1beta/models/m:generateContent", {"contents": [], "tools": [{name: {} for name in LONG}]}),
    ],
)
def test_names_of_hosted_tools_of_a_black_box_are_cut_and_counted(path: str, body: dict[str, object]) -> None:
    """They are in no journal as a whole."""
    onward = black_box_filter.read(path, orjson.dumps(body), "")
    assert len(onward.hosted) == len(LONG)
    notes = _call_request(b"", Dialect.CHAT_COMPLETIONS, onward).normalisations
    assert len("".join(notes)) < MOST_BYTES and notes[-1] == f"and {len(LONG) - 32} more"
