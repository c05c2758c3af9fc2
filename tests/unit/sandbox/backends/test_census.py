"""A sandbox's control group proves that nothing lives there: by its count, less what is dead and not reaped."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from penstock_sandbox.backends.local.spawner.killing import Census


@pytest.mark.requirement("R40")
def test_only_the_sandboxes_own_two_tasks_and_dead_children_mean_empty(tmp_path: Path) -> None:
    def counts(tasks: int) -> Census:
        (tmp_path / "pids.current").write_text(f"{tasks}\n")
        return Census(held)

    (tmp_path / "pids.current").touch()
    held, folder = os.open(tmp_path / "pids.current", os.O_RDONLY), os.open(tmp_path, os.O_RDONLY)
    try:
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as living, subprocess.Popen(["true"]) as dead:
            os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
            assert counts(2).is_empty(())
            assert not counts(3).is_empty(())
            assert counts(3).is_empty([dead.pid])
            assert not counts(3).is_empty([living.pid])
            assert not counts(4).is_empty([dead.pid, living.pid])
            assert not Census(None).is_empty(())
            # A file that cannot be read, as where the controller was taken away.
            assert not Census(folder).is_empty(())
    finally:
        os.close(held)
        os.close(folder)
