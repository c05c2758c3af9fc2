"""Messages as text, without the credentials that they carry.

A message's own `str` and `repr` show every field: protobuf's Python runtime knows no secrets. What is printed or logged
goes through `redacted`.
"""

import functools
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from penstock.options.v1 import options_pb2

MASK: Final = "***"


def redacted(message: Message) -> str:
    """Returns the message as text, with `***` for each credential, in messages inside too.

    Fields that these protos do not know are not shown.
    """
    shown = type(message)()
    shown.CopyFrom(message)
    _mask(shown)
    return str(shown)


@functools.cache
def is_secret(field: FieldDescriptor) -> bool:
    """Whether the field, or each value of the map, is a credential: `(penstock.options.v1.secret)`."""
    return bool(field.GetOptions().Extensions[options_pb2.secret])


def carries_secrets(descriptor: Descriptor) -> bool:
    """Whether the message or one inside has a field for a credential."""
    return _reaches(descriptor, set())


def _reaches(descriptor: Descriptor, seen: set[str]) -> bool:
    if descriptor.full_name in seen:
        return False
    seen.add(descriptor.full_name)
    return any(
        is_secret(field) or (field.message_type and _reaches(field.message_type, seen)) for field in descriptor.fields
    )


def _mask(message: Any) -> None:
    for field, value in message.ListFields():
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if is_secret(field):
            mask = MASK.encode() if field.type == FieldDescriptor.TYPE_BYTES else MASK
            if is_map:
                for key in value:
                    value[key] = mask
            elif field.is_repeated:
                value[:] = [mask] * len(value)
            else:
                setattr(message, field.name, mask)
        elif field.message_type is not None:
            if is_map:
                if field.message_type.fields_by_name["value"].message_type is not None:
                    for item in value.values():
                        _mask(item)
            else:
                for item in value if field.is_repeated else (value,):
                    _mask(item)
