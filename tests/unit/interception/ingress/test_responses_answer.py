"""Answers of OpenAI Responses: what is answered and echoed comes back as the same message, whole or streamed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_codec.chat import FinishReason, Message, ToolCallPart, Usage
from penstock_interception.domain.calls import CallRequest, Dialect, Mode, RolloutSpec
from penstock_interception.domain.completions import Completion
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.domain.state import Call, Rollout
from penstock_interception.graph.fingerprint import canonical_json
from penstock_interception.ingress.dialects.base import Ask, Problem, Route
from penstock_interception.ingress.dialects.responses.dialect import Responses

TOOLS: list[Any] = [
    {"type": "function", "name": "bash"},
    {"type": "custom", "name": "apply"},
    {"type": "namespace", "name": "notes", "tools": [{"type": "function", "name": "read"}]},
    {"type": "local_shell"},
    {"type": "shell"},
    {"type": "apply_patch"},
]
NAMES = ["bash", "apply", "notes__read", "local_shell", "shell", "apply_patch", "unknown"]
# Lone surrogates cannot be decoded from tokens.
TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
STRINGS = st.lists(TEXT, max_size=2)
ARGUMENTS = st.one_of(
    st.dictionaries(TEXT, TEXT, max_size=2),
    st.fixed_dictionaries({"input": TEXT}),
    st.fixed_dictionaries(
        {"command": STRINGS},
        optional={"timeout_ms": st.integers(0, 9), "env": st.dictionaries(TEXT, TEXT, max_size=1), "user": TEXT},
    ),
    st.fixed_dictionaries({"commands": STRINGS}, optional={"max_output_length": st.integers(0, 9) | st.none()}),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["create_file", "delete_file", "other"]), "path": TEXT}, optional={"diff": TEXT}
    ),
).map(lambda value: orjson.dumps(value).decode())
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS | TEXT), max_size=4)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop for the futures of calls."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def request_of(**body: Any) -> ChatRequest:
    return Responses().parse(orjson.dumps({"input": "hi", "tools": TOOLS, **body}), Route(Ask.COMPLETION))


def answered(loop: asyncio.AbstractEventLoop, message: Message, finish: FinishReason) -> Call:
    """A call with its answer."""
    arrival = CallRequest(Dialect.RESPONSES, b"", b"", "", False, ChatRequest("", ()).sampling, "m")
    rollout = Rollout(RolloutSpec("r", "rollout", Mode.INTERCEPTION_GATE), 0.0)
    call = Call("0" * 31 + "a", rollout, 0, arrival, 1.5, 9.0, arrival.sampling, loop.create_future())
    call.message = message
    call.completion = Completion(finish_reason=finish, usage=Usage(7, 5, reasoning_tokens=2, cached_tokens=3))
    return call


def events_of(data: bytes) -> list[dict[str, Any]]:
    return [orjson.loads(event.partition(b"\ndata: ")[2]) for event in data.split(b"\n\n") if event]


@pytest.mark.requirement("R82")
@settings(deadline=None)
@given(TEXT, TEXT, CALLS, st.booleans(), st.booleans(), st.sampled_from(FinishReason))
def test_echoed_answer_is_the_same_message(
    loop: asyncio.AbstractEventLoop,
    text: str,
    thought: str,
    calls: list[tuple[str, str]],
    summary: bool,
    sealed: bool,
    finish: FinishReason,
) -> None:
    """Reasoning, text and calls of every kind come back as they were said, arguments equal as JSON."""
    said = [ToolCallPart(f"call_{i}", name, arguments) for i, (name, arguments) in enumerate(calls)]
    message = Message.assistant(text, *said, reasoning=thought)
    include = ["reasoning.encrypted_content"] if sealed else []
    request = request_of(include=include, reasoning={"summary": "auto"} if summary else None)
    call = answered(loop, message, finish)
    whole = orjson.loads(Responses().answer(call, request))
    stream = Responses().stream(call, request)
    events = events_of(stream.open() + stream.keep_alive() + stream.answer())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"] == whole
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == whole["output"]
    echo = request_of(input=[{"role": "user", "content": "hi"}, *whole["output"], {"role": "user", "content": "go on"}])
    back = echo.messages[1]
    assert (back.text, back.reasoning) == (text, thought)
    assert [(call.id, call.name) for call in back.tool_calls] == [(call.id, call.name) for call in said]
    for ours, theirs in zip(said, back.tool_calls, strict=True):
        assert canonical_json(ours.arguments_json) == canonical_json(theirs.arguments_json)


@pytest.mark.requirement("R30")
def test_usage_has_cached_and_reasoning_tokens(loop: asyncio.AbstractEventLoop) -> None:
    """As the dialect counts them."""
    whole = orjson.loads(Responses().answer(answered(loop, Message.assistant("x"), FinishReason.STOP), request_of()))
    assert whole["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == 2
    assert whole["usage"]["total_tokens"] == 12


@pytest.mark.requirement("R30")
@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (Problem(403, "budget_exhausted", "spent"), "insufficient_quota"),
        (Problem(400, "context_length_exceeded", "long", "messages"), "context_length_exceeded"),
        (Problem(429, "too_many_calls", "busy", retry=True), "rate_limit_exceeded"),
        (Problem(503, "model_unavailable", "later", retry=True), "server_error"),
        (Problem(400, "model_refused", "no"), "invalid_prompt"),
    ],
)
def test_a_late_failure_says_by_its_code_whether_to_ask_again(
    loop: asyncio.AbstractEventLoop, problem: Problem, code: str
) -> None:
    """Codex gives up on a quota, a full context and an invalid prompt, and repeats the rest."""
    stream = Responses().stream(answered(loop, Message.assistant(), FinishReason.STOP), request_of())
    *_, error, failed = events_of(stream.open() + stream.problem(problem))
    assert error["code"] == error["error"]["code"] == failed["response"]["error"]["code"] == code
    assert error["param"] == ("input" if problem.param else None)
