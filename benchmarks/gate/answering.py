"""What both who answer have: a trainer on its stream, and an engine behind HTTP. Each is a program of its own.

They answer at once, or after a given time, or when they are told to; and tell when a number of calls wait.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import orjson


class Answering:
    """When a call may be answered, and with which of the replies."""

    def __init__(self, replies: dict[str, Any]) -> None:
        self.replies = replies
        self.reply = next(iter(replies))
        self.calls = 0
        self.continued = 0
        """Calls whose prompt goes on from what was sampled before."""
        self._latency = 0.0
        self._waiting = 0
        self._changed = asyncio.Event()
        self._free = asyncio.Event()
        self._free.set()

    async def turn(self) -> None:
        """Returns when this call may be answered."""
        self.calls += 1
        self._waiting += 1
        self._changed.set()
        if self._latency:
            await asyncio.sleep(self._latency)
        await self._free.wait()
        self._waiting -= 1

    async def obey(self, orders: AsyncIterator[dict[str, Any]]) -> None:
        """Does what it is told, until nobody tells anything."""
        async for told in orders:
            said: dict[str, Any] = {}
            match told["do"]:
                case "reply":
                    self.reply = told["name"]
                case "latency":
                    self._latency = told["s"]
                case "hold":
                    self._free.clear()
                case "free":
                    self._free.set()
                case "wait":
                    while self._waiting < told["count"]:
                        self._changed.clear()
                        await self._changed.wait()
                case "count":
                    said = {"calls": self.calls, "continued": self.continued}
                    self.calls = self.continued = 0
            say(said)


async def lines() -> AsyncIterator[dict[str, Any]]:
    """What standard input says."""
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield orjson.loads(line)


def say(what: dict[str, Any]) -> None:
    """One line on standard output."""
    sys.stdout.write(orjson.dumps(what).decode() + "\n")
    sys.stdout.flush()
