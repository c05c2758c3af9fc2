"""Bodies of OpenAI Chat Completions: what is refused names its field, what is normalised is recorded."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from penstock_codec.chat import ImagePart, ReasoningPart, Role, TextPart, ToolChoiceMode
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.ingress.dialects.base import Ask, BadRequest, Route
from penstock_interception.ingress.dialects.chat import body as chat_body
from penstock_interception.ingress.dialects.chat import fields
from penstock_interception.ingress.dialects.chat.dialect import ChatCompletions

USER: list[Any] = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}


def parse(**body: Any) -> ChatRequest:
    return ChatCompletions().parse(orjson.dumps({"messages": USER, **body}), Route(Ask.COMPLETION))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    [
        "messages",
        "model",
        "tools",
        "tool_choice",
        "stream",
        "stream_options",
        "temperature",
        "max_tokens",
        "stop",
        "seed",
        "n",
        "response_format",
        "parallel_tool_calls",
        "chat_template_kwargs",
    ]
)
MESSAGE = st.dictionaries(
    st.sampled_from(["role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content"]),
    JSON | st.sampled_from(["user", "assistant", "tool", "system", "developer"]),
)


SAID = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system", "developer", "narrator"])},
    optional={
        "content": st.text(max_size=4) | JSON | st.just([{"type": "text", "text": "x"}]),
        "name": st.text(max_size=4) | JSON,
        "tool_call_id": st.text(max_size=4) | JSON,
        "reasoning": st.text(max_size=4) | JSON,
        "reasoning_content": st.text(max_size=4) | JSON,
        "tool_calls": JSON
        | st.lists(
            st.fixed_dictionaries(
                {"id": st.text(max_size=2), "function": st.just({"name": "f", "arguments": "{}"}) | JSON},
                optional={"type": st.just("function") | JSON},
            ),
            max_size=2,
        ),
    },
)


@pytest.mark.requirement("R33")
@settings(max_examples=200, deadline=None)
@given(SAID)
def test_a_message_is_read_alike_by_the_short_way_and_the_long(said: dict[str, Any]) -> None:
    """What is quick to read means the same as by the models."""
    try:
        item = orjson.loads(json.dumps(said))
    except ValueError:  # NaN, half a surrogate pair
        reject()
    quick = chat_body._plain(item)
    if quick is not None:
        (message,) = fields.ChatBody.model_validate({"messages": [item]}).messages
        assert quick == chat_body._message(message)


@pytest.mark.requirement("R33")
def test_repeated_tools_are_shared_and_different_ones_are_not() -> None:
    """True and 1 are two schemas, though Python calls them equal."""
    schemas: list[Any] = [{"additionalProperties": one} for one in (True, 1, True, 1.0)]
    texts = [
        parse(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}]).tools[0]
        for schema in schemas
    ]
    assert [tool.parameters_json_schema for tool in texts] == [orjson.dumps(schema).decode() for schema in schemas]


@pytest.mark.requirement("R33")
@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_a_bad_request_or_a_request(body: bytes) -> None:
    """Nothing but BadRequest, whatever the bytes."""
    _parses_or_is_refused(body)


@pytest.mark.requirement("R33")
@settings(max_examples=100, deadline=None)
@given(st.dictionaries(FIELDS, JSON), st.lists(MESSAGE, max_size=3) | JSON)
def test_arbitrary_json_is_a_bad_request_or_a_request(body: dict[str, Any], messages: Any) -> None:
    """A malformed body gets 400 with a message, never anything else."""
    try:
        data = orjson.dumps({**body, "messages": messages})
    except TypeError:  # an integer that JSON writers refuse
        return
    _parses_or_is_refused(data)


def _parses_or_is_refused(body: bytes) -> None:
    try:
        request = ChatCompletions().parse(body, Route(Ask.COMPLETION))
    except BadRequest as error:
        assert error.message
    else:
        assert request.messages


@pytest.mark.requirement("R33", "R65")
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 2.5}, "max_completion_tokens"),
        ({"n": 2}, "n"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"functions": []}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_a_bad_field_is_named(body: dict[str, Any], param: str) -> None:
    """The dialect's 400 names the field; legacy functions point to tools."""
    with pytest.raises(BadRequest) as caught:
        parse(**body)
    assert caught.value.param == param


