"""Tasks of the SWE kind that need no network: a small repository with a fault, an issue, and tests that are hidden.

As SWE-smith does it, the fault is put into code that works: one operator or number of it is another. A fault counts if
a case finds it. The issue shows one such case; the verifier has all of them, and the agent's code runs in a process
that does not know what is expected.
"""

import ast
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

MOST_PER_MODULE: Final = 4

_CHECK: Final = '''\
import json, subprocess, sys

name, cases = json.load(open("cases.json"))
program = """
import importlib, json, sys
sys.path.insert(0, "src")
name, expressions = json.load(sys.stdin)
module = importlib.import_module(name)
found = []
for expression in expressions:
    try:
        found.append(repr(eval(expression, {name: module})))
    except Exception as error:
        found.append(type(error).__name__)
print(json.dumps(found))
"""
ran = subprocess.run(
    [sys.executable, "-I", "-c", program], input=json.dumps([name, list(cases)]), stdout=subprocess.PIPE, text=True,
    timeout=60,
)
lines = ran.stdout.splitlines()
sys.exit(ran.returncode != 0 or not lines or json.loads(lines[-1]) != list(cases.values()))
'''


@dataclass(frozen=True, slots=True)
class Module:
    """Code that works, without loops that a fault could make endless, and expressions that show what it does."""

    name: str
    source: str
    expressions: tuple[str, ...]


def _cases(name: str, *calls: str) -> tuple[str, ...]:
    return tuple(f"{name}.{call}" for call in calls)


TRAINED: Final = (
    Module(
        "spans",
        '''
def merge(spans):
    """Joins spans (start, end) that touch or overlap; sorted."""
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def covered(spans):
    """How many integers the spans cover; ends are not part of them."""
    return sum(end - start for start, end in merge(spans))
''',
        _cases(
            "spans",
            *("merge([(1, 3), (2, 5)])", "merge([(1, 2), (2, 4)])", "merge([(5, 6), (1, 2)])", "merge([])"),
            *("covered([(0, 4), (2, 6)])", "merge([(1, 9), (2, 3)])", "covered([(3, 4)])"),
        ),
    ),
    Module(
        "roman",
        '''
VALUES = [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"),
          (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]


def numeral(number):
    """A number from 1 to 3999 as a Roman numeral."""
    if number < 1 or number > 3999:
        raise ValueError("1 to 3999")
    text = ""
    for value, letters in VALUES:
        text = text + letters * (number // value)
        number = number % value
    return text
''',
        _cases(
            "roman",
            *("numeral(1)", "numeral(4)", "numeral(9)", "numeral(40)", "numeral(1994)", "numeral(3999)"),
            *("numeral(0)", "numeral(4000)", "numeral(500)"),
        ),
    ),
    Module(
        "pages",
        '''
def count(items, size):
    """How many pages of `size` items there are; none without items."""
    return (items + size - 1) // size


def bounds(page, items, size):
    """The first item of a page, from 1, and the item after its last, from 0; an empty pair beyond the end."""
    if page < 1 or page > count(items, size):
        return (0, 0)
    first = (page - 1) * size
    return (first, min(first + size, items))
''',
        _cases(
            "pages",
            *("count(10, 5)", "count(11, 5)", "count(0, 5)", "count(4, 5)", "bounds(1, 11, 5)", "bounds(3, 11, 5)"),
            *("bounds(4, 11, 5)", "bounds(0, 11, 5)", "bounds(2, 10, 5)"),
        ),
    ),
    Module(
        "versions",
        '''
def parsed(text):
    """The numbers of a version such as 1.20.3."""
    return [int(part) for part in text.split(".")]


def is_newer(one, two):
    """Whether version `one` is newer than `two`; missing parts are 0."""
    first, second = parsed(one), parsed(two)
    for place in range(max(len(first), len(second))):
        left = first[place] if place < len(first) else 0
        right = second[place] if place < len(second) else 0
        if left != right:
            return left > right
    return False
''',
        _cases(
            "versions",
            *("is_newer('1.10', '1.9')", "is_newer('1.9', '1.10')", "is_newer('1.0', '1')", "is_newer('2', '1.9.9')"),
            *("is_newer('1.0.1', '1.0')", "is_newer('1.0', '1.0.1')", "is_newer('3.1', '3.1')"),
        ),
    ),
    Module(
        "tables",
        '''
def widths(rows):
    """The width of each column of rows of texts."""
    most = max(len(row) for row in rows)
    return [max(len(row[place]) for row in rows if place < len(row)) for place in range(most)]


def aligned(rows):
    """The rows as lines: columns are padded to their width, with two spaces between them and none at the end."""
    sizes = widths(rows)
    return ["  ".join(cell.ljust(sizes[place]) for place, cell in enumerate(row)).rstrip() for row in rows]
''',
        _cases(
            "tables",
            *("widths([['a', 'bb'], ['ccc']])", "aligned([['a', 'bb'], ['ccc', 'd']])", "aligned([['x']])"),
            *("aligned([['one', 'two', 'three'], ['1', '2', '3']])", "widths([['', 'a']])"),
        ),
    ),
    Module(
        "paths",
        '''
def normal(path):
    """A path without `.`, `..` and doubled slashes; `..` at the root stays there."""
    kept = []
    for part in path.split("/"):
        if part == "..":
            if kept and kept[-1] != "..":
                kept.pop()
            elif not path.startswith("/"):
                kept.append(part)
        elif part != "" and part != ".":
            kept.append(part)
    return ("/" if path.startswith("/") else "") + "/".join(kept)
''',
        _cases(
            "paths",
            *("normal('/a/./b')", "normal('a//b/../c')", "normal('/../a')", "normal('../a')", "normal('../../a')"),
            *("normal('/a/b/../..')", "normal('a/..')", "normal('.')"),
        ),
    ),
)

