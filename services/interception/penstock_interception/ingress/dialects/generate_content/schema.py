"""Converts Google's `Schema`, a dialect of OpenAPI, into the JSON Schema that models are shown.

Its types are upper case, null is a flag, counts may be strings (they are int64), and properties have an explicit order.
A schema that is already JSON Schema stays unchanged.
"""

from __future__ import annotations

from typing import Any, Final

from penstock_interception.ingress.dialects.base import BadRequest

MAX_DEPTH: Final = 64
_NAMES: Final = {
    "any_of": "anyOf",
    "one_of": "anyOf",
    "oneOf": "anyOf",
    "min_items": "minItems",
    "max_items": "maxItems",
    "min_length": "minLength",
    "max_length": "maxLength",
    "min_properties": "minProperties",
    "max_properties": "maxProperties",
    "property_ordering": "propertyOrdering",
    "additional_properties": "additionalProperties",
    "defs": "$defs",
    "ref": "$ref",
}
_COUNTS: Final = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
_MAPS: Final = frozenset({"properties", "$defs"})


def json_schema(schema: dict[str, Any], path: str, depth: int = 0) -> dict[str, Any]:
    """Converts a schema. Raises BadRequest if it is invalid or nests deeper than MAX_DEPTH."""
    if depth > MAX_DEPTH:
        raise BadRequest(f"{path}: nested deeper than {MAX_DEPTH}.", path, "invalid_value")
    result: dict[str, Any] = {}
    for written, value in schema.items():
        name = _NAMES.get(written, written)
        if value is None and name != "default":
            continue
        here = f"{path}.{name}"
        if name in _MAPS:
            result[name] = {key: _nested(item, f"{here}.{key}", depth) for key, item in _mapping(value, here).items()}
        elif name == "items" or (name == "additionalProperties" and not isinstance(value, bool)):
            result[name] = _nested(value, here, depth)
        elif name == "anyOf":
            if not isinstance(value, list):
                raise BadRequest(f"{here}: must be a list.", here, "invalid_value")
            result[name] = [_nested(item, f"{here}[{index}]", depth) for index, item in enumerate(value)]
        elif name == "type":
            if (kind := _type(value)) is not None:
                result[name] = kind
        elif name in _COUNTS and isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
            result[name] = int(value)
        elif name not in ("nullable", "propertyOrdering", "example"):
            result[name] = value
    if "example" in schema:
        result.setdefault("examples", [schema["example"]])
    if schema.get("nullable") is True:
        _allow_null(result)
    ordering = schema.get("propertyOrdering", schema.get("property_ordering"))
    if isinstance(ordering, list) and isinstance(result.get("properties"), dict):
        properties = result["properties"]
        first = [name for name in ordering if isinstance(name, str) and name in properties]
        result["properties"] = {name: properties[name] for name in [*dict.fromkeys(first), *properties]}
    return result


def _nested(value: Any, path: str, depth: int) -> dict[str, Any] | bool:
    return value if isinstance(value, bool) else json_schema(_mapping(value, path), path, depth + 1)


def _mapping(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{path}: must be an object.", path, "invalid_value")
    return value


def _type(value: Any) -> Any:
    if isinstance(value, str):
        return None if value == "TYPE_UNSPECIFIED" else value.lower()
    if isinstance(value, list):
        return [item.lower() if isinstance(item, str) else item for item in value]
    return value


def _allow_null(schema: dict[str, Any]) -> None:
    kind = schema.get("type")
    if isinstance(kind, str) and kind != "null":
        schema["type"] = [kind, "null"]
    if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]
    if isinstance(schema.get("anyOf"), list):
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
