"""A proto enum's numbers by the names of its values, and by the members of a class's enum."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from google.protobuf.descriptor import EnumDescriptor

from penstock.values.fields import ValueMismatch

if TYPE_CHECKING:
    from google.protobuf.internal.enum_type_wrapper import _EnumTypeWrapper

E = TypeVar("E", bound=Enum)
N = TypeVar("N", bound=int)


def numbers(kind: type[E], enum: _EnumTypeWrapper[N], unspecified: E | None = None) -> dict[E, N]:
    """Returns the proto enum's number of each member, by the members' names without the enum's prefix.

    Args:
        kind: a class's enum. It may lack values of the proto's.
        enum: a proto's, such as `chat_pb2.Role`.
        unspecified: the member that stands for 0, whatever its name.

    Raises:
        ValueMismatch: the proto's enum lacks a member.
    """
    found = by_name(enum.DESCRIPTOR)
    lacking = [name for name, member in kind.__members__.items() if name not in found and member is not unspecified]
    if lacking:
        raise ValueMismatch(f"{enum.DESCRIPTOR.full_name} has no {', '.join(lacking)}, which {kind.__name__} has")
    typed = {int(number): number for number in enum.values()}
    return {member: typed[0 if member is unspecified else found[name]] for name, member in kind.__members__.items()}


def by_name(enum: EnumDescriptor) -> dict[str, int]:
    """Returns an enum's numbers by their names without the enum's prefix."""
    prefix = enum.values[0].name.removesuffix("UNSPECIFIED")
    return {value.name.removeprefix(prefix): value.number for value in enum.values}
