"""Threads for synchronous SDKs: limited, our own, never the event loop's default ones.

Purpose: an SDK's call blocks. Short calls share a few threads; creates and file transfers take long and have their own,
so that they do not starve others; a stream lasts as long as its sandbox and has one thread each, whose number limits
the number of sandboxes.

Invariants
- There are never more than ``CREATING + ASKING + streams`` threads of ours; the last is one for each sandbox that the
  backend admits, and a few more for streams that end while their successors begin.
- A caller gets each failure, whatever the SDK raised, and is cancelled only by its own canceller.
- All are daemons: a thread that waits forever does not keep the service from ending.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

CREATING = 8
ASKING = 16
_OVERLAP = 8

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """All threads of the backend; ``streams`` is the maximum number of sandboxes."""

    def __init__(self, streams: int) -> None:
        self._creating = _Pool("hf-create", CREATING)
        self._asking = _Pool("hf-ask", ASKING)
        self._free = asyncio.Semaphore(streams + _OVERLAP)

    def create(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Runs a long call. The thread continues when the future is cancelled: shield it."""
        return self._creating.run(lambda: function(*args, **kwargs))

    async def ask(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a short call. The thread continues when this is cancelled."""
        return await self._asking.run(lambda: function(*args, **kwargs))

    async def stream(self, function: Callable[[], None]) -> None:
        """Starts a stream when a thread is free; it must handle its own failures. Returns when it has begun."""
        loop = asyncio.get_running_loop()
        await self._free.acquire()

        def run() -> None:
            try:
                function()
            finally:
                call_on_loop(loop, self._free.release)

        try:
            threading.Thread(target=run, name="hf-stream", daemon=True).start()
        except BaseException:
            self._free.release()
            raise

    def close(self) -> None:
        """Ends idle threads; a busy one ends with its work."""
        self._creating.close()
        self._asking.close()


class _Pool:
    """At most ``size`` threads, made on demand. Daemons, unlike those of ``concurrent.futures``."""

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._size = size
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = 0
        self._waiting = 0

    def run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Runs it when a thread is free; does not run it if it was cancelled before."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            if future.cancelled():
                call_on_loop(loop, self._done)
                return
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 - any exception belongs to the caller
                call_on_loop(loop, self._done, future.set_exception, future, _as_exception(error))
            else:
                call_on_loop(loop, self._done, future.set_result, future, result)

        self._waiting += 1
        self._work.put(work)
        if self._waiting > self._threads and self._threads < self._size:
            self._threads += 1
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        return future

    def _done(
        self,
        settle: Callable[[Any], None] | None = None,
        future: asyncio.Future[Any] | None = None,
        outcome: object = None,
    ) -> None:
        """On the loop: delivers an outcome, if any, and counts one piece of work less."""
        self._waiting -= 1
        if settle is not None and future is not None and not future.done():
            settle(outcome)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def close(self) -> None:
        """Makes every thread end after the work queued before this."""
        for _ in range(self._threads):
            self._work.put(None)


def _as_exception(error: BaseException) -> Exception:
    """Returns the exception for the caller: an SDK's cancellation, SystemExit or StopIteration must neither cancel nor
    end anything here, nor leave the caller without a result."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"the SDK failed with {type(error).__name__}")


def call_on_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object) -> None:
    """Calls a function on the loop from a thread; does nothing when the loop has ended."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
