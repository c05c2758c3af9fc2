"""Bodies of Google generateContent: what is refused names its field, what is normalised is recorded."""

from __future__ import annotations

import base64
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_codec.chat import (
    ImagePart,
    Message,
    Part,
    ReasoningPart,
    Role,
    TextPart,
    ToolCallPart,
    ToolChoiceMode,
    ToolResultPart,
)
from penstock_interception.domain.requests import ChatRequest
from penstock_interception.ingress.dialects.base import Ask, BadRequest, Route
from penstock_interception.ingress.dialects.generate_content.dialect import GenerateContent
from penstock_interception.ingress.dialects.generate_content.schema import json_schema

CODEC = GenerateContent()
ROUTE = Route(Ask.COMPLETION, "m", False)
HI: dict[str, Any] = {"role": "user", "parts": [{"text": "hi"}]}
BASH: dict[str, Any] = {"name": "bash", "parameters": {"type": "OBJECT", "properties": {"command": {"type": "STRING"}}}}
LS: dict[str, Any] = {"name": "ls"}
TOOLS: list[Any] = [{"functionDeclarations": [BASH, LS]}]
PIXEL = base64.urlsafe_b64encode(b"\xff\xfe\xfd\xfc?").decode().rstrip("=")


def parse(*contents: dict[str, Any], **body: Any) -> ChatRequest:
    return CODEC.parse(orjson.dumps({"contents": contents or [HI], **body}), ROUTE)


def model(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "model", "parts": parts}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "parts": parts}


