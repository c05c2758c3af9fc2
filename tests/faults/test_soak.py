"""A short soak: each kind of loss once among groups of rollouts; `python -m tests.hosts soak` is the long form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.hosts.fleet import ROOT
from tests.support.absent import absent

COUNT = 60
KINDS = ("service", "host", "link", "spawner", "agent", "trainer")
_LIMIT_S = 900
"""Guard: a quiet machine needs less than a minute."""


@pytest.mark.requirement("R43", "R49", "R50", "R62", "R74", "R127", "R128")
@pytest.mark.timeout(_LIMIT_S + 60)
def test_rollouts_among_losses_are_all_accounted_for_and_leave_nothing(tmp_path: Path) -> None:
    """Each ends once with what its agent earned, nothing is sampled twice without need, nothing is left."""
    if os.getuid() != 0:
        absent("root, which network namespaces need")
    size = ["--sandboxes", "2", "--gates", "2", "--drivers", "2", "--engines", "2"]
    load = ["--rollouts", str(COUNT), "--at-once", "8", "--work", "1", "--every", "0.5", "--calm", "0.2", "--seed", "7"]
    command = [sys.executable, "-m", "tests.hosts", "soak", "--forked", "--folder", str(tmp_path), *size, *load]
    # How soon a host is named depends on the machine's load.
    command += ["--noticed", str(_LIMIT_S), "--seconds", str(_LIMIT_S)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    assert f"rollouts ended      {COUNT} of {COUNT}" in ended.stdout
    lost = next(line for line in ended.stdout.splitlines() if line.startswith("lost "))
    assert all(f" {kind} " in lost for kind in KINDS), lost
    assert "named by doctor" in ended.stdout
