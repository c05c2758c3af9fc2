"""Runs Django's tests/runtests.py in the repository's root, and writes what each test came to.

    django_report.py REPORT ARGUMENT...

For Python 3.5 and later: that of the oldest images. A test has two names, as SWE-bench has it: the one that unittest
prints, and the first line of its docstring. A name's outcome is the worst of the tests that have it.
"""

import json
import os
import runpy
import sys
import unittest
from typing import Any

WORST = ("passed", "skipped", "xfailed", "failure", "error")
OUTCOMES = {}  # type: dict[str, str]


def note(test: Any, outcome: str) -> None:
    """Keeps the outcome by each of the test's names."""
    names = [str(test), getattr(test, "shortDescription", lambda: None)() or ""]
    # From 3.11 on the name has the function twice: test_a (module.Case.test_a).
    function = getattr(test, "_testMethodName", "")
    if function and names[0].endswith("." + function + ")"):
        names.append(names[0][: -len(function) - 2] + ")")
    for name in filter(None, names):
        if WORST.index(outcome) >= WORST.index(OUTCOMES.get(name, "passed")):
            OUTCOMES[name] = outcome


def watched(method: str, outcome: str) -> None:
    """Makes the results of all runners note an outcome first."""
    inner = getattr(unittest.TextTestResult, method)

    def noting(self: Any, test: Any, *rest: Any) -> Any:
        note(test, outcome)
        return inner(self, test, *rest)

    setattr(unittest.TextTestResult, method, noting)


def watch_subtests() -> None:
    """Makes a subtest that fails fail its test."""
    inner = unittest.TextTestResult.addSubTest

    def noting(self: Any, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            note(test, "failure")
        inner(self, test, subtest, err)

    unittest.TextTestResult.addSubTest = noting  # type: ignore[method-assign]


def main() -> None:
    """Runs the tests, and writes the report however they end."""
    report, arguments = os.path.abspath(sys.argv[1]), sys.argv[2:]
    for method, outcome in (
        ("addSuccess", "passed"),
        ("addSkip", "skipped"),
        ("addExpectedFailure", "xfailed"),
        ("addUnexpectedSuccess", "failure"),
        ("addFailure", "failure"),
        ("addError", "error"),
    ):
        watched(method, outcome)
    watch_subtests()
    program = os.path.join(os.getcwd(), "tests", "runtests.py")
    sys.argv = [program] + arguments
    sys.path[0] = os.path.dirname(program)
    try:
        runpy.run_path(program, run_name="__main__")
    finally:
        with open(report, "w", encoding="utf-8") as file:
            json.dump(OUTCOMES, file)


if __name__ == "__main__":
    main()
