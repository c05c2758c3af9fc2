"""Unit tests of a service stand in directories with the names of its packages."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.unit.docs.pages import ROOT

SERVICES = ("driver", "inference", "interception", "sandbox")


def packages(service: str) -> set[str]:
    """A service's packages by their path below it."""
    root = ROOT / "services" / service / f"penstock_{service}"
    return {path.parent.relative_to(root).as_posix() for path in root.rglob("__init__.py")}


def of_one_package(file: Path, service: str, package: str) -> str:
    """The package below `package` from which the test takes everything that it takes from its service, or nothing.

    Values are what every test needs: where others than the domain are imported, it does not count.
    """
    prefix = ".".join(("penstock_" + service, *(() if package == "." else package.split("/")))) + "."
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    own = {name for name in found if name.startswith(f"penstock_{service}.")}
    own = {name for name in own if not name.startswith(f"penstock_{service}.domain.")} or own
    below = {name.removeprefix(prefix).split(".")[0] if name.startswith(prefix) else "" for name in own}
    return below.pop() if len(below) == 1 else ""


@pytest.mark.parametrize("service", SERVICES)
def test_directories_of_a_services_unit_tests_have_the_names_of_its_packages(service: str) -> None:
    """Who changes a package finds its tests, and what stands beside the directories tests more than one of them."""
    root = ROOT / "tests/unit" / service
    known = packages(service)
    files = sorted(root.rglob("test_*.py"))
    assert files
    strange = {file.parent.relative_to(root).as_posix() for file in files} - known
    assert strange == set()
    misplaced = {}
    for file in files:
        package = file.parent.relative_to(root).as_posix()
        inner = of_one_package(file, service, package)
        if inner and (inner if package == "." else f"{package}/{inner}") in known and is_mirrored(root, package, inner):
            misplaced[file.relative_to(root).as_posix()] = inner
    assert misplaced == {}


def is_mirrored(root: Path, package: str, inner: str) -> bool:
    """Whether tests of this package have directories for those in it: all of a service's own, or some of another's."""
    return package == "." or any(file.parent.parent == root / package for file in root.rglob("test_*.py"))
