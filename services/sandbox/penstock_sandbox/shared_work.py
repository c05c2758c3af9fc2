"""Work that several callers share: done once, told to each of them from its beginning.

Invariants: the work belongs to no caller, so one that gives up stops nothing; a caller that joins late gets every event
that came before; the result, or the error, comes to all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Generic, TypeVar

Event = TypeVar("Event")
Result = TypeVar("Result")


class SharedWork(Generic[Event, Result]):
    """One piece of work. ``work`` gets a function to tell an event."""

    def __init__(self, work: Callable[[Callable[[Event], None]], Awaitable[Result]]) -> None:
        self._events: list[Event] = []
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run(work))

    async def _run(self, work: Callable[[Callable[[Event], None]], Awaitable[Result]]) -> Result:
        try:
            return await work(self._tell)
        finally:
            self._changed.set()

    def _tell(self, event: Event) -> None:
        self._events.append(event)
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def done(self) -> bool:
        """Whether it ended, well or not."""
        return self._task.done()

    async def events(self) -> AsyncIterator[Event]:
        """Every event from the first, until the work ends."""
        position = 0
        while True:
            changed, done = self._changed, self._task.done()
            while position < len(self._events):
                yield self._events[position]
                position += 1
            if done:
                return
            await asyncio.wait(
                [self._task, waiting := asyncio.ensure_future(changed.wait())], return_when="FIRST_COMPLETED"
            )
            waiting.cancel()

    async def result(self) -> Result:
        """The result. Raises what the work raised."""
        return await asyncio.shield(self._task)

    async def aclose(self) -> None:
        """Stop the work; the service ends."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
