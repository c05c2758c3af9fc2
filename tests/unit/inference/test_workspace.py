"""What a service holds while it runs is gone with it, however it went."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from penstock_inference.workspace import workspace

HOLD = """
import sys
from pathlib import Path
from penstock_inference.workspace import workspace
with workspace(Path(sys.argv[1])) as directory:
    (directory / "big").write_text("x")
    print(directory, flush=True)
    sys.stdin.read()
"""


def test_a_workspace_is_gone_with_its_owner(tmp_path: Path) -> None:
    """R23."""
    with workspace(tmp_path / "state") as directory:
        (directory / "big").write_text("x")
    assert not [*(tmp_path / "state").iterdir()]


def test_a_killed_owner_s_is_removed_by_the_next_and_a_living_one_s_is_not(tmp_path: Path) -> None:
    """R50: after a kill -9 too."""
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
