"""Which field of a class belongs to which field of a message."""

import dataclasses
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from penstock.values.provisional import is_provisional

_MAPS: Final = (Mapping,)
_SEQUENCES: Final = (tuple, Sequence, frozenset)


class ValueMismatch(TypeError):
    """A class and a message do not fit together, or a message has an enum value that the class lacks."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A field of a class and its counterpart in the message.

    Attributes:
        name: of the class's field.
        kind: its type, without None.
        optional: whether it may be None.
        default: the class's, as `dataclasses.field` describes it.
        path: the message's field, after those of the messages around it.
    """

    where: str
    name: str
    kind: Any
    optional: bool
    default: dataclasses.Field[Any]
    path: tuple[FieldDescriptor, ...]

    @property
    def proto(self) -> FieldDescriptor:
        """The message's field."""
        return self.path[-1]

    @property
    def item(self) -> "Pair":
        """The pair of one item, where the message's field is repeated or a map.

        Raises:
            ValueMismatch: the class's field has no items.
        """
        if not self.proto.is_repeated:
            return self
        kinds = typing.get_args(self.kind)
        if not kinds or typing.get_origin(self.kind) not in (_MAPS if self.is_map else _SEQUENCES):
            raise self.mismatch(f"{self.kind} is no {'Mapping' if self.is_map else 'tuple, Sequence or frozenset'}")
        kind = self.proto.message_type
        path = (kind.fields_by_name["value"],) if kind is not None and self.is_map else self.path
        return replace(self, kind=kinds[-1 if self.is_map else 0], optional=False, path=path)

    @property
    def is_map(self) -> bool:
        """Whether the message's field is a map."""
        kind = self.proto.message_type
        return kind is not None and bool(kind.GetOptions().map_entry)

    @property
    def takes_turns(self) -> bool:
        """Whether the message's field is a number or text of a oneof: empty values of the class are unset there."""
        oneof, field = self.proto.containing_oneof, self.proto
        synthetic = oneof is not None and len(oneof.fields) == 1 and oneof.name == f"_{field.name}"
        return oneof is not None and not synthetic and field.message_type is None

    def mismatch(self, problem: str) -> ValueMismatch:
        """The error about this field."""
        return ValueMismatch(f"{self.where}.{self.name} and {self.proto.full_name}: {problem}")


def pairs_of(
    cls: type, descriptor: Descriptor, renamed: Mapping[str, str], left_out: Collection[str], by_hand: Collection[str]
) -> list[Pair]:
    """Returns the pairs, in the order of the class.

    Args:
        cls: a dataclass.
        descriptor: of the message.
        renamed: the message's name of a field by the class's; a dotted one is of a message inside.
        left_out: fields, of either, that have no counterpart.
        by_hand: fields, of either, that functions convert.

    Raises:
        ValueMismatch: a field of either is in no pair and is not excepted; or one that is excepted does not exist.
    """
    where = cls.__qualname__
    hints = typing.get_type_hints(cls)
    own = {item.name: item for item in dataclasses.fields(cls) if item.init}
    excepted = {*left_out, *by_hand}
    unknown = {*excepted, *renamed} - own.keys() - set(descriptor.fields_by_name)
    if unknown:
        raise ValueMismatch(f"{where} and {descriptor.full_name} have no field {', '.join(sorted(unknown))}")
    pairs = [
        Pair(where, name, *_without_none(hints[name]), item, tuple(_path(where, name, descriptor, renamed.get(name))))
        for name, item in own.items()
        if name not in excepted or name in renamed
    ]
    # A field that is not served yet has no place in a class.
    given = {field.name for field in descriptor.fields if not is_provisional(field)}
    missing = given - excepted - {pair.path[0].name for pair in pairs}
    if missing:
        raise ValueMismatch(f"{where} has no field for {descriptor.full_name}.{', '.join(sorted(missing))}")
    return pairs


def _path(where: str, name: str, descriptor: Descriptor, given: str | None) -> Iterator[FieldDescriptor]:
    inside: Descriptor | None = descriptor
    for step in (given or _natural(name, descriptor)).split("."):
        found = None if inside is None else inside.fields_by_name.get(step)
        if found is None:
            raise ValueMismatch(f"{where}.{name}: {descriptor.full_name} has no field {given or name}")
        yield found
        inside = found.message_type


def _natural(name: str, descriptor: Descriptor) -> str:
    stem = name.removesuffix("_s")
    kind = descriptor.fields_by_name[stem].message_type if stem in descriptor.fields_by_name else None
    return stem if kind is not None and kind.name in ("Duration", "Timestamp") else name


def _without_none(hint: Any) -> tuple[Any, bool]:
    """Returns a type without None, and whether it had it."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint, False
    kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    return reduce(lambda one, other: one | other, kinds), len(kinds) < len(typing.get_args(hint))
