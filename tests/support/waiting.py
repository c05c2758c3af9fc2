"""Waiting for something to become true, with a deadline that is a guard and not an expectation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

GUARD_S: Final = 60.0
_PAUSE_S: Final = 0.02
_MOST_PAUSE_S: Final = 0.3
_SHARE: Final = 0.1
"""A pause is this share of the time that was waited already: what takes long is asked seldom, and seen hardly later."""


def limits(first: float) -> Iterator[float]:
    """Time limits in seconds, each twice the one before, up to `GUARD_S`: for what a limit ends, where something has to
    happen before it. How long that takes is the machine's business: a test goes on to the next limit if it did not."""
    limit = first
    while limit < GUARD_S:
        yield limit
        limit *= 2


def awaited(check: Callable[[], bool], what: str) -> None:
    """As `eventually`, where no event loop runs."""
    began = time.monotonic()
    while not check():
        waited = time.monotonic() - began
        assert waited < GUARD_S, f"{what}: not within {GUARD_S:g} s"
        time.sleep(_pause(waited))


async def eventually(check: Callable[[], bool], what: str, *, within: float = GUARD_S) -> None:
    """Returns once `check` holds; AssertionError after `within` seconds."""

    async def checked() -> bool:
        return check()

    await eventually_async(checked, what, within=within)


async def eventually_async(check: Callable[[], Awaitable[bool]], what: str, *, within: float = GUARD_S) -> None:
    """As `eventually`, for a check that has to ask somebody."""
    began = asyncio.get_running_loop().time()
    while not await check():
        waited = asyncio.get_running_loop().time() - began
        if waited > within:
            raise AssertionError(f"{what}: not within {within:g} s")
        await asyncio.sleep(_pause(waited))


def _pause(waited: float) -> float:
    return min(max(_PAUSE_S, _SHARE * waited), _MOST_PAUSE_S)
