"""Paths in a sandbox of this machine's own backends, as its processes see them."""

from __future__ import annotations

import os
from pathlib import Path

HOME = "/home/agent"
WORKDIR = "/workspace"
OURS = "/opt/penstock"
TOOLBOXES = "/opt/penstock/toolboxes"
RUNTIMES = "/opt/penstock/runtimes"
USER = "agent"
USER_ID = 1000
SYSTEM_PATH = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/local/sbin", "/usr/sbin", "/sbin")
# Paths that each sandbox has for itself, under every name: they hide mounts below, or their user may replace them.
_OWN = ("/tmp", "/var/tmp", "/dev", "/proc", HOME, WORKDIR, OURS)


def hidden_by(path: Path) -> str:
    """Returns the sandbox's own path that would hide ``path`` of the host; "" = none."""
    there = Path(os.path.normpath(path))
    for own in map(Path, _OWN):
        if there.is_relative_to(own) or own.is_relative_to(there):
            return str(own)
    return ""
