"""Templates of agent specs: strings with `{{name}}` placeholders, and trees of JSON values with such strings.

Invariants: a template is checked when its spec is loaded, so rendering cannot meet an unknown name. Values are inserted
as data, once, into strings of a tree that a serializer then quotes, or into one argument of an argv: a value is never
read as a template, as shell or as syntax. A value that replaces a whole string keeps its type.

A name with the value None in the scope is an option that was not given: everything that depends on it is omitted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, TypeAlias

from pydantic import JsonValue

Scope: TypeAlias = Mapping[str, JsonValue]

_PLACEHOLDER: Final = re.compile(r"\{\{([a-z][a-z0-9_]*(?:\.[a-z][a-z0-9_]*)?)\}\}")
MAX_DEPTH: Final = 32


class Absent:
    """The type of `ABSENT`: the rendering of a template that depends on an option that was not given."""


ABSENT: Final = Absent()


def names(template: str) -> list[str]:
    """The placeholder names of a string, in order of appearance."""
    return _PLACEHOLDER.findall(template)


def is_tail(template: str, name: str) -> bool:
    """Whether `name` occurs once, at the end of the template: nothing after it can be misread."""
    return names(template).count(name) == 1 and template.endswith("{{" + name + "}}")


def walk(tree: JsonValue, path: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield (path, placeholder name) for every name in a tree, keys included; ValueError if the tree is too deep."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{path}: nested deeper than {MAX_DEPTH}")
    if isinstance(tree, str):
        yield from ((path, name) for name in names(tree))
    elif isinstance(tree, list):
        for index, item in enumerate(tree):
            yield from walk(item, f"{path}[{index}]", depth + 1)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from walk(key, f"{path}.{key}", depth + 1)
            yield from walk(value, f"{path}.{key}", depth + 1)


def render_text(template: str, scope: Scope) -> str | Absent:
    """The string with every placeholder replaced, or ABSENT if it needs an option that was not given."""
    if any(scope[name] is None for name in names(template)):
        return ABSENT
    return _PLACEHOLDER.sub(lambda match: _as_text(scope[match[1]]), template)


def render_tree(tree: JsonValue, scope: Scope) -> JsonValue | Absent:
    """The tree with its strings replaced; ABSENT members and items are omitted."""
    if isinstance(tree, str):
        whole = _PLACEHOLDER.fullmatch(tree)
        if whole:
            value = scope[whole[1]]
            return ABSENT if value is None else value
        return render_text(tree, scope)
    if isinstance(tree, list):
        items = [render_tree(item, scope) for item in tree]
        return [item for item in items if not isinstance(item, Absent)]
    if isinstance(tree, dict):
        rendered: dict[str, JsonValue] = {}
        for key, value in tree.items():
            name, item = render_text(key, scope), render_tree(value, scope)
            if not isinstance(name, Absent) and not isinstance(item, Absent):
                rendered[name] = item
        return rendered
    return tree


def _as_text(value: JsonValue) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
