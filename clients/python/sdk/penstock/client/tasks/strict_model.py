"""Validation of mappings that people write: all keys known, all problems reported at once, in terms of the file."""

import re
from collections.abc import Iterator, Mapping
from datetime import date
from typing import Any, Final, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from penstock.client.tasks.named_files import Beside

_CONFLICT: Final = "conflict"

Place = tuple[str | int, ...]
"""A place in a mapping."""


class Strict(BaseModel):
    """A mapping whose keys are all known.

    `conflicts` finds problems of several keys together, or of a file that one of them names. Unlike a validator of the
    whole model, it also runs when single keys are invalid. The context's `beside` is the directory of the file.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @classmethod
    def unfolded(cls, value: Any) -> Any:
        """Returns the mapping for a short form."""
        return value

    @classmethod
    def conflicts(cls, value: Mapping[str, Any], beside: Beside | None) -> Iterator[tuple[Place, str]]:
        """Yields problems across keys, by their place in the mapping. Nothing of `value` is validated yet."""
        return iter(())

    @model_validator(mode="wrap")
    @classmethod
    def _whole(cls, value: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        value = cls.unfolded(value)
        found = cls.conflicts(value, (info.context or {}).get("beside")) if isinstance(value, Mapping) else ()
        wrong = [InitErrorDetails(type=conflict(problem), loc=place, input=None) for place, problem in found]
        if not wrong:
            return handler(value)
        try:
            handler(value)
        except ValidationError as error:
            for item in error.errors(include_url=False):
                context = item.get("ctx", {})
                kind = conflict(context["problem"]) if item["type"] == _CONFLICT else item["type"]
                wrong.append(InitErrorDetails(type=kind, loc=item["loc"], input=item["input"], ctx=context))
        raise ValidationError.from_exception_data(cls.__name__, wrong)


def conflict(problem: str) -> PydanticCustomError:
    """Returns a problem in words, as the type of one of pydantic's errors."""
    return PydanticCustomError(_CONFLICT, "{problem}", {"problem": problem})


_WORDS: Final = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a smaller whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be a mapping of names to values",
    "model_type": "must be a mapping of names to values",
    "missing": "is required",
    "literal_error": "must be {expected}",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "string_too_long": "must have at most {max_length} characters",
    "string_unicode": "must be text in Unicode",
}


def in_words(item: Mapping[str, Any]) -> str:
    """Rephrases a pydantic problem (one of `ValidationError.errors()`)."""
    kind, context, given = item["type"], item.get("ctx", {}), item["input"]
    if kind == "string_type":
        plain = isinstance(given, int | float | date)
        return "must be text: put it in quotes" if plain else "must be text"
    if kind in ("too_short", "string_too_short") and context["min_length"] == 1:
        return "must not be empty"
    if kind == "too_short":
        return f"must have at least {context['min_length']} items, but has {context['actual_length']}"
    if kind == "too_long":
        return f"must have at most {context['max_length']} items, but has {context['actual_length']}"
    words = _WORDS.get(kind)
    if words is None:
        return re.sub(r"^[A-Z][A-Za-z]* should ", "must ", str(item["msg"]).removeprefix("Value error, "))
    return words.format(**context)
