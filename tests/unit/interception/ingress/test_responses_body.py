"""Bodies of OpenAI Responses: items become messages, tools of all kinds functions; what is refused names its field."""

from __future__ import annotations

import copy
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
    ToolResultPart,
)
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.ingress.dialects.base import Ask, BadRequest, Route
from penstock_interception.ingress.dialects.responses.dialect import Responses
from penstock_interception.ingress.dialects.responses.items import sealed, unsealed

FUNCTION: dict[str, Any] = {"type": "function", "name": "bash", "parameters": {"type": "object"}}
PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Changes files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin end"},
}
NOTES: dict[str, Any] = {"type": "namespace", "name": "mcp__notes", "tools": [{"type": "function", "name": "read"}]}
CALL: dict[str, Any] = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "c1",
    "name": "bash",
    "arguments": '{"a":  1}',
}
WHOLE: dict[str, Any] = {
    "model": "m",
    "instructions": "Be brief.",
    "input": [
        {"role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {"role": "user", "content": "hello"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": sealed("hm")},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok", "annotations": []}]},
        CALL,
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "*** Begin"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "out"}]},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
    ],
    "tools": [FUNCTION, PATCH, NOTES, {"type": "web_search"}, {"type": "local_shell"}],
    "tool_choice": {"type": "function", "name": "bash"},
    "parallel_tool_calls": True,
    "reasoning": {"effort": "high", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "low"},
    "store": False,
    "stream": True,
}


def parse(**body: Any) -> ChatRequest:
    return Responses().parse(orjson.dumps({"input": "hi", **body}), Route(Ask.COMPLETION))


def messages(*items: Any) -> tuple[Message, ...]:
    return parse(input=list(items)).messages


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)


@pytest.mark.requirement("R33")
@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_a_bad_request_or_a_request(body: bytes) -> None:
    """Nothing but BadRequest, whatever the bytes."""
    _parses_or_is_refused(body)


@pytest.mark.requirement("R33")
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_body_is_a_bad_request_or_a_request(data: st.DataObject) -> None:
    """Whatever stands wherever in a body that was valid, it is read or refused with a message."""
    body = copy.deepcopy(WHOLE)
    at: Any = body
    while True:
        key = data.draw(st.sampled_from(list(at) if isinstance(at, dict) else range(len(at))))
        inner = at[key]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.booleans()):
            at[key] = data.draw(JSON | st.sampled_from(["message", "function_call", "namespace", "custom", [WHOLE]]))
            break
        at = inner
    try:
        raw = orjson.dumps(body)
    except TypeError:  # an integer that JSON writers refuse
        return
    _parses_or_is_refused(raw)


def _parses_or_is_refused(body: bytes) -> None:
    try:
        request = Responses().parse(body, Route(Ask.COMPLETION))
    except BadRequest as error:
        assert error.message
    else:
        assert request.messages
    Responses().essence(body)


@pytest.mark.requirement("R33")
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"type": "message_from_mars"}]}, "input[0]"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"truncation": "some"}, "truncation"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "telepathy"}]}, "tools[0]"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools"),
        ({"tools": [FUNCTION], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.tools"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_a_bad_field_is_named(body: dict[str, Any], param: str) -> None:
    """The dialect's 400 names the field."""
    with pytest.raises(BadRequest) as caught:
        parse(**body)
    assert caught.value.param == param, caught.value.message


@pytest.mark.requirement("R33", "R86")
@pytest.mark.parametrize(
    ("body", "note"),
    [
        ({"tools": [FUNCTION, {"type": "web_search", "external_web_access": True}]}, "web_search was left out"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "mcp was left out"),
        ({"tools": [{"type": "shell", "environment": {"type": "container_auto"}}]}, "shell was left out"),
        ({"input": [{"role": "user", "content": "x"}, {"type": "web_search_call", "id": "w"}]}, "input[1]"),
        ({"tool_choice": "auto"}, "tool_choice without tools"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls without tools"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 3}, "logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "logprobs"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "xhigh"}}, "its level was ignored"),
        ({"max_tool_calls": 3}, "max_tool_calls was ignored"),
        (
            {
                "tools": [FUNCTION],
                "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "bash"}]},
            },
            "does not allow",
        ),
        ({"instructions": "a", "input": [{"role": "developer", "content": "b"}]}, "were made one"),
    ],
)
def test_normalisations_are_recorded(body: dict[str, Any], note: str) -> None:
    """Each change of the request is one sentence in the record."""
    assert any(note in sentence for sentence in parse(**body).normalisations)


@pytest.mark.requirement("R64")
def test_a_plain_request_is_recorded_as_it_came() -> None:
    """Nothing is normalised, and what is unset stays unset."""
    request = parse(model="m", temperature=0, store=True, user="someone", client_metadata={"a": "b"})
    assert request.normalisations == ()
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.max_tokens) == (0, None, None)
    assert request.messages == (Message.user("hi"),)


@pytest.mark.requirement("R82")
def test_the_items_of_one_turn_are_one_message() -> None:
    """Reasoning, text and parallel calls of one turn come back together, results each by itself."""
    request = Responses().parse(orjson.dumps(WHOLE), Route(Ask.COMPLETION))
    system, user, said, first, second = request.messages
    assert system == Message.system("Be brief.\n\nrules") and user == Message.user("hello")
    assert said.parts == (
        ReasoningPart("hm"),
        TextPart("ok"),
        ToolCallPart("c1", "bash", '{"a":  1}'),
        ToolCallPart("c2", "apply_patch", '{"input":"*** Begin"}'),
    )
    assert (first.tool_results[0].call_id, first.text, second.text) == ("c1", "out", "done")


