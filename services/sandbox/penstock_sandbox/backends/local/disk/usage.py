"""Measures sandboxes' disk usage, for limits without quotas and for statistics.

Purpose: walks a sandbox's upper layer, and looks in its processes for files that are unlinked but still open, so that a
file counts with or without a name. Blocks are counted, not lengths: a hole counts nothing, and a file with several
names counts once.

Invariants: one measurement of a sandbox at a time, shared by concurrent callers and not stopped by their cancellation;
measuring has its own threads and a limit, so that no sandbox's files can block other work.
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

from penstock_chassis.aio.single_flight import SingleFlight
from penstock_sandbox.guest.common import walk

AT_ONCE: Final = 2
MOST_ENTRIES: Final = 2_000_000
"""Limit for one sandbox; about seven seconds' work. More than any sensible inode limit."""
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
    """Maximum bytes and inodes on disk; None = no limit."""

    bytes: int | None = None
    inodes: int | None = None

    def exceeded_by(self, held: Use) -> bool:
        """Whether ``held`` is over the limit."""
        return (self.bytes is not None and held.bytes > self.bytes) or (
            self.inodes is not None and held.inodes > self.inodes
        )


def measure(upper: Path, first_pid: int = 0, most: int | None = MOST_ENTRIES) -> Use:
    """Returns a tree's usage, including nameless files that the sandbox of this first process holds open.

    Raises walk.TooMuch beyond ``most`` entries. Opens directories that their owner has closed while it looks at them.
    """
    linked: set[Identity] = set()
    taken, inodes = 0, 0
    for _, name, is_folder, folder in walk.walk(str(upper), most, unlocks=os.geteuid() != 0):
        try:
            status = os.lstat(name, dir_fd=folder)
        except FileNotFoundError:
            continue
        if status.st_nlink > 1 and not is_folder:
            if (status.st_dev, status.st_ino) in linked:
                continue
            linked.add((status.st_dev, status.st_ino))
        taken += status.st_blocks * _BLOCK
        inodes += 1
    for status in _nameless(first_pid) if first_pid else ():
        taken += status.st_blocks * _BLOCK
        inodes += 1
    return Use(taken, inodes)


def _nameless(first_pid: int) -> Iterator[os.stat_result]:
    """Yields nameless files of a sandbox's root that its processes have open or mapped, each once."""
    # Via the sandbox's own /proc: its processes and no others.
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
                continue  # it has ended, or (for mapped files) only root may look
            for name in names:
                looked += 1
                if looked > _MOST_OPEN:
                    raise walk.TooMuch
                try:
                    status = os.stat(f"{processes}/{pid}/{kind}/{name}")
                except OSError:
                    continue
                identity = (status.st_dev, status.st_ino)
                # Other file systems are skipped: memory, or not the sandbox's.
                if status.st_nlink or status.st_dev != root or not stat.S_ISREG(status.st_mode) or identity in seen:
                    continue
                seen.add(identity)
                yield status


class DiskUse:
    """Measures sandboxes. ``measured`` is as ``measure``."""

    def __init__(self, measured: Callable[[Path, int, int], Use] = measure, most_entries: int = MOST_ENTRIES) -> None:
        self._measured = measured
        self._most_entries = most_entries
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="disk-use")
        self._measuring: SingleFlight[Path, Use | None] = SingleFlight(keep=0, finish=True)

    async def of(self, upper: Path, first_pid: int = 0) -> Use | None:
        """Returns the usage; None if there are too many entries, or some that this user cannot look at."""
        loop = asyncio.get_running_loop()
        return await self._measuring.get(
            upper, lambda: loop.run_in_executor(self._threads, self._measure, upper, first_pid)
        )

    def _measure(self, upper: Path, first_pid: int) -> Use | None:
        try:
            return self._measured(upper, first_pid, self._most_entries)
        except (walk.TooMuch, PermissionError):
            return None

    def close(self) -> None:
        """Accepts no further measurement; those in progress end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)
