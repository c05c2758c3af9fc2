"""The threads that synchronous SDKs need: bounded, our own, never the event loop's default ones.

Purpose: an SDK's call blocks. Short ones share a few threads; making a sandbox takes long and has threads of its own,
so that it starves nobody; and what streams for as long as a sandbox lives has one thread each, whose number bounds
the number of sandboxes.

Invariants
- There are never more than ``CREATING + ASKING + streams`` threads, the last being one for each sandbox that the
  backend admits and a few more for streams that end while their successor begins.
- Threads of streams are daemons: one that waits for a machine which has vanished does not keep the service from
  ending.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

CREATING = 8
ASKING = 16
_OVERLAP = 8

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """All threads of the backend; ``streams`` is how many sandboxes there may be."""

    def __init__(self, streams: int) -> None:
        self._creating = ThreadPoolExecutor(CREATING, "hf-create")
        self._asking = ThreadPoolExecutor(ASKING, "hf-ask")
        self._free = asyncio.Semaphore(streams + _OVERLAP)

    def create(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Run what takes long. The thread goes on when the future is cancelled: shield it."""
        return asyncio.get_running_loop().run_in_executor(self._creating, lambda: function(*args, **kwargs))

    async def ask(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a short call."""
        return await asyncio.get_running_loop().run_in_executor(self._asking, lambda: function(*args, **kwargs))

    async def stream(self, function: Callable[[], None]) -> None:
        """Start what streams, once a thread is free; it must handle its own failures. Answers when it has begun."""
        loop = asyncio.get_running_loop()
        await self._free.acquire()

        def run() -> None:
            try:
                function()
            finally:
                tell(loop, self._free.release)

        try:
            threading.Thread(target=run, name="hf-stream", daemon=True).start()
        except BaseException:
            self._free.release()
            raise

    def close(self) -> None:
        """Take no more; what runs ends by itself."""
        for pool in (self._creating, self._asking):
            pool.shutdown(wait=False, cancel_futures=True)


def tell(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object) -> None:
    """Call on the loop from a thread; when the loop has ended nobody is left to hear it."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
