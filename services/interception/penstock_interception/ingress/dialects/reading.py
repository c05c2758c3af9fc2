"""Common to every dialect's parser: bytes to a JSON object, and pydantic's errors to one refusal.

Raises only BadRequest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import orjson
from pydantic import ValidationError

from penstock_interception.domain.requests import ENABLE_THINKING, REASONING_EFFORT
from penstock_interception.ingress.dialects.base import BadRequest

_EFFORTS: Final = frozenset({"low", "medium", "high"})
"""Levels of reasoning that templates know."""
_SPARE_LEVELS: Final = 16
"""Answers, and the forms of other dialects, wrap a part of a body in fewer levels than this."""


def json_object(body: bytes) -> dict[str, Any]:
    """Parses a body. Raises BadRequest if it is no object, or nests deeper than the 254 levels that orjson writes.

    orjson parses 1,024 levels. Of deeper values than it writes, pydantic's errors cost seconds of CPU per MiB, and
    their text cannot be made: Python then writes each failure to the log.
    """
    try:
        value = orjson.loads(body)
    except ValueError as error:
        raise BadRequest(f"The body is not JSON: {error}.", None, "invalid_json") from None
    if not isinstance(value, dict):
        raise BadRequest("The body is not a JSON object.", None, "invalid_json")
    if _is_too_deep(value):
        name = next((name for name, item in value.items() if _is_too_deep({"": item})), "body")[:64]
        raise BadRequest(f"{name}: nested too deeply.", name, "invalid_value")
    return value


def _is_too_deep(value: dict[str, Any]) -> bool:
    try:
        orjson.dumps(value)
    except TypeError:  # the only cause here
        return True
    return False


def refuse_repeated_keys(body: bytes, value: Any) -> None:
    """Refuses a body with a repeated key in an object: parsers disagree which one counts. `value` is the parsed body.

    A body that equals its re-serialisation, as with most SDKs, has none; any other is parsed again, which is slower.
    """
    try:
        if orjson.dumps(value) == body:
            return
        json.loads(body, object_pairs_hook=_once, parse_int=float)
    except (TypeError, RecursionError):  # orjson parses deeper nesting than it writes, and than `json` parses
        raise BadRequest("The body is nested too deeply.", None, "invalid_value") from None


def _once(pairs: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])[:64]
        raise BadRequest(f"{twice}: duplicate key.", twice, "invalid_json")


def json_text(value: Any, path: str) -> str:
    """Serialises a part of a body again. Raises BadRequest with its path if it nests too deeply to be wrapped."""
    for _ in range(_SPARE_LEVELS):
        value = [value]
    try:
        return orjson.dumps(value)[_SPARE_LEVELS:-_SPARE_LEVELS].decode()
    except TypeError:  # the only cause here: orjson parses deeper nesting than it writes
        raise BadRequest(f"{path}: nested too deeply.", path, "invalid_value") from None


def thinking_of(effort: str, field: str, notes: list[str]) -> tuple[bool, dict[str, Any]]:
    """Returns whether an effort of reasoning asks to think, and the template's arguments; notes an unknown level."""
    if effort == "none":
        return False, {ENABLE_THINKING: False}
    if effort in _EFFORTS:
        return True, {ENABLE_THINKING: True, REASONING_EFFORT: effort}
    notes.append(f"{field} turns thinking on; its level was ignored")
    return True, {ENABLE_THINKING: True}


def refusal(error: ValidationError, body: Mapping[str, Any]) -> BadRequest:
    """Returns the most specific error of a body."""
    found = error.errors(include_input=False, include_url=False, include_context=False)
    # Of a union's members, the one that was validated furthest.
    place = _place(found[0]["loc"])
    first = max((item for item in found if _place(item["loc"]) == place), key=lambda item: len(item["loc"]))
    param = _path(first["loc"], body)
    return BadRequest(f"{param or 'body'}: {first['msg']}.", param, "invalid_value")


def _place(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Returns the field, and the index of its item."""
    return location[:2] if len(location) > 1 and isinstance(location[1], int) else location[:1]


def _path(location: tuple[int | str, ...], value: Any) -> str | None:
    """Returns a pydantic location as a path in the body; skips steps that are not in it: they name union members."""
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
