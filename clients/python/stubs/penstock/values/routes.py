"""The headers that route a request, as the protos declare them (`penstock.options.v1.route`)."""

from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message

from penstock.options.v1 import options_pb2

_LONGEST: Final = 128


@cache
def declared(method: str) -> tuple[tuple[str, str], ...]:
    """Returns the headers of a method and the field of the request that has the value of each.

    Args:
        method: as a stub or a server has it, "/package.Service/Method". Its generated module is imported.
    """
    try:
        found = Default().FindMethodByName(method.strip("/").replace("/", "."))
    except KeyError:
        return ()
    return tuple((route.header, route.field) for route in found.GetOptions().Extensions[options_pb2.route])


def headers(method: str, request: Any) -> tuple[tuple[str, str], ...]:
    """Returns the metadata that routes a request; of a stream, the first request decides.

    Args:
        method: see `declared`.
        request: a message. Anything else has no headers.
    """
    routes = declared(method)
    if not routes or not isinstance(request, Message):
        return ()
    found: dict[str, str] = {}
    for header, field in routes:
        values = set(_values(request, field.split("."))) - {""}
        value = values.pop() if len(values) == 1 else ""
        if header not in found and 1 <= len(value) <= _LONGEST and value.isascii() and value.isprintable():
            found[header] = value
    return tuple(found.items())


def _values(message: Any, path: list[str]) -> Iterator[str]:
    name, *rest = path
    field = message.DESCRIPTOR.fields_by_name[name]
    if field.message_type is not None and not field.is_repeated and not message.HasField(name):
        return
    value = getattr(message, name)
    for item in value if field.is_repeated else (value,):
        if rest:
            yield from _values(item, rest)
        else:
            yield item
