"""Single-flight: concurrent callers with the same key share one piece of work.

Invariants: the work for a key runs once at a time, however many callers request it. A failure goes to the callers that
waited for it and is not cached. Cancelling one caller does not affect the others; cancelling the last one cancels the
work, unless it ends by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

KEPT: Final = 4096

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True, eq=False)
class _Flight(Generic[V]):
    """One piece of work: its waiters, and the loop time until which its result is valid; None is forever."""

    task: asyncio.Task[V]
    waiting: int = 0
    until: float | None = None


class SingleFlight(Generic[K, V]):
    """Results of work by key.

    Args:
        keep: how many results are cached, newest first; a dropped one is computed again on demand. 0: none.
        fresh_s: seconds for which a result is valid; None keeps it until it is forgotten.
        finish: work runs to its end even if all its callers are cancelled.
    """

    def __init__(self, *, keep: int = KEPT, fresh_s: float | None = None, finish: bool = False) -> None:
        self._keep = keep
        self._fresh_s = fresh_s
        self._finish = finish
        self._flights: dict[K, _Flight[V]] = {}
        self._cancelled: dict[K, set[asyncio.Task[V]]] = {}
        """Cancelled work that is still cleaning up, by key."""

    async def get(self, key: K, work: Callable[[], Awaitable[V]]) -> V:
        """Returns the result of `work`, which runs now unless it is running or cached; raises what it raised."""
        flight = self._flights.get(key)
        if flight is None or self._is_stale(flight):
            flight = self._start(key, work)
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done() and not self._finish:
                self._cancel(key, flight)

    def forget(self, key: K) -> None:
        """Drops a finished result, so that the next caller runs the work again."""
        flight = self._flights.get(key)
        if flight is not None and flight.task.done():
            del self._flights[key]

    async def aclose(self) -> None:
        """Cancels the work that runs; returns when it has ended."""
        running = [flight.task for flight in self._flights.values()]
        for task in running:
            task.cancel()
        cleaning = [task for tasks in self._cancelled.values() for task in tasks]
        await asyncio.gather(*running, *cleaning, return_exceptions=True)

    def _start(self, key: K, work: Callable[[], Awaitable[V]]) -> _Flight[V]:
        flight = _Flight(asyncio.ensure_future(_run(work, tuple(self._cancelled.get(key, ())))))
        self._flights.pop(key, None)
        self._flights[key] = flight
        flight.task.add_done_callback(lambda _: self._ended(key, flight))
        self._drop_excess()
        return flight

    def _cancel(self, key: K, flight: _Flight[V]) -> None:
        cancelled = self._cancelled.setdefault(key, set())
        cancelled.add(flight.task)

        def gone(task: asyncio.Task[V]) -> None:
            cancelled.discard(task)
            if not cancelled:
                self._cancelled.pop(key, None)

        flight.task.add_done_callback(gone)
        self._drop(key, flight)
        flight.task.cancel()

    def _ended(self, key: K, flight: _Flight[V]) -> None:
        if flight.task.cancelled() or flight.task.exception():
            self._drop(key, flight)
        elif self._fresh_s is not None:
            flight.until = asyncio.get_running_loop().time() + self._fresh_s
        self._drop_excess()

    def _drop_excess(self) -> None:
        if len(self._flights) > self._keep:
            oldest = next((old for old, other in self._flights.items() if other.task.done()), None)
            if oldest is not None:
                del self._flights[oldest]

    def _is_stale(self, flight: _Flight[V]) -> bool:
        return flight.until is not None and asyncio.get_running_loop().time() >= flight.until

    def _drop(self, key: K, flight: _Flight[V]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]


async def _run(work: Callable[[], Awaitable[V]], before: tuple[asyncio.Task[V], ...]) -> V:
    if before:
        await asyncio.wait(before)
    return await work()
