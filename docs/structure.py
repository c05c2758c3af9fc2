"""How many rooms the crowded plans have: what a newcomer sees first of a service, or of the client.

python -m docs.structure             a line for each: its rooms, the arrows between them, its floors

A room is a module or package directly below the distribution's package; an arrow is that one room imports another, be
it for types alone; floors are layers of imports. tests/unit/docs/test_layering.py holds the sum of the rooms, and
decision 026 has the figures.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
CROWDED: Final[Mapping[str, str]] = {
    "penstock_interception": "services/interception",
    "penstock_driver": "services/driver",
    "penstock_sandbox": "services/sandbox",
    "penstock.client": "clients/python/sdk",
}
"""Packages, and the folders of their distributions."""


def arrows(package: str) -> dict[str, frozenset[str]]:
    """The rooms of a package, each with those that it imports."""
    folder = ROOT / CROWDED[package] / package.replace(".", "/")
    found: dict[str, set[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        if path != folder / "__init__.py":
            room = path.relative_to(folder).parts[0].removesuffix(".py")
            found.setdefault(room, set()).update(_imported(path, package))
    return {room: frozenset(others & found.keys() - {room}) for room, others in found.items()}


def _imported(path: Path, package: str) -> Iterator[str]:
    """The first name below the package of each import in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.startswith(f"{package}."):
                yield name.removeprefix(f"{package}.").split(".")[0]


def floors(rooms: Mapping[str, frozenset[str]]) -> int:
    """The most rooms of which each imports the next. Raises graphlib.CycleError."""
    height: dict[str, int] = {}
    for room in TopologicalSorter(rooms).static_order():
        height[room] = 1 + max((height[other] for other in rooms[room]), default=0)
    return max(height.values())


def main() -> None:
    """See the module's text."""
    plans = {package: arrows(package) for package in CROWDED}
    for package, rooms in plans.items():
        between = sum(map(len, rooms.values()))
        print(f"{package:24}{len(rooms):4} rooms {between:4} arrows {floors(rooms):3} floors")
    together = sum(len(others) for rooms in plans.values() for others in rooms.values())
    print(f"{'sum':24}{sum(map(len, plans.values())):4} rooms {together:4} arrows")


if __name__ == "__main__":
    main()
