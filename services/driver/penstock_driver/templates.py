"""Templates of agent specs: strings with placeholders from a closed set, and trees of JSON values with such strings.

Invariants: a template is checked when its spec is loaded, so rendering cannot meet an unknown name. Values are put in
as data, into strings of a tree that a serialiser then quotes, or into one argument of an argv; never into shell text.

Syntax of a string: `{name}` is a placeholder, `{{` and `}}` are braces. In a tree, a mapping with a `$value`, `$when` or
`$mcp` key is a node:
    {$value: options.max_tokens}          the value with its own type; an unset value drops the entry that holds it
    {$when: options.thinking, then: T}    T if the name is set and not false, else the entry is dropped
    {$mcp: true}                          the mapping of MCP servers, by name; dropped when there are none
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from pydantic import JsonValue

Scalar: TypeAlias = str | int | float | bool | None
Scope: TypeAlias = Mapping[str, Scalar]

_TOKEN: Final = re.compile(r"\{\{|\}\}|\{([a-z][a-z0-9_]*(?:\.[a-z][a-z0-9_]*)?)\}|[{}]")
_NODES: Final = ("$value", "$when", "$mcp")
MAX_DEPTH: Final = 32


class TemplateError(ValueError):
    """A template that cannot be used; `path` names the place inside it, empty for the whole."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class _Dropped:
    """The type of `DROPPED`, what a node renders to when its entry is to be left out."""


DROPPED: Final = _Dropped()


@dataclass(frozen=True, slots=True)
class Text:
    """A parsed string template: literal pieces and placeholder names, in order."""

    pieces: tuple[tuple[bool, str], ...]

    @classmethod
    def parse(cls, source: str) -> Text:
        """Parse `source`; TemplateError on an unbalanced brace or a malformed name."""
        pieces: list[tuple[bool, str]] = []
        literal, at = "", 0
        for match in _TOKEN.finditer(source):
            literal += source[at : match.start()]
            at = match.end()
            if match[0] in ("{{", "}}"):
                literal += match[0][0]
            elif match[1] is None:
                raise TemplateError(f"unbalanced {match[0]!r} at offset {match.start()}: write {match[0] * 2!r} for one")
            else:
                if literal:
                    pieces.append((False, literal))
                pieces.append((True, match[1]))
                literal = ""
        literal += source[at:]
        if literal or not pieces:
            pieces.append((False, literal))
        return cls(tuple(pieces))

    @property
    def names(self) -> tuple[str, ...]:
        """The placeholder names, in order of appearance."""
        return tuple(piece for is_name, piece in self.pieces if is_name)

    @property
    def is_whole(self) -> bool:
        """Whether the template is one placeholder and nothing else."""
        return len(self.pieces) == 1 and self.pieces[0][0]

    def render(self, scope: Scope) -> str:
        """The string with every placeholder replaced; TemplateError names a value that is not set."""
        return "".join(_as_text(name, scope) if is_name else name for is_name, name in self.pieces)


def _as_text(name: str, scope: Scope) -> str:
    value = scope.get(name)
    if value is None:
        raise TemplateError(f"{name} is not set")
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def is_true(name: str, scope: Scope) -> bool:
    """Whether a condition's name is set and not false; zero and the empty string are values, so they count as set."""
    value = scope.get(name)
    return value is not None and value is not False


def walk(tree: JsonValue, path: str = "", depth: int = 0) -> Iterator[tuple[str, str, str]]:
    """Yield (path, kind, name) for every name in a tree, kind being `text`, `value`, `when` or `mcp`.

    Raises TemplateError for a malformed node or string, and for a tree deeper than MAX_DEPTH.
    """
    if depth > MAX_DEPTH:
        raise TemplateError(f"nested deeper than {MAX_DEPTH}", path)
    if isinstance(tree, str):
        try:
            names = Text.parse(tree).names
        except TemplateError as error:
            raise TemplateError(str(error), path) from None
        for name in names:
            yield path, "text", name
    elif isinstance(tree, list):
        for index, item in enumerate(tree):
            yield from walk(item, f"{path}[{index}]", depth + 1)
    elif isinstance(tree, dict):
        kind = _node_kind(tree, path)
        if kind == "$when":
            yield path, "when", str(tree["$when"])
            yield from walk(tree["then"], f"{path}.then", depth + 1)
        elif kind:
            yield path, kind[1:], str(tree[kind])
        else:
            for key, value in tree.items():
                here = f"{path}.{key}" if path else key
                yield from walk(key, here, depth + 1)
                yield from walk(value, here, depth + 1)


def _node_kind(tree: dict[str, JsonValue], path: str) -> str | None:
    kinds = [key for key in tree if key.startswith("$") and key in _NODES]
    if not kinds:
        return None
    kind = kinds[0]
    expected = {"$when", "then"} if kind == "$when" else {kind}
    if set(tree) != expected:
        raise TemplateError(f"a {kind} node has exactly the keys {sorted(expected)}", path)
    if kind == "$mcp" and tree[kind] is not True:
        raise TemplateError("$mcp takes only true", path)
    if kind != "$mcp" and not isinstance(tree[kind], str):
        raise TemplateError(f"{kind} takes a name", path)
    return kind


def render(tree: JsonValue, scope: Scope, mcp: Callable[[], dict[str, JsonValue]] | None = None) -> JsonValue | _Dropped:
    """The tree with its strings and nodes replaced, or DROPPED when the tree itself is an unset node."""
    if isinstance(tree, str):
        return Text.parse(tree).render(scope)
    if isinstance(tree, list):
        items = [render(item, scope, mcp) for item in tree]
        return [item for item in items if not isinstance(item, _Dropped)]
    if isinstance(tree, dict):
        kind = _node_kind(tree, "")
        if kind == "$value":
            value = scope.get(str(tree["$value"]))
            return DROPPED if value is None else value
        if kind == "$when":
            return render(tree["then"], scope, mcp) if is_true(str(tree["$when"]), scope) else DROPPED
        if kind == "$mcp":
            return (mcp() if mcp else {}) or DROPPED
        pairs = ((Text.parse(key).render(scope), render(value, scope, mcp)) for key, value in tree.items())
        return {key: value for key, value in pairs if not isinstance(value, _Dropped)}
    return tree
