"""The guide's table of what each client has is what the clients' sources call."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from tests.integration.client.rpcs import METHODS
from tests.unit.docs.pages import ROOT, tables

Rpc = tuple[str, str]
"""A service and one of its RPCs."""

ALL: Final = {(service, rpc) for service, rpcs in METHODS.items() for rpc in rpcs}
PACKAGES: Final = {
    "driver": ("AgentService", "RolloutService", "RunService", "TerminalService"),
    "interception": ("InterceptService", "RolloutGateService"),
    "inference": ("InferenceService",),
    "ops": ("OperationsService",),
    "sandbox": ("SandboxService", "FileService", "ProcessService", "ToolboxService"),
}
ROWS: Final = [
    row
    for row in tables("docs/guides/your-own-trainer.md")["The same in each language"]
    if row["RPCs"] != "none"  # what a client has beside RPCs
]


def sources(language: str) -> str:
    """A client's own code, without what is generated and its tests."""
    files: Iterator[Path]
    if language == "Python":
        files = (ROOT / "clients/python/sdk/penstock/client").rglob("*.py")
    elif language == "TypeScript":
        files = (ROOT / "clients/typescript/src").rglob("*.ts")
    else:
        files = (path for path in (ROOT / "clients/go").glob("*.go") if not path.name.endswith("_test.go"))
    return "\n".join(path.read_text("utf-8") for path in sorted(files) if not {"gen", "test"} & {*path.parts})


def called(language: str) -> set[Rpc]:
    """The RPCs for which a client has a method."""
    if language == "Python":
        return ALL  # tests/integration/client/test_every_rpc.py calls each
    code = sources(language)
    if language == "Go":
        requests = {tuple(found) for found in re.findall(r"\b(\w+)v1\.(\w+)Request\b", code)}
        return {(service, rpc) for package, rpc in requests for service in PACKAGES[package] if (service, rpc) in ALL}
    services = set(re.findall(r"client\((\w+Service)\)", code))
    methods = re.findall(r"\b(?:client|processes|files)\.(\w)(\w+)\b", code)
    return {(service, f"{first.upper()}{rest}") for first, rest in methods for service in services} & ALL


def listed() -> list[set[Rpc]]:
    """The RPCs of each row: those that it names, and of a service that it names all that no other row does."""
    words = [row["RPCs"].split(", ") for row in ROWS]
    by_name = {word for row in words for word in row if word not in METHODS}
    return [
        {(service, rpc) for service, rpc in ALL for word in row if word in (service, rpc)}
        - {(service, rpc) for service, rpc in ALL if service in row and rpc in by_name}
        for row in words
    ]


def test_the_table_has_every_rpc_once() -> None:
    """A new RPC goes into the row of its service."""
    rows = listed()
    assert sum(map(len, rows)) == len(ALL)
    assert set().union(*rows) == ALL


@pytest.mark.parametrize("language", ["Python", "TypeScript", "Go"])
def test_each_client_has_what_the_table_says(language: str) -> None:
    """A row is all there or all missing; the names in it exist."""
    has, code = called(language), sources(language)
    for row, rpcs in zip(ROWS, listed(), strict=True):
        assert rpcs & has == (set() if row[language] == "no" else rpcs), row["what"]
        for name in re.findall(r"`(?:\w+\.)*(\w+)`", row[language]):
            assert re.search(rf"\b{name}\b", code), f"{language} has no {name}"
