"""Validation of requests: the one error of a field that is out of its range or shape, pydantic's errors as violations
in our wording, pages, and fields that a service does not know or does not serve yet.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from pydantic import ValidationError

from penstock.values.provisional import provisional_set
from penstock_chassis.errors import InvalidArgument, Violation

_SELECTING: Final = ("Abort", "Delete", "Export", "List", "RegisterTools", "Revoke", "Watch")
"""Names of the methods whose requests select resources begin with these."""
_SHOULD: Final = re.compile(r"^(?:[A-Z][A-Za-z]*) should ")
_NOT: Final = re.compile(r" after validation, not (\d+)$")


PAGE_DEFAULT: Final = 100
"""Items of a page whose size the caller leaves to the service."""
PAGE_MOST: Final = 1000
"""Most items of a page."""
MAX_REQUEST_ID: Final = 256
"""Most characters of a request id."""
_LISTED: Final = 20


def invalid(
    violations: Sequence[Violation], message: str = "", metadata: Mapping[str, str] | None = None
) -> InvalidArgument:
    """Returns the error of every request whose fields are out of their range or shape: FIELD_INVALID.

    Callers of all services see one reason, and find the fields in the violations.

    Args:
        violations: at least one.
        message: for people; empty for the first violations.
        metadata: as of every error.
    """
    text = message or "; ".join(f"{item.field}: {item.description}" for item in violations[:_LISTED])
    return InvalidArgument(text, reason="FIELD_INVALID", metadata=metadata, violations=violations)


def invalid_field(field: str, problem: str) -> InvalidArgument:
    """Returns `invalid` for one field."""
    return invalid([Violation(field, problem)])


def check_request_id(value: str) -> None:
    """Raises InvalidArgument FIELD_INVALID unless a request that creates something has a usable request id.

    It is required: without one, a client that repeats a call whose answer was lost would create twice.
    """
    if not 0 < len(value) <= MAX_REQUEST_ID:
        raise invalid_field("request_id", f"must have 1 to {MAX_REQUEST_ID} characters: a fresh id for each creation")


def page_size(asked: int) -> int:
    """Returns the number of items of a page: 0 is the default, more than the maximum is the maximum.

    Raises InvalidArgument FIELD_INVALID for less than 0.
    """
    if asked < 0:
        raise invalid_field("page_size", "must not be negative")
    return min(asked, PAGE_MOST) or PAGE_DEFAULT


def foreign_page_token() -> InvalidArgument:
    """Returns the error of a page token that this RPC did not return."""
    return invalid_field("page_token", "is not a token of this list: start from its first page")


def violations_of(error: ValidationError, whole: str, prefix: str = "") -> list[Violation]:
    """Returns a violation for each problem, without the given value: it may be a secret.

    Args:
        error: pydantic's.
        whole: the field name for a problem of the whole model.
        prefix: prepended to field names, as in "engine_options.".
    """
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    return [
        Violation(prefix + ".".join(map(str, item["loc"])) if item["loc"] else whole, in_words(item["msg"]))
        for item in problems
    ]


def in_words(message: str) -> str:
    """Turns one of pydantic's messages into a sentence about the field: "must be greater than or equal to 1"."""
    text = _SHOULD.sub("must ", message.removeprefix("Value error, "))
    return _NOT.sub(r", and has \1", text)


def selects(method: str) -> bool:
    """Returns whether the requests of `package.Service/Method` select resources."""
    return method.rpartition("/")[2].startswith(_SELECTING)


def refuse_unknown(message: Message, path: str = "") -> None:
    """Raises InvalidArgument FIELD_UNKNOWN if the message or one inside has unknown fields.

    `path` is the message's own, for the violations.
    """
    unknown = _unknown(message, path)
    found = [Violation(where, f"has field {number}, which this version does not know") for where, number in unknown]
    if found:
        raise InvalidArgument(
            "The request has a field that this version of the service does not know. Without it the request could "
            "select more than was meant. Use a newer service, or leave the field out; GetServerInfo has its revision.",
            reason="FIELD_UNKNOWN",
            violations=found,
        )


def refuse_provisional(message: Message, but: frozenset[str] = frozenset()) -> None:
    """Raises InvalidArgument FIELD_NOT_SERVED if the message or one inside sets a field that is not served yet.

    Args:
        message: a request, or an item of one.
        but: full names of messages inside that are not read, because each is judged by itself.
    """
    found = provisional_set(message, but)
    if found:
        raise InvalidArgument(
            f"Not served yet: {', '.join([*found][:_LISTED])}. The protos declare it as provisional, so it may still "
            "change. Leave it out until GetServerInfo names its feature.",
            reason="FIELD_NOT_SERVED",
            violations=[
                Violation(path, f"is provisional: leave it out until the service has the feature {feature}")
                for path, feature in found.items()
            ],
        )


def _unknown(message: Any, path: str) -> Iterator[tuple[str, int]]:
    unknown: Any = UnknownFieldSet(message)
    for field in unknown:
        yield path or "request", field.field_number
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None or descriptor.message_type.GetOptions().map_entry:
            continue
        where = f"{path}.{descriptor.name}" if path else descriptor.name
        for item in value if descriptor.is_repeated else (value,):
            yield from _unknown(item, where)