def called(name: str, call_id: str | None = None, /, **args: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": args, **({"id": call_id} if call_id else {})}}


def answered(name: str, response: Any, call_id: str | None = None, **more: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": response, **({"id": call_id} if call_id else {}), **more}}


def function_calling(**config: Any) -> dict[str, Any]:
    return {"functionCallingConfig": config}


# Whatever the bytes ---------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
VALID: dict[str, Any] = {
    "contents": [
        user({"text": "look"}, {"inlineData": {"mimeType": "image/png", "data": PIXEL}}),
        model({"text": "hm", "thought": True}, {"text": "so"}, called("bash", "c1", command="ls")),
        user(answered("bash", {"output": "a"}, "c1", parts=[{"inlineData": {"mimeType": "image/png", "data": PIXEL}}])),
        model({"executableCode": {"code": "1"}}),
        user({"fileData": {"fileUri": "https://a/b.png"}}),
    ],
    "systemInstruction": {"parts": [{"text": "You are a shell."}]},
    "tools": [*TOOLS, {"googleSearch": {}}],
    "toolConfig": function_calling(mode="ANY", allowedFunctionNames=["bash"]),
    "generationConfig": {
        "temperature": 1,
        "topP": 0.5,
        "topK": 64.0,
        "maxOutputTokens": 8,
        "stopSequences": ["x"],
        "seed": 1,
        "responseMimeType": "application/json",
        "responseSchema": {"type": "OBJECT", "properties": {"a": {"anyOf": [{"type": "STRING"}]}}},
        "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 8},
    },
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a JSON value."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += places(item, (*path, key))
    return found


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with `new` at a place."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = put(copy[path[0]], path[1:], new)
    return copy


def parses_or_is_refused(body: bytes, route: Route = ROUTE) -> None:
    try:
        request = CODEC.parse(body, route)
    except BadRequest as error:
        assert error.message
    else:
        assert request.messages


@pytest.mark.requirement("R33")
@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_a_bad_request_or_a_request(body: bytes) -> None:
    """Nothing but BadRequest, whatever the bytes."""
    parses_or_is_refused(body)


@pytest.mark.requirement("R33", "R80")
@settings(max_examples=300, deadline=None)
@given(st.sampled_from(places(VALID)), JSON, st.sampled_from(["", "x"]))
def test_mutated_body_is_a_bad_request_or_a_request(place: tuple[Any, ...], new: Any, cut: str) -> None:
    """A body that is nearly right gets 400 with a message, never anything else."""
    try:
        data = orjson.dumps(put(VALID, place, new))
    except TypeError:  # an integer that JSON writers refuse
        return
    parses_or_is_refused(data[: len(data) - len(cut)])
    parses_or_is_refused(b'{"generateContentRequest":' + data + b"}", Route(Ask.COUNT, "m"))


@pytest.mark.requirement("R80")
@pytest.mark.parametrize("depth", [200, 1000, 5000])
@pytest.mark.parametrize(
    "at",
    [
        ("contents",),
        ("contents", 1, "parts", 2, "functionCall", "args", "command"),
        ("contents", 2, "parts", 0, "functionResponse", "response", "output"),
        ("tools", 0, "functionDeclarations", 0, "parameters", "items"),
        ("generationConfig", "responseSchema"),
    ],
)
@pytest.mark.parametrize("brackets", [(b"[", b"]"), (b'{"items":', b"}"), (b'{"anyOf":[', b"]}")])
def test_deep_nesting_is_refused_not_crashed_on(depth: int, at: tuple[Any, ...], brackets: tuple[bytes, bytes]) -> None:
    """Thousands of nested values are a bad request wherever they stand."""
    body = {**VALID, "tools": [{"functionDeclarations": [{**BASH, "parameters": {"items": 0}}]}]}
    data = orjson.dumps(put(body, at, "@deep@"))
    opened, closed = brackets
    parses_or_is_refused(data.replace(b'"@deep@"', opened * depth + b"1" + closed * depth))


# What is refused, and what is recorded --------------------------------------------------------------------------------


@pytest.mark.requirement("R33", "R65")
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"contents": []}, "contents"),
        ({"contents": "hi"}, "contents"),
        ({"contents": [{"role": "wizard", "parts": []}]}, "contents[0].role"),
        ({"contents": [{"role": "system", "parts": [{"text": "x"}]}]}, "contents[0].role"),
        ({"contents": [user({"text": 1})]}, "contents[0].parts[0].text"),
        (
            {"contents": [user({"text": "a", "inline_data": {"mimeType": "image/png", "data": ""}})]},
            "contents[0].parts[0]",
        ),
        ({"contents": [user({"hologram": {}})]}, "contents[0].parts[0]"),
        ({"contents": [user(called("bash"))]}, "contents[0].parts[0]"),
        ({"contents": [model(answered("bash", {}))]}, "contents[0].parts[0]"),
        ({"contents": [model({"functionCall": {"args": {}}})]}, "contents[0].parts[0].functionCall.name"),
        (
            {"contents": [model({"functionCall": {"name": "a", "args": "{}"}})]},
            "contents[0].parts[0].functionCall.args",
        ),
        (
            {"contents": [user({"inlineData": {"mimeType": "application/pdf", "data": ""}})]},
            "contents[0].parts[0].inlineData.mimeType",
        ),
        (
            {"contents": [user({"inlineData": {"mimeType": "image/png", "data": "a"}})]},
            "contents[0].parts[0].inlineData.data",
        ),
        (
            {"contents": [user({"fileData": {"mimeType": "video/mp4", "fileUri": "gs://a"}})]},
            "contents[0].parts[0].fileData.mimeType",
        ),
        (
            {"contents": [user(answered("a", {}, parts=[{}]))]},
            "contents[0].parts[0].functionResponse.parts[0]",
        ),
        ({"systemInstruction": user(called("bash"))}, "systemInstruction.parts[0]"),
        ({"cachedContent": "cachedContents/1"}, "cachedContent"),
        ({"generationConfig": {"temperature": "hot"}}, "generationConfig.temperature"),
        ({"generation_config": {"top_p": 0}}, "generation_config.top_p"),
        ({"generationConfig": {"topK": 1.5}}, "generationConfig.topK"),
        ({"generationConfig": {"maxOutputTokens": 0}}, "generationConfig.maxOutputTokens"),
        ({"generationConfig": {"candidateCount": 2}}, "generationConfig.candidateCount"),
        ({"generationConfig": {"stopSequences": ["a"] * 17}}, "generationConfig.stopSequences"),
        ({"generationConfig": {"responseModalities": ["text", "IMAGE"]}}, "generationConfig.responseModalities"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "generationConfig.responseMimeType"),
        ({"generationConfig": {"responseSchema": {"items": 1}}}, "generationConfig.responseSchema.items"),
        (
            {"generationConfig": {"thinkingConfig": {"thinkingBudget": -2}}},
            "generationConfig.thinkingConfig.thinkingBudget",
        ),
        ({"tools": [{"functionDeclarations": [{"name": "a b"}]}]}, "tools[0].functionDeclarations[0].name"),
        ({"tools": [{"functionDeclarations": [BASH]}, {"functionDeclarations": [BASH]}]}, "tools"),
        (
            {"tools": TOOLS, "toolConfig": function_calling(mode="SOMETIMES")},
            "toolConfig.functionCallingConfig.mode",
        ),
        (
            {"tools": TOOLS, "toolConfig": function_calling(mode="ANY", allowedFunctionNames=["rm"])},
            "toolConfig.functionCallingConfig.allowedFunctionNames",
        ),
        (
            {"tools": TOOLS, "toolConfig": function_calling(allowedFunctionNames=["ls"])},
            "toolConfig.functionCallingConfig.allowedFunctionNames",
        ),
    ],
)
def test_a_bad_field_is_named(body: dict[str, Any], param: str) -> None:
    """The dialect's 400 names the field."""
    with pytest.raises(BadRequest) as caught:
        CODEC.parse(orjson.dumps({"contents": [HI], **body}), ROUTE)
    assert caught.value.param == param


