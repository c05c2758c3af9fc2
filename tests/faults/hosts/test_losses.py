"""A fleet that loses hosts: each host is a network namespace, with TLS between all services.

`python -m tests.hosts run --help` has the long forms.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.absent import absent

_LIMIT_S = 600
ROOT = Path(__file__).parents[3]


def test_every_rollout_is_rewarded_although_a_node_and_a_gate_are_lost(tmp_path: Path) -> None:
    if os.getuid() != 0:
        absent("root, which network namespaces need")
    size = ["--sandboxes", "2", "--gates", "2", "--drivers", "1", "--rollouts", "24", "--at-once", "12", "--work", "2"]
    losses = ["--lose", "n1@0.2", "--lose", "g1@0.5:link", "--least", "1"]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.hosts", "run", "--folder", str(tmp_path), *size, *losses],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    assert "n1 is lost (kill)" in ended.stdout
    assert "g1 is lost (link)" in ended.stdout
