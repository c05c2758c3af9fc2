"""Companions of a sandbox's spec: who may have them, within which limits, and where they are inherited."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.unit.sandbox.scripted_domain import opened

from penstock_chassis.errors import FailedPrecondition, InvalidArgument
from penstock_sandbox.domain.model import Companion, Resources, SandboxSpec, SnapshotSpec
from penstock_sandbox.sandboxes.policy import Limits, Policy
from penstock_sandbox.snapshots.manager import key_of

DATABASE = Companion("db", "postgres:16")


@pytest.mark.requirement("R46", "R55")
async def test_companions_are_a_declared_capability(tmp_path: Path) -> None:
    async with opened(tmp_path) as domain:
        with pytest.raises(FailedPrecondition, match="companions") as refused:
            domain.sandboxes.check(SandboxSpec(companions=(DATABASE,)))
        assert refused.value.reason == "CAPABILITY_MISSING"
        domain.backend.capabilities = dataclasses.replace(domain.backend.capabilities, companions=True)
        domain.sandboxes.check(SandboxSpec(companions=(DATABASE,)))
        limited = dataclasses.replace(DATABASE, resources=Resources(pids=100))
        with pytest.raises(FailedPrecondition, match="limit_pids"):
            domain.sandboxes.check(SandboxSpec(companions=(limited,)))


@pytest.mark.requirement("R54", "R64")
async def test_a_wrong_companion_is_refused_by_its_field(tmp_path: Path) -> None:
    async with opened(tmp_path) as domain:
        wrong = dataclasses.replace(DATABASE, after=("web",), resources=Resources(pids=1))
        with pytest.raises(InvalidArgument) as refused:
            domain.sandboxes.check(SandboxSpec(companions=(wrong,)))
    fields = [violation.field for violation in refused.value.violations]
    assert fields == ["spec.companions[0].after", "spec.companions[0].resources.pids"]


@pytest.mark.requirement("R64")
def test_the_operators_maximum_is_of_a_sandbox_with_its_companions() -> None:
    """Else eight companions would be eight more sandboxes."""
    most = Resources(pids=300)
    policy = Policy(Limits(10, 100.0, 1000.0, Resources(), (), max_resources=most))
    share = dataclasses.replace(DATABASE, resources=Resources(pids=100))
    spec = SandboxSpec(resources=Resources(pids=100), companions=(share, share))
    policy.check_together(spec)
    with pytest.raises(InvalidArgument, match="pids 301, and the operator's max_pids is 300"):
        policy.check_together(dataclasses.replace(spec, resources=Resources(pids=101)))


def test_a_snapshot_is_of_its_companions_too() -> None:
    """Its forks have those: equal setups with other companions are other snapshots."""
    specs = [
        SnapshotSpec(SandboxSpec(companions=companions))
        for companions in ((), (DATABASE,), (dataclasses.replace(DATABASE, env={"A": "1"}),))
    ]
    assert len({key_of(spec) for spec in specs}) == 3
