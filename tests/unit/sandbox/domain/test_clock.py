"""Leases run on a clock that nobody sets."""

from __future__ import annotations

import inspect
import time

import pytest

from penstock_chassis.times import even_clock, even_time
from penstock_sandbox.sandboxes.manager import Sandboxes
from penstock_sandbox.snapshots.manager import Snapshots
from penstock_sandbox.status import Health


@pytest.mark.requirement("R50", "R61")
@pytest.mark.parametrize("step", [1e9, -1e9])
def test_a_machine_whose_clock_is_set_ends_no_lease_and_prolongs_none(
    monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    """It goes on from where it was."""
    clock, before, real = even_clock(), time.time(), time.time
    assert abs(clock() - before) < 3600.0
    monkeypatch.setattr(time, "time", lambda: real() + step)
    assert abs(clock() - before) < 3600.0


@pytest.mark.requirement("R50")
@pytest.mark.parametrize("kind", [Sandboxes, Snapshots, Health])
def test_leases_run_on_that_clock(kind: type[object]) -> None:
    """In the service itself, where nobody gives another one."""
    assert inspect.signature(kind).parameters["clock"].default is even_time
