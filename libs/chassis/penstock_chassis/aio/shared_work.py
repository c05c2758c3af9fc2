"""Work shared by several callers, with events: done once, with all its events delivered to each of them.

Invariants: the work belongs to no caller, so a caller's cancellation does not stop it; a caller that joins late gets
every earlier event; all callers get the result or the error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Generic, TypeVar

from penstock_chassis.aio.broadcast import Broadcast

Event = TypeVar("Event")
Result = TypeVar("Result")


class SharedWork(Generic[Event, Result]):
    """One piece of work. ``work`` gets a function that publishes an event."""

    def __init__(self, work: Callable[[Callable[[Event], None]], Awaitable[Result]]) -> None:
        self._events: Broadcast[Event] = Broadcast(keep=None)
        self._task = asyncio.create_task(self._run(work))
        # Not at the end of `_run`: work that is cancelled before its first step never gets there.
        self._task.add_done_callback(lambda _: self._events.close())

    async def _run(self, work: Callable[[Callable[[Event], None]], Awaitable[Result]]) -> Result:
        return await work(self._publish)

    def _publish(self, event: Event) -> None:
        self._events.publish(event)

    @property
    def done(self) -> bool:
        """Whether it has ended, successfully or not."""
        return self._task.done()

    def events(self) -> AsyncIterator[Event]:
        """Yields every event from the first until the work ends."""
        return self._events.read(0)

    async def result(self) -> Result:
        """Returns the result. Raises what the work raised."""
        return await asyncio.shield(self._task)

    async def aclose(self) -> None:
        """Cancels the work, because the service ends."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
