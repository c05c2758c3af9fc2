"""Runs SymPy's tests as its bin/test -C does, in the repository's root, and writes what each test came to.

    sympy_report.py REPORT FILE...

For Python 3.5 and later: that of the oldest images. A test's name is its function's, as SWE-bench has it; a name's
outcome is the worst of the tests that have it.
"""

import importlib
import json
import os
import sys
from typing import Any

WORST = ("passed", "skipped", "xfailed", "failure", "error")
OUTCOMES = {}  # type: dict[str, str]
METHODS = {
    "test_pass": "passed",
    "test_skip": "skipped",
    "test_xfail": "xfailed",
    "test_xpass": "failure",
    "test_fail": "failure",
    "test_exception": "error",
}


def runner() -> Any:
    """The module of SymPy that runs tests: its place changed in 1.6."""
    try:
        return importlib.import_module("sympy.testing.runtests")
    except ImportError:
        return importlib.import_module("sympy.utilities.runtests")


def watch(reporter: Any) -> None:
    """Makes all reporters note the outcome of the test that they entered last."""
    current = [""]
    entering = reporter.entering_test

    def entered(self: Any, function: Any) -> Any:
        current[0] = function.__name__
        return entering(self, function)

    reporter.entering_test = entered

    def watched(method: str, outcome: str) -> None:
        inner = getattr(reporter, method)

        def noting(self: Any, *rest: Any, **named: Any) -> Any:
            if WORST.index(outcome) >= WORST.index(OUTCOMES.get(current[0], "passed")):
                OUTCOMES[current[0]] = outcome
            return inner(self, *rest, **named)

        setattr(reporter, method, noting)

    for method, outcome in METHODS.items():
        watched(method, outcome)


def main() -> None:
    """Runs the tests, and writes the report however they end."""
    report, files = os.path.abspath(sys.argv[1]), sys.argv[2:]
    os.environ["SYMPY_USE_CACHE"] = "no"
    sys.path[0] = os.getcwd()
    try:
        module = runner()
        watch(module.PyTestReporter)
        # In a process of its own it would not be this reporter's.
        passed = module.test(*files, verbose=True, subprocess=False)
    finally:
        with open(report, "w", encoding="utf-8") as file:
            json.dump(OUTCOMES, file)
    sys.exit(not passed)


if __name__ == "__main__":
    main()
