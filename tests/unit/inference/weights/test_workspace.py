"""What a service holds while it runs is gone with it, however it went."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock_inference.weights.uploads import workspace

HOLD = """
import sys
from pathlib import Path
from penstock_inference.weights.uploads import workspace
with workspace(Path(sys.argv[1])) as directory:
    (directory / "big").write_text("x")
    print(directory, flush=True)
    sys.stdin.read()
"""


@pytest.mark.requirement("R23")
def test_a_workspace_is_gone_with_its_owner(tmp_path: Path) -> None:
    with workspace(tmp_path / "state") as directory:
        (directory / "big").write_text("x")
    assert not [*(tmp_path / "state").iterdir()]


@pytest.mark.requirement("R50")
def test_killed_owners_workspace_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    """After a kill -9 too."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        held = Path(other.stdout.readline().strip())
        with workspace(tmp_path):
            assert (held / "big").exists()
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
    assert held.exists()
    with workspace(tmp_path) as ours:
        assert [*tmp_path.iterdir()] == [ours]
