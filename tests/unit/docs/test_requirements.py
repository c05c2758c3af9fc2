"""The requirements and the tests that cite them point at each other."""

from __future__ import annotations

import ast
import re

import pytest
from docs import coverage
from tests.unit.docs.pages import ROOT, tables

NOT_PROVED_YET: dict[int, str] = {}
"""Requirements that no test cites, and the issue that builds them. Only ever shortened."""


def test_every_requirement_is_cited_by_a_test_or_listed_as_open() -> None:
    """A requirement that loses its last test is noticed here."""
    gaps = coverage.missing(coverage.citations())
    assert gaps.keys() == NOT_PROVED_YET.keys(), gaps


def test_no_test_cites_a_requirement_that_does_not_exist() -> None:
    """A number is its text's name."""
    known = coverage.requirements()
    assert list(known) == list(range(1, len(known) + 1))
    assert {number: tests for number, tests in coverage.citations().items() if number not in known} == {}


@pytest.mark.requirement("R72", "R73", "R74", "R75")
def test_a_range_of_numbers_stands_for_all_of_them() -> None:
    """`R72-R75` in a table."""
    assert coverage.cited("R1: as R7, and R72-R75 (not CR9 or R2D2)") == [1, 7, 72, 73, 74, 75]


@pytest.mark.requirement("R13")
def test_every_attack_of_the_threat_model_names_requirements_that_tests_prove() -> None:
    """Principals, what each can reach, and the test that proves it."""
    rows = tables("docs/threat-model.md")
    principals = {row["principal"].split(",")[0] for row in rows["Principals"]}
    assert principals >= {"trainer", "operator", "observer", "agent", "verifier"}
    proved = coverage.citations()
    for row in rows["What an agent can reach, and what stops it"] + rows["What operators look at, and who else may"]:
        numbers = coverage.cited(row["proved by"])
        assert numbers, row
        assert all(number in proved for number in numbers), row


@pytest.mark.requirement("R19")
def test_interface_list_has_every_port_with_its_authentication() -> None:
    """Every network interface is listed in one document."""
    listed = {row["default"]: row for row in next(iter(tables("docs/interfaces.md").values()))}
    found = set[str]()
    for path in sorted((ROOT / "services").glob("*/*/settings.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.AnnAssign(
                    target=ast.Name(id="port" | "ingress_port"),
                    value=ast.Call(args=[ast.Constant(value=int(port)), *_]),
                ):
                    found.add(f"127.0.0.1:{port}")
    assert len(found) == 5
    assert found <= listed.keys()
    assert all(row["how a caller authenticates"] for row in listed.values())


@pytest.mark.requirement("R19")
def test_every_listener_is_in_the_list_of_interfaces() -> None:
    """Who adds a listener adds its line."""
    known = {
        "libs/chassis/penstock_chassis/server.py",  # each service's gRPC port
        "libs/chassis/penstock_chassis/connections/port.py",  # holds that port while several servers take it
        "libs/chassis/penstock_chassis/telemetry/exposition.py",  # each service's metrics, where they are wanted
        "libs/chassis/penstock_chassis/membership/door.py",  # one port in front of replicas
        "services/interception/penstock_interception/app.py",  # the ingress
        "clients/python/sdk/penstock/adapters/openenv/serving.py",  # the OpenEnv server, a client's program
        "clients/python/sdk/penstock/dashboard/serving.py",  # the dashboard, a client's program
        "clients/python/sdk/penstock/agents/smoke_test.py",  # the model that nobody asks, of an agent's trial
        "clients/python/sdk/penstock/redteam/fixtures.py",  # the endpoint that some attacks are to reach
        "services/sandbox/penstock_sandbox/backends/local/spawner/helper.py",  # the endpoint inside a sandbox
        "services/sandbox/penstock_sandbox/guest/common/loopback.py",  # its port, for the helper and for a guest
        "services/sandbox/penstock_sandbox/guest/endpoint.py",  # the same inside a sandbox with a guest
        "services/sandbox/penstock_sandbox/guest/main.py",  # the guest's own socket
        "services/sandbox/penstock_sandbox/guest/server.py",  # serves what main made
        "services/sandbox/penstock_sandbox/egress/__main__.py",  # the proxy's socket, for its sandbox service alone
        "services/sandbox/penstock_sandbox/testing.py",  # that endpoint by itself, in a test
        "services/sandbox/penstock_sandbox/guest/poller.py",  # its output, where nothing can stream
        "services/sandbox/penstock_sandbox/backends/kubernetes/entrypoint.py",  # a pod, for its sandbox service alone
        "services/sandbox/penstock_sandbox/backends/docker/engine/ssh.py",  # the daemon, for this service alone
    }
    opens = re.compile(
        r"\.(listen|add_insecure_port|add_secure_port|create_server|create_unix_server)$"
        r"|(^|\.)(TCPSite|UnixSite|start_server|start_unix_server)$"
    )
    found = set[str]()
    for folder in ("libs", "services", "clients/python/sdk"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and opens.search(ast.unparse(node.func)):
                    found.add(path.relative_to(ROOT).as_posix())
    assert found == known