@pytest.mark.requirement("R33", "R86")
@pytest.mark.parametrize(
    ("body", "note"),
    [
        ({"tools": [{"googleSearch": {}}]}, "googleSearch is a tool of the provider"),
        ({"tools": [{"codeExecution": {}, "urlContext": {}}]}, "urlContext is a tool of the provider"),
        ({"toolConfig": function_calling(mode="AUTO")}, "toolConfig without tools"),
        ({"tools": TOOLS, "toolConfig": function_calling(mode="VALIDATED")}, "VALIDATED is treated as AUTO"),
        ({"generationConfig": {"responseLogprobs": True}}, "logprobs"),
        ({"generationConfig": {"routingConfig": {}}}, "generationConfig.routingConfig was ignored"),
        ({"generationConfig": {"thinkingConfig": {"thinkingLevel": "high"}}}, "thinkingLevel HIGH"),
        ({"magic": 1}, "magic was ignored"),
        ({"contents": [model({"codeExecutionResult": {}}), HI]}, "(code_execution_result)"),
        (
            {"tools": TOOLS, "toolConfig": function_calling(mode="VALIDATED", allowedFunctionNames=["ls"])},
            "allows 1 of 2 functions",
        ),
    ],
)
def test_normalisations_are_recorded(body: dict[str, Any], note: str) -> None:
    """Each change of the request is one sentence in the record; the provider's tools never leave the gate."""
    request = CODEC.parse(orjson.dumps({"contents": [HI], **body}), ROUTE)
    assert any(note in sentence for sentence in request.normalisations), request.normalisations
    assert not {tool.name for tool in request.tools} - {"bash", "ls"}


@pytest.mark.requirement("R64")
def test_a_plain_request_is_recorded_as_it_came() -> None:
    """Nothing is normalised, what is unset or null stays unset, the line's model is the request's."""
    request = parse(safetySettings=[], generationConfig={"temperature": 0, "seed": None}, tools=None)
    assert request.normalisations == ()
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.seed) == (0, None, None)
    assert (request.model, request.stream, request.template_kwargs) == ("m", False, {})


# What a body means ----------------------------------------------------------------------------------------------------


def test_every_kind_of_part_keeps_its_meaning() -> None:
    """Text, images by bytes of either alphabet or by reference, thoughts with their mark, calls, results, failures."""
    system, one, two, three, four, five = parse(
        user({"text": "look "}, {"text": "here"}, {"inlineData": {"mimeType": "image/png", "data": PIXEL}}),
        model({"text": "hm", "thought": True, "thoughtSignature": "s"}, {"text": "I look."}, called("bash", "c1", a=1)),
        user(
            answered("bash", {"output": "out"}, "c1", parts=[{"fileData": {"fileUri": "https://a/b.png"}}]),
            answered("ls", {"error": "no"}),
            {"text": "go on"},
        ),
        systemInstruction={"parts": [{"text": "rules"}]},
    ).messages
    assert system == Message.system("rules")
    assert one.parts == (TextPart("look "), TextPart("here"), ImagePart.inline(b"\xff\xfe\xfd\xfc\x3f", "image/png"))
    assert two.parts == (ReasoningPart("hm", b"s"), TextPart("I look."), ToolCallPart("c1", "bash", '{"a":1}'))
    assert three.parts == (ToolResultPart("c1", "out", False, "bash", (ImagePart("https://a/b.png"),)),)
    assert four.parts == (ToolResultPart("ls", "no", True, "ls"),)
    assert (five.role, five.text) == (Role.USER, "go on")


