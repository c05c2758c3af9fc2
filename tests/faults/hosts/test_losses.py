"""A fleet that loses hosts: each host is a network namespace, with TLS between all services.

`python -m tests.hosts run --help` has the long forms.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.hosts.fleet import ROOT
from tests.support.absent import absent
from tests.support.waiting import awaited

_LIMIT_S = 600
pytestmark = pytest.mark.timeout(_LIMIT_S + 60)  # a guard: the fleet's own comes first, and ends it in order


@pytest.fixture(autouse=True)
def _root() -> None:
    if os.getuid() != 0:
        absent("root, which network namespaces need")


@pytest.mark.requirement("R119", "R120", "R121")
def test_every_rollout_is_rewarded_although_a_node_and_a_gate_are_cut(tmp_path: Path) -> None:
    """Split brain: both live on meanwhile. Afterwards no key of an old attempt is accepted, and no sandbox is left."""
    size = ["--sandboxes", "2", "--gates", "2", "--drivers", "1", "--engines", "2"]
    load = ["--rollouts", "24", "--at-once", "12", "--work", "2", "--least", "1", "--max-attempts", "5"]
    # A gate sees within 30 s that the stream of a driver is cut; then that driver's lease of 1 s ends there.
    losses = ["--lose", "n1@0.2:link=12", "--lose", "g1@0.3:link=40", "--driver-lease", "1"]
    limits = ["--noticed", str(_LIMIT_S), "--waited", str(_LIMIT_S)]
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.hosts",
            "run",
            "--forked",
            "--folder",
            str(tmp_path),
            *size,
            *load,
            *losses,
            *limits,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    for line in (
        "n1 is lost (link)",
        "n1 is back",
        "g1 is lost (link)",
        "g1 is back",
        "keys refused",
        "waits for lost hosts",
    ):
        assert line in ended.stdout
    assert "a driver is lost: its rollouts are closed" in (tmp_path / "g1.log").read_text()


@pytest.mark.on_demand(
    "a killed driver of several, in a fleet of its own: tests/faults/driver/test_restarts.py has the next driver go on"
    " with every rollout, and test_soak kills one of two"
)
@pytest.mark.requirement("R119", "R127")
def test_rollouts_of_a_killed_driver_of_several_go_on(tmp_path: Path) -> None:
    """It comes back on its disk, at two gates and two sandbox services; each rollout has one attempt."""
    size = ["--sandboxes", "2", "--gates", "2", "--drivers", "2", "--engines", "2"]
    load = ["--rollouts", "16", "--at-once", "8", "--work", "2", "--least", "1", "--max-attempts", "1"]
    losses = ["--lose", "d1@0.2:kill=2", "--driver-lease", "120", "--waited", str(_LIMIT_S)]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.hosts", "run", "--forked", "--folder", str(tmp_path), *size, *load, *losses],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    assert "d1 is lost (kill)" in ended.stdout and "d1 is back" in ended.stdout
    assert "the driver goes on with rollouts of its last start" in (tmp_path / "d1.log").read_text()


def test_a_fleet_that_is_brought_up_leaves_nothing(tmp_path: Path) -> None:
    size = ["--sandboxes", "1", "--gates", "1", "--drivers", "1"]
    command = [sys.executable, "-m", "tests.hosts", "up", "--forked", "--folder", str(tmp_path), *size]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        shown = []
        for line in process.stdout:
            shown.append(line)
            if line.startswith("Ctrl-C"):
                break
        holder = shown[0].split()[-1]
        assert Path("/proc", holder).exists(), shown
        assert "10.77.0." in shown[0]
        process.send_signal(signal.SIGINT)
        assert process.wait(_LIMIT_S) == 0
    awaited(lambda: not Path("/proc", holder).exists() and not _processes_with(str(tmp_path)), "all have ended")
    assert list((tmp_path / "state" / "n0" / "local" / "sandboxes").iterdir()) == []


def _processes_with(marker: str) -> list[str]:
    """Programs that have `marker` among their arguments, or in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                known = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            except OSError:
                continue
            if marker.encode() in known:
                found.append(folder.name)
    return found
