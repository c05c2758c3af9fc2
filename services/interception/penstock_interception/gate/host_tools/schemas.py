"""JSON Schemas of host tools: checked once when a tool is offered, then applied to every call's arguments (R15).

A schema comes from a trainer and is applied to a model's output. It therefore cannot reference files or the network,
its patterns run in linear time (RE2), its total work on any arguments is bounded in steps (`bounded`), and anything
that cannot be checked is refused, never passed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson
import re2
from jsonschema import validators
from jsonschema.protocols import Validator
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from penstock_interception import cache
from penstock_interception.gate.host_tools import bounded
from penstock_interception.gate.host_tools.bounded import Steps, TooManySteps

MAX_SCHEMA_BYTES: Final = 64 << 10
MAX_DEPTH: Final = 24
"""Nesting limit of arguments: deeper ones exceed what protobuf decodes in the trainer."""
MAX_STEPS: Final = 10_000
"""Limit for checking one call's arguments; a step takes a few microseconds."""
MAX_OFFER_STEPS: Final = 250_000
"""Limit for checking the schemas of one offer."""
MAX_PROBLEMS: Final = 8
MAX_PROBLEM_CHARS: Final = 300
_MAX_SCHEMA_DEPTH: Final = 64
_DATA: Final = frozenset({"const", "default", "enum", "example", "examples"})
_NOT_OFFERED: Final = frozenset({"patternProperties", "unevaluatedItems", "unevaluatedProperties"})
"""Keywords whose work the steps of their subschemas do not bound."""
_ANY_OBJECT: Final = b'{"type":"object"}'


class SchemaRefused(Exception):
    """The schema is invalid or unusable; the text gives the reason without quoting the schema."""


def canonical(text: str, steps: Steps | None = None) -> str:
    """Returns the schema as compact JSON after checking it. Spends `steps`; default: the steps of one offer.

    Raises:
        SchemaRefused: it is no JSON Schema of an object, uses unsupported keywords, or needs too many steps.
    """
    data = text.encode("utf-8", "surrogatepass") or _ANY_OBJECT
    if len(data) > MAX_SCHEMA_BYTES:
        raise SchemaRefused(f"more than {MAX_SCHEMA_BYTES >> 10} KiB")
    try:
        schema = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise SchemaRefused("no JSON") from error
    if not isinstance(schema, dict):
        raise SchemaRefused("no JSON object")
    if not _is_shallow(schema, _MAX_SCHEMA_DEPTH):
        raise SchemaRefused(f"nested deeper than {_MAX_SCHEMA_DEPTH} levels")
    if schema.setdefault("type", "object") != "object":
        raise SchemaRefused('the type of a tool\'s arguments is "object"')
    _check_form(schema, steps or Steps(MAX_OFFER_STEPS))
    _check_words(schema)
    text = orjson.dumps(schema).decode()
    try:
        list(bounded.errors(_validator(text), bounded.weighed({}), Steps(MAX_STEPS)))
    except TooManySteps as error:
        raise SchemaRefused(f"takes more than {MAX_STEPS} steps to check even an empty object: simplify it") from error
    except RecursionError as error:
        raise SchemaRefused("has an endless reference to itself") from error
    except Exception as error:
        raise SchemaRefused(f"cannot be applied ({type(error).__name__})") from error
    return text


def problems(schema: str, arguments: Mapping[str, Any], steps: int = MAX_STEPS) -> list[str]:
    """Returns the problems of the arguments, worded for the agent; empty if valid. `schema` comes from `canonical`.

    Raises:
        TooManySteps: the check needs more than `steps`, which is below MAX_STEPS. At MAX_STEPS it returns a problem.
    """
    if not _is_shallow(arguments, MAX_DEPTH):
        return [f"the arguments are nested deeper than {MAX_DEPTH} levels"]
    try:
        found = []
        for error in bounded.errors(_validator(schema), bounded.weighed(arguments), Steps(steps)):
            found.append(f"{error.json_path}: {error.message}"[:MAX_PROBLEM_CHARS])
            if len(found) == MAX_PROBLEMS:
                break
    except TooManySteps:
        if steps < MAX_STEPS:
            raise
        return ["the arguments are too complex to check: use fewer values, or nest them less"]
    except RecursionError:
        return ["the arguments are nested too deeply to check"]
    return found


def _check_form(schema: dict[str, Any], steps: Steps) -> None:
    """Checks that it is a valid JSON Schema of its draft."""
    kind = validators.validator_for(schema, default=validators.Draft202012Validator)
    form = bounded.validator_class(kind)(kind.META_SCHEMA, format_checker=kind.FORMAT_CHECKER)
    try:
        wrong = next(bounded.errors(form, bounded.weighed(schema), steps), None)
    except TooManySteps as error:
        raise SchemaRefused("too large to check: offer fewer tools at a time, or simpler ones") from error
    if wrong is not None:
        raise SchemaRefused(f"{wrong.json_path}: not a JSON Schema")


def _check_words(schema: dict[str, Any]) -> None:
    root = DRAFT202012.create_resource(schema)
    resolver = Registry().resolver_with_root(root)
    for word, value in _words(schema):
        if word in ("$ref", "$dynamicRef", "$recursiveRef"):
            if not isinstance(value, str) or not value.startswith("#"):
                raise SchemaRefused("only references within the schema are allowed")
            try:
                resolver.lookup(value)
            except Unresolvable as error:
                raise SchemaRefused("a reference has no target") from error
        elif word in _NOT_OFFERED:
            raise SchemaRefused(f"{word} is not supported")
        elif word == "pattern" and isinstance(value, str):
            try:
                re2.compile(value)
            except re2.error as error:
                raise SchemaRefused("a pattern is not an RE2 regular expression") from error


def _words(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields every key and value of every object that may be a schema; skips plain data."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key, inner
            if key not in _DATA:
                yield from _words(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _words(inner)


def _is_shallow(value: Any, levels: int) -> bool:
    """Returns whether a value nests at most `levels` objects and lists."""
    layer = [value]
    while layer and levels > 0:
        levels -= 1
        layer = [
            inner
            for item in layer
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
            if isinstance(inner, dict | list)
        ]
    return not layer


@cache.VALIDATORS
def _validator(schema: str) -> Validator:
    content = bounded.weighed(orjson.loads(schema))
    kind = validators.validator_for(content, default=validators.Draft202012Validator)
    return bounded.validator_class(kind)(content, registry=Registry())
