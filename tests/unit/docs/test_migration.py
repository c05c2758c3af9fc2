"""docs/migration.md: what it names of Penstock exists, and every row names something or says that there is nothing.

That no module is missing which has moved is in git alone, and a checkout may have no history.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from google.protobuf.descriptor import FileDescriptor
from tests.unit.docs.pages import ROOT

from penstock.cli.main import app
from penstock.driver.v1 import agent_service_pb2, rollout_service_pb2, terminal_service_pb2
from penstock.inference.v1 import inference_service_pb2
from penstock.interception.v1 import intercept_service_pb2, rollout_gate_service_pb2
from penstock.sandbox.v1 import file_service_pb2, process_service_pb2, sandbox_service_pb2, toolbox_service_pb2

PAGE = ROOT / "docs/migration.md"
PROTOS: tuple[Any, ...] = (
    *(agent_service_pb2, rollout_service_pb2, terminal_service_pb2, inference_service_pb2, intercept_service_pb2),
    *(rollout_gate_service_pb2, file_service_pb2, process_service_pb2, sandbox_service_pb2, toolbox_service_pb2),
)
_NAME = re.compile(r"`([^`]+)`")


def rows() -> Iterator[tuple[str, str]]:
    """What there was and what takes its place, of every row of every table."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and not set(cells[0]) <= {"-", " "} and cells[1] != "here":
            if set(cells[1]) <= {"-"}:
                continue
            yield cells[0], cells[1]


def names() -> list[str]:
    """Every name of ours in the tables' middle column."""
    return sorted({name for _, here in rows() for name in _NAME.findall(here)})


def files() -> Iterator[FileDescriptor]:
    """Every proto file that the services' are made of."""
    waiting: list[FileDescriptor] = [module.DESCRIPTOR for module in PROTOS]
    seen: set[str] = set()
    while waiting:
        file = waiting.pop()
        if file.name not in seen:
            seen.add(file.name)
            waiting.extend(file.dependencies)
            yield file


def exists(name: str) -> bool:
    """Whether a name leads somewhere: a Python name, a command, an RPC, or a field of a message."""
    if name.startswith("penstock "):
        return is_command(name.split()[1:])
    if name.startswith(("penstock.", "penstock_")):
        return is_attribute(name.split("."))
    if "/" in name:
        service, _, method = name.partition("/")
        return any(
            service in file.services_by_name and method in file.services_by_name[service].methods_by_name
            for file in files()
        )
    message, _, field = name.partition(".")
    return any(
        message in file.message_types_by_name and field in file.message_types_by_name[message].fields_by_name
        for file in files()
    )


def is_command(words: list[str]) -> bool:
    """Whether the command line has it."""
    command: Any = typer.main.get_command(app)
    for word in words:
        command = getattr(command, "commands", {}).get(word)
    return command is not None


def is_attribute(parts: list[str]) -> bool:
    """Whether a dotted name can be imported; a class's annotated fields count."""
    for split in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for part in parts[split:]:
            annotated = any(part in vars(base).get("__annotations__", {}) for base in getattr(found, "__mro__", ()))
            if not hasattr(found, part) and not annotated:
                return False
            found = getattr(found, part, None)
        return True
    return False


@pytest.mark.requirement("R65")
@pytest.mark.parametrize("name", names())
def test_names_of_the_migration_page_exist(name: str) -> None:
    """Whoever follows the page arrives."""
    assert exists(name), f"docs/migration.md names {name}, which does not exist"


@pytest.mark.requirement("R65")
def test_every_row_names_a_counterpart_or_says_that_there_is_none() -> None:
    found = list(rows())
    assert len(found) > 100
    for there, here in found:
        assert _NAME.search(here) or here == "none", f"{there}: {here!r}"


def moved() -> list[str]:
    """Modules of the client that are no more where they were."""
    text = (
        PAGE.read_text(encoding="utf-8")
        .partition("## Modules of the Python client that moved\n")[2]
        .partition("\n## ")[0]
    )
    return re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE)


@pytest.mark.requirement("R65")
def test_modules_that_moved_are_listed_once_in_order_and_are_gone_from_where_they_were() -> None:
    """Or whoever looks one up does not find it, or is sent away from what is still there."""
    names = moved()
    assert len(names) > 100
    assert names == sorted(set(names))
    assert [name for name in names if is_module(name)] == []


def is_module(name: str) -> bool:
    """Whether it is a module now; a package that took a module's name is another thing."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return False
    return spec is not None and spec.submodule_search_locations is None


def test_a_name_that_does_not_exist_is_found_out() -> None:
    """The check itself would notice."""
    for name in (
        *("penstock.client.Nothing", "penstock.client.Task.nothing", "penstock nothing", "penstock agents nothing"),
        *("RolloutService/Nothing", "AgentSpec.nothing", "Nothing.name"),
    ):
        assert not exists(name), name
