"""One who uses the services while others misuse them: how long each of his calls took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from tests.support.services.stack import Running


def p99(took_s: list[float]) -> float:
    """The 99th percentile."""
    return sorted(took_s)[len(took_s) * 99 // 100]


@dataclass
class Neighbour:
    """His calls: a request at the ingress, and a read of each of the other services."""

    running: Running
    took_s: dict[str, list[float]] = field(default_factory=dict)

    async def during(self, work: asyncio.Future[Any]) -> None:
        """Calls in turn until the work is done; `took_s` then has the seconds of each call, by what was called."""
        self.took_s = {}
        try:
            async with aiohttp.ClientSession() as http:
                while not work.done():
                    await self._round(http)
            await work
        finally:
            work.cancel()

    async def _round(self, http: aiohttp.ClientSession) -> None:
        ps = self.running.ps

        async def health() -> None:
            async with http.get(f"http://{self.running.stack.ingress_address}/health") as answer:
                assert answer.status == 200

        async def first_rollout() -> None:
            async for _ in ps.rollouts.list():
                break

        async def first_sandbox() -> None:
            async for _ in ps.sandboxes.list():
                break

        await self._timed("ingress", health)
        await self._timed("driver", first_rollout)
        await self._timed("sandbox", first_sandbox)

    async def _timed(self, name: str, call: Callable[[], Awaitable[None]]) -> None:
        began = time.perf_counter()
        await call()
        self.took_s.setdefault(name, []).append(time.perf_counter() - began)
