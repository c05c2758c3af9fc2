"""The threads that synchronous SDKs need: bounded, our own, never the event loop's default ones.

Purpose: an SDK's call blocks. Short ones share a few threads; making a sandbox and moving files takes long and has
threads of its own, so that it starves nobody; and what streams for as long as a sandbox lives has one thread each,
whose number bounds the number of sandboxes.

Invariants
- There are never more than ``CREATING + ASKING + streams`` threads of ours, the last being one for each sandbox that
  the backend admits and a few more for streams that end while their successor begins.
- Who asked is told of a failure, whatever the SDK raised, and is cancelled only by who cancels it.
- All of them are daemons: one that waits for what never comes does not keep the service from ending.
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
    """All threads of the backend; ``streams`` is how many sandboxes there may be."""

    def __init__(self, streams: int) -> None:
        self._creating = _Pool("hf-create", CREATING)
        self._asking = _Pool("hf-ask", ASKING)
        self._free = asyncio.Semaphore(streams + _OVERLAP)

    def create(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Run what takes long. The thread goes on when the future is cancelled: shield it."""
        return self._creating.run(lambda: function(*args, **kwargs))

    async def ask(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a short call. The thread goes on when this is cancelled."""
        return await self._asking.run(lambda: function(*args, **kwargs))

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
        """Let idle threads end; a busy one ends with what it does."""
        self._creating.close()
        self._asking.close()


class _Pool:
    """At most ``size`` threads, made as they are needed. Daemons, unlike those of ``concurrent.futures``."""

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._size = size
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = 0
        self._waiting = 0

    def run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run it as soon as a thread is free; one that was cancelled before that does not run."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            if future.cancelled():
                tell(loop, self._done)
                return
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 - whatever it was belongs to who asked
                tell(loop, self._done, future.set_exception, future, _told(error))
            else:
                tell(loop, self._done, future.set_result, future, result)

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
        """On the loop: one thing less is waited for or done."""
        self._waiting -= 1
        if settle is not None and future is not None and not future.done():
            settle(outcome)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def close(self) -> None:
        """Tell every thread to end once the work before this is done."""
        for _ in range(self._threads):
            self._work.put(None)


def _told(error: BaseException) -> Exception:
    """What is told of a failure: an SDK that speaks of a cancellation, of the interpreter's end or of an iterator's end
    cancels nobody here, ends nothing here, and does not leave whoever asked without an answer."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"the SDK gave up with {type(error).__name__}")


def tell(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object) -> None:
    """Call on the loop from a thread; when the loop has ended nobody is left to hear it."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