@pytest.mark.requirement("R33")
@pytest.mark.parametrize("instruction", ["rules", {"text": "rules"}, {"role": "system", "parts": [{"text": "rules"}]}])
def test_a_system_instruction_is_a_text_a_part_or_a_content(instruction: Any) -> None:
    """What clients write is taken."""
    assert parse(system_instruction=instruction).messages[0] == Message.system("rules")


def test_snake_case_means_the_same_as_camel_case() -> None:
    """The API takes both, so both are read alike."""
    snake = parse(
        HI,
        model({"function_call": {"name": "bash", "args": {}}}),
        {"role": "function", "parts": [{"function_response": {"name": "bash", "response": {"output": "x"}}}]},
        tools=[{"function_declarations": [{"name": "bash", "parameters_json_schema": {"type": "object"}}]}],
        tool_config={"function_calling_config": {"mode": "any", "allowed_function_names": ["bash"]}},
        generation_config={"max_output_tokens": 5, "thinking_config": {"include_thoughts": True, "thinking_budget": 0}},
    )
    camel = parse(
        HI,
        model({"functionCall": {"name": "bash", "args": {}}}),
        user({"functionResponse": {"name": "bash", "response": {"output": "x"}}}),
        tools=[{"functionDeclarations": [{"name": "bash", "parametersJsonSchema": {"type": "object"}}]}],
        toolConfig={"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["bash"]}},
        generationConfig={"maxOutputTokens": 5, "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 0}},
    )
    assert snake == camel
    assert (camel.tool_choice.mode, camel.tool_choice.name) == (ToolChoiceMode.NAMED, "bash")
    assert (camel.sampling.max_tokens, camel.sampling.thinking) == (5, False)
    assert camel.template_kwargs == {"enable_thinking": False}


@pytest.mark.requirement("R82")
def test_results_without_ids_match_calls_by_name_and_order_stably() -> None:
    """A client that writes no ids gets stable ones, each result that of the call that it answers."""
    history = [
        HI,
        model(called("bash", command="a"), called("ls"), called("bash", command="b")),
        user(answered("ls", {"output": "1"}), answered("bash", {"output": "2"}), answered("bash", {"output": "3"})),
    ]
    more = [*history, model(called("bash", command="c")), user(answered("bash", {"result": 4}))]
    messages = parse(*more).messages
    assert messages[: len(parse(*history).messages)] == parse(*history).messages
    calls = [call for message in messages for call in message.tool_calls]
    results = [result for message in messages for result in message.tool_results]
    assert [call.id for call in calls] == ["call_1", "call_2", "call_3", "call_4"]
    assert [(result.call_id, result.text) for result in results] == [
        ("call_2", "1"),
        ("call_1", "2"),
        ("call_3", "3"),
        ("call_4", '{"result":4}'),
    ]


@pytest.mark.requirement("R82")
def test_streamed_pieces_are_one_turn_again() -> None:
    """Chunks that a client kept as contents of their own are the one turn that was sampled."""
    messages = parse(
        HI,
        model({"text": "thin", "thought": True}),
        model({"text": "king", "thought": True, "thoughtSignature": "s"}),
        model({"text": "I "}),
        model({"text": "look."}, {"text": "", "thoughtSignature": "t"}),
        model(called("bash", "c1"), {"thoughtSignature": "skip_thought_signature_validator"}),
        model(called("ls", "c2")),
        HI,
    ).messages
    assert [message.role for message in messages] == [Role.USER, Role.ASSISTANT, Role.USER]
    assert messages[1] == Message(
        Role.ASSISTANT,
        (
            ReasoningPart("thinking", b"s"),
            TextPart("I look."),
            ToolCallPart("c1", "bash", "{}"),
            ToolCallPart("c2", "ls", "{}"),
        ),
    )


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(
    ("config", "thinking", "budget"),
    [
        ({"includeThoughts": True}, None, None),
        ({"thinkingBudget": -1}, None, None),
        ({"thinkingBudget": 0}, False, None),
        ({"thinkingBudget": 512.0}, True, 512),
        ({"thinkingLevel": "LOW"}, True, None),
        ({"thinkingLevel": "MINIMAL"}, False, None),
    ],
)
def test_thinking_and_its_budget_take_effect(config: dict[str, Any], thinking: bool | None, budget: int | None) -> None:
    """An accepted option takes effect; -1 and unset leave it to the model."""
    request = parse(generationConfig={"thinkingConfig": config})
    assert (request.sampling.thinking, request.sampling.thinking_budget_tokens) == (thinking, budget)
    assert request.template_kwargs == ({} if thinking is None else {"enable_thinking": thinking})


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"responseMimeType": "text/plain"}, None),
        ({"responseMimeType": "application/json"}, {"type": "json_object"}),
        (
            {"responseMimeType": "application/json", "responseSchema": {"type": "ARRAY", "items": {"type": "STRING"}}},
            {
                "type": "json_schema",
                "json_schema": {"name": "response", "schema": {"type": "array", "items": {"type": "string"}}},
            },
        ),
        (
            {"responseJsonSchema": {"type": "object"}},
            {"type": "json_schema", "json_schema": {"name": "response", "schema": {"type": "object"}}},
        ),
    ],
)
def test_the_form_of_the_answer_reaches_the_engine_in_one_notation(config: dict[str, Any], expected: Any) -> None:
    """JSON and schemas are asked of the engine as the OpenAI API writes them."""
    given = parse(generationConfig=config).sampling.response_format
    assert (orjson.loads(given) if given is not None else None) == expected


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(
    ("config", "mode", "tools"),
    [
        ({"mode": "AUTO"}, ToolChoiceMode.AUTO, ["bash", "ls"]),
        ({"mode": "NONE"}, ToolChoiceMode.NONE, ["bash", "ls"]),
        ({"mode": "ANY"}, ToolChoiceMode.REQUIRED, ["bash", "ls"]),
        ({"mode": "ANY", "allowedFunctionNames": ["ls", "bash"]}, ToolChoiceMode.REQUIRED, ["bash", "ls"]),
        ({"mode": "ANY", "allowedFunctionNames": ["ls"]}, ToolChoiceMode.NAMED, ["bash", "ls"]),
        ({"mode": "VALIDATED", "allowedFunctionNames": ["ls"]}, ToolChoiceMode.AUTO, ["ls"]),
    ],
)
def test_each_mode_of_choosing_functions_is_honoured(
    config: dict[str, Any], mode: ToolChoiceMode, tools: list[str]
) -> None:
    """What may not be called is not shown where it cannot be said otherwise."""
    request = parse(tools=TOOLS, toolConfig=function_calling(**config))
    assert (request.tool_choice.mode, [tool.name for tool in request.tools]) == (mode, tools)


