"""The table `chat`: conversations as messages that chat templates take."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tests.support.endpoints.dialect_bodies import DIALECTS
from tests.support.families import template

from penstock.analysis.export import Row, chat
from penstock.analysis.interchange.chat_rows import conversation
from penstock.chat.v1 import chat_pb2, completion_pb2
from penstock.client import InvalidArgument
from penstock.client.wire.results import trajectory as from_proto
from penstock.tables.columns import row_digest
from penstock.trajectory.v1 import trajectory_pb2 as pb
from penstock_codec.chat import Message, Role, TextPart, ToolCallPart, ToolResultPart
from penstock_codec.template import ChatTemplate
from penstock_interception.ingress.dialects.base import Ask, DialectCodec, Route
from penstock_interception.ingress.dialects.chat.dialect import ChatCompletions
from penstock_interception.ingress.dialects.generate_content.dialect import GenerateContent
from penstock_interception.ingress.dialects.messages.dialect import Messages
from penstock_interception.ingress.dialects.responses.dialect import Responses
from penstock_interception.ingress.dialects.responses.items import sealed

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
NOW = datetime(2026, 3, 4, tzinfo=UTC)
SAID = (
    Message(Role.SYSTEM, (TextPart("You are a shell agent."),)),
    Message.user("Read the note: <b>é</b>"),
    Message(
        Role.ASSISTANT, (TextPart("I look."), ToolCallPart("call00001", "bash", '{"command":"cat note | head -n 1"}'))
    ),
    Message(Role.TOOL, (ToolResultPart("call00001", "12:30 & on"),)),
)


def as_transformers(text: str, messages: list[Row], tools: list[Row]) -> str:
    """Renders dicts as `apply_chat_template` does: the same environment, filters and names."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        raise ValueError(message)

    environment.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": NOW.strftime}
    given: dict[str, Any] = {"messages": messages, "tools": tools or None, "documents": None, **SPECIAL}
    return environment.from_string(text).render(**given, add_generation_prompt=False)


@pytest.mark.parametrize("family", ["qwen3", "llama3", "granite", "glm", "mistral", "kimi"])
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.dialect.value)
def test_a_conversation_renders_as_the_gate_rendered_it(dialect: DialectCodec, family: str) -> None:
    """With the real templates' shapes, from a request of every dialect, and the answer to it."""
    body = orjson.dumps(DIALECTS[dialect](SAID, ["bash"]))
    request = dialect.parse(body, Route(Ask.COMPLETION, "m"))
    answer = {"role": "assistant", "parts": [{"kind": "text", "text": "It is 12:30."}]}
    made = conversation(orjson.loads(body), answer)
    assert made.left_out == [] and [row["role"] for row in made.messages] == [
        *("system", "user", "assistant", "tool", "assistant")
    ]
    text = template(family)
    whole = [*request.messages, Message(Role.ASSISTANT, (TextPart("It is 12:30."),))]
    gate = ChatTemplate(text, SPECIAL, now=lambda: NOW).render(whole, request.tools, add_generation_prompt=False)
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": json.loads(tool.parameters_json_schema),
            },
        }
        for tool in request.tools
    ]
    assert as_transformers(text, made.messages, tools) == gate


