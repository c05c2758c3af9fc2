"""Converts agent specs from YAML to their proto and back, guided by the proto's own descriptors.

Names are the proto's. For people: enums are lower-case words (`stdin`; an event rule's `ignored` makes no event),
durations are seconds in a key that ends in `_s` (`default_timeout_s`), an option's `default` is its `default_value`,
permission bits are octal (`0755`), a file's content is text, or `content_base64`, or `from` a file beside the spec, and
`python_packages` are a list, or `from` a requirements file. A spec may be from a stranger: it is read as strictly as a
task file, and files that it names must be in its directory (`yamlfile`, `beside`). The driver validates the spec's
meaning on registration. `load_spec` reads the output of `dump_spec` as the same spec.
"""

import base64
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Final

import yaml
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message import Message

from penstock.client.errors import InvalidArgument, Violation
from penstock.client.tasks.named_files import Beside, CannotRead
from penstock.client.tasks.yaml import YamlFile, text_node
from penstock.driver.v1 import agent_pb2
from penstock.values.similar_names import did_you_mean

_SHORT_NAMES: Final = {"default": "default_value"}
_LONG_NAMES: Final = {name: short for short, name in _SHORT_NAMES.items()}
_WORDS_FOR_ZERO: Final = {"AgentEventKind": "ignored"}
_NO_KEY: Final = "no such key; known keys: "
_FREE: Final = ("google.protobuf.Struct", "google.protobuf.Value", "google.protobuf.ListValue")


class _Wrong(Exception):
    """An invalid place of the file."""

    def __init__(self, field: str, description: str) -> None:
        super().__init__(field, description)
        self.violation = Violation(field, description)


def load_spec(path: Path) -> agent_pb2.AgentSpec:
    """Reads a spec.

    Raises:
        InvalidArgument: `AGENT_FILE`; `violations` name every invalid field.
    """
    try:
        content = YamlFile(path).content
    except InvalidArgument as error:
        raise _refused(path, error.violations) from None
    if not isinstance(content, dict):
        raise _refused(path, [Violation(str(path), "an agent spec must be a mapping with name, argv and so on")])
    reader = _Reader(Beside(path.parent, bounds="the directory of the agent spec: copy it there"))
    converted = reader.message(agent_pb2.AgentSpec.DESCRIPTOR, content, "")
    if reader.wrong:
        raise _refused(path, reader.wrong)
    try:
        return ParseDict(converted, agent_pb2.AgentSpec())
    except ParseError as error:
        raise _refused(path, [Violation(str(path), str(error))]) from None


def dump_spec(spec: agent_pb2.AgentSpec) -> str:
    """Returns a spec as the YAML that `load_spec` reads."""
    return yaml.dump(_plain(spec), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1_000_000)