def test_a_schema_of_google_is_shown_to_the_model_as_json_schema() -> None:
    """Upper-case types, null flags, counts as strings and an order of properties have their counterparts."""
    schema = {
        "type": "OBJECT",
        "propertyOrdering": ["b", "a"],
        "properties": {
            "a": {"type": "STRING", "nullable": True, "enum": ["x"], "maxLength": "5", "example": "x"},
            "b": {"any_of": [{"type": "INTEGER", "format": "int32"}, {"type": "TYPE_UNSPECIFIED"}], "min_items": 1},
        },
        "required": ["a"],
        "additionalProperties": False,
        "title": None,
    }
    converted = json_schema(schema, "x")
    assert converted == {
        "type": "object",
        "properties": {
            "b": {"anyOf": [{"type": "integer", "format": "int32"}, {}], "minItems": 1},
            "a": {"type": ["string", "null"], "enum": ["x", None], "maxLength": 5, "examples": ["x"]},
        },
        "required": ["a"],
        "additionalProperties": False,
    }
    assert list(converted["properties"]) == ["b", "a"]
    assert json_schema(converted, "x") == converted


def test_tokens_are_counted_of_contents_or_of_a_whole_request() -> None:
    """countTokens has the request in a field of its own, or is the contents alone."""
    route = Route(Ask.COUNT, "m")
    bare = CODEC.parse(orjson.dumps({"contents": [HI]}), route)
    whole = CODEC.parse(orjson.dumps({"generateContentRequest": {"model": "models/m", "contents": [HI]}}), route)
    assert bare.messages == whole.messages == (Message.user("hi"),)


