"""Task files as YAML or JSON, read strictly: every problem names its field and line.

Invariants: a `.json` file has the values of JSON, since YAML 1.1 takes some for others, such as 1e-05 for text; YAML
gives no more than their lines. A duplicate key is refused (YAML would silently keep the last), and so is a file whose
aliases expand to more than `MAX_NODES` values. An unknown key is refused, with the closest valid key.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from penstock.client.errors import InvalidArgument, Violation
from penstock.client.tasks.named_files import Beside, CannotRead, regular
from penstock.client.tasks.strict_json import InvalidJson, read_json
from penstock.client.tasks.strict_model import Place, in_words
from penstock.values.similar_names import did_you_mean

MAX_BYTES: Final = 32 * 1024 * 1024
MAX_NODES: Final = 200_000
_MAX_DEPTH: Final = 100
_UNREADABLE: Final = (yaml.YAMLError, ValueError, ArithmeticError, LookupError, AttributeError)
"""The constructors raise the last three for a value that does not have the type of its tag."""
_NO_YAML: Final = "is neither YAML nor JSON in UTF-8, or has a value that does not match its tag's type"
_TOO_MUCH: Final = f"has more than {MAX_NODES} values, or nests them deeper than {_MAX_DEPTH}"

M = TypeVar("M", bound=BaseModel)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # libyaml, where it was built in
    """Reads numbers in base 60 (1:30:00), which people mean as text and which take quadratic time, as text."""

    def resolve(self, kind: type[yaml.Node], value: str, implicit: Any) -> str:
        """As YAML's own, but for numbers in base 60."""
        tag: str = super().resolve(kind, value, implicit)
        is_number = tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        return "tag:yaml.org,2002:str" if is_number and kind is yaml.ScalarNode and ":" in value else tag

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """As YAML's own, but for numbers in base 60, which a tag may ask for."""
        if ":" in node.value:
            raise yaml.constructor.ConstructorError(
                None, None, "numbers in base 60 are not allowed: put the value in quotes", node.start_mark
            )
        is_int = node.tag.endswith(":int")
        found: int | float = self.construct_yaml_int(node) if is_int else self.construct_yaml_float(node)
        return found


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_number)


class YamlFile:
    """A file's content with the line of every value. It may name files of its directory and of `files_from`.

    Raises:
        InvalidArgument: `TASK_FILE`; it cannot be read, is no YAML or JSON in UTF-8, or is too large.
    """

    def __init__(self, path: Path, files_from: Iterable[Path] = ()) -> None:
        self.path = path
        self.beside = Beside(path.parent, tuple(files_from))
        self._lines: dict[Place, int] = {}
        self._nodes = 0
        self._sizes: dict[int, int] = {}
        self.content: Any = None
        try:
            text = regular(path, MAX_BYTES)[0]
            self.content = self._of_json(text) if path.suffix.lower() == ".json" else self._of_yaml(text)
        except CannotRead as error:
            raise self.refused(str(path), str(error).removeprefix(f"{path}: ").removeprefix(f"{path} ")) from None
        except InvalidJson as error:
            raise self.refused(str(path), str(error)) from None
        except RecursionError:
            raise self.refused(str(path), "is nested too deeply") from None
        except _UNREADABLE as error:
            mark = getattr(error, "problem_mark", None)
            place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
            problem = getattr(error, "problem", None) or _NO_YAML
            raise self.refused(str(path), f"{place}{problem}") from None

    def line(self, place: Sequence[str | int]) -> int | None:
        """Returns the line, from 1, of a field, or of its nearest parent in the file."""
        path = tuple(place)
        while path not in self._lines:
            if not path:
                return None
            path = path[:-1]
        return self._lines[path]

    def violation(self, place: Sequence[str | int], description: str) -> Violation:
        """Returns a violation of a field, with its line."""
        line = self.line(place)
        where = f"line {line}: " if line is not None and place else ""
        return Violation(".".join(map(str, place)) or str(self.path), f"{where}{description}")

    def refused(self, field: str, description: str) -> InvalidArgument:
        """Returns the error of one field."""
        return InvalidArgument(
            f"{field}: {description}", reason="TASK_FILE", violations=(Violation(field, description),)
        )

    def validated(self, model: type[M], what: str, content: Any = None) -> M:
        """Validates the content (or `content`, which was made from it) as a model; `what` names the kind of file.

        Raises:
            InvalidArgument: `TASK_FILE`; `violations` name each field, its line, and the closest valid key.
        """
        given = self.content if content is None else content
        try:
            return model.model_validate(given, context={"beside": self.beside})
        except ValidationError as error:
            found: dict[Violation, int] = {}  # each once, with its line
            for item in _without_other_forms(error.errors(include_url=False), given):
                place, words = _place(item, given), _describe(item, model)
                violation = self.violation(place, words) if place else Violation(what, words)
                found[violation] = self.line(place) or 0 if place else 0
            violations = tuple(sorted(found, key=found.__getitem__))
            raise InvalidArgument(f"{self.path} is not a {what}", reason="TASK_FILE", violations=violations) from None

    def _of_yaml(self, text: bytes) -> Any:
        """Returns the file's value, and records its lines."""
        self._count(text)
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return None
            self._walk(root, ())
            return loader.construct_document(root)
        finally:
            loader.dispose()

    def _of_json(self, text: bytes) -> Any:
        """Returns the file's value, and records its lines where YAML can read it."""
        content, twice = read_json(text, MAX_NODES, _MAX_DEPTH)
        try:
            if (root := yaml.compose(text, _Loader)) is not None:
                self._walk(root, ())
        except InvalidArgument:
            if twice is not None:
                raise  # with the key's place and line
            self._lines.clear()  # YAML takes two other keys for one
        except _UNREADABLE:
            self._lines.clear()
        if twice is not None:
            raise self.refused(twice, "duplicate key")
        return content

    def _count(self, text: bytes) -> None:
        """Refuses a file with too many values before any of them takes up memory."""
        loader, found, depth = _Loader(text), 0, 0
        try:
            while loader.check_event():
                event = loader.get_event()
                if isinstance(event, yaml.DocumentEndEvent):
                    return  # a second document is refused when the first is composed
                found += isinstance(event, yaml.NodeEvent)
                depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
                if found > 2 * MAX_NODES or depth > _MAX_DEPTH + 1:  # keys are no values, but are counted here
                    raise self.refused(str(self.path), _TOO_MUCH)
        finally:
            loader.dispose()

    def _walk(self, node: yaml.Node, path: Place) -> None:
        """Records the lines of a node and its descendants, and counts values; an alias counts as much as its target."""
        before = self._nodes
        self._nodes += self._sizes.get(id(node), 1)
        if self._nodes > MAX_NODES or len(path) > _MAX_DEPTH:
            raise self.refused(str(self.path), _TOO_MUCH)
        self._lines.setdefault(path, node.start_mark.line + 1)
        if id(node) in self._sizes:
            if not self._sizes[id(node)]:
                raise self.refused(str(self.path), f"line {node.start_mark.line + 1}: contains itself")
            return
        self._sizes[id(node)] = 0  # while it is open
        self._walk_into(node, path)
        self._sizes[id(node)] = self._nodes - before

    def _walk_into(self, node: yaml.Node, path: Place) -> None:
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._walk(item, (*path, index))
        elif isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                name = key.value if isinstance(key, yaml.ScalarNode) else ""
                if name in seen and name != "<<":
                    line = key.start_mark.line + 1
                    raise self.refused(".".join(map(str, (*path, name))), f"line {line}: duplicate key")
                seen.add(name)
                self._lines[(*path, name)] = key.start_mark.line + 1
                self._walk(value, (*path, name))


