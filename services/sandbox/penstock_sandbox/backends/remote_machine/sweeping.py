"""Looks for leftovers at a provider of machines, without end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Never

import structlog

SWEEP_S: Final = 60.0
"""From the end of one look to the next."""

_log = structlog.get_logger(__name__)


async def sweep_forever(
    sweep: Callable[[], Awaitable[object]], failures: tuple[type[Exception], ...], *, every_s: float = SWEEP_S
) -> Never:
    """Sweeps every `every_s` seconds; cancel it. One of `failures` is logged, and the next look repeats the sweep."""
    while True:
        await asyncio.sleep(every_s)
        try:
            await sweep()
        except failures as error:
            _log.warning("looking for leftovers failed; it is retried", why=str(error))
