"""Bodies of Anthropic Messages: what is refused names its field, what is normalised is recorded."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_codec.chat import (
    ImagePart,
    Message,
    ReasoningPart,
    Role,
    TextPart,
    ToolCallPart,
    ToolChoiceMode,
)
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.ingress.dialects.base import Ask, BadRequest, Route
from penstock_interception.ingress.dialects.messages.body import signature_of
from penstock_interception.ingress.dialects.messages.dialect import Messages

USER: list[Any] = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {"name": "bash", "description": "Run.", "input_schema": {"type": "object"}}
BASE64 = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
USE = {"type": "tool_use", "id": "t1", "name": "bash", "input": {"a": 1}}


def parse(*, ask: Ask = Ask.COMPLETION, **body: Any) -> ChatRequest:
    given = {"model": "m", "max_tokens": 100, "messages": USER, **body}
    return Messages().parse(orjson.dumps(given), Route(ask))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
WORDS = st.sampled_from(
    [
        *["text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image", "document", "search_result"],
        *["tool_reference", "tool_addition", "server_tool_use", "base64", "url", "content", "user", "assistant"],
        *["system", "auto", "any", "tool", "none", "enabled", "disabled", "adaptive", "custom", "bash_20250124"],
        *["web_search_20250305", "json_schema", "bash", "x"],
    ]
)
RICH: dict[str, Any] = {
    "model": "m",
    "max_tokens": 10,
    "stream": True,
    "system": [{"type": "text", "text": "rules", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image", "source": BASE64}]},
        {"role": "system", "content": [{"type": "tool_addition", "tool": {"type": "tool_reference", "name": "late"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "so"},
                USE,
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "is_error": True,
                    "content": [
                        {"type": "text", "text": "out"},
                        {"type": "image", "source": {"type": "url", "url": "http://x"}},
                        {"type": "tool_reference", "tool_name": "late"},
                    ],
                },
                {"type": "document", "source": {"type": "text", "data": "d", "media_type": "text/plain"}},
                {"type": "search_result", "source": "u", "title": "t", "content": [{"type": "text", "text": "found"}]},
            ],
        },
    ],
    "tools": [
        TOOL,
        {"name": "late", "input_schema": {}, "defer_loading": True},
        {"type": "web_search_20250305", "name": "web_search"},
    ],
    "tool_choice": {"type": "tool", "name": "bash", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 2000},
    "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {}}},
    "stop_sequences": ["a"],
    "temperature": 1,
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    found = [path]
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, child in children:
        found += places(child, (*path, step))
    return found


@pytest.mark.requirement("R33")
@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_a_bad_request_or_a_request(body: bytes) -> None:
    """Nothing but BadRequest, whatever the bytes."""
    _parses_or_is_refused(body)


@pytest.mark.requirement("R33")
@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(places(RICH)[1:]), JSON | WORDS), min_size=1, max_size=3), st.booleans())
def test_a_mutated_body_is_a_bad_request_or_a_request(changes: list[tuple[tuple[Any, ...], Any]], drop: bool) -> None:
    """Any part of a valid body replaced by anything, or left out, gives 400 with a message or is read."""
    body = json.loads(json.dumps(RICH))
    for path, value in changes:
        place = body
        try:
            for step in path[:-1]:
                place = place[step]
            if drop:
                del place[path[-1]]
            else:
                place[path[-1]] = value
        except (KeyError, IndexError, TypeError):  # an earlier change took the place away
            continue
    try:
        data = orjson.dumps(body)
    except TypeError:  # an integer that JSON writers refuse
        return
    _parses_or_is_refused(data)


def _parses_or_is_refused(body: bytes) -> None:
    for ask in (Ask.COMPLETION, Ask.COUNT):
        try:
            request = Messages().parse(body, Route(ask))
        except BadRequest as error:
            assert error.message
        else:
            assert request.messages


@pytest.mark.requirement("R33")
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "wizard"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [PDF]}]}, "messages[0].content[0].source"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}
                ]
            },
            "messages[0].content[0].source",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": 5}}]}]},
            "messages[0].content[0].source.url",
        ),
        (
            {"messages": [*USER, {"role": "assistant", "content": [{**USE, "input": "x"}]}, *USER]},
            "messages[1].content[0].input",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        ({"messages": [*USER, {"role": "assistant", "content": "It is ("}]}, "messages[1]"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"model": None}, "model"),
        ({"temperature": "hot"}, "temperature"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "bash"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "sometimes"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"stream": "yes"}, "stream"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"thread": {"type": "continue"}}, "thread"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
    ],
)
def test_a_bad_field_is_named(body: dict[str, Any], param: str) -> None:
    """The dialect's 400 names the field, a prefill and what is kept at the provider included."""
    with pytest.raises(BadRequest) as caught:
        parse(**body)
    assert caught.value.param == param


