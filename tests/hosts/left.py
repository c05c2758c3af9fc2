"""What living hosts still have of rollouts that have ended."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.hosts.fleet import Fleet, uids

from penstock.client import connect
from penstock_sandbox.host.cgroups import group_name

LEFT_S: Final = 90.0
"""How long after the last end something may be left."""
PAUSE_S: Final = 1.0
"""Between two looks."""
RUNNING: Final = frozenset({"sandbox", "process", "directory", "open"})
"""Kinds of what `left` finds that living hosts have while rollouts run."""


async def until_nothing(fleet: Fleet, living: Collection[str], within_s: float = LEFT_S) -> tuple[list[str], float]:
    """Wait until these hosts have nothing, at most so long. Returns what is left, and the seconds that it took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        found = await left(fleet, living)
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
                found += [f"{name}: sandbox {sandbox_id}" async for sandbox_id, _ in ps.sandboxes.list()]
            found += [f"{name}: {item}" for item in traces(fleet, name)]
        elif fleet.kind(name) == "interception":
            async with connect(fleet.endpoints(gate=name, discover=False)) as ps:
                found += [f"{name}: open rollout {one.rollout_id}" async for one in ps.gate.list(open_only=True)]
    return found


def traces(fleet: Fleet, node: str) -> Iterator[str]:
    """Processes, mounts, control groups and directories of a node's sandboxes."""
    local = fleet.folder / "state" / node / "local"
    yield from (f"process {pid}" for pid in processes(node))
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    yield from (f"mount {line}" for line in lines if f"{local}/" in line)
    for group in groups(fleet, node):
        with suppress(OSError), os.scandir(group) as entries:
            yield from (f"control group {entry.path}" for entry in entries if entry.is_dir())
    for name in ("sandboxes", "trash"):
        yield from (f"directory {path}" for path in (local / name).glob("*"))


def processes(node: str) -> list[int]:
    """Processes of the users that the node gives to its sandboxes."""
    mine, found = uids(node), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if folder.stat().st_uid in mine:
                    found.append(int(folder.name))
    return found


def groups(fleet: Fleet, node: str) -> list[Path]:
    """The node's own control groups, one in each hierarchy."""
    name = group_name(fleet.folder / "state" / node / "local")
    return [Path(root, name) for root, folders, _ in os.walk("/sys/fs/cgroup") if name in folders]
