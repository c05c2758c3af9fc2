"""What becomes of one value: numbers and texts stay, times, enums and messages are converted."""

import dataclasses
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import Enum
from functools import partial
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.timestamp_pb2 import Timestamp

from penstock.values.enums import OpenEnum, by_name
from penstock.values.fields import Pair
from penstock.values.times import duration, seconds, timestamp

Convert = Callable[[Any], Any]
"""Converts one value."""

Nested = Callable[[type, type[Message]], Convert]
"""Finds or makes what converts a dataclass to or from a message inside."""

_SCALARS: Final = {
    FieldDescriptor.TYPE_STRING: str,
    FieldDescriptor.TYPE_BYTES: bytes,
    FieldDescriptor.TYPE_BOOL: bool,
    FieldDescriptor.TYPE_INT32: int,
    FieldDescriptor.TYPE_INT64: int,
    FieldDescriptor.TYPE_UINT32: int,
    FieldDescriptor.TYPE_DOUBLE: float,
}


def _moment(value: Timestamp) -> datetime:
    return value.ToDatetime(tzinfo=UTC)


def _stamp(value: datetime) -> Timestamp:
    result = Timestamp()
    result.FromDatetime(value)
    return result


_TIMES: Final[Mapping[tuple[Any, str], tuple[Convert, Convert]]] = {
    (float, "google.protobuf.Duration"): (seconds, duration),
    (float, "google.protobuf.Timestamp"): (seconds, timestamp),
    (datetime, "google.protobuf.Timestamp"): (_moment, _stamp),
}
"""How each is read and written."""


class _Table(dict[Any, Any]):
    """The values of an enum; one that is missing raises an error that names the field."""

    def __init__(self, pair: Pair, values: Mapping[Any, Any]) -> None:
        super().__init__(values)
        self._pair = pair

    def __missing__(self, key: Any) -> Any:
        raise self._pair.mismatch(f"{key!r} is not one of {', '.join(str(known) for known in self)}")


class _Words(_Table):
    """The words of an enum's numbers; a number without one stays a number, in digits."""

    def __missing__(self, key: Any) -> Any:
        return str(key)


class _Numbers(_Table):
    """The numbers of an enum's words; the digits of one that was read without a word become that number again."""

    def __missing__(self, key: Any) -> Any:
        if isinstance(key, str) and key.isdecimal():
            return int(key)
        return super().__missing__(key)


class _Open(_Table):
    """The members of an OpenEnum by their numbers."""

    def __missing__(self, key: Any) -> Any:
        return self._pair.kind.of(str(key) if key else "unspecified")


def reading(pair: Pair, nested: Nested) -> Convert | None:
    """Returns what makes the class's value of the message's; None = it stays.

    Raises:
        ValueMismatch: the types do not fit.
    """
    field, kind = pair.proto, pair.kind
    if field.enum_type is not None and kind is not int:
        members, numbers = _members(pair), by_name(field.enum_type)
        table = {number: members.get(name) for name, number in numbers.items() if number or name in members}
        lacking = [name for name, number in numbers.items() if number and name not in members]
        if lacking:
            raise pair.mismatch(f"{kind.__name__} has no {', '.join(lacking)}")
        if pair.optional:
            table.setdefault(0, None)
        if kind is str:
            return _Words(pair, table).__getitem__
        return (_Open if issubclass(kind, OpenEnum) else _Table)(pair, table).__getitem__
    times = _times(kind, field)
    return times[0] if times else _plain(pair, nested)


def writing(pair: Pair, nested: Nested) -> Convert | None:
    """Returns what makes the message's value of the class's; None = it stays.

    Raises:
        ValueMismatch: the types do not fit.
    """
    field, kind = pair.proto, pair.kind
    if field.enum_type is not None and kind is not int:
        members, numbers = _members(pair), by_name(field.enum_type)
        lacking = members.keys() - numbers.keys()
        if lacking:
            raise pair.mismatch(f"{field.enum_type.full_name} has no {', '.join(sorted(lacking))}")
        table = {member: numbers[name] for name, member in members.items()}
        return (_Numbers if kind is str else _Table)(pair, table).__getitem__
    times = _times(kind, field)
    if _is_message(kind, field):
        return partial(_kept, pair)
    return times[1] if times else _plain(pair, nested)


def _times(kind: Any, field: FieldDescriptor) -> tuple[Convert, Convert] | None:
    return None if field.message_type is None else _TIMES.get((kind, field.message_type.full_name))


def _plain(pair: Pair, nested: Nested) -> Convert | None:
    field, kind = pair.proto, pair.kind
    if field.message_type is not None:
        if _is_message(kind, field):
            return None
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            raise pair.mismatch(f"{_name(kind)} is no dataclass")
        return nested(kind, GetMessageClass(field.message_type))
    expected = int if field.enum_type is not None else _SCALARS[field.type]
    if kind is not expected:
        raise pair.mismatch(f"{_name(kind)} is not {expected.__name__}")
    return None


def _is_message(kind: Any, field: FieldDescriptor) -> bool:
    return field.message_type is not None and getattr(kind, "DESCRIPTOR", None) is field.message_type


def _kept(pair: Pair, message: Any) -> Any:
    """Returns a message that a value has; without this, None would be written as unset."""
    if message is None:
        raise pair.mismatch("it is None")
    return message


def _members(pair: Pair) -> Mapping[str, Any]:
    """Returns the members of a class's enum by name, or the words where the class has plain ones."""
    kind = pair.kind
    if kind is str:
        assert pair.proto.enum_type is not None
        return {name: name.lower() for name in by_name(pair.proto.enum_type)}
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pair.mismatch(f"{_name(kind)} is no Enum")
    return kind.__members__


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))