@pytest.mark.requirement("R82")
def test_consecutive_turns_are_separated_by_their_item_ids() -> None:
    """An answer that was cut off and the one after it are two turns."""
    one, two = "1" * 32, "2" * 32

    def said(text: str, call: str) -> dict[str, Any]:
        content = [{"type": "output_text", "text": text}]
        return {"type": "message", "id": f"msg_{call}", "role": "assistant", "content": content}

    call = {**CALL, "id": f"fc_{two}_0"}
    cut, rest = messages(said("I will", one), said("I do", two), call)
    assert cut == Message.assistant("I will")
    assert rest == Message.assistant("I do", ToolCallPart("c1", "bash", '{"a":  1}'))


def test_tools_of_every_kind_are_functions_to_the_model() -> None:
    """Freeform, namespaced and built-in tools of the client are told as functions; more of them may come as an item."""
    more = {"type": "additional_tools", "role": "developer", "tools": [{"type": "shell"}, {"type": "apply_patch"}]}
    inner = {"type": "namespace", "name": "notes", "tools": [PATCH, NOTES]}
    request = parse(tools=[FUNCTION, {"type": "local_shell"}, inner], input=[more, {"role": "user", "content": "hi"}])
    names = [tool.name for tool in request.tools]
    assert names == ["bash", "local_shell", "notes__apply_patch", "notes__mcp__notes__read", "shell", "apply_patch"]
    custom = request.tools[2]
    assert "start: begin end" in custom.description and "lark" in custom.description
    assert orjson.loads(custom.parameters_json_schema)["required"] == ["input"]


def test_calls_and_results_of_built_in_tools_are_read() -> None:
    """Shell commands and patches, with failures, structured output and images."""
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    action: dict[str, Any] = {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": None}
    operation = {"type": "update_file", "path": "a", "diff": "@@"}
    said, *heard = messages(
        {"type": "local_shell_call", "call_id": "c1", "action": action, "status": "completed"},
        {"type": "shell_call", "call_id": "c2", "action": {"commands": ["ls"]}},
        {"type": "apply_patch_call", "call_id": "c3", "operation": operation},
        {"type": "local_shell_call_output", "id": "c1", "output": "a"},
        {"type": "shell_call_output", "call_id": "c2", "output": [{"stdout": "a", "stderr": ""}]},
        {"type": "apply_patch_call_output", "call_id": "c3", "status": "failed"},
        {"type": "function_call_output", "call_id": "c4", "output": [image]},
    )
    assert [(call.name, orjson.loads(call.arguments_json)) for call in said.tool_calls] == [
        ("local_shell", {"command": ["ls", "-l"]}),
        ("shell", {"commands": ["ls"]}),
        ("apply_patch", operation),
    ]
    assert [message.tool_results[0] for message in heard] == [
        ToolResultPart("c1", "a"),
        ToolResultPart("c2", '[{"stdout":"a","stderr":""}]'),
        ToolResultPart("c3", "failed", True),
        ToolResultPart("c4", "", images=(ImagePart.inline(bytes(3), "image/png"),)),
    ]


@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_sealed_reasoning_comes_back_and_a_foreign_seal_is_kept(text: str) -> None:
    """Our own encrypted_content is read; another provider's stays what it is."""
    assert unsealed(sealed(text)) == text
    (said,) = messages(
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "x"}
    )
    assert said.parts == (ReasoningPart("s", b"x"),)


@pytest.mark.requirement("R63")
def test_thinking_format_and_choice_reach_the_request() -> None:
    """An accepted option takes effect."""
    request = Responses().parse(orjson.dumps(WHOLE), Route(Ask.COMPLETION))
    assert (request.tool_choice.mode, request.tool_choice.name) == (ToolChoiceMode.NAMED, "bash")
    assert request.tool_choice.parallel_tool_calls is True and request.stream
    assert request.template_kwargs == {"enable_thinking": True, "reasoning_effort": "high"}
    assert request.sampling.thinking is True
    form = orjson.loads(request.sampling.response_format or "")
    assert form == {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    off = parse(reasoning={"effort": "none"}, text={"format": {"type": "json_object"}})
    assert off.template_kwargs == {"enable_thinking": False} and off.sampling.thinking is False
    assert off.sampling.response_format == '{"type":"json_object"}'
    named = parse(tools=[NOTES], tool_choice={"type": "function", "name": "read", "namespace": "mcp__notes"})
    assert named.tool_choice.name == "mcp__notes__read"
    required = parse(tools=[PATCH], tool_choice={"type": "custom", "name": "apply_patch"})
    assert required.tool_choice.name == "apply_patch"


def test_an_image_of_the_user_is_passed_through() -> None:
    """Images are references, for a model that sees."""
    content = [{"type": "input_text", "text": "look"}, {"type": "input_image", "image_url": "https://x/y.png"}]
    (message,) = messages({"role": "user", "content": content})
    assert message == Message(Role.USER, (TextPart("look"), ImagePart("https://x/y.png")))


@pytest.mark.requirement("R80")
def test_deep_nesting_is_refused_not_crashed_on() -> None:
    """3,000 nested arrays are a bad request, and so are namespaces within namespaces."""
    with pytest.raises(BadRequest):
        Responses().parse(b'{"input": ' + b"[" * 3000 + b"]" * 3000 + b"}", Route(Ask.COMPLETION))
    opened = b'{"type": "namespace", "name": "n", "tools": ['
    for depth in (50, 300, 500, 3000):
        _parses_or_is_refused(b'{"input": "hi", "tools": [' + opened * depth + b"]}" * depth + b"]}")