@pytest.mark.requirement("R30")
@pytest.mark.parametrize(
    ("method", "path", "query", "route"),
    [
        ("POST", "/v1beta/models/m:generateContent", {}, Route(Ask.COMPLETION, "m", False)),
        ("POST", "/v1/models/m:generateContent", {}, Route(Ask.COMPLETION, "m", False)),
        (
            "POST",
            "/v1beta/models/org/m-1:streamGenerateContent",
            {"alt": "sse"},
            Route(Ask.COMPLETION, "org/m-1", True),
        ),
        ("POST", "/v1beta/models/m:streamGenerateContent", {}, Route(Ask.COMPLETION, "m", True, array=True)),
        ("POST", "/v1beta/models/m:countTokens", {}, Route(Ask.COUNT, "m", False)),
        ("GET", "/v1beta/models", {}, Route(Ask.MODELS)),
        ("GET", "/v1beta/models/m", {}, Route(Ask.MODEL, "m")),
        ("POST", "/v1beta/models/m:embedContent", {}, None),
        ("POST", "/v1beta/models", {}, None),
        ("GET", "/v1beta/files", {}, None),
        ("POST", "/v1/chat/completions", {}, None),
    ],
)
def test_the_path_says_what_is_wanted(method: str, path: str, query: dict[str, str], route: Route | None) -> None:
    """Model, action and framing are in the line."""
    assert CODEC.route(method, path, query, {}) == route


# There and back -------------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
ARGUMENTS = st.dictionaries(
    TEXT, st.integers(-(2**53), 2**53) | TEXT | st.booleans() | st.none() | st.lists(TEXT), max_size=3
)
ID = st.text("abc", min_size=1, max_size=3)


def as_content(part: Part) -> dict[str, Any]:
    """As a client that keeps all that it got writes a part."""
    match part:
        case ReasoningPart():
            return {"text": part.text, "thought": True}
        case TextPart():
            return {"text": part.text}
        case ToolCallPart():
            return called(part.name, part.id, **orjson.loads(part.arguments_json))
    raise AssertionError(part)


@pytest.mark.requirement("R82")
@settings(deadline=None)
@given(st.booleans(), TEXT | st.none(), TEXT | st.none(), st.lists(st.tuples(ID, ID, ARGUMENTS), max_size=3), st.data())
def test_turn_returned_in_any_number_of_contents_is_one_message(
    indented: bool,
    thought: str | None,
    text: str | None,
    calls: list[tuple[str, str, dict[str, Any]]],
    data: st.DataObject,
) -> None:
    """Reasoning, text and calls in their order, whatever the client splits."""
    parts: list[Part] = [
        *([ReasoningPart(thought)] if thought else []),
        *([TextPart(text)] if text else []),
        *(ToolCallPart(call_id, name, orjson.dumps(args).decode()) for call_id, name, args in calls),
    ]
    pieces = [as_content(part) for part in parts]
    for piece in list(pieces):
        if "text" in piece and len(piece["text"]) > 1:
            cut = data.draw(st.integers(1, len(piece["text"]) - 1))
            at = pieces.index(piece)
            pieces[at : at + 1] = [{**piece, "text": piece["text"][:cut]}, {**piece, "text": piece["text"][cut:]}]
    contents: list[dict[str, Any]] = [HI]
    while pieces:
        count = data.draw(st.integers(1, len(pieces)))
        contents.append(model(*pieces[:count]))
        pieces = pieces[count:]
    body = orjson.dumps({"contents": [*contents, HI]}, option=orjson.OPT_INDENT_2 if indented else 0)
    messages = CODEC.parse(body, ROUTE).messages
    expected = [Message.user("hi"), *([Message(Role.ASSISTANT, tuple(parts))] if parts else []), Message.user("hi")]
    assert list(messages) == expected
