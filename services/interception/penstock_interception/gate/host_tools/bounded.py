"""A JSON Schema validator with bounded work: it stops after a number of steps, whatever the schema and the value.

The plain validator is exponential for a recursive `anyOf`, quadratic for `uniqueItems`, endless for chains of `allOf`,
and keeps the whole error tree of a failed branch. Here every keyword costs steps, a branch ends at its first error, the
verdict on a schema and value is cached, and no message quotes a value at length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache
from typing import Any, Final, TypeAlias

import attrs
import orjson
import re2
from jsonschema import exceptions, validators
from jsonschema.protocols import Validator

PER_STEP: Final = 16
"""List or object entries, string characters, or values of a constant that one step covers."""
_QUOTED_CHARS: Final = 80

_Keyword: TypeAlias = Callable[[Any, Any, Any, Any], Iterator[exceptions.ValidationError] | None]


class TooManySteps(Exception):
    """The validation needs more steps than allowed."""


class Steps:
    """The remaining steps for one value, and the cached verdicts on its parts."""

    def __init__(self, allowed: int) -> None:
        """Allows at most `allowed` steps."""
        self.left = allowed
        self.fits: dict[tuple[int, int], bool] = {}  # (id of schema, id of value) -> whether the value is valid

    def take(self, steps: int) -> None:
        """Spends steps. Raises TooManySteps if too few are left."""
        self.left -= steps
        if self.left < 0:
            raise TooManySteps


class Object(dict[str, Any]):
    """A JSON object with the count of its values; error messages do not quote it."""

    weight: int

    def __repr__(self) -> str:
        return "the object"


class Array(list[Any]):
    """A JSON list with the count of its values; error messages do not quote it."""

    weight: int

    def __repr__(self) -> str:
        return "the list"


class Text(str):
    """A JSON string; error messages quote only its beginning."""

    __slots__ = ()

    def __repr__(self) -> str:
        short = str(self[:_QUOTED_CHARS])
        return repr(short if len(self) <= _QUOTED_CHARS else short + "...")


_steps: ContextVar[Steps] = ContextVar("steps")


def weighed(value: Any) -> Any:
    """Copies a JSON value, or a schema, into the types above. Recursive: check the value's depth first."""
    if isinstance(value, dict):
        made = Object((Text(key), weighed(inner)) for key, inner in value.items())
        made.weight = 1 + sum(map(_weight, made.values())) + sum(len(key) for key in made) // PER_STEP
        return made
    if isinstance(value, list):
        items = Array(weighed(inner) for inner in value)
        items.weight = 1 + sum(map(_weight, items))
        return items
    return Text(value) if isinstance(value, str) else value


def errors(validator: Validator, value: Any, steps: Steps) -> Iterator[exceptions.ValidationError]:
    """Yields the errors of a weighed value as they are found. `validator` must be of a class from `validator_class`.

    Raises:
        TooManySteps: the validation needs more than `steps`.
        RecursionError: the schema refers to itself without end.
    """
    found = validator.iter_errors(value)
    while True:
        token = _steps.set(steps)  # only while the validator runs: a generator shares its consumer's context
        try:
            error = next(found, None)
        finally:
            _steps.reset(token)
        if error is None:
            return
        yield error


@cache
def validator_class(kind: type[Validator]) -> type[Validator]:
    """Returns the step-counting version of a draft's validator."""
    own: dict[str, _Keyword] = {
        "pattern": _pattern,
        "uniqueItems": _unique_items,
        "anyOf": _any_of,
        "oneOf": _one_of,
        "not": _not,
    }
    counted = {name: _counted(name, own.get(name) or check) for name, check in kind.VALIDATORS.items()}
    made: type[Validator] = validators.extend(kind, counted)  # type: ignore[no-untyped-call]
    # The original `evolve` switches to an uncounted class for a schema that names its draft.
    made.evolve = lambda self, **changes: attrs.evolve(self, **changes)  # type: ignore[method-assign]
    return made


def _weight(value: Any) -> int:
    if isinstance(value, Object | Array):
        return value.weight
    return 1 + len(value) // PER_STEP if isinstance(value, str) else 1


def _size(value: Any) -> int:
    return len(value) if isinstance(value, dict | list | str) else 0


def _counted(name: str, check: _Keyword) -> _Keyword:
    deep = name in ("const", "enum", "uniqueItems")  # these compare whole values, the others only the first level

    def counted(validator: Any, wanted: Any, value: Any, schema: Any) -> Iterator[exceptions.ValidationError]:
        size = _weight(wanted) + _weight(value) if deep else _size(wanted) + _size(value)
        _steps.get().take(1 + size // PER_STEP)
        yield from check(validator, wanted, value, schema) or ()

    return counted


def _fits(validator: Any, schema: Any, value: Any) -> bool:
    """Returns whether a value is valid under a schema; cached by id, since both outlive the step counter."""
    known, key = _steps.get().fits, (id(schema), id(value))
    if key not in known:
        known[key] = next(validator.descend(value, schema), None) is None
    return known[key]


def _any_of(validator: Any, branches: Any, value: Any, _: Any) -> Iterator[exceptions.ValidationError]:
    if not any(_fits(validator, branch, value) for branch in branches):
        yield exceptions.ValidationError(f"{value!r} is not valid under any of the given schemas")


def _one_of(validator: Any, branches: Any, value: Any, _: Any) -> Iterator[exceptions.ValidationError]:
    fitting = 0
    for branch in branches:
        fitting += _fits(validator, branch, value)
        if fitting == 2:
            yield exceptions.ValidationError(f"{value!r} is valid under more than one of the given schemas")
            return
    if not fitting:
        yield exceptions.ValidationError(f"{value!r} is not valid under any of the given schemas")


def _not(validator: Any, schema: Any, value: Any, _: Any) -> Iterator[exceptions.ValidationError]:
    if _fits(validator, schema, value):
        yield exceptions.ValidationError(f"{value!r} is valid under the schema that it must not fit")


def _pattern(validator: Any, pattern: Any, value: Any, _: Any) -> Iterator[exceptions.ValidationError]:
    if validator.is_type(value, "string") and not re2.search(str(pattern), str(value)):
        yield exceptions.ValidationError(f"does not match {pattern!r}")


def _unique_items(validator: Any, wanted: Any, value: Any, _: Any) -> Iterator[exceptions.ValidationError]:
    if wanted and validator.is_type(value, "array") and len({_identity(item) for item in value}) < len(value):
        yield exceptions.ValidationError(f"{value!r} has non-unique elements")


def _identity(value: Any) -> bytes:
    """Encodes a value as bytes that are equal for equal values: sorted keys, whole numbers without a point."""
    return orjson.dumps(_whole(value), option=orjson.OPT_SORT_KEYS)


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _whole(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_whole(inner) for inner in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    return str(value) if isinstance(value, str) else value
