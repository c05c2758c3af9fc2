"""What all sandboxes use, measured for those who watch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from penstock.sandbox.v1 import sandbox_service_pb2 as pb
from penstock_chassis import times
from penstock_chassis.errors import PenstockError
from penstock_sandbox.model import Sandbox, Stats
from penstock_sandbox.rpc import convert
from penstock_sandbox.sandboxes import Sandboxes

AT_ONCE: Final = 8
"""Sandboxes that are measured at the same time: where a daemon is asked, it has others to serve."""
PATIENCE_S: Final = 5.0
"""For one sandbox; then it is told without figures."""
ALL_S: Final = 15.0
"""For all of them, however many wait: who watches takes long silence for the end of the service."""
DEFAULT_INTERVAL_S: Final = 2.0
DEFAULT_MOST: Final = 200


def terms_from(request: pb.WatchSandboxesRequest) -> tuple[float, int]:
    """Seconds between two messages, and the most that are told. Raises InvalidArgument."""
    interval = times.seconds(request.interval) if request.HasField("interval") else DEFAULT_INTERVAL_S
    most = request.most if request.HasField("most") else DEFAULT_MOST
    if not 1.0 <= interval <= 60.0:
        raise convert.refuse("interval", "1 s to 1 min")
    if not 1 <= most <= 1000:
        raise convert.refuse("most", "1 to 1000")
    return interval, most


async def usages(sandboxes: Sandboxes, found: Sequence[Sandbox]) -> list[pb.WatchSandboxesResponse.Usage]:
    """Each with its figures, where it has some."""
    places = asyncio.Semaphore(AT_ONCE)
    until = asyncio.get_running_loop().time() + ALL_S

    async def measured(view: Sandbox) -> pb.WatchSandboxesResponse.Usage:
        usage = pb.WatchSandboxesResponse.Usage(sandbox=convert.sandbox_to(view))
        try:
            async with asyncio.timeout_at(until), places, asyncio.timeout(PATIENCE_S):
                _, handle, _ = sandboxes.usable(view.id)
                usage.stats.CopyFrom(stats_to(await handle.stats()))
        except (PenstockError, TimeoutError):
            pass  # not ready, gone meanwhile, or nobody can tell: it is told as it is
        return usage

    return await asyncio.gather(*map(measured, found))


def stats_to(stats: Stats) -> pb.GetStatsResponse:
    """What one sandbox uses."""
    return pb.GetStatsResponse(
        memory_bytes=stats.memory_bytes,
        memory_peak_bytes=stats.memory_peak_bytes,
        pids=stats.pids,
        cpu_time=times.duration(stats.cpu_s) if stats.cpu_s is not None else None,
        disk_bytes=stats.disk_bytes,
        inodes=stats.inodes,
    )
