"""Calls of another service, repeated while it fails for a passing reason."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from penstock_chassis.errors import ResourceExhausted, Unavailable
from penstock_driver.shaping import passes

UNAVAILABLE_PATIENCE_S: Final = 10.0
"""How long a service that does not answer is waited for: its absence is told soon (R51)."""
_RETRY_FIRST_S: Final = 0.2
_RETRY_MOST_S: Final = 5.0

T = TypeVar("T")


async def patiently(
    work: Callable[[], Awaitable[T]],
    *,
    full_s: float = UNAVAILABLE_PATIENCE_S,
    absent_s: float = UNAVAILABLE_PATIENCE_S,
) -> T:
    """Repeat what failed for a passing reason: for `full_s` where a service is full, for `absent_s` where it does not
    answer. What rollouts create goes through a `Shaper` instead, which they share (R51)."""
    loop = asyncio.get_running_loop()
    began, delay = loop.time(), _RETRY_FIRST_S
    while True:
        try:
            return await work()
        except (ResourceExhausted, Unavailable) as error:
            wait = error.retry_after_s if error.retry_after_s is not None else delay
            wait *= random.uniform(1.0, 1.25)  # noqa: S311 - jitter: many wait for the same service
            patience = full_s if isinstance(error, ResourceExhausted) else absent_s
            if not passes(error) or loop.time() + wait > began + patience:
                raise
            await asyncio.sleep(wait)
            delay = min(2 * delay, _RETRY_MOST_S)
