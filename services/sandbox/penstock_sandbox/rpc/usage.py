"""Measures the usage of all sandboxes for WatchSandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from penstock.sandbox.v1 import sandbox_pb2
from penstock.sandbox.v1 import sandbox_service_pb2 as pb
from penstock.values import writer
from penstock_chassis import times
from penstock_chassis.errors import PenstockError
from penstock_chassis.validation import invalid_field
from penstock_sandbox.domain.model import Sandbox, Stats
from penstock_sandbox.sandboxes.table import Table

AT_ONCE: Final = 8
"""Sandboxes measured concurrently: a container daemon also serves other requests."""
PATIENCE_S: Final = 5.0
"""Timeout in seconds for one sandbox, which is then reported without figures."""
ALL_S: Final = 15.0
"""Timeout for all of them, however many queue: watchers treat a long silence as the end of the service."""
DEFAULT_INTERVAL_S: Final = 2.0
DEFAULT_MOST: Final = 200


def terms_from(request: pb.WatchSandboxesRequest) -> tuple[float, int]:
    """Returns the seconds between two messages and the maximum number of sandboxes. Raises InvalidArgument."""
    interval = times.seconds(request.interval) if request.HasField("interval") else DEFAULT_INTERVAL_S
    most = request.most if request.HasField("most") else DEFAULT_MOST
    if not 1.0 <= interval <= 60.0:
        raise invalid_field("interval", "1 s to 1 min")
    if not 1 <= most <= 1000:
        raise invalid_field("most", "1 to 1000")
    return interval, most


async def usages(
    table: Table, found: Sequence[Sandbox], shown: Callable[[Sandbox], sandbox_pb2.Sandbox]
) -> list[pb.WatchSandboxesResponse.Usage]:
    """Returns each sandbox with its figures, if it has some."""
    places = asyncio.Semaphore(AT_ONCE)
    until = asyncio.get_running_loop().time() + ALL_S

    async def measured(view: Sandbox) -> pb.WatchSandboxesResponse.Usage:
        usage = pb.WatchSandboxesResponse.Usage(sandbox=shown(view))
        try:
            async with asyncio.timeout_at(until), places, asyncio.timeout(PATIENCE_S):
                _, handle, _ = table.usable(view.id)
                usage.stats.CopyFrom(stats_to(await handle.stats()))
        except (PenstockError, TimeoutError):
            pass  # not ready, deleted meanwhile, or not measurable: reported without figures
        return usage

    return await asyncio.gather(*map(measured, found))


stats_to = writer(Stats, pb.GetStatsResponse, renamed={"cpu_s": "cpu_time"})
"""Converts one sandbox's usage."""
