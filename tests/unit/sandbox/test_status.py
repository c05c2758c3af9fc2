"""What the sandbox service takes for trouble: sandboxes that outlive their lease, and a default that makes none."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.sandbox.scripted_domain import Domain, opened

from penstock_sandbox import metrics
from penstock_sandbox.snapshots.manager import Snapshots
from penstock_sandbox.status import Health
from penstock_sandbox.store.records import SnapshotRecords
from penstock_sandbox.testing import open_sandboxes

PATIENCE_S = 60.0


def health(domain: Domain) -> Health:
    """Of a domain, by its clock."""
    snapshots = Snapshots(domain.sandboxes, SnapshotRecords(domain.journal), 1000.0, 1 << 30, 100)
    return Health(domain.sandboxes, snapshots, lambda: domain.now)


@pytest.mark.requirement("R50")
async def test_a_sandbox_that_is_still_there_long_after_its_lease_is_overdue(tmp_path: Path) -> None:
    """Its provider does not delete it; one whose lease runs, or has just ended, is none."""
    async with opened(tmp_path) as domain:
        look = health(domain)
        left, kept = await domain.create(), await domain.create()
        await domain.sandboxes.leases.renew(kept.id, 1000.0)
        domain.world.fails = True
        domain.now = left.expires_at + PATIENCE_S
        assert domain.sandboxes.leases.reap() == [left.id]
        await domain.settle()
        assert not list(look.troubles(PATIENCE_S))
        domain.now += 1.0
        (trouble,) = look.troubles(PATIENCE_S)
        assert (trouble.reason, trouble.subjects, trouble.grave) == ("SANDBOXES_OVERDUE", (left.id,), True)
        assert "1 sandbox should be gone" in trouble.message and "its log has" in trouble.advice
        domain.world.fails = False
        await domain.try_again()
        assert not list(look.troubles(PATIENCE_S))


@pytest.mark.requirement("R125")
async def test_an_idle_service_says_that_it_has_no_sandboxes(tmp_path: Path) -> None:
    """Autoscalers take a gauge without values for an error, and keep the fleet at its peak."""
    async with opened(tmp_path) as domain:
        with health(domain).reported():
            none = dict.fromkeys([("scripted", state) for state in ("creating", "ready", "paused")], 0.0)
            assert metrics.SANDBOXES.values() == none
            sandbox = await domain.create()
            assert metrics.SANDBOXES.values() == {**none, ("scripted", "ready"): 1.0}
            await domain.sandboxes.delete(sandbox.id)
            assert metrics.SANDBOXES.values() == none


@pytest.mark.parametrize(("default", "told"), [("e2b", True), ("local", False)])
async def test_only_the_default_backend_must_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default: str, told: bool
) -> None:
    """Without a key of the provider it makes no sandbox; as one of several it is nobody's trouble."""
    for key in ("E2B_API_KEY", "PENSTOCK_SANDBOX_E2B_API_KEY"):
        monkeypatch.delenv(key, raising=False)
    async with open_sandboxes(tmp_path, default_backend=default) as opened:
        found = list(opened.health.troubles(PATIENCE_S))
    assert [trouble.reason for trouble in found] == ["BACKEND_UNAVAILABLE"] * told
    for trouble in found:
        assert trouble.grave and "e2b" in trouble.message and "E2B_API_KEY" in trouble.message
        assert "penstock doctor" in trouble.advice and "default_backend" in trouble.advice
