"""The control groups that the daemon made for a container, as visible on this machine.

Purpose: if this service enters containers itself, the processes that it starts there must join their groups to be
limited; and only the groups' counters show kills for memory, which the daemon does not report.

Invariants: read only, but for ``cgroup.procs``, to which each started process writes itself. Raises OSError if this
service does not see the container's process or its groups: then it cannot enter it.
"""

from __future__ import annotations

from pathlib import Path

from penstock_sandbox.backends.host.cgroups import Group


def of_container(pid: int, container: str) -> tuple[Group, list[str]]:
    """Returns the groups of the container with first process ``pid``, and the files to join them by.

    Raises OSError if the process does not exist or is not that container's.
    """
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    by_controller: dict[str, Path] = {}
    folders: dict[Path, int] = {}
    points = _mounts()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if container not in path:
            continue
        names = frozenset(filter(None, controllers.split(",")))
        point = points.get(names)
        if point is None:
            continue
        folder = point / path.lstrip("/")
        if not (folder / "cgroup.procs").exists():
            raise FileNotFoundError(f"{folder} is not visible to this process")
        folders[folder] = 1 if names else 2
        for name in names or _controllers(folder):
            by_controller[name] = folder
    if not folders:
        raise ProcessLookupError(f"process {pid} is not in a control group of container {container[:12]}")
    group = Group(by_controller, folders)
    return group, group.members_files


def _controllers(folder: Path) -> list[str]:
    """Returns a v2 group's controllers."""
    return (folder / "cgroup.controllers").read_text().split()


def _mounts() -> dict[frozenset[str], Path]:
    """Returns each hierarchy's mount point by its v1 controllers, the empty set for v2."""
    found: dict[frozenset[str], Path] = {}
    known = _v1_controllers()
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, options, *_ = line.split(" ")
        if kind == "cgroup":
            names = frozenset(option for option in options.split(",") if option in known or option.startswith("name="))
            found.setdefault(names, Path(point))
        elif kind == "cgroup2":
            found.setdefault(frozenset(), Path(point))
    return found


def _v1_controllers() -> frozenset[str]:
    lines = Path("/proc/cgroups").read_text().splitlines()
    return frozenset(line.split()[0] for line in lines if not line.startswith("#"))
