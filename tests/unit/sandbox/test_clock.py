"""Leases run on a clock that nobody sets."""

from __future__ import annotations

import inspect
import time

import pytest

from penstock_sandbox.clock import even_time, steady
from penstock_sandbox.oversight import Oversight
from penstock_sandbox.sandboxes import Sandboxes
from penstock_sandbox.snapshots import Snapshots


@pytest.mark.parametrize("step", [1e9, -1e9])
def test_a_machine_whose_clock_is_set_ends_no_lease_and_prolongs_none(
    monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    """R50, R61: it goes on from where it was."""
    clock, before, real = steady(), time.time(), time.time
    assert abs(clock() - before) < 3600.0
    monkeypatch.setattr(time, "time", lambda: real() + step)
    assert abs(clock() - before) < 3600.0


@pytest.mark.parametrize("kind", [Sandboxes, Snapshots, Oversight])
def test_what_has_leases_runs_on_that_clock(kind: type[object]) -> None:
    """R50: in the service itself, where nobody gives another one."""
    assert inspect.signature(kind).parameters["clock"].default is even_time
