"""JSON Schemas of host tools: checked once when a tool is offered, then against every call's arguments (R15).

A schema comes from a trainer and is applied to what a model wrote. So it reaches nothing but itself (no reference leads
to a file or the network), its patterns run in linear time (RE2), the work of any schema on any arguments is bounded in
steps (`bounded`), and what cannot be checked is refused, never let pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

import orjson
import re2
from jsonschema import validators
from jsonschema.protocols import Validator
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from penstock_interception.tools import bounded
from penstock_interception.tools.bounded import Steps, TooManySteps

MAX_SCHEMA_BYTES: Final = 64 << 10
MAX_DEPTH: Final = 24
"""Levels of arguments: deeper ones would pass what protobuf decodes in the trainer."""
MAX_STEPS: Final = 10_000
"""What checking one call's arguments may take; a step is a few microseconds."""
MAX_OFFER_STEPS: Final = 250_000
"""What checking the schemas of one offer may take."""
MAX_PROBLEMS: Final = 8
MAX_PROBLEM_CHARS: Final = 300
_MAX_SCHEMA_DEPTH: Final = 64
_DATA: Final = frozenset({"const", "default", "enum", "example", "examples"})
_NOT_OFFERED: Final = frozenset({"patternProperties", "unevaluatedItems", "unevaluatedProperties"})
"""Words whose work is not bounded by the steps of the schemas in them."""
_ANY_OBJECT: Final = b'{"type":"object"}'


class SchemaRefused(Exception):
    """A schema that is none, or that cannot be used; the text says why, without quoting it."""


def canonical(text: str, steps: Steps | None = None) -> str:
    """The schema as compact JSON, once it is known to be usable. Takes `steps`: by default those of one offer.

    Raises:
        SchemaRefused: it is no JSON Schema of an object, asks for what is not offered, or takes too many steps.
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
        raise SchemaRefused("refers to itself without end") from error
    except Exception as error:
        raise SchemaRefused(f"cannot be applied ({type(error).__name__})") from error
    return text


def problems(schema: str, arguments: Mapping[str, Any], steps: int = MAX_STEPS) -> list[str]:
    """What is wrong with the arguments, in words for the agent; empty when they hold. `schema` is of `canonical`.

    Raises:
        TooManySteps: it takes more than `steps`, which are fewer than MAX_STEPS.
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
        return ["the arguments are too complex to be checked: give fewer values, or nest them less"]
    except RecursionError:
        return ["the arguments are nested deeper than can be checked"]
    return found


def _check_form(schema: dict[str, Any], steps: Steps) -> None:
    """Whether it is a JSON Schema of its draft."""
    kind = validators.validator_for(schema, default=validators.Draft202012Validator)
    form = bounded.validator_class(kind)(kind.META_SCHEMA, format_checker=kind.FORMAT_CHECKER)
    try:
        wrong = next(bounded.errors(form, bounded.weighed(schema), steps), None)
    except TooManySteps as error:
        raise SchemaRefused("too large to be checked: offer fewer tools at a time, or simpler ones") from error
    if wrong is not None:
        raise SchemaRefused(f"{wrong.json_path}: no JSON Schema")


def _check_words(schema: dict[str, Any]) -> None:
    root = DRAFT202012.create_resource(schema)
    resolver = Registry().resolver_with_root(root)
    for word, value in _words(schema):
        if word in ("$ref", "$dynamicRef", "$recursiveRef"):
            if not isinstance(value, str) or not value.startswith("#"):
                raise SchemaRefused("references lead to the schema itself only")
            try:
                resolver.lookup(value)
            except Unresolvable as error:
                raise SchemaRefused("a reference leads nowhere") from error
        elif word in _NOT_OFFERED:
            raise SchemaRefused(f"{word} is not offered")
        elif word == "pattern" and isinstance(value, str):
            try:
                re2.compile(value)
            except re2.error as error:
                raise SchemaRefused("a pattern is no RE2 regular expression") from error


def _words(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key of every object that may be a schema, and its value; data in it is passed over."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key, inner
            if key not in _DATA:
                yield from _words(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _words(inner)


def _is_shallow(value: Any, levels: int) -> bool:
    """Whether a value has at most so many levels of objects and lists."""
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


@lru_cache(maxsize=128)
def _validator(schema: str) -> Validator:
    content = bounded.weighed(orjson.loads(schema))
    kind = validators.validator_for(content, default=validators.Draft202012Validator)
    return bounded.validator_class(kind)(content, registry=Registry())