class _Reader:
    """Converts the file's content to the proto's JSON form, and collects violations in `wrong`."""

    def __init__(self, beside: Beside) -> None:
        self._beside = beside
        self.wrong: list[Violation] = []

    def message(self, descriptor: Descriptor, value: Any, where: str) -> Any:
        if not isinstance(value, Mapping):
            raise _Wrong(where, f"expected a mapping, not {type(value).__name__}")
        result: dict[str, Any] = {}
        for key, item in value.items():
            place = f"{where}.{key}" if where else str(key)
            try:
                name, field = _field(descriptor, key, place)
                if key == "from":
                    result["content"] = _content(self._beside, str(item), place)
                elif key == "content_base64":
                    result[name] = item
                elif key == "python_packages" and isinstance(item, Mapping):
                    result[name] = _requirements(self._beside, item, place)
                elif key == "content" and field.type == FieldDescriptor.TYPE_BYTES:
                    result[name] = base64.b64encode(str(item).encode()).decode()
                elif item is not None:
                    result[name] = self._value(field, item, place)
            except _Wrong as error:
                self.wrong.append(self._once(error.violation))
        return result

    def _once(self, found: Violation) -> Violation:
        """Lists all valid keys only for the first unknown key."""
        known = any(found.description == before.description for before in self.wrong)
        return Violation(found.field, "no such key") if known and found.description.startswith(_NO_KEY) else found

    def _value(self, field: FieldDescriptor, value: Any, where: str) -> Any:
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            if not isinstance(value, Mapping):
                raise _Wrong(where, "expected a mapping")
            return self._texts(value, where)
        if field.is_repeated:
            if not isinstance(value, list):
                raise _Wrong(where, "expected a list")
            return [self._single(field, item, f"{where}.{index}") for index, item in enumerate(value)]
        return self._single(field, value, where)

    def _texts(self, value: Mapping[Any, Any], where: str) -> dict[str, str]:
        """Returns a mapping of texts: what YAML read as something else, only its author can write as it was meant."""
        texts: dict[str, str] = {}
        for name, item in value.items():
            wrong = [part for part in (name, item) if not isinstance(part, str)]
            if wrong:
                remedy = ": put it in quotes" if isinstance(wrong[0], int | float | date) else ""
                self.wrong.append(Violation(f"{where}.{name}", f"must be text{remedy}"))
            else:
                texts[name] = item
        return texts

    def _single(self, field: FieldDescriptor, value: Any, where: str) -> Any:
        if field.enum_type is not None:
            return _word(field.enum_type, value, where)
        if field.name == "mode":
            return _mode(value, where)
        if field.message_type is not None and field.message_type.full_name == "google.protobuf.Duration":
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise _Wrong(where, "expected seconds")
            return f"{value:.9f}s"
        if field.message_type is None:
            return _scalar(field, value, where)
        if field.message_type.full_name in _FREE:
            return value
        return self.message(field.message_type, value, where)


def _field(descriptor: Descriptor, key: Any, place: str) -> tuple[str, FieldDescriptor]:
    """Returns the proto's field for a key of the file."""
    fields = descriptor.fields_by_name
    if key in ("from", "content_base64") and "content" in fields:
        return "content", fields["content"]
    name = _SHORT_NAMES.get(key, key)
    if name in fields:
        return name, fields[name]
    stem = str(key).removesuffix("_s")
    if stem != key and stem in fields and _full_name(fields[stem]) == "google.protobuf.Duration":
        return stem, fields[stem]
    written = sorted(_LONG_NAMES.get(item, item) + _unit(fields[item]) for item in fields)
    meant = did_you_mean(str(key), written)
    raise _Wrong(place, f"no such key{meant}" if meant else _NO_KEY + ", ".join(written))


def _unit(field: FieldDescriptor) -> str:
    return "_s" if _full_name(field) == "google.protobuf.Duration" else ""


def _word(enum: EnumDescriptor, value: Any, where: str) -> str:
    if value == _WORDS_FOR_ZERO.get(enum.name):
        return enum.values[0].name
    prefix = enum.values[0].name.removesuffix("UNSPECIFIED")
    name = prefix + str(value).upper()
    if name not in enum.values_by_name or name.endswith("_UNSPECIFIED"):
        words = ", ".join(item.name.removeprefix(prefix).lower() for item in enum.values[1:])
        raise _Wrong(where, f"{value!r} is not one of {words}")
    return name


def _requirements(beside: Beside, item: Mapping[Any, Any], where: str) -> list[str]:
    """Returns a requirements file's entries, one per line, without comments, continuations and extra white space."""
    if list(item) != ["from"]:
        raise _Wrong(where, "expected a list, or {from: FILE} with a requirements file")
    try:
        joined = _read(beside, str(item["from"]), where).decode().replace("\\\n", " ").splitlines()
    except UnicodeDecodeError:
        raise _Wrong(where, f"{item['from']} is not text in UTF-8") from None
    return [" ".join(line.split()) for line in joined if line.strip() and not line.lstrip().startswith("#")]


def _content(beside: Beside, name: str, where: str) -> str:
    return base64.b64encode(_read(beside, name, where)).decode()


def _read(beside: Beside, name: str, where: str) -> bytes:
    try:
        return beside.read(name)[0]
    except CannotRead as error:
        raise _Wrong(where, str(error)) from None


