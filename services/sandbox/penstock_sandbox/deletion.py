"""Deletions that are tried until they succeed (R50).

Invariants: one attempt runs at a time; a failed one is repeated, for ever, after a delay that doubles up to a minute;
who waits hears how the attempt in progress ends, or at once that the last one failed and when the next one is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from penstock_chassis.errors import Unavailable

_FIRST_DELAY_S = 0.5
_MOST_DELAY_S = 60.0
_LEAST_RETRY_AFTER_S = 0.1

_log = structlog.get_logger(__name__)

Pause = Callable[[float], Awaitable[None]]


class Deletion:
    """One deletion, begun by making it.

    Args:
        what: for the log and the caller, such as "sandbox sb-1".
        attempt: deletes; idempotent; whatever it raises means "not yet".
        on_failure: told of each failed attempt.
        pause: how to wait between attempts, in seconds.
    """

    def __init__(
        self,
        what: str,
        attempt: Callable[[], Awaitable[None]],
        *,
        on_failure: Callable[[], None] = lambda: None,
        pause: Pause = asyncio.sleep,
    ) -> None:
        self._what = what
        self._attempt = attempt
        self._on_failure = on_failure
        self._pause = pause
        self._loop = asyncio.get_running_loop()
        self._attempting: asyncio.Future[bool] = self._loop.create_future()
        self._next_at = 0.0
        self._task = asyncio.create_task(self._run(), name=f"delete {what}")

    async def _run(self) -> None:
        delay = _FIRST_DELAY_S
        try:
            while not await self._succeeds(delay):
                await self._pause(delay)
                self._attempting = self._loop.create_future()
                delay = min(2 * delay, _MOST_DELAY_S)
        finally:
            if not self._attempting.done():
                self._attempting.set_result(False)  # stopped: nobody may wait for ever

    async def _succeeds(self, delay: float) -> bool:
        try:
            await self._attempt()
        except Exception as error:  # noqa: BLE001
            # Whatever it is, what is to be deleted is still there.
            _log.warning("not deleted yet; tried again", what=self._what, error=repr(error), again_in_s=delay)
            self._next_at = self._loop.time() + delay
            self._on_failure()
            self._attempting.set_result(False)
            return False
        self._attempting.set_result(True)
        return True

    @property
    def done(self) -> bool:
        """Whether it is deleted, or was given up by ``aclose``."""
        return self._task.done()

    async def outcome(self) -> None:
        """Wait for the attempt in progress. Raises Unavailable (DELETE_PENDING) when it, or the last one, failed."""
        if not await asyncio.shield(self._attempting):
            raise Unavailable(
                f"{self._what} is not deleted yet: its backend failed; it is tried again until it succeeds",
                reason="DELETE_PENDING",
                retry_after_s=max(_LEAST_RETRY_AFTER_S, self._next_at - self._loop.time()),
            )

    async def finished(self) -> None:
        """Wait until it is deleted, however many attempts that takes, or until it is given up."""
        await asyncio.wait([self._task])

    async def aclose(self) -> None:
        """Give it up; the service ends, and its next start goes on with it."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
