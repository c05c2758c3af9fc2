"""Who imports whom: the rules that CONTRIBUTING.md states hold in the sources."""

from __future__ import annotations

import ast

import pytest
from tests.unit.docs.code import FOLDERS, modules

SERVICES = ("sandbox", "driver", "interception", "inference")
WIRE = ("grpc", "google.protobuf", "penstock.")


def imported(tree: ast.Module) -> set[str]:
    """The modules that a file names in its imports, wherever they stand."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("component", FOLDERS)
def test_clients_servers_and_services_meet_in_the_protos_only(component: str) -> None:
    """R20: clients import no server code, servers no client code, services not each other."""
    others = {f"penstock_{service}" for service in SERVICES if service != component}
    forbidden = others | {"penstock.client", "penstock.cli"}
    if component == "client":
        forbidden = others | {"penstock_chassis", "penstock_codec"}
    for module in modules(component):
        names = imported(module.tree)
        assert {
            name for name in names if name.split(".")[0] in forbidden or ".".join(name.split(".")[:2]) in forbidden
        } == set()


@pytest.mark.parametrize("component", SERVICES)
def test_only_the_files_that_speak_the_wire_know_it(component: str) -> None:
    """R20: what is meant by `the domain knows neither gRPC nor protos`."""
    for module in modules(component):
        if "/rpc/" not in module.path and not module.path.endswith(("/service.py", "/clients.py")):
            assert {name for name in imported(module.tree) if name.startswith(WIRE)} == set(), module.path