def test_what_is_no_message_is_named() -> None:
    """Images do not vanish from a row without a trace."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "a screen"}, image]}
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    body = {
        "messages": [
            {"role": "user", "content": [image, {"type": "text", "text": "What is there?"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "I look."}, call]},
            {"role": "user", "content": [result]},
        ]
    }
    made = conversation(body)
    assert made.left_out == ["image", "image"]
    assert made.messages == [
        {"role": "user", "content": "What is there?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I look.",
            "tool_calls": [{"id": "t", "type": "function", "function": {"name": "look", "arguments": {}}}],
        },
        {"role": "tool", "tool_call_id": "t", "name": "look", "content": "a screen"},
    ]


def test_items_of_shells_patches_and_free_text_are_the_calls_that_the_model_made() -> None:
    """Responses has an item type for each. They are one turn, and render as the gate rendered them."""
    body = {
        "model": "m",
        "tools": [{"type": "local_shell"}, {"type": "apply_patch"}, {"type": "custom", "name": "note"}],
        "input": [
            {"type": "message", "role": "user", "content": "Patch it."},
            {"type": "reasoning", "summary": [], "encrypted_content": sealed("I patch.")},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]},
            {"type": "custom_tool_call", "call_id": "n", "name": "note", "input": "*** Begin"},
            {"type": "local_shell_call", "call_id": "s", "action": {"type": "exec", "command": ["ls"], "env": {}}},
            {"type": "apply_patch_call", "call_id": "p", "operation": {"type": "delete_file", "path": "a"}},
            {"type": "custom_tool_call_output", "call_id": "n", "output": "noted"},
            {"type": "local_shell_call_output", "call_id": "s", "output": "a.txt"},
            {"type": "apply_patch_call_output", "call_id": "p", "status": "completed", "output": "gone"},
        ],
    }
    made = conversation(body).messages
    request = Responses().parse(orjson.dumps(body), Route(Ask.COMPLETION, "m"))
    (turn,) = [message for message in made if message["role"] == "assistant"]
    assert [call["function"] for call in turn["tool_calls"]] == [
        {"name": "note", "arguments": {"input": "*** Begin"}},
        {"name": "local_shell", "arguments": {"command": ["ls"]}},
        {"name": "apply_patch", "arguments": {"type": "delete_file", "path": "a"}},
    ]
    assert [row["name"] for row in made if row["role"] == "tool"] == ["note", "local_shell", "apply_patch"]
    text = template("qwen3")
    gate = ChatTemplate(text, SPECIAL, now=lambda: NOW).render(request.messages, add_generation_prompt=False)
    assert as_transformers(text, made, []) == gate and "I patch." in gate


ASKED: Row = {"role": "user", "content": "Look."}
USED: Row = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]}
SHELL: Row = {"type": "shell_call", "call_id": "s", "action": {"commands": ["ls"]}}
PATCH: Row = {"type": "apply_patch_call", "call_id": "p", "operation": {"type": "delete_file", "path": "a"}}


@pytest.mark.requirement("R33")
@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (ChatCompletions(), {"messages": [ASKED, {"role": "assistant", "content": "So.", "reasoning_text": "Hm."}]}),
        (
            ChatCompletions(),
            {"messages": [ASKED, {"role": "assistant", "content": "So.", "reasoning": None, "reasoning_text": "Hm."}]},
        ),
        (GenerateContent(), {"contents": [{"parts": [{"text": "Look."}]}]}),
        (GenerateContent(), {"contents": [{"role": None, "parts": [{"text": "Look."}]}]}),
        (GenerateContent(), {"contents": [{"role": "function", "parts": [{"text": "Look."}]}]}),
        *(
            (
                Messages(),
                {"max_tokens": 9, "messages": [ASKED, USED, {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t", **content}]}]},
            )
            for content in list[Row]([{"content": []}, {"content": None}, {"content": ""}, {}])
        ),
        *(
            (
                GenerateContent(),
                {"contents": [
                    {"role": "user", "parts": [{"text": "Look."}]},
                    {"role": "model", "parts": [{call: {"name": "look", "args": args}}]},
                    {"role": "user", "parts": [{result: {"name": "look", "response": response}}]},
                ]},
            )
            for call, result in (("functionCall", "functionResponse"), ("function_call", "function_response"))
            for args, response in (({"a": 1}, {"output": "seen"}), (None, None), ({}, {}))
        ),
        (ChatCompletions(), {"messages": [ASKED, {"role": "tool", "tool_call_id": "t", "content": []}]}),
        (Responses(), {"input": [ASKED, SHELL, {"type": "shell_call_output", "call_id": "s", "output": []}]}),
        (
            Responses(),
            {"input": [ASKED, SHELL, {"type": "shell_call_output", "call_id": "s", "output": [{"stdout": "a"}]}]},
        ),
        (Responses(), {"input": [ASKED, SHELL, {"type": "function_call_output", "call_id": "s", "output": []}]}),
        *(
            (Responses(), {"input": [ASKED, PATCH, {"type": "apply_patch_call_output", "call_id": "p", **given}]})
            for given in ({"status": "failed"}, {"output": None}, {"output": "gone"})
        ),
    ],
)  # fmt: skip
def test_a_row_has_what_the_gate_read(dialect: DialectCodec, body: Row) -> None:
    """Whatever a client may leave out, and however it names it."""
    made = conversation(body)
    request = dialect.parse(orjson.dumps({"model": "m", **body}), Route(Ask.COMPLETION, "m"))
    text = template("qwen3")
    gate = ChatTemplate(text, SPECIAL, now=lambda: NOW).render(request.messages, add_generation_prompt=False)
    assert as_transformers(text, made.messages, []) == gate and made.left_out == []


def test_images_of_a_function_s_response_are_named() -> None:
    """generateContent has them beside the response's object."""
    image = {"inlineData": {"mimeType": "image/png", "data": "aa"}}
    response = {"name": "look", "response": {"output": "a screen"}, "parts": [image]}
    made = conversation({"contents": [{"role": "user", "parts": [{"functionResponse": response}]}]})
    assert [row["content"] for row in made.messages] == ["a screen"] and made.left_out == ["inlineData"]


