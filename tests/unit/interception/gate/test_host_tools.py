"""The parts of host tools by themselves: JSON-RPC, schemas, names, results."""

from __future__ import annotations

import math
from typing import Any

import orjson
import pytest
from google.protobuf import struct_pb2
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.interception.v1 import intercept_service_pb2 as pb
from penstock.values import jsonrpc
from penstock.values.jsonrpc import Notification, Reply, Request
from penstock_chassis.errors import InvalidArgument
from penstock_interception.domain.host_tools import ToolResult
from penstock_interception.domain.results import Rejection, RejectionReason
from penstock_interception.gate.host_tools import bounded, offers, schemas
from penstock_interception.gate.host_tools.bounded import Steps, TooManySteps
from penstock_interception.ingress.mcp import messages, server
from penstock_interception.ingress.mcp.messages import HttpRpcError
from penstock_interception.rpc import tools

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.text(max_size=8), JSON, max_size=4)
ENVELOPES = st.fixed_dictionaries(
    {},
    optional={
        "jsonrpc": st.just("2.0") | JSON,
        "id": st.integers() | st.text() | JSON,
        "method": st.sampled_from(["ping", "tools/call"]) | JSON,
        "params": OBJECTS | JSON,
        "result": JSON,
        "error": JSON,
    },
)
CODES = {-32700, -32600, -32602}


def read(body: bytes) -> jsonrpc.Message | HttpRpcError:
    """What a body is."""
    try:
        return messages.parse(body)
    except HttpRpcError as error:
        return error


@pytest.mark.requirement("R33", "R80")
@given(st.binary())
@example(b"[" * 100_000)
@example(b'{"jsonrpc":"2.0","id":' + b"9" * 400 + b',"method":"ping"}')
@example(b'{"jsonrpc":"2.0","id":"\xed\xa0\x80","method":"ping"}')
def test_any_bytes_are_a_message_or_a_json_rpc_error(body: bytes) -> None:
    """Never another exception, and the error is itself JSON that a client can read."""
    seen = read(body)
    assert isinstance(seen, Request | Notification | Reply | HttpRpcError)
    if isinstance(seen, HttpRpcError):
        answer = jsonrpc.error(seen)
        assert (answer["jsonrpc"], answer["error"]["code"] in CODES, seen.status) == ("2.0", True, 400)


@pytest.mark.requirement("R33")
@given(ENVELOPES | JSON)
def test_any_json_is_a_message_or_a_json_rpc_error(value: Any) -> None:
    """A request has an id and named parameters, a notification has no id; an id comes back as it came."""
    try:
        body = orjson.dumps(value)
    except orjson.JSONEncodeError:  # integers that JSON parsers do not agree on
        return
    seen = read(body)
    if isinstance(seen, Request):
        assert value["jsonrpc"] == "2.0"
        assert seen.id == value["id"]
        assert isinstance(seen.params, dict)
        assert orjson.loads(messages.result(seen.id, {}))["id"] == seen.id
        assert orjson.loads(seen.id_json) == seen.id
    elif isinstance(seen, Notification):
        assert "id" not in value
    elif isinstance(seen, HttpRpcError):
        assert jsonrpc.error(seen)["id"] in (None, value.get("id") if isinstance(value, dict) else None)


@pytest.mark.requirement("R8", "R33")
@given(OBJECTS)
def test_any_object_is_shown_as_blocks_that_mcp_knows(value: dict[str, Any]) -> None:
    """Whatever a tool gave back, the agent gets content that its client can read, and nothing is lost."""
    try:
        result = orjson.dumps(value)
    except orjson.JSONEncodeError:
        return
    blocks, structured = server.tool_content(result)
    assert blocks
    assert all(block["type"] in ("text", "image", "audio") for block in blocks)
    assert structured is None or structured == orjson.loads(result)
    if structured is None:
        assert value.keys() <= {"text", "content"}


@pytest.mark.requirement("R33")
def test_almost_mcp_content_is_returned_as_json() -> None:
    """A block with a field too many or of another kind is data."""
    for block in (
        {"type": "text", "text": "a", "annotations": "x"},
        {"type": "text"},
        {"type": "resource", "text": "a"},
        {"type": "text", "text": 3},
        "text",
    ):
        blocks, structured = server.tool_content(orjson.dumps({"content": [block]}))
        assert structured == {"content": [block]}
        assert blocks[0]["type"] == "text"


@pytest.mark.requirement("R15", "R80")
@given(OBJECTS)
def test_any_schema_object_is_refused_with_a_reason_or_judges_arguments(value: dict[str, Any]) -> None:
    """Nothing but a refusal, and nothing but a verdict."""
    try:
        text = orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        return
    try:
        schema = schemas.canonical(text)
    except schemas.SchemaRefused:
        return
    assert schemas.canonical(schema) == schema
    schemas.problems(schema, {"a": 1})


