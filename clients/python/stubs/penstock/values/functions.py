"""Functions that convert whole values, made from source text once for each pair of a class and a message.

They are made at the first conversion: programs declare many pairs and use few.
"""

import dataclasses
import linecache
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from penstock.values.fields import Pair, ValueMismatch, pairs_of
from penstock.values.kinds import Convert, reading, writing

V = TypeVar("V")
M = TypeVar("M", bound=Message)


@dataclass(slots=True, eq=False)
class _Function:
    """A function that `make` makes at its first call."""

    make: Callable[[], Convert]
    made: Convert | None = None

    def __call__(self, it: Any) -> Any:
        return (self.made or self.ready())(it)

    def ready(self) -> Convert:
        if self.made is None:
            self.made = self.make()
        return self.made


_Functions = dict[tuple[type, Descriptor], _Function]
_readers: Final[_Functions] = {}
_writers: Final[_Functions] = {}
_NOTHING: Final[Mapping[str, Any]] = {}


def from_proto(cls: type[V], message: Message) -> V:
    """Returns the value of a message.

    Raises:
        ValueMismatch: the class and the message do not fit, or an enum's value is unknown.
    """
    value: V = _found(_readers, _read, cls, message)(message)
    return value


def to_proto(value: Any, message_type: type[M]) -> M:
    """Returns the message of a value.

    Raises:
        ValueMismatch: the class and the message do not fit, or a word is not one of the enum's.
        TypeError, ValueError: a field's value is not of its type, or out of range.
    """
    message: M = _found(_writers, _write, type(value), message_type)(value)
    return message


def reader(
    cls: type[V],
    message_type: type[M],
    *,
    renamed: Mapping[str, str] = _NOTHING,
    left_out: Collection[str] = (),
    by: Mapping[str, Callable[[M], Any]] = _NOTHING,
) -> Callable[[M], V]:
    """Returns a function that makes a value of a message; messages inside others are then read by it too.

    Args:
        cls: a dataclass.
        message_type: of the message.
        renamed: the message's name of a field by the class's; `spec.agent.name` is of a message inside.
        left_out: fields of the message that the class has not, and of the class that keep their default.
        by: functions of the message for fields of the class.

    Raises:
        ValueMismatch: this pair has a reader already. The function, at its first call: as `from_proto`.
    """
    return _declared(_readers, _read, cls, message_type, renamed, left_out, by)


def writer(
    cls: type[V],
    message_type: type[M],
    *,
    renamed: Mapping[str, str] = _NOTHING,
    left_out: Collection[str] = (),
    by: Mapping[str, Callable[[V], Any]] = _NOTHING,
) -> Callable[[V], M]:
    """Returns a function that makes a message of a value; values inside others are then written by it too.

    Args:
        cls: a dataclass.
        message_type: of the message.
        renamed: the message's name of a field by the class's; `argv.args` is of a message inside, which is set if one
            of its fields is.
        left_out: fields of the class that the message has not, and of the message that stay unset.
        by: functions of the value for fields of the message; None = unset.

    Raises:
        ValueMismatch: this pair has a writer already. The function, at its first call: as `to_proto`.
    """
    return _declared(_writers, _write, cls, message_type, renamed, left_out, by)


def check() -> int:
    """Makes every function that is declared so far, as a test does; returns how many there are.

    Raises:
        ValueMismatch: the class and the message of a pair do not fit.
    """
    declared = [*_readers.values(), *_writers.values()]
    for function in declared:
        function.ready()
    return len(declared)


def _declared(
    functions: _Functions, make: Callable[..., Convert], cls: type, message_type: Any, *terms: Any
) -> Convert:
    key = cls, _descriptor(message_type)
    if key in functions:
        raise ValueMismatch(f"{cls.__qualname__} and {key[1].full_name}: declared twice, or after their first use")
    functions[key] = _Function(partial(make, *key, *terms))
    return functions[key]


def _found(functions: _Functions, make: Callable[..., Convert], cls: type, message: Any) -> Convert:
    """Returns the pair's function; declares it, with equal names on both sides, if there is none."""
    found = functions.get((cls, _descriptor(message)))
    return found.ready() if found else _declared(functions, make, cls, message, _NOTHING, (), _NOTHING)


def _descriptor(message: Message | type[Message]) -> Descriptor:
    return typing.cast(Descriptor, message.DESCRIPTOR)


def _read(
    cls: type, descriptor: Descriptor, renamed: Mapping[str, str], left_out: Collection[str], by: Mapping[str, Any]
) -> Convert:
    names: dict[str, Any] = {"made": cls} | {f"by_{name}": by[name] for name in by}
    pairs = pairs_of(cls, descriptor, renamed, left_out, by)
    arguments = [f"{pair.name}={_read_field(pair, names)}" for pair in pairs]
    arguments += [f"{name}=by_{name}(it)" for name in by]
    _check_names(by, {item.name for item in dataclasses.fields(cls)}, cls.__qualname__)
    return _function(f"reads {cls.__qualname__}", arguments, names)


def _read_field(pair: Pair, names: dict[str, Any]) -> str:
    """Returns an expression for a field of the class; `it` is the message."""
    field, name = pair.proto, pair.name
    owner = ".".join(("it", *(step.name for step in pair.path[:-1])))
    got = f"{owner}.{field.name}"
    convert = names[f"c_{name}"] = reading(pair.item, partial(_found, _readers, _read))
    if field.is_repeated:
        if pair.is_map:
            found = f"{{key: c_{name}(item) for key, item in {got}.items()}}" if convert else f"dict({got})"
        else:
            names[f"t_{name}"] = frozenset if typing.get_origin(pair.kind) is frozenset else tuple
            found = f"t_{name}(map(c_{name}, {got}))" if convert else f"t_{name}({got})"
        return f"({found} or None)" if pair.optional else found
    found = f"c_{name}({got})" if convert else got
    if field.has_presence:
        unset = _unset(pair, found, names)
        return found if unset == found else f"({found} if {owner}.HasField({field.name!r}) else {unset})"
    if pair.optional and field.enum_type is None:
        raise pair.mismatch("it may be None, but the message's is never unset")
    return found


def _unset(pair: Pair, found: str, names: dict[str, Any]) -> str:
    """Returns an expression for a field of the class that is unset in the message."""
    default = pair.default
    if pair.optional:
        return "None"
    if default.default is not dataclasses.MISSING:
        names[f"d_{pair.name}"] = default.default
        return f"d_{pair.name}"
    if default.default_factory is not dataclasses.MISSING:
        names[f"d_{pair.name}"] = default.default_factory
        return f"d_{pair.name}()"
    return found


def _write(
    cls: type, descriptor: Descriptor, renamed: Mapping[str, str], left_out: Collection[str], by: Mapping[str, Any]
) -> Convert:
    names: dict[str, Any] = {"made": GetMessageClass(descriptor)} | {f"by_{name}": by[name] for name in by}
    fields = {name: f"by_{name}(it)" for name in by}
    inside: dict[str, list[Pair]] = {}
    for pair in pairs_of(cls, descriptor, renamed, left_out, by):
        if len(pair.path) == 1:
            fields[pair.proto.name] = _write_field(pair, names)
        else:
            inside.setdefault(pair.path[0].name, []).append(pair)
    fields |= {name: _write_inside(name, pairs, names) for name, pairs in inside.items()}
    _check_names(by, set(descriptor.fields_by_name), descriptor.full_name)
    # Of a oneof's members the last one stays, so the first is written last.
    order = sorted(fields, key=lambda name: -descriptor.fields_by_name[name].index)
    return _function(f"writes {cls.__qualname__}", [f"{name}={fields[name]}" for name in order], names)


def _check_names(by: Mapping[str, Any], fields: Collection[str], owner: str) -> None:
    unknown = by.keys() - fields
    if unknown:
        raise ValueMismatch(f"{owner} has no field {', '.join(sorted(unknown))}, which a function makes")


def _write_inside(head: str, pairs: Sequence[Pair], names: dict[str, Any]) -> str:
    """Returns an expression for a message inside, None where all that it has of the value is unset."""
    if any(len(pair.path) > 2 for pair in pairs):
        raise pairs[0].mismatch("it is too deep to be written")
    names[f"m_{head}"] = GetMessageClass(typing.cast(Descriptor, pairs[0].proto.containing_type))
    fields = {pair: _write_field(pair, names) for pair in pairs}
    given = [f"it.{pair.name}" if pair.proto.is_repeated else f"{field} is not None" for pair, field in fields.items()]
    arguments = ", ".join(f"{pair.proto.name}={field}" for pair, field in fields.items())
    return f"(m_{head}({arguments}) if {' or '.join(given)} else None)"


def _write_field(pair: Pair, names: dict[str, Any]) -> str:
    """Returns an expression for a field of the message, None where it stays unset; `it` is the value."""
    got = f"it.{pair.name}"
    convert = names[f"c_{pair.name}"] = writing(pair.item, partial(_found, _writers, _write))
    if pair.is_map:
        found = f"{{key: c_{pair.name}(item) for key, item in {got}.items()}}"
    elif pair.proto.is_repeated:
        found = f"list(map(c_{pair.name}, {got}))"
    else:
        found = f"c_{pair.name}({got})"
    found = found if convert else got
    if pair.optional:
        return f"(None if {got} is None else {found})" if convert else found
    return f"({found} if {got} else None)" if pair.takes_turns else found


def _function(title: str, arguments: Sequence[str], names: dict[str, Any]) -> Convert:
    """Returns a function of `it` that calls `made` with the arguments. Only names of fields are in its text."""
    source = "def convert(it):\n    return made(\n" + "".join(f"        {item},\n" for item in arguments) + "    )\n"
    file = f"<penstock.values: {title}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # for tracebacks
    exec(compile(source, file, "exec"), names)  # noqa: S102 - as `dataclasses` does; nothing of a message is in it
    made: Convert = names["convert"]
    return made
