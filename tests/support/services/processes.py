"""Processes of this machine, as /proc shows them; one that ends while it is looked at is none."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """The direct children of a process, whichever of its threads started them; none if it has ended."""
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (thread / "children").read_text().split())
    return found


def descriptors() -> list[Path]:
    """Where the open descriptors of this process lead."""
    found: list[Path] = []
    for descriptor in list(Path("/proc/self/fd").iterdir()):
        with suppress(FileNotFoundError):
            found.append(descriptor.readlink())
    return found


async def until_ended(pids: Iterable[int], end: Callable[[], Awaitable[object]]) -> None:
    """Calls `end`, and returns once these processes have ended, which need not be children of this one."""
    descriptors = [os.pidfd_open(pid) for pid in pids]
    await end()
    loop = asyncio.get_running_loop()
    for descriptor in descriptors:
        ended = asyncio.Event()
        loop.add_reader(descriptor, ended.set)
        await ended.wait()
        loop.remove_reader(descriptor)
        os.close(descriptor)


def argv_of(pid: int) -> list[bytes]:
    """The arguments of a process, its program first; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return []
