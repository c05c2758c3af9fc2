"""Both kinds of freezer that this machine may have: frozen is frozen, and the killed do not wait for anybody."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.waiting import GUARD_S, awaited

from penstock_sandbox.backends.host import cgroups
from penstock_sandbox.backends.host.cgroups import FREEZER, Cgroups, Group
from penstock_sandbox.domain.model import Resources, Stats


@pytest.fixture(params=[1, 2])
def group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Group | None]:
    """A group whose freezer is of this version; None where the machine has no such one that we may use."""
    mounts = [found for found in cgroups._mounts() if found[0] == request.param]
    monkeypatch.setattr(cgroups, "_mounts", lambda: mounts)
    name = f"penstock-freezer-test-{os.getpid()}"
    found = Cgroups.detect(name)
    if FREEZER not in found.controllers:
        assert os.geteuid() != 0 or not any(FREEZER in mount[1] or mount[0] == 2 for mount in mounts)
        cgroups.remove_parents(found.parents, name)
        yield None
        return
    made = found.create("one", Resources())
    yield made
    awaited(lambda: _removed(made), "the group is removed")
    cgroups.remove_parents(found.parents, name)


@pytest.mark.requirement("R40", "R55")
def test_frozen_group_stands_still_thaws_and_can_be_killed(group: Group | None) -> None:
    if group is None:
        return  # declared: the backend offers no pause here
    with subprocess.Popen(["/bin/bash", "-c", "while :; do :; done"], stdin=subprocess.DEVNULL) as process:
        for file in group.members_files:
            Path(file).write_text(str(process.pid))
        for _ in range(2):
            group.freeze()
            awaited(group.frozen, "frozen")
            before = _ticks(process.pid)
            _burn()
            assert _ticks(process.pid) == before
            group.thaw()
            awaited(lambda: _ticks(process.pid) > before, "it runs")  # noqa: B023 - called in the loop only
            assert not group.frozen()
        group.freeze()
        awaited(group.frozen, "frozen")
        group.kill_and_thaw()
        assert process.wait(GUARD_S) == -9


def _removed(group: Group) -> bool:
    try:
        group.remove()
    except OSError:
        return False  # the kernel notices in a moment that it is empty
    return True


def _burn() -> None:
    """Time in which something that runs would have run: three ticks of ours."""
    until = time.process_time() + 0.03
    while time.process_time() < until:
        pass


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.requirement("R51")
def test_hastening_a_move_moves_nothing() -> None:
    """The wait that it takes off a create must not cost this process its own place."""
    name = f"penstock-hasten-test-{os.getpid()}"
    found = Cgroups.detect(name)
    before = Path("/proc/self/cgroup").read_text()
    found.hasten()
    Cgroups(()).hasten()
    assert Path("/proc/self/cgroup").read_text() == before
    cgroups.remove_parents(found.parents, name)


@pytest.mark.requirement("R32")
def test_a_group_that_is_gone_has_no_figures(tmp_path: Path) -> None:
    """A sandbox is still listed while its files are sealed, after its group was removed."""
    by_controller = dict.fromkeys(("memory", "pids", "cpu"), tmp_path / "gone")
    for version in (1, 2):
        assert Group(by_controller, {tmp_path / "gone": version}).stats() == Stats()
