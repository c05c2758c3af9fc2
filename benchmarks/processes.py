"""CPU time and memory of other processes, as the kernel counts them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Cpu:
    """CPU seconds, user and system together; `ended` is that of waited-for children and of theirs."""

    own: float
    ended: float


def cpu(pid: int) -> Cpu:
    """What a process has used so far. Its resolution is a tick (10 ms), so it is read around many operations."""
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    user, system, child_user, child_system = (int(field) * _TICK_S for field in fields[11:15])
    return Cpu(user + system, child_user + child_system)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text("utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def children(pid: int) -> list[int]:
    """Processes that it started, from any of its threads."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text("utf-8").split())
    return found
