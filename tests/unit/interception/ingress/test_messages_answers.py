"""Answers of Anthropic Messages: what a client echoes is the message that was sampled."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_codec.chat import FinishReason, Message, ReasoningPart, Role, Sampling, TextPart, ToolCallPart, Usage
from penstock_interception.domain.calls import CallRequest, Dialect, Mode, RolloutSpec
from penstock_interception.domain.completions import Completion
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.domain.state import Call, Rollout
from penstock_interception.graph.fingerprint import Fingerprints, reasoning_text
from penstock_interception.ingress.dialects.base import Ask, Problem, Route
from penstock_interception.ingress.dialects.messages.dialect import Messages

REQUEST = ChatRequest("m", ())
SHOWN = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | SHOWN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SHOWN, inner, max_size=3),
    max_leaves=8,
)
# As a model may write them: with odd spacing, escapes and exponents.
ARGUMENTS = st.builds(
    lambda value, indent, plain: json.dumps(value, indent=indent, ensure_ascii=plain),
    st.dictionaries(SHOWN, VALUES, max_size=3),
    st.sampled_from([None, 1]),
    st.booleans(),
) | st.sampled_from(['{"x":1e2 ,"y" : -0.0}', '{"n": 123456789012345678901234567890}', '{"a":1,"a":2}'])
REPLIES = st.builds(
    lambda thought, texts, calls: Message(
        Role.ASSISTANT,
        (
            *([ReasoningPart(thought)] if thought else []),
            *(TextPart(text) for text in texts),
            *(ToolCallPart(f"call_{i}", "bash", arguments) for i, arguments in enumerate(calls)),
        ),
    ),
    st.none() | SHOWN,
    st.lists(SHOWN, max_size=2),
    st.lists(ARGUMENTS, max_size=3),
)


def answered(message: Message) -> Call:
    """A call with that answer."""
    opening = RolloutSpec("request", "rollout", Mode.INTERCEPTION_GATE)
    rollout = Rollout(opening, created=0.0)
    arrival = CallRequest(Dialect.MESSAGES, b"", b"", "", False, Sampling(), "m")
    loop = asyncio.new_event_loop()
    call = Call("c1", rollout, 0, arrival, 0.0, 0.0, Sampling(), ended=loop.create_future())
    loop.close()
    call.message = message
    call.completion = Completion(message=message, finish_reason=FinishReason.STOP, usage=Usage(7, 5, 2, 3))
    return call


def from_stream(data: bytes) -> dict[str, Any]:
    """The message that a client puts together."""
    events = [json.loads(event.partition(b"data: ")[2]) for event in data.strip().split(b"\n\n")]
    message = next(event["message"] for event in events if event["type"] == "message_start")
    written: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                written[event["index"]] = written.get(event["index"], "") + delta["partial_json"]
                block["input"] = json.loads(written[event["index"]])
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    return dict(message)


@pytest.mark.requirement("R82")
@settings(max_examples=150, deadline=None)
@given(REPLIES)
def test_echoed_answer_is_the_same_message(reply: Message) -> None:
    """Whole or streamed, parsed and written again by a client, it has the fingerprint of what was sampled."""
    call, dialect = answered(reply), Messages()
    whole = json.loads(dialect.answer(call, REQUEST))
    stream = from_stream(dialect.stream_open(call, REQUEST) + dialect.stream_answer(call, REQUEST))
    assert stream == whole
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": whole["content"]},
        {"role": "user", "content": "and"},
    ]
    body = json.dumps({"model": "m", "max_tokens": 1, "messages": history}).encode()
    echoed = dialect.parse(body, Route(Ask.COMPLETION)).messages[1]
    keys = Fingerprints(with_call_ids=True)
    assert keys.key(echoed) == keys.key(reply)
    assert reasoning_text(echoed) == reasoning_text(reply)


@pytest.mark.requirement("R30")
def test_usage_says_what_was_cached_and_thought() -> None:
    """Input tokens without those from a cache, as the API counts them."""
    usage = orjson.loads(Messages().answer(answered(Message.assistant("x")), REQUEST))["usage"]
    assert usage == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": 5,
        "output_tokens_details": {"thinking_tokens": 2},
    }


@pytest.mark.requirement("R30", "R33")
def test_error_has_its_statuss_type_the_stable_code_and_the_field() -> None:
    """The same object whole and as the last event of a stream."""
    problem = Problem(400, "invalid_value", "model: Field required.", "model")
    body = orjson.loads(Messages().problem(problem))
    details = {"error_code": "invalid_value", "param": "model"}
    assert body == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "model: Field required.", "details": details},
    }
    assert Messages().stream_problem(problem, REQUEST) == b"event: error\ndata: " + orjson.dumps(body) + b"\n\n"
