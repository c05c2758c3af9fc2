"""Calls whose arguments are tagged one by one: Qwen3-Coder and GLM.

Values are plain text in both; the tool's schema has their types. A value that does not fit its type is passed on as
text, for the agent to refuse; so is the value of a parameter without a schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from penstock_codec import cache
from penstock_codec.chat import Tool
from penstock_codec.parsers.grammar import THINK, Grammar, Mark
from penstock_codec.parsers.json_calls import TAGS
from penstock_codec.tool_json import MAX_CALL_CHARS, MAX_NAME_CHARS, CallText, Malformed, parse_value

_FUNCTION: Final = re.compile(r"\s*<function=([^<>\n]+)>")
_PARAMETER: Final = re.compile(r"\s*<parameter=([^<>\n]+)>\n?")
# A value may mention tags: only a closing tag followed by more markup of the call closes it.
_PARAMETER_END: Final = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=|</function>))")
_FUNCTION_END: Final = re.compile(r"\s*</function>\s*")
_NAME: Final = re.compile(r"\s*([^<>{}\s]+)\s*")
_KEY: Final = re.compile(r"\s*<arg_key>([^<>\n]+)</arg_key>\s*<arg_value>")
_VALUE_END: Final = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|\Z))")
_AS_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}  # literals that templates write in Python
_TYPES: Final[Mapping[str, type | tuple[type, ...]]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}


def _read_function(body: str, tools: Sequence[Tool]) -> Sequence[CallText] | Malformed:
    head = _FUNCTION.match(body)
    if head is None:
        return Malformed("NOT_A_CALL" if body.strip() else "EMPTY")
    return _read_all(body, head.end(), head[1].strip(), _PARAMETER, _PARAMETER_END, _FUNCTION_END, tools)


def _read_pairs(body: str, tools: Sequence[Tool]) -> Sequence[CallText] | Malformed:
    head = _NAME.match(body)
    if head is None:
        return Malformed("NOT_A_CALL" if body.strip() else "EMPTY")
    return _read_all(body, head.end(), head[1], _KEY, _VALUE_END, re.compile(r"\s*"), tools)


def _read_all(
    body: str,
    at: int,
    name: str,
    opening: re.Pattern[str],
    closing: re.Pattern[str],
    last: re.Pattern[str],
    tools: Sequence[Tool],
) -> Sequence[CallText] | Malformed:
    if len(body) > MAX_CALL_CHARS:
        return Malformed("TOO_LARGE")
    values: dict[str, str] = {}
    while (key := opening.match(body, at)) is not None:
        end = closing.search(body, key.end())
        if end is None or key[1] in values:
            return Malformed("NOT_A_CALL")
        values[key[1]] = body[key.end() : end.start()]
        at = end.end()
    if last.fullmatch(body, at) is None or not name or len(name) > MAX_NAME_CHARS:
        return Malformed("NOT_A_CALL")
    schema = next((tool.parameters_json_schema for tool in tools if tool.name == name), "{}")
    types = _types(schema)
    members = [f"{_quoted(key)}: {_as_json(value, types.get(key, frozenset()))}" for key, value in values.items()]
    return (CallText(name, "{" + ", ".join(members) + "}"),)


def _as_json(text: str, types: frozenset[str]) -> str:
    """Returns a value as JSON: of the first type that it fits; a string where the schema allows one or nothing fits."""
    if types and "string" not in types:
        written = text.strip()
        value = parse_value(_AS_PYTHON.get(written, written))
        if value is not None and any(_is(value.value, name) for name in types):
            return value.text
    return _quoted(text)


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _TYPES.get(name, ()))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@cache.ARGUMENT_TYPES
def _types(schema_text: str) -> Mapping[str, frozenset[str]]:
    """Returns the JSON types that the schema itself states for each parameter."""
    try:
        schema = json.loads(schema_text)
    except (ValueError, RecursionError):
        return {}
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {name: frozenset(_named(item)) for name, item in properties.items()}


def _named(schema: Any) -> Iterable[str]:
    if not isinstance(schema, dict):
        return
    kind = schema.get("type")
    yield from (item for item in (kind if isinstance(kind, list) else [kind]) if isinstance(item, str))
    for group in ("anyOf", "oneOf"):
        members = schema.get(group)
        for item in members if isinstance(members, list) else ():
            if isinstance(item, dict) and isinstance(item.get("type"), str):
                yield item["type"]
    if "type" not in schema and isinstance(schema.get("enum"), list):
        yield from ("string" for item in schema["enum"] if isinstance(item, str))


QWEN3_CODER: Final = Grammar(
    "qwen3_coder",
    {**THINK, **TAGS},
    _read_function,
    lambda template: all(text in template for text in ("<tool_call>", "<function=", "<parameter=")),
    is_json=False,
)
GLM: Final = Grammar(
    "glm",
    {
        **THINK,
        **TAGS,
        "<arg_key>": Mark.INSIDE,
        "</arg_key>": Mark.INSIDE,
        "<arg_value>": Mark.INSIDE,
        "</arg_value>": Mark.INSIDE,
    },
    _read_pairs,
    lambda template: all(text in template for text in ("<tool_call>", "<arg_key>", "<arg_value>")),
    is_json=False,
    turn_ends=("<|user|>", "<|observation|>"),
    turn_openings=("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
)
