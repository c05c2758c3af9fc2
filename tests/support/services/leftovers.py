"""What a sandbox service on the local backend may leave on its host: processes, mounts, control groups, directories.

`state_dir` is the directory that holds the service's `state`.
"""

from __future__ import annotations

import os
from pathlib import Path

from penstock_sandbox.backends.host.cgroups import group_name


def processes_with(marker: str) -> list[int]:
    """Processes of the host whose arguments hold `marker`."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and marker.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def mounts_with(marker: str) -> list[str]:
    """Mounts of the host whose lines hold `marker`."""
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if marker in line]


def groups_of(state_dir: Path) -> list[str]:
    """Control groups of the service, wherever they are."""
    name = group_name(state_dir / "state" / "local")
    return [f"{root}/{name}" for root, folders, _ in os.walk("/sys/fs/cgroup") if name in folders]


def groups_in(group: str) -> list[str]:
    """Names of the control groups below one: those of sandboxes."""
    return [entry.name for entry in os.scandir(group) if entry.is_dir()]


def sandboxes_of(state_dir: Path) -> list[Path]:
    """Directories of sandboxes."""
    return list((state_dir / "state/local/sandboxes").iterdir())


def layers_of(state_dir: Path) -> list[Path]:
    """Directories of snapshots, and of copies of live sandboxes."""
    return list((state_dir / "state/local/layers").iterdir())
