"""Tasks with an owner: none is lost to garbage collection, none outlives its owner, no error is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import structlog

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class TaskOwner:
    """Owns tasks until they are done. Work whose tasks belong to one call uses `asyncio.TaskGroup` instead.

    Args:
        unlogged: errors that are no faults, such as refusals, which the callers that wait for a task get.
    """

    def __init__(self, *, unlogged: tuple[type[Exception], ...] = ()) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._unlogged = unlogged

    def __len__(self) -> int:
        """Number of tasks that are not done."""
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(tuple(self._tasks))

    def start(self, work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        """Starts `work` in the background. Its error is logged."""
        task = self._own(work, name)
        task.add_done_callback(self._log_error)
        return task

    async def run(self, work: Coroutine[Any, Any, T], name: str | None = None) -> T:
        """Returns the result of `work`, which runs to its end even if this call is cancelled.

        Raises what `work` raises; after a cancellation its error is logged.
        """
        task = self._own(work, name)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._log_error)
            raise

    async def finish(self, work: Coroutine[Any, Any, T], name: str | None = None) -> T:
        """As `run`, but a cancelled call ends only with the work, unless it is cancelled once more."""
        task = self._own(work, name)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._log_error)
            await asyncio.wait([task])
            raise

    async def wait(self, timeout_s: float | None = None) -> int:
        """Waits for all tasks, also for those that start meanwhile; returns how many are left after `timeout_s`."""
        loop = asyncio.get_running_loop()
        until = None if timeout_s is None else loop.time() + timeout_s
        while left := self._tasks - {asyncio.current_task()}:
            seconds = None if until is None else until - loop.time()
            if seconds is not None and seconds <= 0:
                break
            await asyncio.wait(left, timeout=seconds)
        return len(left)

    async def aclose(self) -> None:
        """Cancels all tasks; returns when they have ended. Idempotent."""
        while left := self._tasks - {asyncio.current_task()}:
            for task in left:
                if not task.cancelling():  # once: its clean-up is not interrupted
                    task.cancel()
            await asyncio.wait(left)

    def _own(self, work: Coroutine[Any, Any, T], name: str | None) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _log_error(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or (error := task.exception()) is None or isinstance(error, self._unlogged):
            return
        _log.error("a background task failed", task=task.get_name(), error=repr(error), exc_info=error)
