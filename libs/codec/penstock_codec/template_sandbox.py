"""The sandbox of chat templates: what they may access, and how much work they may do.

A template is a program by the model's author. It can access only the values passed to it, and its work is bounded in
steps, so that one that never ends is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce, wraps
from typing import Any, Final, cast

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS: Final = 1_000_000
"""Limit on loop items and on calls of macros and methods per rendering, together; a message takes some hundreds."""

MACRO_STEPS: Final = 20
"""Weight of a macro call, which costs as much as so many loop items."""

MAX_TEXT_CHARS: Final = 64 << 20
"""Maximum length of a text that a template makes, and of a rendered conversation."""

MOST_BASE: Final = 1 << 32
MOST_POWER: Final = 64
MAX_WIDTH: Final = 10_000
"""Maximum width that a text is padded to."""

_SIZED: Final = (list, tuple, dict, str, range)  # a union would be built anew each time
_WIDE_FIELD: Final = re.compile(r"\{[^{}]*:[^{}]*(?:\d{5}|\{)")
_GROWING: Final = frozenset({"replace", "join", "translate", "center", "ljust", "rjust", "zfill", "expandtabs"})
"""String methods that can make a much longer string."""
_WIDE: Final = re.compile(r"%[^%a-zA-Z]*(?:\d{5}|\*)")
_MOST_UNCOUNTED: Final = 2  # the operands of one addition, which is counted once it is made
WORK: Final = "_work"
"""The variable with the rendering's remaining work; the sandbox lets no template change it."""

# Attributes of dicts, which take precedence over their items.
_OF_DICTS = frozenset(dir(dict))
# The loop attributes that templates use; none of them is callable or leads anywhere.
_OF_LOOPS = frozenset({"index", "index0", "revindex", "revindex0", "first", "last", "length", "previtem", "nextitem"})
# The string methods that templates use; all make new values. (`format`, which reaches further, is the sandbox's.)
_OF_STRINGS = frozenset({"startswith", "endswith", "strip", "lstrip", "rstrip", "split", "rsplit", "replace", "upper"})


