"""What agents said before is not read again, and makes no difference to what is understood."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_codec.chat import Message
from penstock_interception import cache
from penstock_interception.cache import ParsedBodies, weight
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.ingress.dialects.base import Ask, BadRequest, Route
from penstock_interception.ingress.dialects.chat.dialect import ChatCompletions

CHAT, ROUTE = ChatCompletions(), Route(Ask.COMPLETION)
WORDS = st.sampled_from(["", "a", "b", "kiwi"])
MESSAGES = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": WORDS}),
    st.fixed_dictionaries({"role": st.just("user"), "content": WORDS, "odd": st.sampled_from([1, True, 1.0, None])}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": WORDS, "reasoning": st.none() | WORDS}),
    st.fixed_dictionaries({"role": st.just("tool"), "tool_call_id": WORDS, "content": WORDS}),
    st.fixed_dictionaries({"role": st.just("narrator")}),
)
REPLY = Message.assistant("x")
PARSED_BODIES = st.lists(MESSAGES, max_size=5)


def _body(messages: list[Any]) -> bytes:
    return orjson.dumps({"model": "m", "messages": messages})


def _parsed(body: bytes) -> ChatRequest:
    return cache.for_rollout("r", lambda: CHAT.parse(body, ROUTE))


def _understood(messages: list[Any]) -> ChatRequest | tuple[str, str | None]:
    try:
        return _parsed(_body(messages))
    except BadRequest as error:
        return error.message, error.param


def _kept(conversations: ParsedBodies, rollout_id: str, size: int, said: tuple[Message, ...] = (REPLY,)) -> None:
    conversations.keep(rollout_id, b"x" * size, [{}], said)


@pytest.mark.requirement("R82")
@settings(max_examples=300, deadline=None)
@given(PARSED_BODIES, PARSED_BODIES, st.integers(0, 5))
def test_conversation_is_parsed_alike_whatever_is_cached(said: list[Any], added: list[Any], kept: int) -> None:
    """With what went before and without, a request and a refusal are the same."""
    cache.PARSED_BODIES.clear()
    _understood(said)
    messages = [*said[:kept], *added]
    warm = _understood(messages)
    cache.PARSED_BODIES.clear()
    assert warm == _understood(messages)


@pytest.mark.requirement("R32")
def test_messages_that_come_again_are_those_that_were_read() -> None:
    """A turn costs what is new in it."""
    said = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "gone"}]
    first = _parsed(_body(said))
    again = _parsed(_body([*said, {"role": "user", "content": "on"}]))
    assert all(one is other for one, other in zip(first.messages, again.messages, strict=False))


@pytest.mark.requirement("R4")
def test_unread_fields_may_nest_as_deep_as_a_body_may() -> None:
    """Comparing what comes with what came cannot fail."""
    said = b'{"role": "user", "content": "go", "odd": ' + b"[" * 250 + b"]" * 250 + b"}"
    body = b'{"messages": [' + said + b', {"role": "assistant", "content": "on"}]}'
    assert _parsed(body) == _parsed(body)


@pytest.mark.parametrize("answered", [False, True])
def test_only_a_conversation_that_goes_on_is_kept(answered: bool) -> None:
    """A first turn that may be the only one costs no memory."""
    conversations = ParsedBodies()
    _kept(conversations, "r", 10, (Message.user("go"), *([REPLY] if answered else [])))
    assert (conversations.get("r") is not None) == answered


@pytest.mark.requirement("R13")
def test_latest_conversations_are_cached_up_to_a_bound() -> None:
    """What is kept is bounded in bytes, whoever speaks; a rollout's end ends it."""
    conversations = ParsedBodies(kept_bytes=800)
    for name in ("a", "b", "a", "c"):
        _kept(conversations, name, 100)
    for name in "defghi":
        _kept(conversations, name, 100)
    assert [name for name in "abcdefghi" if conversations.get(name) is not None] == [*"acdefghi"]
    _kept(conversations, "j", 50)
    assert [name for name in "acj" if conversations.get(name) is not None] == [*"cj"]
    conversations.forget("c")
    _kept(conversations, "k", 50)
    assert [name for name in "cdjk" if conversations.get(name) is not None] == [*"djk"]


@pytest.mark.requirement("R4", "R13")
def test_body_small_as_bytes_and_large_as_objects_is_not_cached() -> None:
    """An agent cannot have the gate hold on to more than its share, nor push out what others said."""
    conversations = ParsedBodies(kept_bytes=80_000)
    for name in ("quiet", "loud"):
        _kept(conversations, name, 100)
    conversations.keep("loud", b"[],[]," * 100, [{}], (REPLY,))
    assert conversations.get("quiet") is not None and conversations.get("loud") is None
    assert weight(b'{"a":[1,2]}') == 11 + 3 * 64