def text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Represents a text so that it is read back as it is: as a block if it has several lines.

    Raises ValueError for half a surrogate pair, which can be written, and which no reader takes.
    """
    text.encode()
    # The library writes U+0085 as it is, and reads it as a space or as a line feed.
    style = '"' if "\x85" in text else "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _place(item: Mapping[str, Any], content: Any) -> Place:
    """Returns a problem's place in the file, without pydantic's steps (a union's alternative, a short form's key)."""
    place: list[str | int] = []
    for step in item["loc"]:
        known = isinstance(content, Mapping) and step in content
        if known or (isinstance(content, list) and isinstance(step, int) and step < len(content)):
            content = content[step]
            place.append(step)
    if item["type"] == "missing":
        place.append(item["loc"][-1])
    return tuple(place)


def _without_other_forms(found: Sequence[Mapping[str, Any]], content: Any) -> Iterator[Mapping[str, Any]]:
    """Where a field may be a word or a mapping, yields only the problems of the form that was meant."""
    kinds: dict[Place, set[str]] = {}
    for item in found:
        kinds.setdefault(_place(item, content), set()).add(item["type"])
    for item in found:
        place = _place(item, content)
        inside = any(len(other) > len(place) and other[: len(place)] == place for other in kinds)
        meant_otherwise = (item["type"] == "literal_error" and inside) or (
            item["type"] == "model_type" and "literal_error" in kinds[place]
        )
        if not meant_otherwise:
            yield item


def _describe(item: Mapping[str, Any], model: type[BaseModel]) -> str:
    """Describes a problem; for an unknown key, with the closest valid one."""
    if item["type"] == "list_type":
        return in_words(item) + _of_what(model, item["loc"])
    if item["type"] != "extra_forbidden":
        return in_words(item)
    wrong = str(item["loc"][-1])
    return f"no such key{did_you_mean(wrong, _keys(model, item['loc'][:-1]))}"


def _of_what(model: type[BaseModel], place: Sequence[str | int]) -> str:
    """Describes the items of the list at a place: mappings with these keys, required ones first; or texts."""
    item = _at(model, (*place, 0))
    required = item.get("required", ())
    keys = sorted(item.get("properties", {}), key=lambda key: key not in required)
    if keys:
        return f" of {{{', '.join(keys)}}}"
    return " of texts" if item.get("type") == "string" else ""


def _keys(model: type[BaseModel], place: Sequence[str | int]) -> set[str]:
    """Returns the valid keys at a place."""
    return set(_at(model, place).get("properties", {}))


def _at(model: type[BaseModel], place: Sequence[str | int]) -> Any:
    """Returns the schema of a place."""
    here: Any = (schema := _schema(model))
    for step in place:
        here = _resolved(schema, here)
        # A name that is no property is pydantic's step for a union's alternative.
        here = here.get("items", {}) if isinstance(step, int) else here.get("properties", {}).get(step, here)
    return _resolved(schema, here)


@cache
def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema()


def _resolved(schema: Any, node: Any) -> Any:
    """Follows references, and the one structured alternative of several."""
    while True:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
            continue
        choices = [item for item in node.get("anyOf", ()) if "$ref" in item or item.get("type") in ("array", "object")]
        structured = [item for item in choices if "$ref" in item or "properties" in item] or choices
        if not structured:
            return node
        node = structured[0]