HELD_OUT: Final = (
    Module(
        "retries",
        '''
def delay(attempt, first=1, most=60):
    """Seconds before an attempt, from 0: none before the first, then doubled each time, at most `most`."""
    if attempt <= 0:
        return 0
    return min(first * 2 ** (attempt - 1), most)


def total(attempts, first=1, most=60):
    """Seconds spent in waiting before that many attempts."""
    return sum(delay(attempt, first, most) for attempt in range(attempts))
''',
        _cases(
            "retries",
            *("delay(0)", "delay(1)", "delay(2)", "delay(5)", "delay(9)", "total(1)", "total(4)", "total(3, 5)"),
            *("delay(4, 2, 10)", "total(0)"),
        ),
    ),
    Module(
        "intervals",
        '''
def bucket(value, edges):
    """The index of the bucket of a value: those below the first edge are 0, an edge belongs to the bucket above it."""
    place = 0
    for edge in edges:
        if value >= edge:
            place = place + 1
    return place


def histogram(values, edges):
    """How many values are in each bucket."""
    counts = [0] * (len(edges) + 1)
    for value in values:
        counts[bucket(value, edges)] += 1
    return counts
''',
        _cases(
            "intervals",
            *("bucket(0, [1, 2])", "bucket(1, [1, 2])", "bucket(5, [1, 2])", "histogram([0, 1, 1, 3], [1, 2])"),
            *("histogram([], [1])", "histogram([2, 2], [2])"),
        ),
    ),
    Module(
        "money",
        '''
def shares(cents, people):
    """Cents in as equal shares as can be; the first ones are a cent larger."""
    each, rest = cents // people, cents % people
    return [each + 1 if place < rest else each for place in range(people)]


def shown(cents):
    """Such as 12.05, or -0.50."""
    sign = "-" if cents < 0 else ""
    return f"{sign}{abs(cents) // 100}.{abs(cents) % 100:02d}"
''',
        _cases(
            "money",
            *("shares(100, 3)", "shares(5, 5)", "shares(2, 3)", "shown(1205)", "shown(-50)", "shown(0)", "shown(99)"),
            "shares(7, 2)",
        ),
    ),
)


