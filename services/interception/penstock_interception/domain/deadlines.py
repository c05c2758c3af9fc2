"""The gate's clocks, replaceable in tests, and many deadlines on one timer: a heap with lazy deletion.

Setting costs O(log n), dropping O(1). Dropped entries are swept when they outnumber the live ones, so memory is bounded
by the live entries. Times are in seconds on the owner's clock.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock_chassis import times


@dataclass(frozen=True, slots=True)
class Clock:
    """`wall` in seconds since 1970, for stored times; `steady` for deadlines, which are never stored.

    Neither jumps while the process lives, even if the machine's clock is set. A restart begins with the machine's
    current time, so stored times may then lie in the future or in the distant past.
    """

    wall: Callable[[], float] = times.even_time
    steady: Callable[[], float] = time.monotonic


Key = TypeVar("Key", bound=Hashable)
_SLACK = 64


class Deadlines(Generic[Key]):
    """At most one deadline per key."""

    def __init__(self, on_earlier: Callable[[], None] | None = None) -> None:
        """`on_earlier` is called when the earliest deadline moves earlier.

        Dropping the earliest deadline does not call it, nor does a later one set in its place: the waiter wakes once
        with nothing due.
        """
        self._on_earlier = on_earlier
        self._announced = math.inf
        self._at: dict[Key, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._at)

    def set(self, key: Key, at: float) -> None:
        self._serial += 1
        self._at[key] = (at, self._serial)
        heapq.heappush(self._heap, (at, self._serial, key))
        if len(self._heap) > 2 * len(self._at) + _SLACK:
            self._heap = [(at, serial, key) for key, (at, serial) in self._at.items()]
            heapq.heapify(self._heap)
        if at < self._announced:
            self._announced = at
            if self._on_earlier is not None:
                self._on_earlier()

    def at(self, key: Key) -> float | None:
        """Returns a key's deadline, or None."""
        known = self._at.get(key)
        return None if known is None else known[0]

    def drop(self, key: Key) -> None:
        """Removes a key's deadline, if any."""
        self._at.pop(key, None)

    def next(self) -> float | None:
        """Returns the earliest deadline, or None."""
        heap = self._heap
        while heap and not self._live(heap[0]):
            heapq.heappop(heap)
        self._announced = heap[0][0] if heap else math.inf
        return heap[0][0] if heap else None

    def due(self, now: float) -> Iterator[Key]:
        """Removes and yields the keys whose deadline has passed, earliest first."""
        while (at := self.next()) is not None and at <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._at[key]
            yield key

    def _live(self, entry: tuple[float, int, Key]) -> bool:
        known = self._at.get(entry[2])
        return known is not None and known[1] == entry[1]