@pytest.mark.requirement("R33", "R86")
@pytest.mark.parametrize(
    ("body", "note"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305 was left out"),
        ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "computer_20250124 was left out"),
        ({"tools": [{"type": "mcp_toolset", "mcp_server_name": "x"}]}, "mcp_toolset was left out"),
        ({"mcp_servers": [{"type": "url", "name": "x", "url": "http://x"}]}, "mcp_servers was left out"),
        ({"container": "c"}, "container was left out"),
        ({"tool_choice": {"type": "any"}}, "tool_choice without tools"),
        ({"output_config": {"effort": "high"}}, "effort was ignored"),
        ({"context_management": {"edits": []}}, "context_management was ignored"),
        ({"thinking": {"type": "between_tools"}}, "treated as adaptive"),
        (
            {"messages": [*USER, {"role": "system", "content": "x", "clear_at": "next_user_message"}, *USER]},
            "clear_at was ignored",
        ),
        (
            {"messages": [*USER, {"role": "assistant", "content": [{"type": "server_tool_use", "id": "s"}]}, *USER]},
            "server_tool_use of the conversation was left out",
        ),
    ],
)
def test_normalisations_are_recorded(body: dict[str, Any], note: str) -> None:
    """Each change of the request is one sentence in the record."""
    assert any(note in sentence for sentence in parse(**body).normalisations)


@pytest.mark.requirement("R64")
def test_a_plain_request_is_recorded_as_it_came() -> None:
    """Nothing is normalised, and what is unset stays unset."""
    request = parse(temperature=0, metadata={"user_id": "x"}, cache_control={"type": "ephemeral"})
    assert request.normalisations == ()
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.max_tokens) == (0, None, 100)
    assert request.sampling.thinking is None and request.template_kwargs == {}


def test_every_kind_of_block_keeps_its_meaning() -> None:
    """System as a list, images, reasoning with its mark, calls, results with errors and images, documents."""
    system, look, added, reply, result, more = Messages().parse(orjson.dumps(RICH), Route(Ask.COMPLETION)).messages
    assert (system.role, system.text) == (Role.SYSTEM, "rules")
    assert look.parts == (TextPart("look"), ImagePart.inline(bytes(3), "image/png"))
    assert added.role is Role.SYSTEM and '"name":"late"' in added.text
    assert reply.parts == (
        ReasoningPart("hm", b"s"),
        ReasoningPart("", b"x"),
        TextPart("so"),
        ToolCallPart("t1", "bash", '{"a":1}'),
    )
    (answered,) = result.tool_results
    assert (result.role, answered.call_id, answered.is_error) == (Role.TOOL, "t1", True)
    assert answered.text.startswith("out") and '"name":"late"' in answered.text
    assert answered.images == (ImagePart("http://x"),)
    assert (more.role, more.text) == (Role.USER, "dt\nu\nfound\n")


@pytest.mark.requirement("R82")
def test_results_follow_their_calls_order_and_precede_the_users_text() -> None:
    """Agents send results as they finish; a template without ids would show them to the wrong calls."""
    uses = [{**USE, "id": name} for name in ("a", "b", "c")]
    results = [{"type": "tool_result", "tool_use_id": name, "content": name} for name in ("c", "a", "b")]
    text = {"type": "text", "text": "and then"}
    request = parse(
        messages=[*USER, {"role": "assistant", "content": uses}, {"role": "user", "content": [text, *results]}]
    )
    assert [message.text for message in request.messages[2:]] == ["a", "b", "c", "and then"]
    assert request.messages[-1].role is Role.USER
    assert any("order of their calls" in note for note in request.normalisations)


@pytest.mark.requirement("R82")
def test_messages_of_one_role_in_a_row_are_one_turn() -> None:
    """As the API combines them."""
    request = parse(
        messages=[
            *USER,
            {"role": "assistant", "content": "one"},
            {"role": "assistant", "content": [{"type": "text", "text": " two"}, USE]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]},
            {"role": "user", "content": "more"},
        ]
    )
    assert [message.role for message in request.messages] == [Role.USER, Role.ASSISTANT, Role.TOOL, Role.USER]
    assert request.messages[1].text == "one two"


