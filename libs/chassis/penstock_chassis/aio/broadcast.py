"""Events for any number of readers: a signal that something changed, and a ring of the last events.

Invariants: a reader gives the number of what it has seen, so that nothing between two waits is missed; a reader that
falls behind the ring gets a distinct result, and never misses an event silently; nothing is kept for a reader.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Signal:
    """Counts changes; waiters get the next one."""

    __slots__ = ("__weakref__", "_listeners", "_waiting", "number")

    def __init__(self, number: int = 0) -> None:
        self.number = number
        """Number of the last change."""
        self._waiting: dict[asyncio.Future[bool], None] | None = None  # of thousands, few have any
        self._listeners: dict[Callable[[], None], None] | None = None

    def call_on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` at each change and `wake`, until `forget`: for readers without a task. It must not raise."""
        self._listeners = {**(self._listeners or {}), listener: None}

    def forget(self, listener: Callable[[], None]) -> None:
        """Calls `listener` no more; idempotent."""
        if self._listeners is not None:
            self._listeners = {one: None for one in self._listeners if one != listener} or None

    def notify(self, number: int | None = None) -> None:
        """Counts a change and wakes all waiters. `number` is its number, if others count; it must grow."""
        self.number = self.number + 1 if number is None else number
        self.wake()

    def wake(self) -> None:
        """Wakes all waiters without a change."""
        if self._waiting:
            woken, self._waiting = self._waiting, None
            for waiter in woken:
                _settle(waiter, True)
        if self._listeners is not None:
            for listener in self._listeners:
                listener()

    async def wait(self, number: int, timeout_s: float | None = None) -> bool:
        """Waits for a change after `number`, or for `wake`; returns False after `timeout_s` seconds without either."""
        if self.number > number:
            return True
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        if self._waiting is None:
            self._waiting = {}
        self._waiting[waiter] = None
        timer = None if timeout_s is None else loop.call_later(timeout_s, _settle, waiter, False)
        try:
            return await waiter
        finally:
            if timer is not None:
                timer.cancel()
            if self._waiting is not None:
                self._waiting.pop(waiter, None)


class FellBehind(Exception):
    """Events that a reader has not seen have left the ring."""


class Broadcast(Generic[T]):
    """A ring of events with sequence numbers that grow by one.

    Args:
        keep: how many events are kept; None keeps all.
        start: the number before the first event's.
    """

    def __init__(self, *, keep: int | None, start: int = 0) -> None:
        self._ring: deque[T] = deque(maxlen=keep)
        self.published = Signal(start)
        """Its number is the last event's."""
        self._closed = False

    @property
    def last(self) -> int:
        """The last event's sequence number."""
        return self.published.number

    @property
    def oldest_resumable(self) -> int:
        """The smallest sequence number after which no event is missing."""
        return self.last - len(self._ring)

    def publish(self, event: T) -> int:
        """Appends an event; returns its sequence number."""
        self._ring.append(event)
        self.published.notify()
        return self.last

    def close(self) -> None:
        """Ends `read` for all readers, after the last event. Idempotent."""
        self._closed = True
        self.published.wake()

    def after(self, sequence: int, most: int = 1024) -> Sequence[T] | None:
        """Returns up to `most` events after `sequence`, oldest first; None if some of them have left the ring."""
        behind = self.last - sequence
        if behind > len(self._ring):
            return None
        if behind <= 0:
            return ()
        if behind <= most:  # from the newest end: slicing a deque walks to the start of the slice
            found = list(itertools.islice(reversed(self._ring), behind))
            found.reverse()
            return found
        skip = len(self._ring) - behind
        return list(itertools.islice(self._ring, skip, skip + most))

    async def wait(self, sequence: int, timeout_s: float | None = None) -> bool:
        """Waits for an event after `sequence`; returns False after `timeout_s` seconds without one."""
        return await self.published.wait(sequence, timeout_s)

    async def read(self, sequence: int) -> AsyncIterator[T]:
        """Yields the events after `sequence` until `close`. Raises FellBehind."""
        while True:
            closed, found = self._closed, self.after(sequence)
            if found is None:
                raise FellBehind(f"the events after {sequence} are kept from {self.oldest_resumable} on")
            for event in found:
                yield event
            sequence += len(found)
            if not found:
                if closed:
                    return
                await self.wait(sequence)


def _settle(waiter: asyncio.Future[bool], value: bool) -> None:
    if not waiter.done():
        waiter.set_result(value)