def write(folder: Path, modules: tuple[Module, ...], *, kinds: frozenset[str] | None = None) -> list[str]:
    """Writes the tasks of these modules into a directory, each a file of its own.

    Args:
        folder: made if it is missing.
        modules: the code.
        kinds: the kinds of faults, of `faults`; None = all.

    Returns:
        The tasks' ids. The same modules always give the same tasks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for module in modules:
        found = {task["instruction"]: task for task in _tasks(module, kinds)}
        every = max(1, len(found) // MOST_PER_MODULE)
        for number, task in enumerate(list(found.values())[::every][:MOST_PER_MODULE], 1):
            task["task_id"] = f"{module.name}-{number}"
            (folder / f"{task['task_id']}.yaml").write_text(yaml.safe_dump(task, sort_keys=False), "utf-8")
            made.append(task["task_id"])
    return made


def faults(source: str) -> Iterator[tuple[str, str]]:
    """Every fault that can be put into code: its kind, and the code with it."""
    tree = ast.parse(source)
    for place, node in enumerate(ast.walk(tree)):
        for kind, change in _changes(node):
            broken = ast.parse(source)
            change([*ast.walk(broken)][place])
            yield kind, ast.unparse(broken) + "\n"


def results(module: Module, source: str) -> dict[str, str]:
    """What each expression gives with this source: its value's text, or the name of its error."""
    namespace: dict[str, Any] = {}
    exec(compile(source, module.name, "exec"), namespace)
    found = {}
    for expression in module.expressions:
        try:
            found[expression] = repr(eval(expression.removeprefix(f"{module.name}."), namespace))
        except Exception as error:  # noqa: BLE001 - whatever a fault leads to
            found[expression] = type(error).__name__
    return found


def _tasks(module: Module, kinds: frozenset[str] | None) -> Iterator[dict[str, Any]]:
    right = results(module, module.source)
    for kind, broken in faults(module.source):
        if kinds is not None and kind not in kinds:
            continue
        wrong = results(module, broken)
        if shown := next((expression for expression in right if wrong[expression] != right[expression]), ""):
            yield _task(module, broken, shown, wrong, right)


def _task(
    module: Module, broken: str, shown: str, wrong: Mapping[str, str], right: Mapping[str, str]
) -> dict[str, Any]:
    passing = [expression for expression in right if wrong[expression] == right[expression]][:3]
    tests = "\n".join(f"    assert repr({expression}) == {right[expression]!r}" for expression in passing)
    visible = f'import sys\n\nsys.path.insert(0, "src")\nimport {module.name}\n\n\ndef test_{module.name}():\n'
    return {
        "task_id": "",
        "instruction": (
            f"{shown} gives {wrong[shown]}, but {right[shown]} is right. Find the fault in src/{module.name}.py and "
            "correct it there. It is in one place."
        ),
        "files": [
            {"path": f"src/{module.name}.py", "content": broken},
            {"path": f"tests/test_{module.name}.py", "content": visible + (tests or "    pass") + "\n"},
            {"path": "README.md", "content": f"# {module.name}\n\nThe code is in `src`, its tests are in `tests`.\n"},
        ],
        "setup": [
            {"shell": "git init -q . && git add . && git -c user.name=a -c user.email=a@localhost commit -qm first"}
        ],
        "verifier": {
            "files": [
                {"path": "check.py", "content": _CHECK},
                {"path": "cases.json", "content": json.dumps([module.name, dict(right)])},
            ],
            "commands": [["python3", "-I", "check.py"]],
            "changes_below": ["src"],
        },
        "limits": {"setup": 60, "verify": 60},
    }


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], None]]]:
    swapped: dict[type[ast.AST], type[ast.AST]] = {
        ast.Add: ast.Sub, ast.Sub: ast.Add, ast.FloorDiv: ast.Mod, ast.Mod: ast.FloorDiv,
        ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
        ast.And: ast.Or, ast.Or: ast.And,
    }  # fmt: skip
    match node:
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in swapped:
            yield type(op).__name__, lambda other: setattr(other, "op", swapped[type(op)]())
        case ast.Compare(ops=[op]) if type(op) in swapped:
            yield type(op).__name__, lambda other: setattr(other, "ops", [swapped[type(op)]()])
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            yield "Constant", lambda other: setattr(other, "value", value + 1)
