"""The compute thread, and its communication with the event loop.

The event loop queues callables, which the thread runs between two steps. So only the thread touches the scheduler, the
cache and the weights, without a lock. All results of a step return in one wake-up of the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

from threadpoolctl import threadpool_limits

from penstock_chassis.errors import Internal, PenstockError, Unavailable
from penstock_inference.domain.generation import Done, GenerateEvent, Scores
from penstock_inference.engines.checks import closed
from penstock_inference.engines.numpy.scheduler import Scheduler
from penstock_inference.engines.numpy.sequence import Event, Sequence

_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


class Worker:
    """Runs one scheduler. All public methods belong to the event loop that called `start`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._streams: dict[Sequence, asyncio.Queue[Event]] = {}
        self._idle_waits: list[asyncio.Future[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._over: PenstockError | None = None

    @property
    def in_flight(self) -> int:
        """Number of requests with a listener."""
        return len(self._streams)

    @property
    def failure(self) -> str:
        """Why the thread ended without being closed; empty while it runs."""
        return "" if self._over is None or self._stopping else self._over.message

    def start(self) -> None:
        """Start the thread; call it once, on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="penstock-numpy-engine", daemon=True)
        self._thread.start()

    async def aclose(self) -> None:
        """Abort what is in flight and end the thread. Idempotent."""
        if self._thread is None or self._stopping:
            return
        self._stopping = True
        self._inbox.put(lambda: None)
        await asyncio.to_thread(self._thread.join)

    async def follow(self, sequence: Sequence) -> AsyncGenerator[GenerateEvent | Scores, None]:
        """Submit a request and yield its events; abort it if the caller leaves early."""
        self._check_alive()
        events: asyncio.Queue[Event] = asyncio.Queue()
        self._streams[sequence] = events
        self._inbox.put(lambda: self._scheduler.submit(sequence))
        try:
            while True:
                event = await events.get()
                if isinstance(event, PenstockError):
                    raise event
                yield event
                if isinstance(event, Done | Scores):
                    return
        finally:
            del self._streams[sequence]
            if not self._stopping:
                self._inbox.put(lambda: self._forget(sequence))

    async def between_steps(self, act: Callable[[], _Result]) -> _Result:
        """Run `act` on the thread and return its result."""
        self._check_alive()
        assert self._loop is not None
        future: asyncio.Future[_Result] = self._loop.create_future()

        def run() -> None:
            try:
                result = act()
            except Exception as error:  # noqa: BLE001 - raised to the caller, not in the thread
                self._wake(_settle, future, None, error)
            else:
                self._wake(_settle, future, result)

        self._inbox.put(run)
        return await future

    async def idle(self) -> None:
        """Wait until nothing runs, until what runs is frozen, or until `release`."""
        assert self._loop is not None
        future: asyncio.Future[None] = self._loop.create_future()

        def wait() -> None:
            self._idle_waits.append(future)
            self._signal_if_idle()

        await self.between_steps(wait)
        await future

    # From here on: only for the engine's thread.

    def deliver(self, events: list[tuple[Sequence, Event]]) -> None:
        """Pass events to the event loop, in one wake-up."""
        if events:
            self._wake(self._dispatch, events)

    def release(self) -> None:
        """End all waits for idleness."""
        waits, self._idle_waits = self._idle_waits, []
        for future in waits:
            self._wake(_settle, future, None)

    def _run(self) -> None:
        try:
            # One thread: more make products of this size slower, and a second core belongs to others.
            with threadpool_limits(limits=1, user_api="blas"):
                while not self._stopping:
                    self._take_in()
                    if self._scheduler.has_work:
                        self.deliver(self._scheduler.step())
                        self._signal_if_idle()
            self.deliver(self._scheduler.abort(lambda _: True))
            self._end(Unavailable("the engine was closed", reason="ENGINE_CLOSED"))
        except Exception:  # noqa: BLE001 - after any error, no caller may wait forever
            _log.exception("the engine's thread died")
            self._end(Internal("the engine failed; restart the inference service", reason="ENGINE_FAILED"))

    def _take_in(self) -> None:
        """Run the callables from the event loop; wait for one when there is nothing to compute."""
        try:
            if not self._scheduler.has_work:
                self._inbox.get()()
            while True:
                self._inbox.get_nowait()()
        except Empty:
            return

    def _forget(self, sequence: Sequence) -> None:
        """Abort a sequence whose caller is gone, if it is not over already."""
        self._scheduler.abort(lambda s: s is sequence)
        self._signal_if_idle()

    def _signal_if_idle(self) -> None:
        if self._idle_waits and (self._scheduler.frozen or not self._scheduler.running):
            self.release()

    def _end(self, error: PenstockError) -> None:
        def end() -> None:
            self._over = error
            for events in self._streams.values():
                events.put_nowait(error)

        self._wake(end)
        # Run the remaining callables: their callers wait for them.
        try:
            while True:
                self._inbox.get_nowait()()
        except Empty:
            self.release()

    def _check_alive(self) -> None:
        if self._over is not None:
            raise self._over
        if self._thread is None or self._stopping:
            raise closed()

    def _dispatch(self, events: list[tuple[Sequence, Event]]) -> None:
        for sequence, event in events:
            stream = self._streams.get(sequence)
            if stream is not None:
                stream.put_nowait(event)

    def _wake(self, callback: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            # The loop is closed: the process is exiting and there is no listener.
            _log.debug("event loop closed before the engine")


def _settle(future: asyncio.Future[_Result], result: _Result, error: Exception | None = None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