@pytest.mark.requirement("R15", "R80")
@given(
    JSON.map(lambda value: {"properties": {"a": value}})
    | st.sampled_from(
        ["type", "items", "anyOf", "$ref", "$defs", "$id", "$schema", "pattern", "required", "minimum"]
    ).flatmap(lambda word: JSON.map(lambda value: {"properties": {"a": {word: value}}}))
)
def test_schema_keywords_with_any_value_are_refused_or_judged(schema: dict[str, Any]) -> None:
    """As above, where it is more likely to matter."""
    try:
        text = orjson.dumps(schema).decode()
        made = schemas.canonical(text)
    except (orjson.JSONEncodeError, schemas.SchemaRefused):
        return
    values: list[Any] = ["x", 1, None, [1], {"a": {}}]
    for each in values:
        schemas.problems(made, {"a": each})


@pytest.mark.requirement("R80")
@given(st.integers(0, 200))
def test_depth_is_bounded_before_anything_recurses(depth: int) -> None:
    """Arguments deeper than a trainer's parser takes are refused, others are not."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    found = schemas.problems(schemas.canonical(""), {"a": value})
    assert bool(found) is (depth >= schemas.MAX_DEPTH)


@pytest.mark.requirement("R15")
def test_a_recursive_schema_judges_recursive_arguments() -> None:
    """References within a schema work."""
    tree = {
        "$defs": {
            "node": {"type": "object", "properties": {"child": {"$ref": "#/$defs/node"}, "n": {"type": "integer"}}}
        },
        "$ref": "#/$defs/node",
        "type": "object",
    }
    made = schemas.canonical(orjson.dumps(tree).decode())
    assert schemas.problems(made, {"child": {"child": {"n": 1}}}) == []
    [wrong] = schemas.problems(made, {"child": {"child": {"n": "x"}}})
    assert wrong.startswith("$.child.child.n")


@pytest.mark.requirement("R80")
def test_a_pattern_runs_in_linear_time() -> None:
    """What would keep a backtracking engine busy for ever is judged at once."""
    made = schemas.canonical('{"properties": {"a": {"pattern": "^(a+)+$"}}}')
    assert schemas.problems(made, {"a": "a" * 50_000 + "!"})
    assert not schemas.problems(made, {"a": "a" * 50_000})


@pytest.mark.requirement("R15")
def test_data_in_a_schema_is_not_read_as_a_schema() -> None:
    """A constant may look like a reference."""
    schemas.canonical('{"properties": {"a": {"const": {"$ref": "https://example.com", "pattern": "(?=x)"}}}}')


@pytest.mark.requirement("R26", "R33")
def test_schema_error_is_short() -> None:
    """A few problems of bounded length, however much is wrong."""
    made = schemas.canonical('{"additionalProperties": {"type": "integer"}}')
    found = schemas.problems(made, {f"k{n}": "x" * 10_000 for n in range(50)})
    assert len(found) == schemas.MAX_PROBLEMS
    assert all(len(text) <= schemas.MAX_PROBLEM_CHARS for text in found)


def filters(draft: str = "https://json-schema.org/draft/2020-12/schema") -> str:
    """A schema of search filters as pydantic writes it for `Term | Not | All | Any`, which refers to itself."""
    several = {"properties": {"clauses": {"items": {"$ref": "#/$defs/Filter"}, "type": "array"}}}
    return orjson.dumps(
        {
            "$schema": draft,
            "$defs": {
                "Term": {
                    "properties": {"field": {"type": "string"}, "op": {"enum": ["eq", "lt"]}},
                    "required": ["field", "op"],
                    "type": "object",
                },
                "Not": {
                    "properties": {"clause": {"$ref": "#/$defs/Filter"}},
                    "required": ["clause"],
                    "type": "object",
                },
                "All": several | {"required": ["clauses"], "type": "object"},
                "Any": several | {"required": ["clauses"], "type": "object"},
                "Filter": {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in ("Term", "Not", "All", "Any")]},
            },
            "properties": {"where": {"$ref": "#/$defs/Filter"}},
            "required": ["where"],
            "type": "object",
        }
    ).decode()


@pytest.mark.requirement("R15", "R145")
@pytest.mark.parametrize("depth", [1, 5, 10])
@pytest.mark.parametrize("leaf", [{"field": "a", "op": "eq"}, {"field": "a"}, {"field": "a", "op": "x"}, 7])
@pytest.mark.parametrize(
    "draft", ["https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#"]
)
def test_a_recursive_filter_is_judged_in_steps_that_grow_with_its_size(depth: int, leaf: Any, draft: str) -> None:
    """230 bytes under such a schema took 21 s and 1 GiB: each level was explored by every branch again."""
    made = schemas.canonical(filters(draft))
    value: Any = leaf
    for _ in range(depth):
        value = {"clauses": [value]}
    holds = leaf == {"field": "a", "op": "eq"}
    assert (schemas.problems(made, {"where": value}) == []) is holds
    steps = Steps(schemas.MAX_STEPS)
    list(bounded.errors(schemas._validator(made), bounded.weighed({"where": value}), steps))
    assert schemas.MAX_STEPS - steps.left <= 50 * (depth + 1)


@pytest.mark.requirement("R15", "R145")
@pytest.mark.parametrize("depth", [12, 24])
def test_a_filter_deeper_than_is_taken_is_refused_without_being_explored(depth: int) -> None:
    """274 bytes ended the stack."""
    value: Any = {"field": "a"}
    for _ in range(depth):
        value = {"clauses": [value]}
    [told] = schemas.problems(schemas.canonical(filters()), {"where": value})
    assert told == f"the arguments are nested deeper than {schemas.MAX_DEPTH} levels"


@pytest.mark.requirement("R15", "R145")
@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({"additionalProperties": {"anyOf": [{"type": "integer"}] * 1000}}, {f"k{n}": "x" * 900 for n in range(250)}),
        ({"additionalProperties": {"enum": list(range(10_000))}}, {f"k{n}": n for n in range(10_000)}),
        ({"additionalProperties": {"const": {"a": [0] * 20_000}}}, {f"k{n}": {"a": []} for n in range(1000)}),
        (
            {"additionalProperties": {"not": {"required": ["a" + str(n) for n in range(5000)]}}},
            {f"k{n}": {} for n in range(9000)},
        ),
        ({"properties": {"a": {"anyOf": [{"pattern": f"^(a+)+{n}$"} for n in range(1500)]}}}, {"a": "a" * 200_000}),
        ({"properties": {"a": {"allOf": [{"uniqueItems": True}] * 2000}}}, {"a": list(range(50_000))}),
    ],
)
def test_arguments_too_costly_to_check_are_refused_with_a_reason(schema: Any, arguments: Any) -> None:
    """Wide lists, constants, patterns and strings cost steps as branches do; what an agent reads says so."""
    made = schemas.canonical(orjson.dumps(schema).decode())
    [told] = schemas.problems(made, arguments)
    assert told.startswith("the arguments are too complex to check")
    with pytest.raises(TooManySteps):
        schemas.problems(made, arguments, 500)


@pytest.mark.requirement("R145")
def test_unique_items_are_counted_once_each() -> None:
    """Comparing each with each took 20 s for 10,000 objects; 1 and 1.0 are one value, 1 and true are two."""
    made = schemas.canonical('{"properties": {"a": {"uniqueItems": true}}}')
    items: list[Any] = [{"k": n} for n in range(10_000)]
    assert schemas.problems(made, {"a": items}) == []
    assert schemas.problems(made, {"a": [*items, {"k": 3}]}) == ["$.a: the list has non-unique elements"]
    assert schemas.problems(made, {"a": [1, True, "1", [1], None, 1.5]}) == []
    assert schemas.problems(made, {"a": [1, 1.0]})
    assert schemas.problems(made, {"a": [{"x": 1, "y": 2}, {"y": 2, "x": 1}]})


@pytest.mark.requirement("R145")
@pytest.mark.parametrize("word", ["allOf", "anyOf", "oneOf"])
def test_schema_of_exponential_work_is_refused_when_offered(word: str) -> None:
    """2.8 KB of it never ended. Where the same branch is met again the answer is known, so anyOf is taken."""
    levels: dict[str, Any] = {f"d{n}": {word: [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    text = orjson.dumps({"$defs": levels | {"d40": {}}, "$ref": "#/$defs/d0"}).decode()
    if word == "allOf":
        with pytest.raises(schemas.SchemaRefused, match="takes more than 10000 steps"):
            schemas.canonical(text)
    else:
        assert schemas.canonical(text)


@pytest.mark.requirement("R145")
def test_the_schemas_of_one_offer_share_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several schemas that are each as much work as one may be are refused by the field that was too much."""
    monkeypatch.setattr(schemas, "MAX_OFFER_STEPS", schemas.MAX_OFFER_STEPS // 4)  # five seconds of work, whole
    wide = orjson.dumps({"properties": {f"p{n}": {"type": "string"} for n in range(1500)}}).decode()
    with pytest.raises(InvalidArgument) as refused:
        offers.accepted([offers.Proposal(f"tool_{n}", "", wide) for n in range(20)], ["*"])
    assert "too large to check" in refused.value.violations[-1].description
    assert 0 < len(refused.value.violations) < 20
    with pytest.raises(schemas.SchemaRefused, match="too large to check"):
        schemas.canonical(orjson.dumps({"anyOf": [{}] * 20_000}).decode())


@pytest.mark.requirement("R145")
@pytest.mark.parametrize("word", ["patternProperties", "unevaluatedItems", "unevaluatedProperties"])
def test_a_word_whose_work_is_not_counted_is_refused(word: str) -> None:
    """The validator's own loops for it go around the steps."""
    with pytest.raises(schemas.SchemaRefused, match=f"{word} is not supported"):
        schemas.canonical(orjson.dumps({"properties": {"a": {word: {}}}}).decode())


@pytest.mark.requirement("R145")
def test_a_schema_that_names_its_draft_inside_is_counted_as_any_other() -> None:
    """The validator took its own uncounted form for a part that says which draft it is of."""
    inner = {"$schema": "https://json-schema.org/draft/2020-12/schema", "pattern": "^(a+)+$"}
    made = schemas.canonical(orjson.dumps({"properties": {"a": inner}, "additionalProperties": inner}).decode())
    assert schemas.problems(made, {"a": "a" * 50_000 + "!"}) == ["$.a: does not match '^(a+)+$'"]
    assert schemas.problems(made, {f"k{n}": "a" for n in range(12_000)})[0].startswith("the arguments are too complex")


@pytest.mark.requirement("R26", "R145")
def test_messages_quote_no_value_at_length() -> None:
    """Each error's text held the whole value: 250 KB for each branch that was tried."""
    made = schemas.canonical('{"properties": {"a": {"type": "integer"}, "b": {"enum": ["x"]}, "c": {"maxItems": 1}}}')
    long = {"a": "x" * 100_000, "b": "y" * 100_000, "c": [1] * 1000}
    found = [error.message for error in bounded.errors(schemas._validator(made), bounded.weighed(long), Steps(9999))]
    assert len(found) == 3
    assert all(len(text) < 200 for text in found)


@pytest.mark.requirement("R15")
@given(st.text(max_size=60))
def test_any_name_is_taken_or_refused_by_its_field(name: str) -> None:
    """Names are ASCII letters, digits, _ and -, whatever else is written."""
    try:
        [tool] = offers.accepted([offers.Proposal(name, "", "")], ["*"])
    except InvalidArgument as error:
        assert error.reason in ("FIELD_INVALID", "TOOL_NAME_RESERVED")
        assert [item.field for item in error.violations] == ["tools[0].name"]
    else:
        assert tool.name == name
        assert name.isascii()
        assert len(name) <= 48


@pytest.mark.requirement("R15", "R63")
def test_every_wrong_field_of_an_offer_is_named_at_once() -> None:
    wrong = [
        offers.Proposal("a b", "", ""),
        offers.Proposal("good", "x" * 20_000, "{"),
        offers.Proposal("good", "", ""),
    ]
    with pytest.raises(InvalidArgument) as refused:
        offers.accepted(wrong, ["*"])
    named = [item.field for item in refused.value.violations]
    assert named == ["tools[0].name", "tools[1].description", "tools[1].parameters_json_schema", "tools[2].name"]
    with pytest.raises(InvalidArgument) as many:
        offers.accepted([offers.Proposal(f"t{n}", "", "") for n in range(65)], ["*"])
    assert [item.field for item in many.value.violations] == ["tools"]
    with pytest.raises(InvalidArgument) as none:
        offers.accepted([offers.Proposal("t", "", "")], [])
    assert none.value.reason == "TOOL_NOT_ALLOWED"


@pytest.mark.requirement("R33")
def test_numbers_of_a_result_are_whole_where_they_were() -> None:
    """A Struct has doubles only; what has no JSON is refused."""
    struct = struct_pb2.Struct()
    struct.update({"n": 4, "x": 0.5, "deep": [{"m": -3}], "none": None, "yes": True})
    made = tools.result_from(pb.HostToolResult(tool_call_id="t", result=struct))
    assert isinstance(made, ToolResult)
    assert orjson.loads(made.content) == {"n": 4, "x": 0.5, "deep": [{"m": -3}], "none": None, "yes": True}
    assert b".0" not in made.content
    struct.update({"bad": math.inf})
    refused = tools.result_from(pb.HostToolResult(tool_call_id="t", result=struct))
    assert isinstance(refused, Rejection)
    assert refused.reason is RejectionReason.INVALID
