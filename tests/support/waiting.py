"""Waiting for something to become true, with a deadline that is a guard and not an expectation."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

GUARD_S: Final = 60.0
_PAUSE_S: Final = 0.02

T = TypeVar("T")


async def eventually(check: Callable[[], T | Awaitable[T]], what: str, *, within: float = GUARD_S) -> T:
    """The first truthy value of `check`; AssertionError that tells the last value after `within` seconds."""
    deadline = asyncio.get_running_loop().time() + within
    while True:
        found = check()
        value: T = await found if inspect.isawaitable(found) else found
        if value:
            return value
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"{what}: not within {within:g} s, last {value!r}")
        await asyncio.sleep(_PAUSE_S)
