"""What living hosts still have of rollouts that have ended."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.hosts.fleet import Fleet, uids

from penstock.client import connect
from penstock_sandbox.backends.host.cgroups import group_name

LEFT_S: Final = 90.0
"""How long after the last end something may be left."""
PAUSE_S: Final = 1.0
"""Between two looks."""
RUNNING: Final = frozenset({"sandbox", "process", "directory", "open"})
"""Kinds of what `left` finds that living hosts have while rollouts run."""


async def until_nothing(fleet: Fleet, living: Collection[str], within_s: float = LEFT_S) -> tuple[list[str], float]:
    """Wait until these hosts have nothing, at most so long. Returns what is left, and the seconds that it took."""
    return await until_none(lambda: left(fleet, living), within_s)


async def until_none(look: Callable[[], Awaitable[list[str]]], within_s: float = LEFT_S) -> tuple[list[str], float]:
    """Wait until `look` finds nothing, at most so long. Returns what it finds, and the seconds that it took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        found = await look()
        took = loop.time() - began
        if not found or took > within_s:
            return found, took
        await asyncio.sleep(PAUSE_S)


async def left(fleet: Fleet, living: Collection[str]) -> list[str]:
    """Sandboxes, places at gates, and what a sandbox shows to the host, of these hosts."""
    found = []
    for name in living:
        if fleet.kind(name) == "sandbox":
            async with connect(fleet.endpoints(sandbox=name, discover=False)) as ps:
                # A lost one of an earlier process holds nothing: it is shown until its lease would have ended.
                shown = [sandbox_id async for sandbox_id, state in ps.sandboxes.list() if state != "lost"]
                found += [f"{name}: sandbox {sandbox_id}" for sandbox_id in shown]
            found += [f"{name}: {item}" for item in traces(fleet, name)]
        elif fleet.kind(name) == "interception":
            async with connect(fleet.endpoints(gate=name, discover=False)) as ps:
                found += [f"{name}: open rollout {one.rollout_id}" async for one in ps.gate.list(open_only=True)]
    return found


def traces(fleet: Fleet, node: str) -> Iterator[str]:
    """What a node's sandboxes show to its host."""
    return traces_of(fleet.folder / "state" / node / "local", uids(node))


def traces_of(local: Path, users: range) -> Iterator[str]:
    """Processes, mounts, control groups and directories of the sandboxes of a local backend and its users."""
    yield from (f"process {pid}" for pid in processes_of(users))
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    yield from (f"mount {line}" for line in lines if f"{local}/" in line)
    for group in _groups(local):
        with suppress(OSError), os.scandir(group) as entries:
            yield from (f"control group {entry.path}" for entry in entries if entry.is_dir())
    for name in ("sandboxes", "trash"):
        yield from (f"directory {path}" for path in (local / name).glob("*"))


def processes(node: str) -> list[int]:
    """Processes of the users that the node gives to its sandboxes."""
    return processes_of(uids(node))


def processes_of(users: range) -> list[int]:
    """Processes of these users."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if folder.stat().st_uid in users:
                    found.append(int(folder.name))
    return found


def _groups(local: Path) -> list[Path]:
    """The backend's own control groups, one in each hierarchy."""
    name = group_name(local)
    return [Path(root, name) for root, folders, _ in os.walk("/sys/fs/cgroup") if name in folders]