@pytest.mark.requirement("R33", "R86")
@pytest.mark.parametrize(
    ("body", "note"),
    [
        ({"tools": []}, "tools was empty"),
        ({"tool_choice": "auto"}, "tool_choice without tools"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls without tools"),
        ({"stream_options": {"include_usage": True}}, "stream_options without stream"),
        ({"max_tokens": 3, "max_completion_tokens": 2}, "the smaller one is used"),
        ({"reasoning_effort": "xhigh"}, "reasoning_effort turns thinking on; its level was ignored"),
        ({"reasoning_effort": 3}, "reasoning_effort was ignored"),
        ({"thinking": {"type": "adaptive"}}, "thinking was ignored"),
        ({"thinking": True}, "thinking was ignored"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens was ignored"),
    ],
)
def test_normalisations_are_recorded(body: dict[str, Any], note: str) -> None:
    """Each change of the request is one sentence in the record."""
    assert any(note in sentence for sentence in parse(**body).normalisations)


@pytest.mark.requirement("R64")
def test_a_plain_request_is_recorded_as_it_came() -> None:
    """Nothing is normalised, and what is unset stays unset."""
    request = parse(model="m", temperature=0, user="someone")
    assert request.normalisations == ()
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.max_tokens) == (0, None, None)


def test_every_kind_of_message_keeps_its_parts() -> None:
    """Text as string or parts, images by reference, reasoning, tool calls exactly as written, results by id."""
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"a":  1}'}}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages: list[Any] = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": [{"type": "text", "text": "look"}, image]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "out"}]},
    ]
    one, two, three, four = parse(messages=messages).messages
    assert one.role is Role.DEVELOPER
    assert two.parts == (TextPart("look"), ImagePart.inline(bytes(3), "image/png"))
    assert three.parts[0] == ReasoningPart("hm") and three.tool_calls[0].arguments_json == '{"a":  1}'
    assert (four.tool_results[0].call_id, four.tool_results[0].text) == ("c1", "out")


@pytest.mark.requirement("R63")
def test_tool_choice_and_thinking_reach_the_request() -> None:
    """An accepted option takes effect."""
    named = {"type": "function", "function": {"name": "bash"}}
    request = parse(
        tools=[TOOL], tool_choice=named, parallel_tool_calls=False, chat_template_kwargs={"enable_thinking": False}
    )
    assert (request.tool_choice.mode, request.tool_choice.name) == (ToolChoiceMode.NAMED, "bash")
    assert request.tool_choice.parallel_tool_calls is False
    assert request.template_kwargs == {"enable_thinking": False} and request.sampling.thinking is False


ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}
HIGH = {**ON, "reasoning_effort": "high"}


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(
    ("wish", "kwargs"),
    [
        ({"reasoning_effort": "high"}, HIGH),
        ({"reasoning_effort": "minimal"}, ON),
        ({"reasoning_effort": "none"}, OFF),
        ({"reasoning_effort": None, "thinking": None, "chat_template_kwargs": None}, {}),
        ({"thinking": {"type": "enabled"}}, ON),
        ({"thinking": {"type": "disabled"}}, OFF),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "high"}, HIGH),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, OFF),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": ON}, ON),
        ({"reasoning_effort": "high", "chat_template_kwargs": OFF}, OFF),
        ({"reasoning_effort": "high", "chat_template_kwargs": ON}, HIGH),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"x": 1}}, OFF),
        ({"thinking": {"type": ["enabled"]}}, {}),
    ],
)
def test_each_field_on_thinking_reaches_the_template_and_the_explicit_one_wins(
    wish: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    """As aider, Kimi CLI, OpenHands, Pi and Terminus send them; read alike the short way and the long."""
    request = parse(**wish)
    assert request.template_kwargs == kwargs and request.sampling.thinking is kwargs.get("enable_thinking")
    whole = fields.ChatBody.model_validate({"messages": [{"role": "user", "content": "q"}], **wish})
    long = chat_body._request(whole, None)
    assert (long.template_kwargs, long.sampling) == (request.template_kwargs, request.sampling)
    assert long.normalisations == request.normalisations


@pytest.mark.requirement("R80")
def test_deep_nesting_is_refused_not_crashed_on() -> None:
    """3,000 nested arrays are a bad request."""
    with pytest.raises(BadRequest):
        ChatCompletions().parse(b'{"messages": ' + b"[" * 3000 + b"]" * 3000 + b"}", Route(Ask.COMPLETION))


@pytest.mark.requirement("R33")
def test_settings_that_came_before_are_those_of_this_body() -> None:
    """What is remembered of settings and tools is theirs alone, and what breaks a rule is refused each time."""

    def body(**more: object) -> bytes:
        return orjson.dumps({"messages": [{"role": "user", "content": "q"}], **more})

    tool = {"type": "function", "function": {"name": "f"}}
    for _ in range(2):
        assert chat_body.parse_chat(body(temperature=1)).sampling.temperature == 1.0
        assert chat_body.parse_chat(body(temperature=0.5, user="a")).sampling.temperature == 0.5
        with pytest.raises(BadRequest):
            chat_body.parse_chat(body(temperature=True))
        with pytest.raises(BadRequest):
            chat_body.parse_chat(body(n=2))
        assert [tool.name for tool in chat_body.parse_chat(body(tools=[tool], tool_choice="required")).tools] == ["f"]
        assert chat_body.parse_chat(body(tool_choice="required")).normalisations == (
            "tool_choice without tools was ignored",
        )
        with pytest.raises(BadRequest):
            chat_body.parse_chat(body(tools=[tool, tool]))
    first, second = chat_body.parse_chat(body(tools=[tool])), chat_body.parse_chat(body(tools=[tool], user="other"))
    assert first == second and first.tools is second.tools and first.tools_sha256
