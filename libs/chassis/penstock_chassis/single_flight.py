"""Work that many ask for and that is done once.

Invariants: the work for a key runs once at a time, whoever asks and however often; a failure is given to those who
waited for it and is not remembered; cancelling one who waits stops nothing while others wait, and the last one to leave
stops the work.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

KEPT: Final = 4096

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True, eq=False)
class _Flight(Generic[V]):
    """One piece of work: who waits for it, and until when (loop time) its result is good; None is for good."""

    task: asyncio.Task[V]
    waiting: int = 0
    until: float | None = None


class SingleFlight(Generic[K, V]):
    """Results of work by key.

    Args:
        keep: how many results are kept, the newest ones; what was dropped is made again when it is asked for.
        fresh_s: how many seconds a result is given out; None keeps it until it is forgotten.
    """

    def __init__(self, *, keep: int = KEPT, fresh_s: float | None = None) -> None:
        self._keep = keep
        self._fresh_s = fresh_s
        self._flights: dict[K, _Flight[V]] = {}

    async def get(self, key: K, work: Callable[[], Awaitable[V]]) -> V:
        """The result of `work`, run now if nobody has; raises what it raised."""
        flight = self._flights.get(key)
        if flight is None or self._is_stale(flight):
            flight = self._start(key, work)
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                self._drop(key, flight)
                flight.task.cancel()

    def forget(self, key: K) -> None:
        """Drop a finished result, so that the next one who asks has the work done again."""
        flight = self._flights.get(key)
        if flight is not None and flight.task.done():
            del self._flights[key]

    def _start(self, key: K, work: Callable[[], Awaitable[V]]) -> _Flight[V]:
        flight = _Flight(asyncio.ensure_future(_run(work)))
        self._flights.pop(key, None)
        self._flights[key] = flight
        flight.task.add_done_callback(lambda _: self._ended(key, flight))
        if len(self._flights) > self._keep:
            oldest = next((old for old, other in self._flights.items() if other.task.done()), None)
            if oldest is not None:
                del self._flights[oldest]
        return flight

    def _ended(self, key: K, flight: _Flight[V]) -> None:
        if flight.task.cancelled() or flight.task.exception():
            self._drop(key, flight)
        elif self._fresh_s is not None:
            flight.until = asyncio.get_running_loop().time() + self._fresh_s

    def _is_stale(self, flight: _Flight[V]) -> bool:
        return flight.until is not None and asyncio.get_running_loop().time() >= flight.until

    def _drop(self, key: K, flight: _Flight[V]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]


async def _run(work: Callable[[], Awaitable[V]]) -> V:
    return await work()
