"""A sandbox service that joins a fleet under load; `python -m tests.hosts grow` is the long form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.hosts.fleet import ROOT
from tests.support.absent import absent

_LIMIT_S = 600
pytestmark = pytest.mark.timeout(_LIMIT_S + 60)  # a guard: the fleet's own comes first, and ends it in order


@pytest.mark.requirement("R9")
def test_a_new_service_gets_work_and_impostors_get_none(tmp_path: Path) -> None:
    """One that takes another's name, and one with a certificate of a stranger: all have one DNS name."""
    if os.getuid() != 0:
        absent("root, which network namespaces need")
    size = ["--sandboxes", "2", "--gates", "1", "--drivers", "1", "--members", "dns"]
    load = ["--rollouts", "30", "--at-once", "8", "--work", "1", "--within", str(_LIMIT_S)]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.hosts", "grow", "--forked", "--folder", str(tmp_path), *size, *load],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    assert "given no work       ['n8', 'n9']" in ended.stdout
