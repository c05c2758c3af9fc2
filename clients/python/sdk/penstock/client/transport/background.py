"""Background tasks with an owner, so that none is lost to garbage collection or outlives what it works for."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

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
