"""Waiting for something to become true, with a deadline that is a guard and not an expectation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

GUARD_S: Final = 60.0
_PAUSE_S: Final = 0.02


def limits(first: float) -> Iterator[float]:
    """Time limits in seconds, each twice the one before, up to `GUARD_S`: for what a limit ends, where something has to
    happen before it. How long that takes is the machine's business: a test goes on to the next limit if it did not."""
    limit = first
    while limit < GUARD_S:
        yield limit
        limit *= 2


def awaited(check: Callable[[], bool], what: str) -> None:
    """As `eventually`, where no event loop runs."""
    deadline = time.monotonic() + GUARD_S
    while not check():
        assert time.monotonic() < deadline, f"{what}: not within {GUARD_S:g} s"
        time.sleep(_PAUSE_S)


async def eventually(check: Callable[[], bool], what: str, *, within: float = GUARD_S) -> None:
    """Returns once `check` holds; AssertionError after `within` seconds."""

    async def checked() -> bool:
        return check()

    await eventually_async(checked, what, within=within)


async def eventually_async(check: Callable[[], Awaitable[bool]], what: str, *, within: float = GUARD_S) -> None:
    """As `eventually`, for a check that has to ask somebody."""
    deadline = asyncio.get_running_loop().time() + within
    while not await check():
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"{what}: not within {within:g} s")
        await asyncio.sleep(_PAUSE_S)
