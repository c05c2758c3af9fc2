"""What the code says about its errors, read from its syntax trees: nothing is imported, nothing has to be raised."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tests.unit.docs.pages import ROOT

FOLDERS = {
    "chassis": "libs/chassis",
    "codec": "libs/codec",
    "sandbox": "services/sandbox",
    "driver": "services/driver",
    "interception": "services/interception",
    "inference": "services/inference",
    "client": "clients/python/sdk",
}
ANY = "*"
"""Stands for a value that the code only knows when it runs."""

_REASON = re.compile(r"[A-Z][A-Z0-9_]+")


@dataclass(frozen=True, slots=True)
class Module:
    """A source file: its path below its distribution, and its tree."""

    path: str
    tree: ast.Module

    def calls(self) -> Iterator[ast.Call]:
        """Every call in it."""
        return iter(_calls(self.tree))


@cache
def _calls(tree: ast.Module) -> tuple[ast.Call, ...]:
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.Call))


@dataclass(frozen=True, slots=True)
class Raised:
    """An error that is made somewhere: the name of its class (or `ANY`), its reason, and where."""

    kind: str
    reason: str
    where: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """An RPC whose handler does nothing but raise."""

    rpc: str
    kind: str
    reason: str


@cache
def modules(component: str) -> tuple[Module, ...]:
    """The modules of a component."""
    folder = ROOT / FOLDERS[component]
    return tuple(
        Module(path.relative_to(folder).as_posix(), ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(folder.rglob("*.py"))
    )


def raised(component: str, kinds: frozenset[str]) -> tuple[list[Raised], set[str]]:
    """Every construction of an error, and those whose reason cannot be read: "path: source of the call's head".

    Found are calls of a class in `kinds`, or of a variable `kind` that holds one, with a keyword `reason`; and pairs
    (class, "REASON", ...), of which the tables are made that such variables come from.
    """
    found, unread = [], set()
    for module in modules(component):
        for call in module.calls():
            name = last_name(call.func)
            reason = keyword(call, "reason")
            if reason is None or (name not in kinds and name != "kind"):
                continue
            texts = list(strings(reason))
            found += [Raised(name if name in kinds else ANY, text, module.path) for text in texts]
            if not texts:
                unread.add(f"{module.path}: {ast.unparse(call.func)}(reason={ast.unparse(reason)})")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Tuple) and len(node.elts) >= 2 and last_name(node.elts[0]) in kinds:
                found += [Raised(last_name(node.elts[0]), text, module.path) for text in strings(node.elts[1])]
    return found, unread


def strings(node: ast.expr | None) -> Iterator[str]:
    """The UPPER_SNAKE texts that an expression may be: a constant, `x or "TEXT"`, `"TEXT" if c else y`."""
    match node:
        case ast.Constant(value=str(text)) if _REASON.fullmatch(text):
            yield text
        case ast.BoolOp(values=values):
            for value in values:
                yield from strings(value)
        case ast.IfExp(body=body, orelse=orelse):
            yield from strings(body)
            yield from strings(orelse)


def last_name(node: ast.expr) -> str:
    """`c` of `a.b.c`, `a` of `a`, else nothing."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value of a keyword argument."""
    return next((item.value for item in call.keywords if item.arg == name), None)


def argument(call: ast.Call, position: int) -> ast.expr | None:
    """The value of a positional argument."""
    return call.args[position] if position < len(call.args) else None


def servicers(component: str) -> dict[str, dict[str, ast.AsyncFunctionDef]]:
    """The handlers of each gRPC service that a component serves, by service and RPC."""
    found = {}
    for module in modules(component):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    name = last_name(base)
                    if name.endswith("ServiceServicer"):
                        handlers = [item for item in node.body if isinstance(item, ast.AsyncFunctionDef)]
                        found[name.removesuffix("Servicer")] = {item.name: item for item in handlers}
    return found


def refusals(component: str, kinds: frozenset[str]) -> list[Refusal]:
    """The RPCs that only refuse: after looking up what is meant, if at all, their handler raises."""
    factories = dict(_factories(component, kinds))
    found = []
    for service, handlers in servicers(component).items():
        for rpc, handler in handlers.items():
            *before, last = [item for item in handler.body if not _is_docstring(item)]
            if not isinstance(last, ast.Raise) or not isinstance(last.exc, ast.Call):
                continue
            if any(not isinstance(item, ast.Assign) for item in before):
                continue
            name = last_name(last.exc.func)
            if name in kinds:
                kind, reasons = name, list(strings(keyword(last.exc, "reason")))
            else:
                kind, reasons = factories[name]
            found += [Refusal(f"{service}/{rpc}", kind, reason) for reason in reasons]
    return found


def _factories(component: str, kinds: frozenset[str]) -> Iterator[tuple[str, tuple[str, list[str]]]]:
    """Functions that return an error and do nothing else: their name, and the error's class and reasons."""
    for module in modules(component):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef):
                match [item for item in node.body if not _is_docstring(item)]:
                    case [ast.Return(value=ast.Call() as call)] if last_name(call.func) in kinds:
                        yield node.name, (last_name(call.func), list(strings(keyword(call, "reason"))))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
