"""Any message of a type, as strategies: each field unset or set, enums to a value that they have.

Times are such that a float has them exactly.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

_DEPTH = 4
_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_STRING: st.sampled_from(["", "a", "bc"]),
    FieldDescriptor.TYPE_BYTES: st.sampled_from([b"", bytes(4), bytes(8)]),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_DOUBLE: st.floats(allow_nan=False),
}
_NUMBERS = st.integers(0, 2**31 - 1)


def messages(descriptor: Descriptor, depth: int = 0) -> st.SearchStrategy[Message]:
    """Messages of the type; those far inside are empty."""
    made = GetMessageClass(descriptor)
    if descriptor.full_name in ("google.protobuf.Duration", "google.protobuf.Timestamp"):
        return st.builds(made, seconds=st.integers(0, 2**31), nanos=st.sampled_from([0, 250_000_000, 500_000_000]))
    if descriptor.full_name.startswith("google.protobuf.") or depth > _DEPTH:
        return st.builds(made)
    return st.fixed_dictionaries({}, optional=_fields(descriptor, depth)).map(lambda fields: made(**fields))


def _fields(descriptor: Descriptor, depth: int) -> dict[str, st.SearchStrategy[Any]]:
    return {field.name: _values(field, depth) for field in descriptor.fields}


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        values = _single(kind.fields_by_name["value"], depth)
        return st.dictionaries(st.sampled_from(["x", "y"]), values, max_size=2)
    return st.lists(_single(field, depth), max_size=2) if field.is_repeated else _single(field, depth)


def _single(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.enum_type is not None:
        return st.sampled_from([value.number for value in field.enum_type.values[1:]])
    if field.message_type is not None:
        kind = field.message_type
        return st.deferred(lambda: messages(kind, depth + 1))
    return _SCALARS.get(field.type, _NUMBERS)
