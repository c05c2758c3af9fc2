"""What sandboxes take on disk, measured by looking: where no quota counts it, and for those who watch.

Purpose: a sandbox's upper layer is walked, and what is unlinked there but still open is looked for at its processes, so
that a file takes what it takes whatever its name. Blocks are counted, not lengths: a hole takes none; a file with
several names is one.

Invariants: a sandbox is measured once at a time, for all who ask meanwhile, and goes on being measured when they have
gone; measuring has threads of its own and an end, so that whatever sandboxes make on disk keeps nothing else waiting.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock_sandbox.spawner import descents, files

AT_ONCE: Final = 2
MOST_ENTRIES: Final = 2_000_000
"""Of one sandbox; about seven seconds' work. More than any limit of inodes that is worth its name."""
_BLOCK: Final = 512
_MOST_OPEN: Final = 200_000

Identity = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Use:
    """Bytes and inodes on disk."""

    bytes: int = 0
    inodes: int = 0

    def __add__(self, other: Use) -> Use:
        return Use(self.bytes + other.bytes, self.inodes + other.inodes)


@dataclass(frozen=True, slots=True)
class Limit:
    """The most bytes and inodes on disk; None = no limit."""

    bytes: int | None = None
    inodes: int | None = None

    def exceeded_by(self, held: Use) -> bool:
        """Whether that is more."""
        return (self.bytes is not None and held.bytes > self.bytes) or (
            self.inodes is not None and held.inodes > self.inodes
        )


def measure(upper: Path, first_pid: int = 0, most: int | None = MOST_ENTRIES) -> Use:
    """What a tree takes, and what processes of the sandbox with this first process hold that has no name there.

    Raises descents.TooMuch beyond ``most`` entries. A directory that its owner has closed to itself is opened for it.
    """
    linked: set[Identity] = set()
    taken, inodes = 0, 0
    for _, name, is_folder, folder in descents.walk(str(upper), most):
        try:
            status = os.lstat(name, dir_fd=folder)
        except FileNotFoundError:
            continue
        if status.st_nlink > 1 and not is_folder:
            if (status.st_dev, status.st_ino) in linked:
                continue
            linked.add((status.st_dev, status.st_ino))
        if is_folder and status.st_mode & 0o500 != 0o500 and os.geteuid() != 0:
            files.unlock(folder, name, status)
        taken += status.st_blocks * _BLOCK
        inodes += 1
    for status in _nameless(first_pid) if first_pid else ():
        taken += status.st_blocks * _BLOCK
        inodes += 1
    return Use(taken, inodes)


def _nameless(first_pid: int) -> Iterator[os.stat_result]:
    """Files of a sandbox's root without a name that its processes have open or mapped, each once."""
    # As the sandbox sees them: its processes and no others.
    processes = f"/proc/{first_pid}/root/proc"
    seen: set[Identity] = set()
    looked = 0
    try:
        root = os.stat(f"/proc/{first_pid}/root").st_dev
        pids = [name for name in os.listdir(processes) if name.isdecimal()]
    except OSError:
        return  # it has ended
    for pid in pids:
        for kind in ("fd", "map_files"):
            try:
                names = os.listdir(f"{processes}/{pid}/{kind}")
            except OSError:
                continue  # it has ended, or (of what is mapped) is the kernel's to tell root alone
            for name in names:
                looked += 1
                if looked > _MOST_OPEN:
                    raise descents.TooMuch
                try:
                    status = os.stat(f"{processes}/{pid}/{kind}/{name}")
                except OSError:
                    continue
                identity = (status.st_dev, status.st_ino)
                # Of other file systems: memory, and what is nobody's here.
                if status.st_nlink or status.st_dev != root or not stat.S_ISREG(status.st_mode) or identity in seen:
                    continue
                seen.add(identity)
                yield status


class DiskUse:
    """Measures sandboxes. ``measured`` as ``measure``."""

    def __init__(self, measured: Callable[[Path, int, int], Use] = measure, most_entries: int = MOST_ENTRIES) -> None:
        self._measured = measured
        self._most_entries = most_entries
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="disk-use")
        self._under_way: dict[Path, asyncio.Future[Use | None]] = {}

    async def of(self, upper: Path, first_pid: int = 0) -> Use | None:
        """What it takes; None where there is too much to look at, or somebody made what this user cannot look at."""
        measuring = self._under_way.get(upper)
        if measuring is None:
            measuring = asyncio.get_running_loop().run_in_executor(self._threads, self._measure, upper, first_pid)
            self._under_way[upper] = measuring
            measuring.add_done_callback(lambda _: self._under_way.pop(upper))
        return await asyncio.shield(measuring)

    def _measure(self, upper: Path, first_pid: int) -> Use | None:
        try:
            return self._measured(upper, first_pid, self._most_entries)
        except (descents.TooMuch, PermissionError):
            return None

    def close(self) -> None:
        """Take nothing more; what is being measured ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)