@pytest.mark.requirement("R82")
def test_deferred_tool_is_in_the_prompt_only_when_found_by_search() -> None:
    """So the head of the prompt stays as it was when a tool is loaded later."""
    late = {"name": "late", "input_schema": {"type": "object"}, "defer_loading": True}
    plain, loaded = parse(tools=[TOOL]), parse(tools=[TOOL, late])
    assert [tool.name for tool in loaded.tools] == ["bash"]
    assert plain.tools_sha256 == loaded.tools_sha256
    hosted_search = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    assert [tool.name for tool in parse(tools=[hosted_search, late]).tools] == ["late"]
    with pytest.raises(BadRequest) as caught:
        parse(
            messages=[
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t",
                            "content": [{"type": "tool_reference", "tool_name": "nowhere"}],
                        }
                    ],
                }
            ]
        )
    assert caught.value.param == "messages[0].content[0].content[0]"


@pytest.mark.requirement("R63")
@pytest.mark.parametrize("kind", ["bash_20250124", "text_editor_20250728", "memory_20250818"])
def test_a_tool_of_the_provider_that_the_client_runs_gets_its_schema(kind: str) -> None:
    """The agent's tool stays callable by a model that was not trained on its name alone."""
    (tool,) = parse(tools=[{"type": kind, "name": "it"}]).tools
    assert tool.name == "it" and "command" in json.loads(tool.parameters_json_schema)["properties"]


@pytest.mark.requirement("R63")
def test_tool_choice_thinking_and_format_reach_the_request() -> None:
    """An accepted option takes effect."""
    request = Messages().parse(orjson.dumps(RICH), Route(Ask.COMPLETION))
    assert (request.tool_choice.mode, request.tool_choice.name) == (ToolChoiceMode.NAMED, "bash")
    assert request.tool_choice.parallel_tool_calls is False
    assert request.sampling.thinking is True and request.sampling.thinking_budget_tokens == 2000
    assert request.template_kwargs == {"enable_thinking": True}
    assert json.loads(request.sampling.response_format or "")["type"] == "json_schema"
    assert parse(thinking={"type": "disabled"}).template_kwargs == {"enable_thinking": False}
    assert parse(tools=[TOOL], tool_choice={"type": "any"}).tool_choice.mode is ToolChoiceMode.REQUIRED
    assert parse(tools=[TOOL], tool_choice={"type": "none"}).tool_choice.mode is ToolChoiceMode.NONE


@pytest.mark.requirement("R33")
def test_counting_needs_no_limit_and_takes_a_prefill() -> None:
    """Count_tokens asks for no answer."""
    begun = [*USER, {"role": "assistant", "content": "It is"}]
    assert len(parse(ask=Ask.COUNT, max_tokens=None, messages=begun).messages) == 2


@pytest.mark.requirement("R82")
def test_reasoning_sampled_here_returns_without_its_own_mark() -> None:
    """The signature is the dialect's alone; a thought that was hidden from the client is dropped."""
    thoughts = [
        {"type": "thinking", "thinking": "hm", "signature": signature_of("hm")},
        {"type": "thinking", "thinking": "", "signature": signature_of("secret")},
    ]
    reply = parse(messages=[*USER, {"role": "assistant", "content": thoughts}, *USER]).messages[1]
    assert reply == Message.assistant(reasoning="hm")


@pytest.mark.requirement("R80")
@pytest.mark.parametrize("field", ["messages", "tools"])
def test_deep_nesting_is_refused_not_crashed_on(field: str) -> None:
    """3,000 nested arrays are a bad request, and so is what nests deeper than can be written again."""
    with pytest.raises(BadRequest):
        Messages().parse(b'{"messages": ' + b"[" * 3000 + b"]" * 3000 + b"}", Route(Ask.COMPLETION))
    deep: Any = {}
    for _ in range(300):
        deep = {"a": deep}
    body = {"model": "m", "max_tokens": 1, "messages": USER}
    if field == "tools":
        body["tools"] = [{**TOOL, "input_schema": deep}]
    else:
        body["messages"] = [*USER, {"role": "assistant", "content": [{**USE, "input": deep}]}, *USER]
    with pytest.raises(BadRequest) as caught:
        Messages().parse(json.dumps(body).encode(), Route(Ask.COMPLETION))
    assert caught.value.param is not None and caught.value.param.startswith(field)
