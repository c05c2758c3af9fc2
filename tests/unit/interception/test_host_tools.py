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
from penstock_chassis.errors import InvalidArgument
from penstock_interception.ingress import jsonrpc
from penstock_interception.ingress.jsonrpc import Notification, Reply, Request, RpcError
from penstock_interception.ports import Rejection, RejectionReason
from penstock_interception.rpc import tools
from penstock_interception.tools import content, offers, schemas
from penstock_interception.tools.model import ToolResult

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


def read(body: bytes) -> jsonrpc.Message | RpcError:
    """What a body is."""
    try:
        return jsonrpc.parse(body)
    except RpcError as error:
        return error


@given(st.binary())
@example(b"[" * 100_000)
@example(b'{"jsonrpc":"2.0","id":' + b"9" * 400 + b',"method":"ping"}')
@example(b'{"jsonrpc":"2.0","id":"\xed\xa0\x80","method":"ping"}')
def test_any_bytes_are_a_message_or_a_json_rpc_error(body: bytes) -> None:
    """R33, R80: never another exception, and the error is itself JSON that a client can read."""
    seen = read(body)
    assert isinstance(seen, Request | Notification | Reply | RpcError)
    if isinstance(seen, RpcError):
        told = orjson.loads(jsonrpc.error(seen))
        assert (told["jsonrpc"], told["error"]["code"] in CODES, seen.status) == ("2.0", True, 400)


@given(ENVELOPES | JSON)
def test_any_json_is_a_message_or_a_json_rpc_error(value: Any) -> None:
    """R33: a request has an id and named parameters, a notification has no id; an id comes back as it came."""
    try:
        body = orjson.dumps(value)
    except orjson.JSONEncodeError:  # integers that JSON parsers do not agree on
        return
    seen = read(body)
    if isinstance(seen, Request):
        assert value["jsonrpc"] == "2.0"
        assert seen.id == value["id"]
        assert isinstance(seen.params, dict)
        assert orjson.loads(jsonrpc.result(seen.id, {}))["id"] == seen.id
        assert orjson.loads(seen.id_json) == seen.id
    elif isinstance(seen, Notification):
        assert "id" not in value
    elif isinstance(seen, RpcError):
        assert orjson.loads(jsonrpc.error(seen))["id"] in (None, value.get("id") if isinstance(value, dict) else None)


@given(OBJECTS)
def test_any_object_is_shown_as_blocks_that_mcp_knows(value: dict[str, Any]) -> None:
    """R8, R33: whatever a tool gave back, the agent gets content that its client can read, and nothing is lost."""
    try:
        result = orjson.dumps(value)
    except orjson.JSONEncodeError:
        return
    blocks, structured = content.shown(result)
    assert blocks
    assert all(block["type"] in ("text", "image", "audio") for block in blocks)
    assert structured is None or structured == orjson.loads(result)
    if structured is None:
        assert value.keys() <= {"text", "content"}


def test_content_that_is_almost_mcps_is_told_as_json() -> None:
    """R33: a block with a field too many or of another kind is data."""
    for block in (
        {"type": "text", "text": "a", "annotations": "x"},
        {"type": "text"},
        {"type": "resource", "text": "a"},
        {"type": "text", "text": 3},
        "text",
    ):
        blocks, structured = content.shown(orjson.dumps({"content": [block]}))
        assert structured == {"content": [block]}
        assert blocks[0]["type"] == "text"


@given(OBJECTS)
def test_any_object_as_a_schema_is_refused_in_words_or_judges_any_arguments(value: dict[str, Any]) -> None:
    """R15, R80: nothing but a refusal, and nothing but a verdict."""
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


@given(
    JSON.map(lambda value: {"properties": {"a": value}})
    | st.sampled_from(
        ["type", "items", "anyOf", "$ref", "$defs", "$id", "$schema", "pattern", "required", "minimum"]
    ).flatmap(lambda word: JSON.map(lambda value: {"properties": {"a": {word: value}}}))
)
def test_words_of_json_schema_with_any_value_are_refused_or_judged(schema: dict[str, Any]) -> None:
    """R15, R80: as above, where it is more likely to matter."""
    try:
        text = orjson.dumps(schema).decode()
        made = schemas.canonical(text)
    except (orjson.JSONEncodeError, schemas.SchemaRefused):
        return
    values: list[Any] = ["x", 1, None, [1], {"a": {}}]
    for each in values:
        schemas.problems(made, {"a": each})


@given(st.integers(0, 200))
def test_depth_is_bounded_before_anything_recurses(depth: int) -> None:
    """R80: arguments deeper than a trainer's parser takes are refused, others are not."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    found = schemas.problems(schemas.canonical(""), {"a": value})
    assert bool(found) is (depth >= schemas.MAX_DEPTH)


def test_a_recursive_schema_judges_recursive_arguments() -> None:
    """R15: references within a schema work."""
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


def test_a_pattern_runs_in_linear_time() -> None:
    """R80: what would keep a backtracking engine busy for ever is judged at once."""
    made = schemas.canonical('{"properties": {"a": {"pattern": "^(a+)+$"}}}')
    assert schemas.problems(made, {"a": "a" * 50_000 + "!"})
    assert not schemas.problems(made, {"a": "a" * 50_000})


def test_data_in_a_schema_is_not_read_as_a_schema() -> None:
    """R15: a constant may look like a reference."""
    schemas.canonical('{"properties": {"a": {"const": {"$ref": "https://example.com", "pattern": "(?=x)"}}}}')


def test_what_is_wrong_is_told_shortly() -> None:
    """R26, R33: a few problems of bounded length, however much is wrong."""
    made = schemas.canonical('{"additionalProperties": {"type": "integer"}}')
    found = schemas.problems(made, {f"k{n}": "x" * 10_000 for n in range(50)})
    assert len(found) == schemas.MAX_PROBLEMS
    assert all(len(text) <= schemas.MAX_PROBLEM_CHARS for text in found)


@given(st.text(max_size=60))
def test_any_name_is_taken_or_refused_by_its_field(name: str) -> None:
    """R15: names are ASCII letters, digits, _ and -, whatever else is written."""
    try:
        [tool] = offers.accepted([offers.Proposal(name, "", "")], ["*"])
    except InvalidArgument as error:
        assert error.reason in ("FIELD_INVALID", "TOOL_NAME_RESERVED")
        assert [item.field for item in error.violations] == ["tools[0].name"]
    else:
        assert tool.name == name
        assert name.isascii()
        assert len(name) <= 48


def test_every_wrong_field_of_an_offer_is_named_at_once() -> None:
    """R15, R63"""
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


def test_numbers_of_a_result_are_whole_where_they_were() -> None:
    """R33: a Struct has doubles only; what has no JSON is refused."""
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
