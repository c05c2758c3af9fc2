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

_LIMIT_S = 600


@pytest.fixture(autouse=True)
def _root() -> None:
    if os.getuid() != 0:
        absent("root, which network namespaces need")


def test_every_rollout_is_rewarded_although_a_node_and_a_gate_are_lost(tmp_path: Path) -> None:
    size = ["--sandboxes", "2", "--gates", "2", "--drivers", "1", "--rollouts", "24", "--at-once", "12", "--work", "2"]
    losses = ["--lose", "n1@0.2:link=12", "--lose", "g1@0.3:link", "--least", "1", "--max-attempts", "5"]
    limits = ["--noticed", str(_LIMIT_S)]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.hosts", "run", "--folder", str(tmp_path), *size, *losses, *limits],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    for line in ("n1 is lost (link)", "n1 is back", "g1 is lost (link)"):
        assert line in ended.stdout


def test_a_fleet_that_is_brought_up_leaves_nothing(tmp_path: Path) -> None:
    size = ["--sandboxes", "1", "--gates", "1", "--drivers", "1"]
    command = [sys.executable, "-m", "tests.hosts", "up", "--folder", str(tmp_path), *size]
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
    assert not Path("/proc", holder).exists()
    assert _processes_with(str(tmp_path)) == []
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