@pytest.mark.parametrize("arguments", ["{cut", "[1]", '"text"'])
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (message,) = conversation({"messages": [{"role": "assistant", "tool_calls": [call]}]}).messages
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_calls_without_ids_are_paired_by_the_names_of_their_tools() -> None:
    """generateContent may leave ids out."""
    calls: list[Row] = [{"functionCall": {"name": name, "args": {}}} for name in ("a", "b", "a")]
    results = [{"functionResponse": {"name": name, "response": {"of": n}}} for n, name in enumerate(("b", "a", "a"))]
    made = conversation({"contents": [{"role": "model", "parts": calls}, {"role": "user", "parts": results}]})
    assert [call["id"] for call in made.messages[0]["tool_calls"]] == ["call_0", "call_1", "call_2"]
    assert [row["tool_call_id"] for row in made.messages[1:]] == ["call_1", "call_0", "call_2"]


def call(name: str, asked: list[Row], answer: str, *, parent: str | None = None, injected: bool = False) -> pb.Call:
    part = chat_pb2.Part(text=chat_pb2.Text(text=answer))
    done = completion_pb2.Completion(
        message=chat_pb2.Message(role=chat_pb2.ROLE_ASSISTANT, parts=[part]),
        finish_reason=chat_pb2.FINISH_REASON_STOP,
        model="m",
    )
    body = orjson.dumps({"messages": asked})
    return pb.Call(
        call_id=name,
        parent_call_id=parent,
        state=pb.CALL_STATE_DELIVERED,
        completion=done,
        injected=injected,
        tools_sha256=b"t",
        request_body=body,
    )


def trajectory() -> pb.Trajectory:
    """A main conversation of two calls, a branch of one that leaves it after the first, and one without an answer."""
    first: list[Row] = [{"role": "user", "content": "u"}]
    after: list[Row] = [*first, {"role": "assistant", "content": "a"}]
    message = pb.Trajectory(rollout_id="r", reward=pb.Reward(value=0.5), grade=pb.GRADE_EXACT)
    message.calls.extend(
        [
            call("c0", first, "a"),
            call("c1", [*after, {"role": "user", "content": "v"}], "b", parent="c0"),
            call("c2", [*after, {"role": "user", "content": "w"}], "c", parent="c0", injected=True),
            pb.Call(call_id="c3", state=pb.CALL_STATE_FAILED),
        ]
    )
    message.calls[0].tools.add(name="f", description="d", parameters_json_schema='{"type":"object"}')
    message.branches.extend(
        [
            pb.Branch(branch_id="b0", branch_class=pb.CALL_CLASS_MAIN, call_ids=["c0", "c1"]),
            pb.Branch(branch_id="b1", branch_class=pb.CALL_CLASS_SUB_AGENT, call_ids=["c2"], fork_call_id="c0"),
            pb.Branch(branch_id="b2", branch_class=pb.CALL_CLASS_TITLE, call_ids=["c3"]),
        ]
    )
    return message


