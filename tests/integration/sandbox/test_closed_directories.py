"""Directories that their owner closed to itself, in an overlay whose upper directory is changed from beside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, subprocess, sys
from penstock_sandbox.spawner import descents

top, user = sys.argv[1], 65534
subprocess.run(["mount", "-t", "tmpfs", "none", top], check=True)
for name in ("lower", "upper", "work", "merged"):
    os.mkdir(f"{top}/{name}")
    os.chown(f"{top}/{name}", user, user)
layers = f"lowerdir={top}/lower,upperdir={top}/upper,workdir={top}/work"
subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, f"{top}/merged"], check=True)
os.setresuid(user, user, user)
for closed in (0, 0o400, 0o600):
    os.makedirs(f"{top}/merged/d/e/f")
    os.chmod(f"{top}/merged/d/e", closed)
    os.chmod(f"{top}/upper/d/e", 0o700)
    assert os.stat(f"{top}/merged/d/e").st_mode & 0o777 == 0o700
    descents.remove(f"{top}/merged/d")
assert os.listdir(f"{top}/merged") == []
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting an overlay in a mount namespace is root's")
def test_a_tree_is_removed_that_shows_a_mode_which_its_overlay_does_not_go_by() -> None:
    """R70, R95: measuring what a sandbox takes on disk opens closed directories below the overlay, which shows that."""
    top = Path("/mnt")  # other users may pass through it; the mount is in a namespace of its own
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", SCRIPT, str(top)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
