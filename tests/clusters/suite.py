"""How the suite runs a cluster: as a process of its own, in namespaces of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import Final

from tests.hosts.fleet import ROOT
from tests.support.absent import absent

LIMIT_S: Final = 1200


def run(*arguments: str) -> str:
    """Run `python -m tests.clusters`; return what it printed. AssertionError where something is not as it must be."""
    if os.getuid() != 0:
        absent("root, which network namespaces need")
    # Ray's sockets have long names below this one, and may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="pc-") as folder:
        times = [word for name in ("noticed", "waited", "home") for word in (f"--{name}", str(LIMIT_S))]
        patient = ["--max-attempts", "5", *times]
        command = [sys.executable, "-m", "tests.clusters", *arguments, *patient, "--folder", folder]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return ended.stdout
