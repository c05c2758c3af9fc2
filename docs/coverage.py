"""Which requirement is proved by which tests: `@pytest.mark.requirement("R49")` names numbers of docs/requirements.md.

python docs/coverage.py              a line per requirement with its tests
python docs/coverage.py --missing    those that no test names; exit code 1 when there are any

A test proves what its own mark names. Docstrings are for people and prove nothing.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_REQUIREMENT = re.compile(r"^- R(\d+) (.*(?:\n  .*)*)", re.MULTILINE)
_CITED = re.compile(r"\bR(\d+)(?:\s*(?:-|to)\s*R(\d+))?\b")


def requirements() -> dict[int, str]:
    """Each requirement's number and text."""
    text = (ROOT / "docs/requirements.md").read_text(encoding="utf-8")
    return {int(number): " ".join(words.split()) for number, words in _REQUIREMENT.findall(text)}


@cache
def citations() -> dict[int, list[str]]:
    """For each number that a test's mark names, the tests: "tests/unit/driver/rollouts/test_attempt.py::test_name"."""
    found: dict[int, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name, marks in _tests(tree):
            for number in cited(marks):
                found.setdefault(number, []).append(f"{path.relative_to(ROOT).as_posix()}::{name}")
    return found


def cited(text: str) -> Sequence[int]:
    """The numbers in a text, in order; `R72-R75` stands for all four."""
    numbers: list[int] = []
    for first, last in _CITED.findall(text):
        numbers += range(int(first), int(last or first) + 1)
    return sorted(set(numbers))


def missing(proved: Mapping[int, object]) -> dict[int, str]:
    """The requirements that no test names."""
    return {number: text for number, text in requirements().items() if number not in proved}


def _tests(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Each test's name, and what its marks name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            marks = (mark for mark in node.decorator_list if isinstance(mark, ast.Call))
            named = (mark.args for mark in marks if ast.unparse(mark.func) == "pytest.mark.requirement")
            yield (
                node.name,
                " ".join(str(word.value) for words in named for word in words if isinstance(word, ast.Constant)),
            )


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description="Which requirement is proved by which tests.")
    parser.add_argument("--missing", action="store_true", help="only those that no test names; exit code 1 if any")
    only_missing = parser.parse_args().missing
    proved = citations()
    gaps = missing(proved)
    for number, text in requirements().items():
        if not only_missing or number in gaps:
            print(f"R{number} {text}")
            for test in () if only_missing else proved.get(number, ["(no test)"]):
                print(f"    {test}")
    if only_missing and gaps:
        sys.exit(1)


if __name__ == "__main__":
    main()
