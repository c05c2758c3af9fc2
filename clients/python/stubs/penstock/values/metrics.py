"""The rules of metrics that a trainer logs, for clients and services alike.

Invariant: what holds these rules can be stored, thinned and drawn: finite numbers, at steps that every client can read
exactly.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Final

MOST_NAMES: Final = 128
"""Metrics of one step in a request."""
MOST_METRICS: Final = 1024
"""Metrics of a run."""
MOST_POINTS: Final = 2_000_000
"""Points of a run."""
MOST_STEPS: Final = 1024
"""Steps of a request."""
MOST_VALUES: Final = 4096
"""Values of a request, all steps together."""
MOST_STEP: Final = (1 << 53) - 1
THINNED: Final = (3, 10_000)
"""The least and the most points to which a metric can be thinned."""

_NAME: Final = re.compile(r"[A-Za-z0-9_./-]{1,128}")
_RUN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")
_SHOWN: Final = 64


def run_problem(run_id: str) -> str:
    """Returns why a run's id cannot be used; empty if it can."""
    return "" if _RUN.fullmatch(run_id) else "expected 1 to 63 letters, digits and . _ / -"


def name_problem(name: str) -> str:
    """Returns why a metric's name cannot be used; empty if it can."""
    return "" if _NAME.fullmatch(name) else "expected a name of 1 to 128 letters, digits and _ . / -"


def step_problem(step: int) -> str:
    """Returns why a step cannot be used; empty if it can."""
    return "" if 0 <= step <= MOST_STEP else "expected 0 to 2^53 - 1"


def problems(step: int, values: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the values of a step: the field, such as `values[loss]`, and the reason."""
    if problem := step_problem(step):
        yield "step", problem
    if not 1 <= len(values) <= MOST_NAMES:
        yield "values", f"expected 1 to {MOST_NAMES}"
        return
    for name, value in values.items():
        shown = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}..."
        if problem := name_problem(name):
            yield f"values[{shown}]", problem
        elif not math.isfinite(value):
            yield f"values[{shown}]", f"is {value}: expected a finite number"
