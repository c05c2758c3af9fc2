"""Removals that are tried until they succeed: what E2B keeps costs money, whoever asked for it is gone or not.

Invariants: a removal that was asked for once is never forgotten while the service runs; two for the same thing are one;
waiting for it ends after the first attempt, however that went (R49, R50).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import structlog

from penstock_chassis.errors import PenstockError
from penstock_sandbox.backends.e2b.errors import Denied, Gone

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 60.0

_log = structlog.get_logger(__name__)


class Removals:
    """All removals of a backend that are not done yet, by a key of the caller's."""

    def __init__(self, *, first_pause_s: float = _FIRST_PAUSE_S) -> None:
        self._first_pause_s = first_pause_s
        self._pending: dict[str, asyncio.Task[None]] = {}

    async def remove(self, key: str, once: Callable[[], Awaitable[None]]) -> None:
        """Remove something; returns when it is removed or will be tried again. Goes on when the caller gives up."""
        task = self._pending.get(key)
        tried = asyncio.Event()
        if task is None:
            task = asyncio.create_task(self._until_done(key, once, tried), name=f"remove-{key}")
            self._pending[key] = task
            task.add_done_callback(lambda _: self._pending.pop(key, None))
            await tried.wait()
        else:
            # Somebody else's first attempt may be long over: the end is waited for no longer than it takes to ask.
            await asyncio.wait({task}, timeout=_FIRST_PAUSE_S)

    async def _until_done(self, key: str, once: Callable[[], Awaitable[None]], tried: asyncio.Event) -> None:
        pause = self._first_pause_s
        try:
            while True:
                try:
                    await once()
                    return
                except Gone:
                    return
                except (PenstockError, Denied) as error:
                    _log.warning("removal will be tried again", what=key, why=str(error), in_s=round(pause, 1))
                tried.set()
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
                pause = min(pause * 2, _LONGEST_PAUSE_S)
        finally:
            tried.set()

    async def aclose(self, timeout_s: float) -> None:
        """Give what is pending a last chance; what stays is found by its labels at the next start."""
        if self._pending:
            _, left = await asyncio.wait(set(self._pending.values()), timeout=timeout_s)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            if left:
                _log.error("not removed; the next start removes them", count=len(left))
