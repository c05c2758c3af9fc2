"""A proto enum's numbers by the names of its values, and by the members of a class's enum."""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Any, Self, TypeVar

from google.protobuf.descriptor import EnumDescriptor

from penstock.values.fields import ValueMismatch

if TYPE_CHECKING:
    from google.protobuf.internal.enum_type_wrapper import _EnumTypeWrapper

_UNKNOWN = "UNKNOWN"


class OpenEnum(StrEnum):
    """The words of an enum in services' answers. A newer service may have values that this client has no word for.

    Such a value is read as a member of the name UNKNOWN that no loop over the enum has, equal to the proto's number in
    digits, and "unspecified" for 0. Only `of` makes it; a call of the class raises ValueError for it.
    """

    @classmethod
    def of(cls, word: str) -> Self:
        """Returns the member of a word, or an unknown one of that word."""
        known = cls._value2member_map_.get(word)
        if isinstance(known, cls):
            return known
        made = str.__new__(cls, word)
        made._name_, made._value_ = _UNKNOWN, word
        return made

    @property
    def known(self) -> bool:
        """Whether this client has a word for the value."""
        return self._name_ != _UNKNOWN

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return type(self).of, (self._value_,)


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
