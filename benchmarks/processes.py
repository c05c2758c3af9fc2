"""CPU time and memory of other processes, as the kernel counts them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
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


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used so far, in all of its threads, by the scheduler's own clock."""
    # CPUCLOCK_SCHED of another process, as clock_getcpuclockid(3) makes it.
    return time.clock_gettime((~pid << 3) | 2)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text("utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def children(pid: int) -> list[int]:
    """Processes that it started, from any of its threads."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended has handed its children on
            found += map(int, (task / "children").read_text("utf-8").split())
    return found


def keep_on(pid: int, cores: set[int]) -> None:
    """Have a process, with all threads that it has by now, run on these cores only."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


def tree_pss_bytes(pids: Iterable[int]) -> int:
    """Memory of processes and all below them, each shared page counted once in all; who ended meanwhile has none."""
    below: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                parent = int((folder / "stat").read_text("utf-8").rpartition(")")[2].split()[1])
                below.setdefault(parent, []).append(int(folder.name))
    total, queue = 0, list(pids)
    while queue:
        pid = queue.pop()
        queue += below.get(pid, [])
        with suppress(FileNotFoundError, ProcessLookupError):
            total += _kibibytes(Path(f"/proc/{pid}/smaps_rollup"), "Pss:") * 1024
    return total


def container_shims() -> list[int]:
    """What containerd keeps beside each container; they are nobody's children."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                if (folder / "comm").read_text("utf-8").startswith("containerd-shim"):
                    found.append(int(folder.name))
    return found


def available_bytes() -> int:
    """What the machine could still give without swapping."""
    return _kibibytes(Path("/proc/meminfo"), "MemAvailable:") * 1024


def _kibibytes(file: Path, key: str) -> int:
    lines = file.read_text("utf-8").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(key)), 0)
