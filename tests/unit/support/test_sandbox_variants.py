"""What the sandbox conformance suite leaves out is a repetition: no part of the contract goes untested on a backend."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.conformance.sandbox import forms
from tests.conformance.sandbox.services import SERVICES, not_run

SUITE = Path(forms.__file__).parent
WHOLE = ("local", "local-ordinary-user", "docker", "e2b")
RUN = [name for name, variant in SERVICES.items() if not variant.on_demand]


def tests_by_file() -> dict[str, set[str]]:
    """The names of the tests in each file of the suite."""
    return {
        path.name: {
            node.name
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        }
        for path in SUITE.glob("test_*.py")
    }


def test_every_name_in_a_form_is_a_test_of_the_suite() -> None:
    """Or a test that is renamed would no longer run on the variants with a short form."""
    known = set[str]().union(*tests_by_file().values())
    assert known >= forms.SHORT | forms.ISOLATION | forms.OWN_FILE_SYSTEM
    for variant in SERVICES.values():
        assert known >= {*variant.left_out, *variant.left_out_unless_named}


@pytest.mark.parametrize("name", RUN)
def test_each_variant_runs_tests_of_every_part_of_the_contract(name: str) -> None:
    """Each file of the suite is one part."""
    for file, tests in tests_by_file().items():
        assert any(SERVICES[name].runs(test, named=False) for test in tests), file


def test_every_test_runs_on_each_way_to_reach_a_sandbox() -> None:
    """From the host, by entering a container, and through programs inside; what is dear runs from the host at least."""
    for test in set[str]().union(*tests_by_file().values()):
        runs = [name for name in WHOLE if SERVICES[name].runs(test, named=False)]
        assert runs == list(WHOLE) or (test in forms.MANY and runs == ["local", "local-ordinary-user"]), test
    assert all(not SERVICES[name].short_form for name in WHOLE)


def test_whoever_asks_for_a_backend_gets_its_whole_suite() -> None:
    """By name, and all of them by `--full`; only what a variant can never run is left out then."""
    known = set[str]().union(*tests_by_file().values())
    for variant in SERVICES.values():
        assert {test for test in known if not variant.runs(test, named=True)} == set(variant.left_out)


def test_a_run_says_of_each_variant_what_it_leaves_out() -> None:
    """One line for each short form and for each variant that is not run; fewer where more is asked."""
    said = not_run([])
    for name, variant in SERVICES.items():
        mentioned = any(line.startswith(f"{name}: ") for line in said)
        assert mentioned == bool(
            variant.on_demand or variant.short_form or variant.left_out or variant.left_out_unless_named
        )
    assert not_run(["docker-gvisor"]) == []
    assert {line.partition(":")[0] for line in not_run([], full=True)} == {
        name for name, variant in SERVICES.items() if variant.left_out
    }
