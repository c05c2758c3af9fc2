"""Agent specs from YAML to their proto, guided by the proto's own descriptors.

Names are the proto's. For people: enums are lower-case words (`stdin`; an event rule's `ignored` makes no event),
durations are seconds in a key that ends in `_s` (`default_timeout_s`), an option's `default` is its `default_value`,
and a file of the toolbox may be given `from` a file beside the spec. What the spec means is the driver's business,
which checks it when it is registered.
"""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.json_format import ParseDict, ParseError

from penstock.client.errors import InvalidArgument, Violation
from penstock.driver.v1 import agent_pb2

_SHORT_NAMES: Final = {"default": "default_value"}
_WORDS_FOR_ZERO: Final = {"AgentEventKind": "ignored"}
_FREE: Final = ("google.protobuf.Struct", "google.protobuf.Value", "google.protobuf.ListValue")


def load_spec(path: Path) -> agent_pb2.AgentSpec:
    """Reads a spec.

    Raises:
        InvalidArgument: `AGENT_FILE`; `violations` name the field.
    """
    try:
        content = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise _refused(str(path), error.strerror or "cannot be read") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}: " if mark is not None else ""
        raise _refused(str(path), f"{place}{getattr(error, 'problem', None) or 'is not YAML in UTF-8'}") from None
    if not isinstance(content, dict):
        raise _refused(str(path), "an agent spec is a mapping with name, argv and so on")
    converted = _message(agent_pb2.AgentSpec.DESCRIPTOR, content, "", path.parent)
    try:
        return ParseDict(converted, agent_pb2.AgentSpec())
    except ParseError as error:
        raise _refused(str(path), str(error)) from None


def _message(descriptor: Descriptor, value: Any, where: str, base: Path) -> Any:
    if not isinstance(value, Mapping):
        raise _refused(where, f"expected a mapping, not {type(value).__name__}")
    result = {}
    for key, item in value.items():
        place = f"{where}.{key}" if where else str(key)
        name, kind = _field(descriptor, key, place)
        if key == "from":
            result["content"] = _content(base / str(item), place)
        elif key == "content" and kind.type == FieldDescriptor.TYPE_BYTES:
            result[name] = base64.b64encode(str(item).encode()).decode()
        elif item is not None:
            result[name] = _value(kind, item, place, base)
    return result


def _field(descriptor: Descriptor, key: Any, place: str) -> tuple[str, FieldDescriptor]:
    """The proto's field for a key of the file."""
    fields = descriptor.fields_by_name
    if key == "from" and "content" in fields:
        return "content", fields["content"]
    name = _SHORT_NAMES.get(key, key)
    if name in fields:
        return name, fields[name]
    stem = str(key).removesuffix("_s")
    if stem != key and stem in fields and _full_name(fields[stem]) == "google.protobuf.Duration":
        return stem, fields[stem]
    raise _refused(place, f"no such key; there are {', '.join(sorted(fields))}")


def _value(field: FieldDescriptor, value: Any, where: str, base: Path) -> Any:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        if not isinstance(value, Mapping):
            raise _refused(where, "expected a mapping")
        return {str(name): str(item) if isinstance(item, int | float) else item for name, item in value.items()}
    if field.is_repeated:
        if not isinstance(value, list):
            raise _refused(where, "expected a list")
        return [_single(field, item, f"{where}.{index}", base) for index, item in enumerate(value)]
    return _single(field, value, where, base)


def _single(field: FieldDescriptor, value: Any, where: str, base: Path) -> Any:
    if field.enum_type is not None:
        return _word(field.enum_type, value, where)
    if field.message_type is None or field.message_type.full_name in _FREE:
        return value
    if field.message_type.full_name == "google.protobuf.Duration":
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _refused(where, "expected seconds")
        return f"{value:.9f}s"
    return _message(field.message_type, value, where, base)


def _word(enum: EnumDescriptor, value: Any, where: str) -> str:
    if value == _WORDS_FOR_ZERO.get(enum.name):
        return enum.values[0].name
    prefix = enum.values[0].name.removesuffix("UNSPECIFIED")
    name = prefix + str(value).upper()
    if name not in enum.values_by_name or name.endswith("_UNSPECIFIED"):
        words = ", ".join(item.name.removeprefix(prefix).lower() for item in enum.values[1:])
        raise _refused(where, f"{value!r} is none of {words}")
    return name


def _content(path: Path, where: str) -> str:
    try:
        return base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        raise _refused(where, f"{path}: {error.strerror}") from None


def _full_name(field: FieldDescriptor) -> str:
    return field.message_type.full_name if field.message_type is not None else ""


def _refused(field: str, description: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: {description}", reason="AGENT_FILE", violations=(Violation(field, description),))