class Work:
    """The remaining work of one rendering."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def step(self, count: int) -> None:
        """Consumes `count` steps. Raises SecurityError when none are left."""
        self._left -= count
        if self._left < 0:
            raise SecurityError(f"a template may take {MAX_STEPS} steps")


def work_of(context: Context) -> Work:
    """Returns the remaining work of the rendering that a context belongs to."""
    work = context.parent.get(WORK)
    return work if isinstance(work, Work) else Work()  # a module-level call of the compiler's own


def too_much() -> SecurityError:
    """The error for a value that would become too large."""
    return SecurityError(f"a template may make texts of up to {MAX_TEXT_CHARS} characters")


def joined(pieces: Iterable[str]) -> str:
    """Joins the pieces of a rendered text. Raises SecurityError when they are too long."""
    parts: list[str] = []
    length, most = 0, MAX_TEXT_CHARS
    for piece in pieces:
        length += len(piece)
        if length > most:
            raise too_much()
        parts.append(piece)
    return "".join(parts)


def _narrow(kept: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a padding filter with a limit on the width."""

    def narrow(text: Any, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        if any(isinstance(value, int) and value > MAX_WIDTH for value in given) or _WIDE.search(str(text)):
            raise too_much()
        return kept(text, *args, **kwargs)

    return narrow


def _bounded(kept: Callable[..., Any], size: Callable[[Any, Sequence[Any]], int]) -> Callable[..., Any]:
    """Wraps a filter that makes one text of many, refused by the size that the text would have."""

    @wraps(kept)
    def bounded(eval_context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if size(value, (*args, *kwargs.values())) > MAX_TEXT_CHARS:
            raise too_much()
        return kept(eval_context, value, *args, **kwargs)

    return bounded


def _replaced_size(text: Any, given: Sequence[Any]) -> int:
    """Returns the maximum length of a text in which the first value is replaced by the second."""
    match given:
        case [str() as old, str() as new, *_] if len(new) > len(old):
            text = str(text)
            if (len(text) + 1) * len(new) > MAX_TEXT_CHARS:  # counted only where it may matter
                return len(text) + int(text.count(old)) * (len(new) - len(old))
    return 0


def _joined_size(values: Any, given: Sequence[Any]) -> int:
    """Returns the length of `join`'s result for a sized collection; 0 where the size is unknown."""
    if not isinstance(values, _SIZED):
        return 0
    between = sum(len(value) for value in given if isinstance(value, str))
    return sum(len(value) if isinstance(value, str) else 0 for value in values) + between * len(values)


def _check_method(text: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises SecurityError when a string method would make a text that is too long."""
    given = (*args, *kwargs.values())
    if any(isinstance(value, int) and value > MAX_WIDTH for value in given):
        raise too_much()
    if name == "replace":
        if _replaced_size(text, given) > MAX_TEXT_CHARS:
            raise too_much()
    elif name == "join":
        if args and _joined_size(args[0], (text,)) > MAX_TEXT_CHARS:
            raise too_much()
    elif name == "translate":
        raise SecurityError("a template may not translate texts")


@pass_context
def _counted(context: Context, values: Any) -> Any:
    """Counts the items of a loop: at once where the length is known."""
    if isinstance(values, _SIZED):
        if values:
            work_of(context).step(len(values))
        return values
    return _one_by_one(values, work_of(context))


def _one_by_one(values: Iterable[Any], work: Work) -> Iterator[Any]:
    for value in values:
        work.step(1)
        yield value


def _joined(values: Sequence[Any]) -> str:
    parts = [*map(str, values)]
    if sum(map(len, parts)) > MAX_TEXT_CHARS:
        raise too_much()
    return "".join(parts)


def _added(values: Sequence[Any]) -> Any:
    """Returns the sum of some values, from the left; most are texts."""
    length = 0
    for value in values:
        if type(value) is not str:
            return reduce(_sum, values)
        length += len(value)
    if length > MAX_TEXT_CHARS:
        raise too_much()
    return "".join(values)


def _sum(left: Any, right: Any) -> Any:
    made = left + right
    if type(made) is str and len(made) > MAX_TEXT_CHARS:
        raise too_much()
    return made


class _Sums(NodeTransformer):
    """Rewrites sums so that all terms are added at once and the result is counted.

    A sum that is output is left unchanged if it has few values beside constants: the output is counted in any case.
    """

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802  (jinja2's name for it)
        node.nodes = [self._output(item) for item in node.nodes]
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Node:  # noqa: N802
        terms = [self.visit(term) for term in _terms(node)]
        return _filtered(nodes.List(terms, lineno=node.lineno), "_added")

    def _output(self, node: nodes.Expr) -> nodes.Expr:
        terms = _terms(node)
        values = sum(not isinstance(term, nodes.Const) for term in terms)
        if values > _MOST_UNCOUNTED:
            return cast("nodes.Expr", self.visit(node))
        made: list[nodes.Expr] = [self.visit(term) for term in terms]
        return reduce(lambda left, right: nodes.Add(left, right, lineno=node.lineno), made)


def _terms(node: nodes.Expr) -> list[nodes.Expr]:
    """Returns the terms of a sum, from the left."""
    terms: list[nodes.Expr] = []
    while isinstance(node, nodes.Add):
        terms.append(node.right)
        node = node.left
    return [node, *reversed(terms)]


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    # Nodes take their fields by position; Jinja's own types do not say so.
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _ItemsInPlace(CodeGenerator):
    """Compiles access to a dict's items, which is most of what templates do, to a direct lookup; everything else goes
    through the sandbox.

    The compiled code does the first thing that the sandbox would do: `_found` is a local variable of each function.
    """

    @optimizeconst
    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:  # noqa: N802  (jinja2's name for it)
        if node.attr in _OF_DICTS:
            super().visit_Getattr(node, frame)
        else:
            self._item(node.node, node.attr, "getattr", frame)

    @optimizeconst
    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if isinstance(node.arg, nodes.Const) and type(node.arg.value) is str:
            self._item(node.node, node.arg.value, "getitem", frame)
        else:
            super().visit_Getitem(node, frame)

    def _item(self, of: nodes.Expr, name: str, otherwise: str, frame: Frame) -> None:
        self.write(f"(_found[{name!r}] if type(_found := ")
        self.visit(of, frame)
        self.write(f") is dict and {name!r} in _found else environment.{otherwise}(_found, {name!r}))")


class Known(dict[str, Any]):
    """A tool as templates see it, with cached facts about it. The sandbox lets no template change it."""

    __slots__ = ("clear_of", "written")

    def __init__(self, value: dict[str, Any]) -> None:
        super().__init__(value)
        self.written: str | None = None
        """Its JSON, once requested."""
        self.clear_of: object = None
        """The `ControlText.key` of the control tokens that it was last found not to spell."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, with a fast path for what templates use most: a message's items and a loop's position.

    A template's work is bounded: the steps of its loops and calls, and the length of the texts that it makes.
    """

    code_generator_class = _ItemsInPlace
    intercepted_binops = frozenset({"*", "**", "%"})
    concat = staticmethod(joined)  # for a macro, or a block whose text becomes a value

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in ("center", "indent", "format"):
            self.filters[name] = _narrow(self.filters[name])
        self.filters["replace"] = _bounded(self.filters["replace"], _replaced_size)
        self.filters["join"] = _bounded(self.filters["join"], _joined_size)
        self.filters["_counted"] = _counted
        self.filters["_joined"] = _joined
        self.filters["_added"] = _added

    def bounded(self, tree: nodes.Template) -> nodes.Template:
        """Returns a parsed template with its loops, sums and joined texts counted."""
        _Sums().visit(tree)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _filtered(loop.iter, "_counted")
        for concat in list(tree.find_all(nodes.Concat)):
            concat.nodes = [_filtered(nodes.List(concat.nodes), "_joined")]
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """As the base class, but no operation makes a text, a list or a number that is too long."""
        if operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise too_much()
        if operator == "**" and not (abs(left) <= MOST_BASE and abs(right) <= MOST_POWER):
            raise too_much()
        if operator == "*":
            for sized, times in ((left, right), (right, left)):
                if isinstance(sized, str | list | tuple) and len(sized) * times > MAX_TEXT_CHARS:
                    raise too_much()
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As the base class."""
        kind = type(obj)
        if (kind is dict or kind is Known) and attribute not in _OF_DICTS:
            # Found or not, no attribute of an object is accessible. The base class would first fail to find one.
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is str and attribute in _OF_STRINGS:
            return getattr(obj, attribute)
        if kind is LoopContext and attribute in _OF_LOOPS:
            return getattr(obj, attribute)
        if kind is Namespace and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)  # its only attributes are those that a template set
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """As the base class, for formats whose fields are not too wide."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_FIELD.search(value.__self__):
            raise too_much()
        return wrapped

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """As the base class, counted: macros may call each other."""
        work_of(context).step(MACRO_STEPS if isinstance(obj, Macro) else 1)
        if obj is Namespace and not args and "_loop_vars" not in kwargs and "_block_vars" not in kwargs:
            return Namespace(**kwargs)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str) and obj.__name__ in _GROWING:
            _check_method(owner, obj.__name__, args, kwargs)
        return super().call(context, obj, *args, **kwargs)
