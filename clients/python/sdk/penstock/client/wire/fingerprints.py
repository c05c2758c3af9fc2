"""A message as bytes that are the same in every language: what is hashed where clients of several languages compare.

Protobuf's own form is not: fields and maps may come in any order.
"""

import struct
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_REAL = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)


def fingerprint(message: Message) -> bytes:
    """Returns the set fields by their numbers, each as `NUMBER:LENGTH:VALUE`, one for each item of a list.

    A text is its UTF-8, an integer, a truth value and an enum's number its decimal form, a real number its eight bytes,
    the highest first, a message its fingerprint. An entry of a map is a message of its key (1) and its value (2), both
    always there; entries are in the order of their bytes.
    """
    return b"".join(
        item
        for field, value in message.ListFields()
        for item in (_entries(field, value) if _is_map(field) else _items(field, value))
    )


def _items(field: FieldDescriptor, value: Any) -> list[bytes]:
    return [_item(field.number, _value(field, one)) for one in (value if field.is_repeated else (value,))]


def _entries(field: FieldDescriptor, value: Any) -> list[bytes]:
    entry = field.message_type
    assert entry is not None
    of_key, of_value = (entry.fields_by_number[number] for number in (1, 2))
    return sorted(
        _item(field.number, _item(1, _value(of_key, key)) + _item(2, _value(of_value, value[key]))) for key in value
    )


def _item(number: int, value: bytes) -> bytes:
    return b"%d:%d:" % (number, len(value)) + value


def _value(field: FieldDescriptor, value: Any) -> bytes:
    if isinstance(value, Message):
        return fingerprint(value)
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    return struct.pack(">d", value) if field.type in _REAL else b"%d" % value


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry
