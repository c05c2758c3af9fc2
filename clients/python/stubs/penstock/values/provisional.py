"""What the protos declare before it is served: `(penstock.options.v1.provisional)` and `provisional_method`."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message

from penstock.options.v1 import options_pb2

_NONE: Final[frozenset[str]] = frozenset()


class _Step(NamedTuple):
    """A field of a message that is provisional, or whose messages may have such fields."""

    name: str
    feature: str
    has_presence: bool
    is_map: bool
    inside: Descriptor | None


@functools.cache
def feature_of(field: FieldDescriptor) -> str:
    """Returns the feature that will serve the field, as in ServerInfo.features. Empty = it is served."""
    return field.GetOptions().Extensions[options_pb2.provisional]


def is_provisional(field: FieldDescriptor) -> bool:
    """Whether the field is declared and not served yet."""
    return feature_of(field) != ""


@functools.cache
def feature_of_method(method: str) -> str:
    """Returns the feature that will serve the RPC. Empty = it is served, or not an RPC of the protos.

    Args:
        method: "package.Service/Method", with or without a slash before it. Its generated module is imported.
    """
    found = _method(method)
    return "" if found is None else found.GetOptions().Extensions[options_pb2.provisional_method]


def is_provisional_method(method: str) -> bool:
    """Whether the RPC is declared and not served yet. See `feature_of_method`."""
    return feature_of_method(method) != ""


def takes_provisional(method: str, but: frozenset[str] = _NONE) -> bool:
    """Whether requests of the RPC have a provisional field. See `is_provisional_method` and `provisional_set`."""
    found = _method(method)
    return found is not None and bool(_steps(found.input_type, but))


def provisional_set(message: Message, but: frozenset[str] = _NONE) -> dict[str, str]:
    """Returns the provisional fields that are set in the message and in messages inside, each as path: feature.

    A field inside a provisional one is not listed. Messages that cannot have such fields are not read, so that the
    cost does not depend on the length of texts, tokens or conversations. Of a message that sets none it is 1 to 3 us.

    Args:
        message: any.
        but: full names of messages that are not read.
    """
    if not _test(message.DESCRIPTOR, but)(message):
        return {}
    return dict(_found(message, _steps(message.DESCRIPTOR, but), but, ""))


def _method(name: str) -> MethodDescriptor | None:
    try:
        return Default().FindMethodByName(name.strip("/").replace("/", "."))
    except KeyError:
        return None


def _found(message: Any, steps: tuple[_Step, ...], but: frozenset[str], path: str) -> Iterator[tuple[str, str]]:
    for name, feature, has_presence, is_map, inside in steps:
        if has_presence:
            if not message.HasField(name):
                continue
            value = getattr(message, name)
        else:
            value = getattr(message, name)
            if not value:
                continue
        if feature or inside is None:
            yield path + name, feature
            continue
        deeper = _steps(inside, but)
        if has_presence:
            yield from _found(value, deeper, but, f"{path}{name}.")
        elif is_map:
            for key, item in value.items():
                yield from _found(item, deeper, but, f"{path}{name}[{key}].")
        else:
            for index, item in enumerate(value):
                yield from _found(item, deeper, but, f"{path}{name}[{index}].")


@functools.cache
def _test(descriptor: Descriptor, but: frozenset[str]) -> Callable[[Any], bool]:
    """Returns whether a message sets any, as a function made of source text: nearly every message sets none.

    Only names of fields are in the text.
    """
    to_make, names, lines = [descriptor], {descriptor.full_name: "test_0"}, list[str]()
    while to_make:
        made = to_make.pop()
        tests = []
        for name, feature, has_presence, is_map, inside in _steps(made, but):
            value = f"it.{name}"
            test = f"it.HasField({name!r})" if has_presence else value
            if inside is not None and not feature:
                if inside.full_name not in names:
                    names[inside.full_name] = f"test_{len(names)}"
                    to_make.append(inside)
                function = names[inside.full_name]
                items = f"{value}.values()" if is_map else value
                test = f"{test} and {function}({value})" if has_presence else f"any(map({function}, {items}))"
            tests.append(f"({test})")
        lines.append(f"def {names[made.full_name]}(it):\n    return {' or '.join(tests) or 'False'}\n")
    scope: dict[str, Any] = {}
    exec(compile("".join(lines), "<penstock.values: provisional>", "exec"), scope)  # noqa: S102 - as `functions` does
    return scope["test_0"]  # type: ignore[no-any-return]


@functools.cache
def _steps(descriptor: Descriptor, but: frozenset[str]) -> tuple[_Step, ...]:
    steps = []
    for field in descriptor.fields:
        inside = _inside(field)
        if is_provisional(field) or (inside is not None and _reaches(inside, but, set())):
            is_map = inside is not None and inside is not field.message_type
            steps.append(_Step(field.name, feature_of(field), field.has_presence, is_map, inside))
    return tuple(steps)


def _reaches(descriptor: Descriptor, but: frozenset[str], seen: set[str]) -> bool:
    if descriptor.full_name in seen or descriptor.full_name in but:
        return False
    seen.add(descriptor.full_name)
    return any(
        is_provisional(field) or ((inside := _inside(field)) is not None and _reaches(inside, but, seen))
        for field in descriptor.fields
    )


def _inside(field: FieldDescriptor) -> Descriptor | None:
    """Returns the type of the field's messages; of a map, of its values."""
    kind: Any = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        return kind.fields_by_name["value"].message_type  # type: ignore[no-any-return]
    return kind  # type: ignore[no-any-return]
