"""Skips: tests that cannot run on a machine fail where CI is set, with two exceptions."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from tests.support.absent import absent

TESTS = Path(__file__).parents[2]
SKIPS = re.compile(r"\bpytest\.skip\(|\bskipif\(|\bmark\.skip\b|\bimportorskip\(|\bskipTest\(")
ALLOWED = {
    "support/absent.py": 1,
    # An attack that this backend does not offer its agents; named in the test, and tried on another backend.
    "security/test_redteam.py": 1,
    # Where there is a GPU, as for `make gpu`: on a CPU, as in continuous integration, it runs.
    "integration/vllm/conftest.py": 1,
    "integration/vllm/test_generation.py": 1,
    # Needs the environment of `make test-trl`, of several GB.
    "unit/codec/test_published_templates.py": 1,
    # In the text of a task's tests.
    "unit/tasks/test_importers.py": 2,
}


@pytest.mark.requirement("R146")
@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_absent_thing_fails_a_test_only_where_ci_is_set(
    monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="no compiler"):
        absent("no compiler")


@pytest.mark.requirement("R146")
def test_tests_skip_in_one_way_with_few_exceptions() -> None:
    """A skip of any other kind would go unseen in continuous integration."""
    found = Counter(
        {
            str(path.relative_to(TESTS)): len(SKIPS.findall(path.read_text()))
            for path in TESTS.rglob("*.py")
            if path != Path(__file__)
        }
    )
    assert {path: count for path, count in found.items() if count} == ALLOWED
