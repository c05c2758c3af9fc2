"""What every dialect's body reader begins with: bytes to a JSON object, and pydantic's findings to one refusal.

Nothing here raises anything but BadRequest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import ValidationError

from penstock_interception.ingress.dialect import BadRequest


def json_object(body: bytes) -> dict[str, Any]:
    """A body as a JSON object."""
    try:
        value = orjson.loads(body)
    except ValueError as error:
        raise BadRequest(f"The body is not JSON: {error}.", None, "invalid_json") from None
    if not isinstance(value, dict):
        raise BadRequest("The body is not a JSON object.", None, "invalid_json")
    return value


def refuse_repeated_keys(body: bytes, value: Any) -> None:
    """Refuses a body in which an object has a key twice: readers disagree which of the two counts. `value` is the body.

    A body as most SDKs write it is told by writing it again; any other is read a second time, which takes longer.
    """
    try:
        if orjson.dumps(value) == body:
            return
        json.loads(body, object_pairs_hook=_once, parse_int=float)
    except (TypeError, RecursionError):  # orjson reads deeper than it writes, and than this one reads
        raise BadRequest("The body is nested too deeply.", None, "invalid_value") from None


def _once(pairs: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])[:64]
        raise BadRequest(f"{twice}: the key is there twice.", twice, "invalid_json")


def json_text(value: Any, path: str) -> str:
    """A part of a body as JSON text again; what is nested deeper than writers go is refused by its path."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # its one cause here: orjson reads deeper than it writes
        raise BadRequest(f"{path}: nested too deeply.", path, "invalid_value") from None


def refusal(error: ValidationError, body: Mapping[str, Any]) -> BadRequest:
    """The finding that says most of a body."""
    found = error.errors(include_input=False, include_url=False, include_context=False)
    # Of the members of a union, the one that got furthest says most.
    place = _place(found[0]["loc"])
    first = max((item for item in found if _place(item["loc"]) == place), key=lambda item: len(item["loc"]))
    param = _path(first["loc"], body)
    return BadRequest(f"{param or 'body'}: {first['msg']}.", param, "invalid_value")


def _place(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The field, and which of its items."""
    return location[:2] if len(location) > 1 and isinstance(location[1], int) else location[:1]


def _path(location: tuple[int | str, ...], value: Any) -> str | None:
    """A pydantic location as a client writes it: steps that are no part of the value name members of unions."""
    path = ""
    for position, step in enumerate(location):
        if isinstance(step, int):
            if not isinstance(value, list):
                break
            path += f"[{step}]"
            value = value[step]
        elif isinstance(value, dict):
            absent = step not in value
            if absent and (position + 1 < len(location) or not step.isidentifier() or step in ("str", "list")):
                continue
            path += f".{step}" if path else step
            value = None if absent else value[step]
        elif not isinstance(value, list):
            break
    return path or None
