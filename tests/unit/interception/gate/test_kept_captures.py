"""What a driver exports is kept until it says that it is stored, whatever the retention and the restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from tests.support.disks.failing_disk import Disk, failing
from tests.support.services.inner_gate import inner_gate

from penstock_chassis.errors import ResourceExhausted
from penstock_chassis.telemetry.metrics import REGISTRY
from penstock_interception.domain.kept_captures import CaptureLimits, Why
from penstock_interception.gate.context import GateLimits
from penstock_interception.gate.rollout_lifecycle import HURRY_S, LOOK_S
from penstock_interception.status.health import KEPT_S, Health
from penstock_interception.testing import OpenGate

LIMITS: Final = GateLimits(retention_s=1000.0, captures=CaptureLimits(count=2, age_s=10_000.0))


def is_there(gate: OpenGate, rollout_id: str = "r1") -> bool:
    return gate.interceptor.registry.find(rollout_id) is not None


@pytest.mark.requirement("R124")
@pytest.mark.parametrize("restarts", [False, True])
async def test_a_kept_capture_outlives_the_retention_until_it_is_stored(tmp_path: Path, restarts: bool) -> None:
    async with inner_gate(tmp_path) as gate:
        retention_s = gate.interceptor.limits.retention_s
        rollouts, registry = gate.interceptor.rollouts, gate.interceptor.registry
        await rollouts.close((await gate.open(keep_capture=True)).id, "DONE")
        await rollouts.close((await gate.open(request_id="q2", rollout_id="r2")).id, "DONE")
        await gate.passes(3 * retention_s)
        assert is_there(gate) and not is_there(gate, "r2"), "the other one is as ever"
        assert registry.held() == 1, "a drain waits for it"
        now = gate.now[0]
        if not restarts:
            await rollouts.close("r1", "DONE", capture_stored=True)
            assert registry.held() == 0
            await gate.passes(1.0)
            assert not is_there(gate), "the retention counts from the close"
            return
    async with inner_gate(tmp_path, began=now) as gate:
        await gate.passes(retention_s)
        assert is_there(gate) and gate.interceptor.registry.held() == 1
        await gate.interceptor.rollouts.close("r1", "DONE", capture_stored=True)
    async with inner_gate(tmp_path, began=now) as gate:
        assert gate.interceptor.registry.held() == 0
        await gate.passes(1.0)
        assert not is_there(gate), "that it is stored is on disk"


@pytest.mark.requirement("R124")
async def test_a_stored_capture_stays_for_its_retention(tmp_path: Path) -> None:
    """A trainer may still read it."""
    async with inner_gate(tmp_path) as gate:
        await gate.open(keep_capture=True)
        await gate.interceptor.rollouts.close("r1", "DONE", capture_stored=True)
        await gate.passes(gate.interceptor.limits.retention_s - 1)
        assert is_there(gate)
        await gate.passes(2.0)
        assert not is_there(gate)


async def test_a_deletion_deletes_a_kept_capture(tmp_path: Path) -> None:
    async with inner_gate(tmp_path) as gate:
        await gate.open(keep_capture=True)
        await gate.interceptor.rollouts.delete("r1")
        assert not is_there(gate) and gate.interceptor.registry.held() == 0


async def test_a_capture_that_is_kept_for_long_is_named(tmp_path: Path) -> None:
    async with inner_gate(tmp_path) as gate:
        await gate.open(keep_capture=True)
        health = Health(gate.interceptor.registry, gate.interceptor.clock)
        await gate.interceptor.rollouts.close("r1", "DONE")
        assert not list(health.troubles(60.0))
        await gate.passes(KEPT_S + 1)
        (trouble,) = health.troubles(60.0)
        assert (trouble.reason, trouble.subjects, trouble.grave) == ("CAPTURES_KEPT", ("r1",), False)


async def ended(gate: OpenGate, *numbers: int, driver_id: str = "d0") -> None:
    """Opens and closes these rollouts of a driver that is not connected."""
    for number in numbers:
        rollout = await gate.open(
            request_id=f"q{number}", rollout_id=f"r{number}", keep_capture=True, driver_id=driver_id
        )
        await gate.interceptor.rollouts.close(rollout.id, "DONE")


def discarded(gate: OpenGate) -> dict[str, Why]:
    """The rollouts whose captures were discarded, and why."""
    return {one.rollout_id: one.why for one in gate.interceptor.registry.kept_captures.discarded_since(0.0)}


def counted(limit: str) -> float:
    return REGISTRY.get_sample_value("penstock_gate_discarded_captures_total", {"limit": limit}) or 0.0


@pytest.mark.requirement("R124")
async def test_a_capture_of_a_driver_that_never_returns_goes_by_age(tmp_path: Path) -> None:
    """Its end is named by the gate, also after a restart."""
    before = counted("age")
    async with inner_gate(tmp_path, limits=LIMITS) as gate:
        await ended(gate, 1)
        await gate.passes(9_990.0)
        assert is_there(gate) and not discarded(gate)
        await gate.passes(LOOK_S)
        assert not is_there(gate) and discarded(gate) == {"r1": Why.AGE}
        assert gate.interceptor.registry.held() == 0, "a drain waits no longer"
        assert counted("age") == before + 1
        now = gate.now[0]
    async with inner_gate(tmp_path, limits=LIMITS, began=now) as gate:
        assert not is_there(gate) and discarded(gate) == {"r1": Why.AGE}
        health = Health(gate.interceptor.registry, gate.interceptor.clock, LIMITS.captures)
        (trouble,) = health.troubles(60.0)
        assert (trouble.reason, trouble.subjects, trouble.grave) == ("CAPTURES_DISCARDED", ("r1",), True)


@pytest.mark.requirement("R124")
async def test_a_gate_full_of_captures_refuses_drivers_that_export(tmp_path: Path) -> None:
    """Nothing that may still be stored is given up for room: neither a connected driver's, nor what is young."""
    async with inner_gate(tmp_path, limits=LIMITS) as gate:
        drivers, registry = gate.interceptor.gate.drivers, gate.interceptor.registry
        await ended(gate, 1, 2)
        with pytest.raises(ResourceExhausted, match="2 captures") as refused:
            await gate.open(request_id="q3", rollout_id="r3", keep_capture=True)
        assert refused.value.reason == "CAPTURES_FULL"
        await gate.open(request_id="q4", rollout_id="r4")  # keeps nothing
        health = Health(registry, gate.interceptor.clock, LIMITS.captures)
        assert [trouble.reason for trouble in health.troubles(60.0)] == ["CAPTURES_FULL"]
        with drivers.held("d0"):
            await gate.passes(2_000.0)
            assert is_there(gate) and not discarded(gate), "its driver is connected, and may store it"
        await gate.passes(LIMITS.driver_lease_s + 1)
        await gate.passes(HURRY_S)
        with pytest.raises(ResourceExhausted):
            await gate.open(request_id="q3", rollout_id="r3", keep_capture=True)
        await gate.passes(0.0)  # the refusal hurries it
        assert discarded(gate) == {"r1": Why.COUNT} and is_there(gate, "r2"), "the oldest, and no more than is needed"
        await gate.open(request_id="q3", rollout_id="r3", keep_capture=True)


