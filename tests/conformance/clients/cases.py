"""What the cases' files hold, and how a step's expectation is compared with what was observed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

_FOLDER: Final = Path(__file__).parent / "cases"


@dataclass(frozen=True)
class Case:
    """One case: `requirement` says what it proves, `steps` are as README.md defines them."""

    name: str
    requirement: str
    steps: Sequence[Mapping[str, Any]]


@cache
def load() -> Sequence[Case]:
    """All cases, file by file."""
    cases = [
        Case(item["name"], item["requirement"], item["steps"])
        for path in sorted(_FOLDER.glob("*.yaml"))
        for item in yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    ]
    assert len({case.name for case in cases}) == len(cases), "two cases have one name"
    return cases


def differences(expected: Any, seen: Any, where: str = "") -> Iterator[str]:
    """How what was seen is not what was expected; see README.md for the forms that an expectation has."""
    at = where or "it"
    if isinstance(expected, Mapping):
        operator = next((name for name in expected if name.startswith("$")), None)
        if operator == "$contains":
            missing = [part for part in expected[operator] if part not in seen]
            if missing:
                yield f"{at} has not {missing}: {seen!r}"
        elif operator == "$length":
            if len(seen) != expected[operator]:
                yield f"{at} has length {len(seen)}, not {expected[operator]}"
        elif operator == "$some":
            if not any(not list(differences(expected[operator], item)) for item in seen):
                yield f"{at} has nothing like {expected[operator]!r}: {seen!r}"
        elif operator == "$not":
            if seen is None or seen == expected[operator]:
                yield f"{at} is {seen!r}"
        elif operator is not None:
            yield f"{at}: there is no {operator}"
        elif not isinstance(seen, Mapping):
            yield f"{at} is {seen!r}, not {dict(expected)!r}"
        else:
            for name, item in expected.items():
                if name not in seen:
                    yield f"{at} has no {name}: {dict(seen)!r}"
                else:
                    yield from differences(item, seen[name], f"{where}.{name}".lstrip("."))
    elif isinstance(expected, list):
        if not isinstance(seen, list) or len(seen) != len(expected):
            yield f"{at} is {seen!r}, not {expected!r}"
        else:
            for index, (want, got) in enumerate(zip(expected, seen, strict=True)):
                yield from differences(want, got, f"{where}[{index}]")
    elif expected != seen or isinstance(expected, bool) != isinstance(seen, bool):
        yield f"{at} is {seen!r}, not {expected!r}"
