"""Converts pydantic's validation errors to violations in our wording."""

from __future__ import annotations

import re
from typing import Final

from pydantic import ValidationError

from penstock_chassis.errors import Violation

_SHOULD: Final = re.compile(r"^(?:[A-Z][A-Za-z]*) should ")
_NOT: Final = re.compile(r" after validation, not (\d+)$")


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
