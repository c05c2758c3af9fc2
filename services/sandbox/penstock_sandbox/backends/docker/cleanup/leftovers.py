"""Ends what a runtime with its own kernel leaves of a container that the daemon has removed, or cannot remove.

Purpose: with gVisor a container that failed to start leaves its kernel, its file server and its supervisor behind: the
daemon forgets the container, and all three live on (dockerd 20.10, even beyond its end), as do their control groups.
They run on the daemon's machine; if that is this one, and this service may, it ends them.

Invariants: only processes of container runtime programs, with the full id of a container in their arguments that this
service made and had the daemon remove. On another machine this finds nothing, and does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import structlog

_PROGRAMS = ("runsc", "containerd-shim", "kata", "qemu", "virtiofsd", "cloud-hypervisor", "firecracker")
# A daemon may report a removal a moment before the container's supervisor has ended.
_GRACE_S = 2.0
_TRIES = 10
_PAUSE_S = 0.5
_GROUPS = "/sys/fs/cgroup"

_log = structlog.get_logger(__name__)


async def end(container: str) -> None:
    """Ends what is left of a container, by its full id; returns when nothing is, or after some tries."""
    if not await asyncio.to_thread(find, container):
        return
    await asyncio.sleep(_GRACE_S)
    for _ in range(_TRIES):
        left = await asyncio.to_thread(find, container)
        if not left:
            await asyncio.to_thread(_remove_groups, container)
            return
        _log.warning("a container's remaining processes are killed", container=container[:12], count=len(left))
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            except PermissionError:
                _log.warning("this user may not kill them", container=container[:12])
                return
        await asyncio.sleep(_PAUSE_S)


def _remove_groups(container: str) -> None:
    """Removes a container's control groups; the kernel refuses for one that is not empty."""
    for folder, names, _ in os.walk(_GROUPS, topdown=False):
        for name in names:
            if container in name:
                with contextlib.suppress(OSError):
                    Path(folder, name).rmdir()


def find(container: str) -> list[int]:
    """Returns this machine's processes that still run a container."""
    wanted, found = container.encode(), []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            arguments = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it ended meanwhile
        program = arguments[0].rpartition(b"/")[2].decode(errors="replace")
        if program.startswith(_PROGRAMS) and any(wanted in argument for argument in arguments[1:]):
            found.append(int(process.name))
    return found
