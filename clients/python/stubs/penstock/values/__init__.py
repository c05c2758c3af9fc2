"""Converts frozen dataclasses to protobuf messages and back, by the names of their fields.

    resources_to = writer(Resources, sandbox_pb2.Resources)
    exit_from = reader(Exit, process_service_pb2.Exit, left_out=("ended_inside",))

`reader` and `writer` return functions. They are made at their first call, once, from source text, so that they are as
fast as written ones. A field that only one side has, or whose types differ, raises ValueMismatch then; `check` makes
all that are declared. `from_proto` and `to_proto` find or make the function of a pair; so do messages in messages.

A class's field has the name of the message's field, or that name and `_s` for seconds. What each type becomes:

- `float` for a Duration (seconds) or a Timestamp (seconds since the epoch), `datetime` for a Timestamp (UTC);
- an Enum by the names of its members, without the proto's prefix; `str` for an enum: the name in lower case. A number
  without a name is a ValueMismatch for an Enum, an unknown member of an OpenEnum, and its digits for `str`;
- a dataclass for a message, a tuple, Sequence (read as a tuple) or frozenset for a repeated field, a Mapping for a map;
- a message's own class, and `int` for an enum: the same object.

`redacted` is a message as text without its credentials, for logs and people.

`numbers` maps an Enum alone, for the few converters that are written by hand.

Unset fields become None if the class's field may be None, else its default, else what an empty message gives. None is
written as unset. Of a oneof, the first member that is not None (for other types: not empty) is written.
"""

from penstock.values.enums import OpenEnum, numbers
from penstock.values.fields import ValueMismatch
from penstock.values.functions import check, from_proto, reader, to_proto, writer
from penstock.values.secrets import redacted

__all__ = ["OpenEnum", "ValueMismatch", "check", "from_proto", "numbers", "reader", "redacted", "to_proto", "writer"]
