"""Background tasks with an owner, so that none is lost to garbage collection or outlives what it works for."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class TaskOwner:
    """Owns tasks until they are done."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        """Number of tasks that are not done."""
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        """Starts `work` and returns its task."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait(self) -> None:
        """Waits for all tasks, also for those that start meanwhile."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Cancels all tasks and waits for their ends. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await self.wait()


class SharedWork(Generic[T]):
    """Work that those share who ask for it by one key while it runs. Its end is theirs, also a failure; later ones
    start it anew. It goes on when an asker is cancelled.
    """

    def __init__(self) -> None:
        self._owner = TaskOwner()
        self._running: dict[Hashable, asyncio.Task[T]] = {}

    async def get(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Returns the result of `work`, which starts now unless it runs for this key."""
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = self._owner.start(work())
            task.add_done_callback(lambda done: self._ended(key, done))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Cancels what runs and waits for its end."""
        await self._owner.close()

    def _ended(self, key: Hashable, done: asyncio.Task[T]) -> None:
        del self._running[key]
        if not done.cancelled():
            done.exception()  # of work whose askers are all cancelled, nobody else reads it