def _full_name(field: FieldDescriptor) -> str:
    return field.message_type.full_name if field.message_type is not None else ""


def _mode(value: Any, where: str) -> int:
    """Returns permission bits: YAML reads 0755 as octal, and a text is octal too."""
    try:
        return int(value, 8) if isinstance(value, str) else int(value)
    except (ValueError, TypeError):
        raise _Wrong(where, f"{value!r} are not permission bits such as 0755") from None


_SCALARS: Final = {
    FieldDescriptor.CPPTYPE_STRING: ((str,), "a text"),
    FieldDescriptor.CPPTYPE_BOOL: ((bool,), "true or false"),
    FieldDescriptor.CPPTYPE_INT32: ((int,), "a whole number"),
    FieldDescriptor.CPPTYPE_INT64: ((int,), "a whole number"),
    FieldDescriptor.CPPTYPE_UINT32: ((int,), "a whole number"),
    FieldDescriptor.CPPTYPE_DOUBLE: ((int, float), "a number"),
}


def _scalar(field: FieldDescriptor, value: Any, where: str) -> Any:
    kinds, name = _SCALARS[field.cpp_type]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise _Wrong(where, f"expected {name}, not {value!r}")
    return value


class _Octal(int):
    """Permission bits, dumped in octal."""


class _Dumper(yaml.SafeDumper):
    """Dumps multi-line texts as blocks and permission bits in octal."""


_Dumper.add_representer(str, text_node)
_Dumper.add_representer(
    _Octal, lambda dumper, bits: dumper.represent_scalar("tag:yaml.org,2002:int", f"0{int(bits):o}")
)


def _plain(message: Message) -> dict[str, Any]:
    """Returns a message in the file's form: the set fields, in the order of the proto."""
    plain: dict[str, Any] = {}
    given = {field.name: value for field, value in message.ListFields()}
    for field in message.DESCRIPTOR.fields:
        if field.name in given:
            key, value = _entry(field, given[field.name])
            plain[key] = value
        elif field.enum_type is not None and field.enum_type.name in _WORDS_FOR_ZERO:
            plain[field.name] = _WORDS_FOR_ZERO[field.enum_type.name]
    return plain


def _entry(field: Any, value: Any) -> tuple[str, Any]:
    """Returns a field's key in the file, and its value there."""
    key = _LONG_NAMES.get(field.name, field.name)
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        return key, dict(sorted(value.items()))
    if field.is_repeated:
        return key, [_written(field, item) for item in value]
    if kind is not None and kind.full_name == "google.protobuf.Duration":
        return f"{key}_s", _number(value.ToNanoseconds() / 1e9)
    if field.type == FieldDescriptor.TYPE_BYTES:
        try:
            return key, value.decode()
        except UnicodeDecodeError:
            return f"{key}_base64", base64.b64encode(value).decode()
    if field.name == "mode":
        return key, _Octal(value)
    return key, _written(field, value)


def _written(field: Any, value: Any) -> Any:
    if field.enum_type is not None:
        prefix = field.enum_type.values[0].name.removesuffix("UNSPECIFIED")
        return field.enum_type.values_by_number[value].name.removeprefix(prefix).lower()
    if field.message_type is None:
        return _number(value)
    return _number(MessageToDict(value)) if field.message_type.full_name in _FREE else _plain(value)


def _number(value: Any) -> Any:
    """Turns whole floats into ints: protos have one kind of number, people write whole ones without a point."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _number(item) for name, item in value.items()}
    return [_number(item) for item in value] if isinstance(value, list) else value


def _refused(path: Path, violations: Sequence[Violation]) -> InvalidArgument:
    """With several problems the message names the file only: callers show the violations one per line."""
    message = f"{violations[0].field}: {violations[0].description}"
    if len(violations) > 1:
        message = f"{path} is not an agent spec"
    return InvalidArgument(message, reason="AGENT_FILE", violations=tuple(violations))
