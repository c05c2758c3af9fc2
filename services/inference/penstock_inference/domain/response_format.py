"""The required form of a completion: parsed from the caller's request, checked before an engine gets it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

from penstock_chassis.errors import InvalidArgument
from penstock_chassis.validation import invalid_field

FIELD = "sampling.response_format_json"
MAX_LENGTH = 128 * 1024
"""Limit in characters; agents write formats, and a grammar costs time to compile."""
MAX_CHOICES = 1024


class FormatKind(Enum):
    JSON_OBJECT = "json_object"
    """Any JSON object."""
    JSON_SCHEMA = "json_schema"
    """JSON that conforms to a schema."""
    REGEX = "regex"
    """Text that a regular expression matches as a whole."""
    CHOICE = "choice"
    """One of several texts."""
    GRAMMAR = "grammar"
    """Text of a context-free grammar, in the notation that the engine reads."""


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """A form. `text` is the schema as JSON, the expression or the grammar; `choices` are those of CHOICE.

    `json_text` is the complete format as the caller wrote it.
    """

    kind: FormatKind
    json_text: str
    text: str = ""
    choices: tuple[str, ...] = ()

    @classmethod
    def parse(cls, json_text: str) -> ResponseFormat | None:
        """Parse the OpenAI API's format: `json_object`, `json_schema` and `text` (None), and three more types.

        The others are `regex`, `choice` and `grammar`, with the value under the type's name. Raises InvalidArgument
        (FIELD_INVALID).
        """
        if len(json_text) > MAX_LENGTH:
            raise _invalid(f"must be of at most {MAX_LENGTH} characters")
        value = _object(json_text)
        type_ = value.get("type")
        if type_ == "text":
            return None
        kind = next((kind for kind in FormatKind if kind.value == type_), None)
        if kind is None:
            known = ", ".join(kind.value for kind in FormatKind)
            raise _invalid(f"must have a type, one of text, {known}")
        if kind is FormatKind.JSON_OBJECT:
            return cls(kind, json_text)
        inner = value.get(kind.value)
        if kind is FormatKind.JSON_SCHEMA:
            schema = inner.get("schema") if isinstance(inner, dict) else None
            if not isinstance(schema, dict):
                raise _invalid("must have an object as json_schema.schema")
            return cls(kind, json_text, json.dumps(schema))
        if kind is FormatKind.CHOICE:
            if not isinstance(inner, list) or not all(isinstance(text, str) and text for text in inner):
                raise _invalid("must have choice, a list of texts that are not empty")
            if not 1 <= len(inner) <= MAX_CHOICES:
                raise _invalid(f"must have 1 to {MAX_CHOICES} choices")
            return cls(kind, json_text, choices=tuple(inner))
        if not isinstance(inner, str) or not inner.strip():
            raise _invalid(f"must have a text as {kind.value}")
        return cls(kind, json_text, inner)


def _object(json_text: str) -> dict[str, Any]:
    try:
        value = json.loads(json_text)
    except (ValueError, RecursionError):
        raise _invalid("must be JSON") from None
    if not isinstance(value, dict):
        raise _invalid("must be a JSON object")
    return value


def _invalid(text: str) -> InvalidArgument:
    return invalid_field(FIELD, text)