def test_each_branch_with_an_answer_is_a_row() -> None:
    one, two = chat(from_proto(trajectory()))
    assert [row["content"] for row in one["messages"]] == ["u", "a", "v", "b"]
    assert [row["content"] for row in two["messages"]] == ["u", "a", "w", "c"]
    assert (one["role"], one["call_id"], one["call_ids"]) == ("main", "c1", ["c0", "c1"])
    assert (two["role"], two["call_id"], two["call_ids"]) == ("sub_agent", "c2", ["c0", "c2"])
    assert [(row["shared_messages"], row["injected"]) for row in (one, two)] == [(0, False), (2, True)]
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert one["tools"] == two["tools"] == [{"type": "function", "function": function}]
    for row in (one, two):
        assert (row["reward"], row["grade"], row["finish_reason"], row["model"]) == (0.5, "exact", "stop", "m")
        assert (row["rollout_rows"], row["row_sha256"]) == (2, row_digest(row))


def said(*texts: str) -> list[Row]:
    """User and assistant in turn."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def rollout(*calls: pb.Call, branches: list[list[str]]) -> pb.Trajectory:
    message = pb.Trajectory(rollout_id="r", calls=calls)
    for index, call_ids in enumerate(branches):
        message.branches.add(branch_id=f"b{index}", branch_class=pb.CALL_CLASS_MAIN, call_ids=call_ids)
    return message


@pytest.mark.parametrize("written", ["w", "a"])
def test_a_written_answer_in_the_middle_counts_though_what_follows_has_the_call_before_it_as_parent(
    written: str,
) -> None:
    """Its tokens do not exist, so the graph passes it over; also one that says what a sampled one said."""
    message = rollout(
        call("c1", said("u"), "a"),
        call("c2", said("u", "a", "v"), written, parent="c1", injected=True),
        call("c3", said("u", "a", "v", written, "x"), "b", parent="c1"),
        branches=[["c1", "c3"], ["c2"]],
    )
    one, two = chat(from_proto(message))
    assert (one["call_ids"], one["injected"]) == (["c1", "c2", "c3"], True)
    assert (two["call_ids"], two["injected"]) == (["c1", "c2"], True)


def test_a_conversation_that_shares_only_tokens_with_another_line_has_none_of_its_calls() -> None:
    """A new root is stored behind the call with which it has most of its prompt in common."""
    message = rollout(
        call("c1", said("u"), "a", injected=True),
        call("c2", said("v"), "b", parent="c1"),
        branches=[["c1"], ["c2"]],
    )
    found = [(row["call_ids"], row["injected"]) for row in chat(from_proto(message))]
    assert found == [(["c1"], True), (["c2"], False)]


def test_equal_answers_of_several_lines_are_told_apart() -> None:
    """By the place at which they were asked for; then the call's own line counts."""
    message = rollout(
        call("c1", said("u"), "ok"),
        call("s1", said("u"), "ok", injected=True),
        call("c2", said("u", "ok", "v"), "ok", parent="c1"),
        call("s2", said("title?"), "ok", injected=True),
        call("c3", said("u", "ok", "v", "ok", "x"), "ok", parent="c2"),
        branches=[["c1", "c2", "c3"], ["s1"], ["s2"]],
    )
    found = [(row["call_ids"], row["injected"]) for row in chat(from_proto(message))]
    assert found == [(["c1", "c2", "c3"], False), (["s1"], True), (["s2"], True)]


def test_an_answer_that_says_nothing_is_the_last_of_its_line() -> None:
    message = rollout(
        call("c1", said("u"), "a"),
        call("c2", said("u", "a", "v"), "", parent="c1", injected=True),
        branches=[["c1", "c2"]],
    )
    message.calls[1].completion.message.ClearField("parts")
    (row,) = chat(from_proto(message))
    assert (row["call_ids"], row["injected"]) == (["c1", "c2"], True)
    assert [one["content"] for one in row["messages"]] == ["u", "a", "v"]


def test_a_trajectory_without_bodies_makes_no_conversation() -> None:
    """A row without the agent's messages would teach nothing, and seem whole."""
    message = trajectory()
    message.calls[1].request_body = b""
    with pytest.raises(InvalidArgument, match="bodies=True") as caught:
        list(chat(from_proto(message)))
    assert caught.value.reason == "BODIES_MISSING"
