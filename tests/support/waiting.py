"""Waiting for something to become true, with a deadline that is a guard and not an expectation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

GUARD_S: Final = 60.0
_PAUSE_S: Final = 0.02


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
