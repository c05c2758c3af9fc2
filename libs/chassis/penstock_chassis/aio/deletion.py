"""Deletions that are retried until they succeed (R50).

Invariants
- Two deletions of the same thing are one; of each, one attempt runs at a time. A caller's cancellation stops none.
- A failed deletion is retried after a growing delay, whatever its error: what was to be deleted is still there.
- At most ``keep`` deletions are retried at the same time; a failed one beyond that is logged and left.
- The end of the service makes one last attempt of each, and logs what is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any, Final

import structlog

from penstock_chassis.aio.retry import Backoff, Delays, Pause
from penstock_chassis.errors import Unavailable

DELAYS: Final = Delays(0.5, 60.0)
KEPT: Final = 65_536
_LEAST_RETRY_AFTER_S = 0.1
_LOGGED = 20

_log = structlog.get_logger(__name__)


class Deletion:
    """One deletion; made by `Deletions.start`."""

    def __init__(
        self, group: Deletions, what: str, attempt: Callable[[], Awaitable[object]], on_failure: Callable[[], None]
    ) -> None:
        self.what = what
        self._group = group
        self._attempt = attempt
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._attempting: asyncio.Future[bool] = self._loop.create_future()
        self._pausing: asyncio.Future[Any] | None = None
        self._next_at = 0.0
        self.task = asyncio.create_task(self._run(), name=f"delete {what}")
        self.task.add_done_callback(self._stopped)

    @property
    def done(self) -> bool:
        """Whether it succeeded, or was left: because the service ends, or too many fail."""
        return self.task.done()

    async def attempted(self) -> bool:
        """Waits for the current attempt; returns whether it, or the last one, succeeded."""
        return await asyncio.shield(self._attempting)

    async def outcome(self) -> None:
        """Waits for the current attempt. Raises Unavailable (DELETE_PENDING) if it, or the last one, failed."""
        if not await self.attempted():
            raise Unavailable(
                f"{self.what} is not deleted yet, because its backend failed; the service retries until it succeeds",
                reason="DELETE_PENDING",
                retry_after_s=max(_LEAST_RETRY_AFTER_S, self._next_at - self._loop.time()),
            )

    async def finished(self) -> None:
        """Waits until it is done, however many attempts that takes."""
        await asyncio.wait([self.task])

    def hurry(self) -> None:
        """Ends the delay before the next attempt."""
        if self._pausing is not None:
            self._pausing.cancel()

    async def _run(self) -> None:
        backoff = Backoff(self._group.delays)
        while not await self._succeeds(backoff) and self._group.keeps(self):
            self._pausing = asyncio.ensure_future(self._group.pause(self._next_at - self._loop.time()))
            try:
                await asyncio.wait([self._pausing])  # its cancellation is `hurry`
            finally:
                self._pausing.cancel()
                self._pausing = None
            self._attempting = self._loop.create_future()

    def _stopped(self, _: asyncio.Task[None]) -> None:
        if not self._attempting.done():
            self._attempting.set_result(False)  # release the waiters

    async def _succeeds(self, backoff: Backoff) -> bool:
        try:
            async with self._group.slots:
                await self._attempt()
        except self._group.gone:
            pass
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and self._is_cancelled():
                raise
            # Whatever the error, also a cancellation of some part of the work: the target still exists.
            delay = backoff.next()
            _log.warning(
                "not deleted yet; it is retried", what=self.what, error=repr(error), again_in_s=round(delay, 2)
            )
            self._next_at = self._loop.time() + delay
            self._on_failure()
            self._attempting.set_result(False)
            return False
        self._attempting.set_result(True)
        return True

    def _is_cancelled(self) -> bool:
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0


class Deletions:
    """All deletions of one owner that are not done.

    Args:
        delays: between the attempts of one deletion.
        gone: errors which mean that there is nothing to delete any more.
        keep: how many failed deletions are retried.
        at_once: how many attempts run at the same time; None = no limit.
        pause: waits for a delay.
    """

    def __init__(
        self,
        delays: Delays = DELAYS,
        *,
        gone: tuple[type[Exception], ...] = (),
        keep: int = KEPT,
        at_once: int | None = None,
        pause: Pause = asyncio.sleep,
    ) -> None:
        self.delays = delays
        self.gone = gone
        self.pause = pause
        self.slots = nullcontext() if at_once is None else asyncio.Semaphore(at_once)
        self._keep = keep
        self._stopping = False
        self._pending: dict[str, Deletion] = {}

    @property
    def pending(self) -> tuple[str, ...]:
        """What is being deleted."""
        return tuple(self._pending)

    def start(
        self,
        what: str,
        attempt: Callable[[], Awaitable[object]],
        *,
        on_failure: Callable[[], None] = lambda: None,
    ) -> Deletion:
        """Starts to delete something, or joins its deletion.

        Args:
            what: identifies it, also in the log and in errors, such as "sandbox sb-1".
            attempt: deletes it; idempotent; any error means "not yet".
            on_failure: called after each failed attempt; must not raise.
        """
        deletion = self._pending.get(what)
        if deletion is None:
            deletion = self._pending[what] = Deletion(self, what, attempt, on_failure)
            deletion.task.add_done_callback(lambda _: self._pending.pop(what, None))
        return deletion

    async def delete(self, what: str, attempt: Callable[[], Awaitable[object]]) -> bool:
        """Deletes something; returns whether it is gone. If not, it is retried; so it is if this call is cancelled."""
        return await self.start(what, attempt).attempted()

    def keeps(self, deletion: Deletion) -> bool:
        """Whether a failed deletion is retried."""
        if not self._stopping and len(self._pending) > self._keep:
            _log.error("too many deletions fail; this one is not retried", what=deletion.what, kept=self._keep)
            return False
        return not self._stopping

    async def aclose(self, timeout_s: float | None = None) -> None:
        """Makes a last attempt of each, or waits for the current one, at most ``timeout_s`` in all; logs what is left.

        What begins meanwhile is attempted once.
        """
        self._stopping = True
        left = {deletion.what: deletion for deletion in self._pending.values()}
        for deletion in left.values():
            deletion.hurry()
        if left:
            await asyncio.wait([deletion.task for deletion in left.values()], timeout=timeout_s)
        left |= self._pending
        for deletion in left.values():
            deletion.task.cancel()  # harmless to those that are done
        await asyncio.gather(*(deletion.task for deletion in left.values()), return_exceptions=True)
        failed = [what for what, deletion in left.items() if not await deletion.attempted()]
        if failed:
            _log.error("not deleted at the service's end", count=len(failed), what=failed[:_LOGGED])