async def test_stored_and_deleted_captures_make_room(tmp_path: Path) -> None:
    async with inner_gate(tmp_path, limits=LIMITS) as gate:
        await ended(gate, 1, 2)
        await gate.interceptor.rollouts.close("r1", "DONE", capture_stored=True)
        await ended(gate, 3)
        await gate.interceptor.rollouts.delete("r2")
        await ended(gate, 4)
        assert len(gate.interceptor.registry.kept_captures) == 2 and not discarded(gate)


@pytest.mark.requirement("R34", "R124")
async def test_a_discard_that_the_disk_refuses_is_made_later(tmp_path: Path) -> None:
    """The capture and the record of its loss change together: no kill between them finds half."""
    disk = Disk()
    disk.armed = False
    with failing(disk):
        async with inner_gate(tmp_path, limits=LIMITS) as gate:
            await ended(gate, 1)
            disk.armed = True
            disk.fill()
            await gate.passes(10_000.0 + LOOK_S)
            assert disk.refused and is_there(gate) and not discarded(gate)
            assert len(gate.interceptor.registry.kept_captures) == 1
            disk.free()
            disk.armed = False
            now = gate.now[0]
        async with inner_gate(tmp_path, limits=LIMITS, began=now) as gate:
            assert is_there(gate) and not discarded(gate), "nothing of it is on disk"
            await gate.passes(LOOK_S)
            assert not is_there(gate) and discarded(gate) == {"r1": Why.AGE}
